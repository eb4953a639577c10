"""The callback and the strategy together; the whole way on an S3 server: train, stop, go on elsewhere, gather."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from names import CONFIG
from safetensors.torch import load_file

from lightning_shard import ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import Seen, combine, layout, train
from tests.servers import KEY, SECRET, serve

STOPPED, TRAINED = 3, 5  # of the six steps of an epoch
STAGES, SHARDS = layout(pipeline=2), layout(data=2)


def run(
    sizes: dict[str, int], url: str, options: dict[str, Any], steps: int, asynchronous: bool = False
) -> tuple[Seen, dict[str, Any]]:
    """Train from the last checkpoint, if there is one: the account, and the callback's state."""
    keep = ModelCheckpoint(
        url, "{step}", monitor="val_loss", save_top_k=2, save_last=True, save_on_train_epoch_end=False
    )
    seen = train(
        "gpt",
        sizes,
        steps=steps,
        shuffle=True,
        callbacks=[keep],
        trainer={"enable_checkpointing": True, "val_check_interval": 1},
        resume="last",
        checkpoint_io=ShardedCheckpointIO(options, asynchronous),
    )
    return seen, keep.state_dict()


def resume_beside_an_uninterrupted_run(url: str, options: dict[str, Any]) -> tuple[Any, Seen]:
    uninterrupted = train("gpt", SHARDS, steps=TRAINED, shuffle=True, trainer={"val_check_interval": 1})
    return run(SHARDS, url, options, TRAINED, asynchronous=True), uninterrupted


def test_a_run_on_s3_goes_on_with_another_layout_and_is_gathered_to_one_file(tmp_path: Path) -> None:
    with serve("s3", tmp_path / "served") as server:
        url, options = f"{server.url}/run", server.options
        first = run_ranks(run, 2, STAGES, url, options, STOPPED, elastic=True)
        before = combine([seen for seen, _ in first], STAGES)
        folder = server.folder / "bucket" / "run"
        assert names(folder) == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]

        second = run_ranks(resume_beside_an_uninterrupted_run, 2, url, options, elastic=True)
        after = combine([seen for (seen, _), _ in second], SHARDS)
        curve = combine([uninterrupted for _, uninterrupted in second], SHARDS)
        assert before.losses + after.losses == pytest.approx(curve.losses, rel=2e-6)
        assert len(after.losses) == TRAINED - STOPPED
        assert names(folder) == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]

        states = [state for (_, state), _ in second]
        assert states[0] == states[1]
        assert states[0]["best_model_path"] == f"{url}/step=5.ckpt"
        assert sorted(states[0]["best_k_models"]) == [f"{url}/step=4.ckpt", f"{url}/step=5.ckpt"]

        assert all(checkpoint.verify(f"{url}/{name}", storage_options=options).ok for name in names(folder))
        checkpoint.gather(f"{url}/last.ckpt", tmp_path / "model.safetensors", storage_options=options)
        gathered = load_file(tmp_path / "model.safetensors")
        assert gathered.keys() == after.parameters.keys()
        assert all(torch.equal(gathered[name], value) for name, value in after.parameters.items())


def refused(url: str, options: dict[str, Any]) -> str:
    keep = ModelCheckpoint(url, save_top_k=1)
    io = ShardedCheckpointIO(options)
    try:
        train("gpt", SHARDS, steps=1, callbacks=[keep], trainer={"enable_checkpointing": True}, checkpoint_io=io)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_every_rank_is_told_at_once_that_the_keys_are_wrong(tmp_path: Path) -> None:
    with serve("s3", tmp_path / "served") as server:
        options = {**server.options, "secret": f"{SECRET}-but-wrong"}
        told = run_ranks(refused, 2, f"{server.url}/run", options, elastic=True, timeout_s=30)
    refusal = f"{server.url}/run can't be looked up: PermissionError: "
    assert told[0].startswith(f"CheckpointError: {refusal}")
    assert told[1].startswith(f"CheckpointError: rank 0: {refusal}")
    assert SECRET not in "".join(told)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


TRAIN = CONFIG.parent / "recipes" / "train.py"


@pytest.mark.long
@pytest.mark.parametrize("runs", [1, 2])
def test_a_run_saves_to_s3_and_goes_on_from_there(runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "poem.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    with serve("s3", tmp_path / "served") as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        said = ""
        for steps in range(1, runs + 1):
            options = [
                "model=gpt_tiny",
                "data=folder",
                f"data.path={tmp_path}",
                "data.context=32",
                f"output={tmp_path / 'output'}",
                "checkpoint=s3",
                f"checkpoint.dirpath={server.url}/run",
                "checkpoint.every_n_train_steps=1",
                "checkpoint.resume=last",
                f"trainer.max_steps={steps}",
                "trainer.enable_progress_bar=false",
            ]
            run = subprocess.run(
                [sys.executable, str(TRAIN), *options],
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=200,
                env=os.environ,
            )
            assert run.returncode == 0, run.stderr
            said += run.stdout + run.stderr
        assert (f"Restored all states from the checkpoint at {server.url}/run/last.ckpt" in said) is (runs == 2)
        kept = checkpoint.inspect(f"{server.url}/run/last.ckpt", storage_options=server.options)
        assert kept.global_step == runs
    written = [path.read_text(errors="replace") for path in (tmp_path / "output").rglob("*") if path.is_file()]
    assert len(written) > 2
    assert not [text for text in [said, *written] if SECRET in text or KEY in text]
