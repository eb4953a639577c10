"""Every shell command and all Python of the README and of docs/, run as it stands, in a copy of the repository.

A fence marked ``bash`` or ``console`` holds commands, for a plain shell; one marked ``python`` is a file, if it begins
with a comment that names one, or else a part of the page's script, which runs after the commands. A page's commands run
in their order in one folder, so that a command may use what an earlier one has made. What can't run here has the reason
in a comment before its fence, ``<!-- not run: needs four machines -->``, at a line's end, ``# on a GPU``, or for all of
a page's Python, ``<!-- python not run: parts of steps -->``: Python is compiled all the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.servers import KEY, SECRET, serve

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>.+?) -->\n+)?^```(?P<kind>\S*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
LIMIT_S = 900
PLAIN = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH")
"""All that a plain shell exports; the last is set by nobody but who tests a checkout that isn't the installed one."""


@dataclass(frozen=True)
class Command:
    """A command of a page; ``why`` says why it isn't run, if it isn't."""

    page: str
    line: str
    why: str | None = None

    @property
    def makes_an_environment(self) -> bool:
        return self.line.startswith(("pip ", "make "))


def commands(page: Path) -> list[Command]:
    found = []
    for fence in FENCE.finditer(page.read_text()):
        lines = fence["body"].replace("\\\n", " ").splitlines()
        if fence["kind"] == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif fence["kind"] != "bash":
            continue
        for line in lines:
            command, _, comment = line.partition("  #")
            why = fence["why"] or ("no GPU" if "on a GPU" in comment else None)
            found.append(Command(page.name, " ".join(command.split()), why))
    return found


ALL = [command for page in PAGES for command in commands(page)]
RUN = [command for command in ALL if not command.why]


