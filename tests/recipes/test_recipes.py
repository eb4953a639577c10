"""The recipes: their configuration, their data, their model, and the script that puts them together."""

import csv
import math
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpt import GPT, LanguageModel
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from names import CONFIG, refuse_unknown_names, refuse_unknown_overrides
from omegaconf import OmegaConf
from text import TextFolder

TRAIN = CONFIG.parent / "recipes" / "train.py"
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONFIG.glob("*/*.yaml"))
MUST_BE_GIVEN = {
    "data=folder": ["data.path=here"],
    "checkpoint=s3": ["checkpoint.dirpath=s3://bucket/run"],
    "recipe=spot": ["checkpoint.dirpath=s3://bucket/run"],
    "recipe=finetune": ["folder=here", "data.path=here"],
    "recipe=lora": ["folder=here", "data.path=here"],
    "data=shapes": ["model=vit"],
    "model=lora": ["model.path=here"],
    "model=transformers_folder": ["model.config.pretrained_model_name_or_path=here"],
}
POEM = "The quick brown fox jumps over the lazy dog, and the dog says nothing at all.\n" * 400


def train(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TRAIN), "trainer.enable_progress_bar=false", *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=200)


def logged(output: Path, column: str) -> dict[int, float]:
    """A column of all the runs in an output folder, by the number of finished steps."""
    files = sorted(output.rglob("metrics.csv"))
    rows = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
    return {int(row["step"]) + 1: float(row[column]) for row in rows if row.get(column)}


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        return compose("config", [*overrides])


class TestConfiguration:
    @pytest.mark.parametrize("option", OPTIONS)
    def test_every_option_composes_and_is_taken_by_its_targets(self, option: str) -> None:
        config = composed(option, *MUST_BE_GIVEN.get(option, []))
        OmegaConf.resolve(config)
        refuse_unknown_names(config)

    @pytest.mark.parametrize(
        ("argument", "answer"),
        [
            (
                "strategy.pipelin_parallel_size=2",
                "unknown key strategy.pipelin_parallel_size: did you mean strategy.pipeline_parallel_size?",
            ),
            ("pipeline_parallel_size=2", "did you mean strategy.pipeline_parallel_size?"),
            ("strateg=single", "did you mean strategy?"),
            ("~model.widht", "did you mean model.width?"),
            ("trainer.deterministic=true", "write +trainer.deterministic=true"),
        ],
    )
    def test_an_unknown_key_is_answered_with_the_nearest_known_one(self, argument: str, answer: str) -> None:
        if argument[0] == "~":
            argument += "=1"
        with pytest.raises(SystemExit) as refusal:
            refuse_unknown_overrides(["data.batch_size=2", argument])
        assert str(refusal.value).endswith(answer)

    @pytest.mark.parametrize(
        "argument",
        ["strategy.pipeline_parallel_size=2", "strategy=single", "+trainer.deterministic=true", "--cfg", "run=a"],
    )
    def test_a_known_key_is_not_refused(self, argument: str) -> None:
        refuse_unknown_overrides([argument])

    def test_a_misspelt_addition_is_refused_too(self) -> None:
        config = composed("strategy=single", "+trainer.determnistic=true")
        with pytest.raises(SystemExit, match=r"did you mean trainer\.deterministic\?"):
            refuse_unknown_names(config)

    def test_a_value_that_must_be_given_is_asked_for(self) -> None:
        config = composed("strategy=single", "data=folder")
        with pytest.raises(SystemExit, match=r"data\.path must be given"):
            refuse_unknown_names(config)

    def test_the_store_of_the_checkpoints_gets_its_options(self) -> None:
        option = "checkpoint.storage_options.client_kwargs.endpoint_url=http://here"
        config = composed("checkpoint=s3", *MUST_BE_GIVEN["checkpoint=s3"], option)
        strategy = instantiate(config.strategy, _convert_="all")
        assert strategy.checkpoint_io.storage_options == {"client_kwargs": {"endpoint_url": "http://here"}}

    def test_the_recipe_for_spot_machines_takes_the_ranks_of_torchruns_round(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
        config = composed("recipe=spot", *MUST_BE_GIVEN["recipe=spot"])
        assert (config.trainer.devices, config.trainer.num_nodes, config.checkpoint.resume) == (8, 3, "last")
        strategy = instantiate(config.strategy, _convert_="all")
        assert strategy._timeout == timedelta(minutes=5)


class TestText:
    def test_the_last_tenth_of_every_file_is_held_out(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "a.txt").write_bytes(b"a" * 900 + b"A" * 100)
        (tmp_path / "b" / "b.txt").write_bytes(b"b" * 90 + b"B" * 10)
        (tmp_path / "c.bin").write_bytes(b"c" * 1000)
        data = TextFolder(str(tmp_path), context=10)
        data.setup()
        assert bytes(data.train_text.tolist()) == b"a" * 900 + b"b" * 90
        assert bytes(data.held_out_text.tolist()) == b"A" * 100 + b"B" * 10

    @pytest.mark.parametrize(("replicas", "own"), [(None, 12), (1, 12), (4, 3)])
    def test_a_global_batch_is_dealt_to_the_ranks(self, replicas: int | None, own: int) -> None:
        data = TextFolder("unused", context=4, global_batch_size=12)
        data.train_text = torch.arange(101, dtype=torch.uint8)
        kwargs = None if replicas is None else {"num_replicas": replicas, "rank": 0}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=kwargs)
        assert data.train_dataloader().batch_size == own

    def test_a_global_batch_that_the_ranks_dont_divide_is_refused(self) -> None:
        data = TextFolder("unused", global_batch_size=12)
        data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 5, "rank": 0})
        with pytest.raises(ValueError, match=r"data\.global_batch_size \(12\) must be a multiple of the 5 data ranks"):
            data.train_dataloader()

    def test_too_little_text_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"data\.path"):
            TextFolder(str(tmp_path)).setup()


