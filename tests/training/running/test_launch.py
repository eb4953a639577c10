"""The ways in which processes are started: Lightning's own launcher, torchrun, SLURM.

Each runs in the environment of a plain shell, so the strategy alone makes the ranks compute alike.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_shard import HybridShardStrategy, checkpoint, processors
from lightning_shard.checkpoint.store.local import MAX_THREADS, thread_count
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, Model, layout, loader
from tests.paths import ROOT

LAYOUTS = {"tp2": layout(tensor=2), "pp2": layout(pipeline=2)}
SCRIPT = "import sys; from tests.training.running.test_launch import fit_all; fit_all(sys.argv[1])"


class Threads(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen = torch.get_num_threads(), thread_count()


def fit(strategy: Any, folder: str) -> str:
    """Fit two steps, and save after the first; tells the loss and the numbers of threads."""
    L.seed_everything(3)
    threads = Threads()
    saves = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    settings = {**QUIET, "enable_checkpointing": True, "max_steps": 2, "callbacks": [threads, saves]}
    trainer = L.Trainer(strategy=strategy, devices=2, **settings)
    batch = GLOBAL_BATCH // trainer.strategy.layout.data_parallel_size  # type: ignore[attr-defined]
    trainer.fit(Model("llama"), loader(batch))
    loss = trainer.callback_metrics["train_loss"]
    sizes = trainer.strategy.layout  # type: ignore[attr-defined]
    return f"rank {trainer.global_rank} of {trainer.world_size}, {sizes}, loss {loss:.4f}, threads {threads.seen}\n"


def fit_all(folder: str) -> None:
    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    for name, sizes in LAYOUTS.items():
        sys.stdout.write(fit(HybridShardStrategy(**sizes), f"{folder}/{name}"))
        assert before == (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")), "what a run sets is set back"


def plain_shell() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not re.match("(OMP|MKL)_", name)}
    return {**own, "PYTHONPATH": str(ROOT)}


def run(*command: str) -> str:
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=plain_shell(),
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
    trainer.fit(Model("llama"), loader(GLOBAL_BATCH))
    return f"loss {trainer.callback_metrics['train_loss']:.4f}"


def check(said: str, threads: int, *names: str) -> None:
    """That both ranks of each layout have the loss of one process, and the same number of threads."""
    loss, own = loss_of_one_process(), min(MAX_THREADS, share())
    for name in names:
        sizes = " × ".join(f"{size} {axis.partition('_')[0]}" for axis, size in LAYOUTS[name].items())
        for rank in range(2):
            assert f"rank {rank} of 2, {sizes}, {loss}, threads ({threads}, {own})\n" in said


def share() -> int:
    return processors.shares([processors.Available.here()] * 2)


@pytest.mark.parametrize("launcher", [pytest.param("lightning", marks=pytest.mark.long), "torchrun"])
def test_a_script_on_two_processes_computes_alike_on_both_and_saves(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [str(script), str(tmp_path)]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *command]
    # torchrun sets a variable for one thread, which counts as set by the user
    check(run(*command), 1 if launcher == "torchrun" else share(), *LAYOUTS)
    for name in LAYOUTS:
        assert len(list((tmp_path / name).iterdir())) == 2
        for path in (tmp_path / name).iterdir():
            checkpoint.verify(path)


def under_slurm(folder: str) -> tuple[str, str]:
    rank = os.environ["RANK"]
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]  # srun sets none of torchrun's
    torch.set_num_threads(len(processors.Available.here().processors))  # as in a new process
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
    strategy = HybridShardStrategy(**LAYOUTS["tp2"])
    said = fit(strategy, folder)
    return type(strategy.cluster_environment).__name__, said


def test_slurm(tmp_path: Path) -> None:
    seen = run_ranks(under_slurm, 2, str(tmp_path), init=False)
    assert {environment for environment, _ in seen} == {"SLURMEnvironment"}
    check("".join(said for _, said in seen), share(), "tp2")
