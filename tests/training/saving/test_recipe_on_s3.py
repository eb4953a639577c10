"""The recipe with ``checkpoint=s3``: the server and its keys are known from the environment only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from names import CONFIG

from lightning_shard import checkpoint
from tests.servers import KEY, SECRET, serve

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