class TestModel:
    def test_no_prediction_looks_ahead(self) -> None:
        torch.manual_seed(0)
        model = GPT(width=32, layers=2, heads=2, context=8)
        tokens = torch.randint(256, (1, 8))
        changed = tokens.clone()
        changed[0, 5] ^= 1
        same = (model(tokens) == model(changed)).all(-1)[0]
        assert same.tolist() == [True] * 5 + [False] * 3

    def test_an_untrained_model_is_no_better_than_chance(self) -> None:
        torch.manual_seed(0)
        loss = LanguageModel(context=16).loss(torch.randint(256, (8, 17)))
        assert loss.item() == pytest.approx(math.log(256), rel=0.02)


class TestTraining:
    @pytest.mark.long
    @pytest.mark.parametrize("strategy", ["single", "hybrid_shard"])
    def test_a_folder_of_text_is_learned_and_the_run_resumed(self, tmp_path: Path, strategy: str) -> None:
        (tmp_path / "poem.txt").write_text(POEM)
        output = tmp_path / "output"
        options = [
            f"strategy={strategy}",
            "model=gpt_tiny",
            "data=folder",
            f"data.path={tmp_path}",
            "data.context=32",
            f"output={output}",
            "checkpoint.every_n_train_steps=20",
            "trainer.val_check_interval=20",
        ]
        first = train(*options, "trainer.max_steps=40")
        assert first.returncode == 0, first.stderr
        second = train(*options, "trainer.max_steps=60", "checkpoint.resume=last")
        assert second.returncode == 0, second.stderr

        data = TextFolder(str(tmp_path), context=32)
        data.setup()
        losses = logged(output, "val_loss")
        assert list(losses) == [20, 40, 60]
        assert losses[60] < losses[40] < data.byte_entropy()
        # Forty steps by the first run, twenty by the second: it went on where the first had stopped.
        assert len(list(output.rglob("metrics.csv"))) == 2
        assert "resum" in second.stderr.lower() or "restor" in second.stderr.lower()