def files_of_page(page: Path, folder: Path) -> None:
    """Write the page's own files: fences whose first line is a comment with a path."""
    for fence in FENCE.finditer(page.read_text()):
        if named := re.match(r"# (\S+\.(?:py|yaml))\n", fence["body"]):
            file = folder / named[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(fence["body"])


def copy_of_the_repository(folder: Path) -> Path:
    """As a fresh clone would have it, with what isn't committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def plain_shell(**more: str) -> dict[str, str]:
    """The environment of a new shell with the environment's programs on its path."""
    plain = {name: os.environ[name] for name in PLAIN if name in os.environ}
    return {**plain, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{plain['PATH']}", **more}


def run(command: Command, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command.line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    # As diff(1): 1 is an answer, not a fault. The README's two checkpoints say in which folder they were saved.
    right = (0, 1) if " diff " in command.line else (0,)
    assert done.returncode in right, f"{command.page}: {command.line}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout + done.stderr


CHECKPOINTS = """
import lightning as L, torch
from transformers import GPT2Config, GPT2LMHeadModel
from lightning_shard import HybridShardStrategy, ModelCheckpoint

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    def training_step(self, batch, _):
        return self.model(batch, labels=batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

batches = torch.utils.data.DataLoader(torch.arange(1600).remainder(64).view(200, 8), batch_size=2)
for folder in ("run", "s3://bucket/run"):
    L.seed_everything(1)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=100, save_last=True)
    strategy = HybridShardStrategy()
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_steps=100, logger=False, callbacks=[saves])
    trainer.fit(Lit(), batches)
"""
MODULES = """
import lightning as L, torch
from torch import nn

class MyModule(L.LightningModule):
    def __init__(self, width: int = 32, layers: int = 8, dropout: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, dropout=dropout, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)
    def training_step(self, batch, _):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randint(0, 1000, (64, 8)), batch_size=8)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
"""
TAKEN = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
import lightning as L, lightning_shard, torch
import torch.distributed.checkpoint as dcp
from lightning import Trainer
from lightning_shard import HybridShardStrategy
from my_project import MyModule
from safetensors.torch import save_file

model, batches, rank, step = MyModule(), [torch.zeros(32, 8, dtype=torch.long)] * 2, 0, 0
optimizer, batch, state = torch.optim.AdamW(model.parameters()), batches[0], model.state_dict()
Path("llama-folder").mkdir(exist_ok=True)
save_file(state, "llama-folder/model.safetensors")
"""
"""What a page's script may use without saying where it comes from."""


def write_users_files(folder: Path) -> None:
    (folder / "my_texts").mkdir()
    (folder / "my_texts" / "fox.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 4000)
    (folder / "my_project").mkdir()
    (folder / "my_project" / "modules.py").write_text(MODULES)
    (folder / "my_project" / "__init__.py").write_text("from my_project.modules import MyModule\n")


def what_a_page_takes_for_granted(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """A user's texts and modules, and a run's checkpoints on disk and on S3."""
    write_users_files(folder)
    if re.search(r"\s(s3://bucket/)?run/last", page.read_text()):
        run(Command("-", f"python -c '{CHECKPOINTS.replace(chr(39), chr(34))}'"), folder, environment)


def python_of(page: Path) -> list[tuple[str, bool]]:
    """The page's Python that is no file, and whether it is run."""
    text = page.read_text()
    runs = "<!-- python not run: " not in text
    fences = [fence for fence in FENCE.finditer(text) if fence["kind"] == "python"]
    return [(f["body"], runs and not f["why"]) for f in fences if not re.match(r"# \S+\.py\n", f["body"])]


def script_of(page: Path) -> str:
    return "\n".join(body for body, runs in python_of(page) if runs)


def run_page(page: Path, folder: Path, environment: dict[str, str]) -> None:
    files_of_page(page, folder)
    for command in commands(page):
        if not command.why and not command.makes_an_environment:
            run(command, folder, environment)
    if script := script_of(page):
        (folder / "page.py").write_text(TAKEN + script)
        run(Command(page.name, "python page.py"), folder, environment)


@pytest.fixture
def on_s3(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A plain shell where ``s3://bucket`` is reached as a user's environment says."""
    with serve("s3", tmp_path / "served") as server:
        yield plain_shell(
            AWS_ACCESS_KEY_ID=KEY,
            AWS_SECRET_ACCESS_KEY=SECRET,
            AWS_DEFAULT_REGION="us-east-1",
            AWS_ENDPOINT_URL=server.endpoint,
        )


def test_every_fence_with_a_command_is_marked_as_a_shells() -> None:
    starts = ("$ ", "python ", "pytest ", "lightning-shard ", "pip ", "make ", "torchrun ")
    bare = [
        f"{page.name}: {line}"
        for page in PAGES
        for fence in FENCE.finditer(page.read_text())
        if fence["kind"] not in ("bash", "console")
        for line in fence["body"].splitlines()
        if line.startswith(starts)
    ]
    assert not bare
    assert len(RUN) >= 50


def test_all_python_of_the_pages_compiles_and_each_file_of_theirs_is_used() -> None:
    for page in PAGES:
        for body, _ in python_of(page):
            compile(f"def part(self):\n{textwrap.indent(body, '    ')}", page.name, "exec")
        text = page.read_text()
        for name in re.findall(r"^```python\n# (\S+?)(?:/\S+)?\.py\n", text, re.MULTILINE):
            uses = rf"(python|pytest) .*\b{name}\.py|{name}\.\w+:\w+"
            assert re.search(uses, text), f"{page.name}: no command runs {name}.py"


QUICK = [page for page in PAGES if page.parent.name in ("guides", "moving", "start") and script_of(page)]


def test_python_that_makes_strategies_and_trainers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_users_files(tmp_path)
    assert len(QUICK) >= 6
    for page in QUICK:
        exec(compile(TAKEN + script_of(page), page.name, "exec"), {"__name__": page.stem})
    for name in [name for name in sys.modules if name.startswith("my_project")]:
        del sys.modules[name]


def shorter(command: Command, steps: int | None) -> Command:
    """A training as it is typed, and then on two ranks, of few steps of a small model."""
    if steps is None:
        return command
    few = f"trainer.devices=2 trainer.max_steps={steps} checkpoint.every_n_train_steps=2 trainer.limit_val_batches=1"
    return Command(command.page, f"{command.line} {few} model=gpt_tiny data.context=32")


@pytest.mark.timeout(600)
def test_the_first_commands_of_the_readme_train_resume_elsewhere_and_gather(tmp_path: Path) -> None:
    first = [each for each in commands(PAGES[0]) if not each.makes_an_environment][:3]
    assert [each.line.split()[0] for each in first] == ["python", "python", "lightning-shard"]
    assert all("trainer.devices=" in each.line and "trainer.max_steps=" in each.line for each in first[:2])
    folder = copy_of_the_repository(tmp_path / "clone")
    shown = "".join(run(shorter(command, steps), folder, plain_shell()) for command, steps in zip(first, (2, 4, None)))
    assert (folder / "model.safetensors").stat().st_size > 100_000
    assert "Epoch 0:" in shown
    for noise in ("/-2", "FLOPs: 0", "Traceback", "deprecated"):
        assert noise not in shown


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_commands_of_a_page_run_in_a_plain_shell(page: Path, tmp_path: Path, on_s3: dict[str, str]) -> None:
    folder = copy_of_the_repository(tmp_path / "clone")
    what_a_page_takes_for_granted(page, folder, on_s3)
    run_page(page, folder, on_s3)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_readmes_environment_is_made_from_nothing_and_runs_its_commands(
    tmp_path: Path, on_s3: dict[str, str]
) -> None:
    folder = copy_of_the_repository(tmp_path / "clone")
    run(Command("-", "python3 -m venv venv"), folder, plain_shell())
    fresh = {**on_s3, "PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{on_s3['PATH']}"}
    fresh.pop("PYTHONPATH", None)
    for command in commands(PAGES[0]):
        if command.line.startswith("pip "):
            run(command, folder, fresh)
    first = [each for each in commands(PAGES[0]) if not each.makes_an_environment][:3]
    for command in first:
        run(command, folder, fresh)
