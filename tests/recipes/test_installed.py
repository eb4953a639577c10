"""The package as it is installed from a wheel, without a clone: commands from any folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from lightning_shard import cli, installed
from tests.recipes.test_documented_commands import (
    ROOT,
    Command,
    commands,
    copy_of_the_repository,
    on_s3,  # noqa: F401
    plain_shell,
    run,
    run_page,
    write_users_files,
)

MINE = """# @package _global_
defaults:
  - override /model: gpt_tiny
run: mine
trainer:
  max_steps: 1
  devices: 2
  enable_progress_bar: false
  limit_val_batches: 1
strategy:
  pipeline_parallel_size: 2
checkpoint:
  every_n_train_steps: 1
"""


def shell(command: str, folder: Path, **environment: str) -> str:
    return run(Command("-", command), folder, plain_shell(**environment))


def wheel_of_a_copy(folder: Path) -> Path:
    copy = copy_of_the_repository(folder / "clone")
    shell(f"{sys.executable} -m pip wheel --quiet --no-deps --no-build-isolation -w {folder / 'wheels'} .", copy)
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel


def trains(command: str, folder: Path, **environment: str) -> None:
    """A training by one who has installed the package, in a folder with a recipe of theirs and no other file."""
    own = folder / "conf" / "recipe" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(MINE)
    said = shell(f"{command} train recipe=mine", folder, **environment)
    assert "1 (1)   norm, head" in said


def test_a_wheel_trains_a_recipe_in_any_folder(tmp_path: Path) -> None:
    wheel = wheel_of_a_copy(tmp_path)
    site = tmp_path / "site"
    shell(f"{sys.executable} -m pip install --quiet --no-deps --target {site} {wheel}", tmp_path)
    trains(str(site / "bin" / "lightning-shard"), tmp_path / "work", PYTHONPATH=str(site))


def new_environment(folder: Path, extras: str) -> Path:
    """The programs of an environment with the wheel and nothing else."""
    wheel = wheel_of_a_copy(folder)
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    install = [programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    nothing_else = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, f"{wheel}[{extras}]"], check=True, env=nothing_else)
    return programs


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_wheel_works_in_an_environment_with_nothing_else(tmp_path: Path) -> None:
    programs = new_environment(tmp_path, "recipes")
    command, folder, paths = str(programs / "lightning-shard"), tmp_path / "work", f"{programs}:/usr/bin:/bin"
    trains(command, folder, PATH=paths)
    assert shell(f"{command} --version", folder, PATH=paths) == f"lightning-shard {installed.version()}\n"
    assert "embedding" in shell(f"{command} inspect outputs/mine/checkpoints/last.ckpt", folder, PATH=paths)
    assert "2 pipeline × 1 data" in shell(f"{command} plan recipe=mine", folder, PATH=paths)


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_a_newcomer_with_the_wheel_runs_every_guide_in_one_folder(
    tmp_path: Path,
    on_s3: dict[str, str],  # noqa: F811
) -> None:
    programs = new_environment(tmp_path, "recipes,hf,s3")
    folder = tmp_path / "work"
    folder.mkdir()
    write_users_files(folder)
    environment = {**on_s3, "PATH": f"{programs}:/usr/bin:/bin"}
    environment.pop("PYTHONPATH", None)
    (copied,) = re.findall(r"^cp -r .*$", (ROOT / "docs/start/first_run.md").read_text(), re.MULTILINE)
    run(Command("first_run.md", copied), folder, environment)
    pages = re.findall(r"- ((?:start|guides|moving)/\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(pages) >= 18
    for page in [ROOT / "docs" / name for name in pages]:
        for command in commands(page):
            if command.line.startswith("pip ") and " -e " not in command.line:
                run(command, folder, environment | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")})
        run_page(page, folder, environment)


@pytest.mark.long
def test_a_source_distribution_has_the_recipes(tmp_path: Path) -> None:
    copy = copy_of_the_repository(tmp_path / "clone")
    shell(f"{sys.executable} setup.py --quiet sdist", copy)
    (archive,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"recipes/train.py", "conf/config.yaml", "conf/recipe/demo.yaml", "setup.py"} <= names


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_missing_extra_is_named_by_what_installs_it(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(installed._MODULES, "hydra-core", "not_installed")
    assert cli.main([verb, "recipe=demo"]) == 1
    assert capsys.readouterr().err == (
        "lightning-shard: Recipes are configured by Hydra, which isn't installed: pip install 'hydra-core<1.4,>=1.3'\n"
    )
