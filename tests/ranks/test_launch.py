"""The ways in which processes are started: Lightning's own launcher, torchrun, SLURM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest

from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, Model, loader

SCRIPT = """
import sys, torch
torch.set_num_threads(1)
import lightning as L
import lightning_shard
from lightning_shard import HybridShardStrategy
from tests.parity import GLOBAL_BATCH, QUIET, Model, loader

L.seed_everything(3)
strategy = "hybrid_shard" if sys.argv[1] == "by name" else HybridShardStrategy(pipeline_parallel_size=2)
trainer = L.Trainer(strategy=strategy, devices=2, max_steps=2, **QUIET)
batch = GLOBAL_BATCH // trainer.strategy.layout.data_parallel_size
trainer.fit(Model("gpt"), loader(batch))
loss = trainer.callback_metrics["train_loss"]
print(f"rank {trainer.global_rank} of {trainer.world_size}, {trainer.strategy.layout}, loss {loss:.5f}")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*command: str) -> str:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=150)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the ranks that it has started, too
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said + errors
    return said


def loss_of_one_process() -> str:
    L.seed_everything(3)
    trainer = L.Trainer(devices=1, max_steps=2, **QUIET)
    trainer.fit(Model("gpt"), loader(GLOBAL_BATCH))
    return f"loss {trainer.callback_metrics['train_loss']:.5f}"


BY_NAME, PIPELINE = ("by name", "1 pipeline × 2 data × 1 tensor"), ("pipeline", "2 pipeline × 1 data × 1 tensor")


@pytest.mark.parametrize(
    ("launcher", "strategy", "layout"),
    [
        ("lightning", *BY_NAME),
        pytest.param("torchrun", *PIPELINE, marks=pytest.mark.long),
        pytest.param("lightning", *PIPELINE, marks=pytest.mark.long),
        pytest.param("torchrun", *BY_NAME, marks=pytest.mark.long),
    ],
)
def test_a_script_on_two_processes(launcher: str, strategy: str, layout: str, script: str) -> None:
    command = [script, strategy]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *command]
    said = run(*command)
    for rank in range(2):
        assert f"rank {rank} of 2, {layout}, {loss_of_one_process()}" in said


def under_slurm() -> tuple[str, str, str]:
    from lightning_shard import HybridShardStrategy

    rank = os.environ["RANK"]
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    os.environ.update(
        SLURM_NTASKS="2",
        SLURM_JOB_NAME="train",
        SLURM_JOB_ID="1",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID="0",
        SLURM_NODELIST=address,
        SLURM_NTASKS_PER_NODE="2",
        MASTER_ADDR=address,
        MASTER_PORT=port,
    )
    L.seed_everything(3)
    trainer = L.Trainer(strategy=HybridShardStrategy(pipeline_parallel_size=2), devices=2, max_steps=2, **QUIET)
    trainer.fit(Model("gpt"), loader(GLOBAL_BATCH))
    environment = type(trainer.strategy.cluster_environment).__name__
    return (
        environment,
        f"{trainer.global_rank} of {trainer.world_size}",
        f"loss {trainer.callback_metrics['train_loss']:.5f}",
    )


def test_slurm() -> None:
    loss = loss_of_one_process()
    seen = run_ranks(under_slurm, 2, init=False)
    assert seen == [("SLURMEnvironment", f"{rank} of 2", loss) for rank in range(2)]
