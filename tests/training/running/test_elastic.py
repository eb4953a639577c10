"""torchrun's elastic agent: a machine is lost, the others restart with the ranks that are left and go on.

Two agents of two processes each on this machine; an S3 server is the only store that they share.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_shard import HybridShardStrategy, ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, Model, loader
from tests.paths import ROOT
from tests.servers import Server, serve

STEPS = 12  # two epochs of 96 samples
LOST_AFTER = 5
SAVED_EVERY = 2
GROUP = "Preemption"
PATIENCE_S = 280.0  # a loaded machine takes minutes to import torch in four processes
REPETITIONS = int(os.environ.get("ELASTIC_REPETITIONS", "3"))
"""Of the long version."""

AGENT = """
import pathlib, sys, time
from torch.distributed.run import main

go = pathlib.Path(sys.argv[1])
go.with_name(sys.argv[2]).touch()
while not go.exists():  # so that both come to the first round
    time.sleep(0.02)
main(sys.argv[3:])
"""

SCRIPT = """
import json, sys
from tests.training.running.test_elastic import train

train(*json.loads(sys.argv[1]))
"""


class Noting(Model):
    """Notes each step of this process in a line of a file: when, on how many ranks, its loss, its samples."""

    def __init__(self, folder: str, pause_s: float) -> None:
        super().__init__()
        self.notes = Path(folder, f"{time.time_ns()}-{os.getpid()}.jsonl")
        self.pause_s = pause_s
        self.samples: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.samples = (batch["x"][:, 0] + 64 * batch["x"][:, 1] + 64**2 * batch["x"][:, 2]).tolist()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        loss = float(self.trainer.callback_metrics["train_loss"])
        note = {"step": self.trainer.global_step, "world": self.trainer.world_size, "loss": loss}
        with self.notes.open("a") as file:
            file.write(json.dumps({**note, "samples": self.samples, "time": time.time()}) + "\n")
        time.sleep(self.pause_s)


def train(folder: str, url: str, options: dict[str, Any], pause_s: float = 0.0) -> None:
    """What every user of torchrun writes, with nothing in it about rounds or restarts."""
    L.seed_everything(3)
    nodes, devices = int(os.environ.get("GROUP_WORLD_SIZE", "1")), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = L.Trainer(
        num_nodes=nodes,
        devices=devices,
        strategy=HybridShardStrategy(data_parallel_size="auto", checkpoint_io=ShardedCheckpointIO(options)),
        max_steps=STEPS,
        callbacks=[ModelCheckpoint(url, every_n_train_steps=SAVED_EVERY, save_last=True)],
        **{**QUIET, "enable_checkpointing": True},
    )
    data = loader(GLOBAL_BATCH // (nodes * devices), shuffle=True)
    trainer.fit(Noting(folder, pause_s), data, ckpt_path="last")


def notes(folder: Path) -> list[dict[str, Any]]:
    """Of all processes, in the order of time; a line that is being written is none yet."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: note["time"])


Lineage = dict[int, tuple[float, list[int]]]


def lineage(seen: list[dict[str, Any]]) -> Lineage:
    """Of each step its loss and samples, as of the last run that made it: what became of earlier ones is forgotten."""
    steps: Lineage = {}
    for step in sorted({note["step"] for note in seen}):
        made = [note for note in seen if note["step"] == step]
        made = [note for note in made if note["world"] == made[-1]["world"]]
        assert len(made) == made[0]["world"], f"step {step}: {made}"
        assert len({note["loss"] for note in made}) == 1
        steps[step] = made[0]["loss"], sorted(sample for note in made for sample in note["samples"])
    return steps


def children(pid: int) -> list[int]:
    """Of a process, with theirs."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [grandchild for child in own for grandchild in children(child)]


def kill(pid: int) -> None:
    for process in [pid, *children(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def two_agents(folder: Path, server: Server, survivor: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``survivor`` keeps the rendezvous; the other one's loss is to be survived."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "notes").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(ROOT)
    arguments = [str(folder / "notes"), f"{server.url}/{folder.name}", server.options, 0.15]
    agents = []
    try:
        for index in range(2):
            waits = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=6"
            command = [sys.executable, str(folder / "agent.py"), str(folder / "go"), f"ready-{index}"]
            command += ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.2"]
            command += ["--rdzv-id=run", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
            command += [f"--rdzv-conf=is_host={int(index == survivor)},{waits}", "--local-addr=127.0.0.1"]
            command += [str(folder / "script.py"), json.dumps(arguments)]
            environment = {**os.environ, "PYTHONPATH": root}
            with (folder / f"agent-{index}.log").open("wb") as log:
                process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)
            agents.append(process)
        wait_for(lambda: len(list(folder.glob("ready-*"))) == 2, agents)
        (folder / "go").touch()
        yield agents
    finally:
        for agent in agents:
            kill(agent.pid)
            agent.wait()


def wait_for(condition: Callable[[], bool], agents: list[subprocess.Popen[bytes]]) -> None:
    stop = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < stop
        assert all(agent.poll() is None for agent in agents)
        time.sleep(0.05)


def run_and_lose(how: signal.Signals, survivor: int, folder: Path, server: Server, undisturbed: Lineage) -> None:
    logs = [folder / "agent-0.log", folder / "agent-1.log"]
    try:
        with two_agents(folder, server, survivor) as agents:
            wait_for(lambda: any(note["step"] >= LOST_AFTER for note in notes(folder / "notes")), agents)
            lost = agents[1 - survivor]
            if how == signal.SIGKILL:
                kill(lost.pid)
            else:
                lost.send_signal(how)
            assert agents[survivor].wait(PATIENCE_S) == 0
        seen = notes(folder / "notes")
        first_after = min(note["step"] for note in seen if note["world"] == 2)
        last_before = max(note["step"] for note in seen if note["world"] == 4)
        assert {note["world"] for note in seen} == {4, 2}
        if how == signal.SIGKILL:  # at most what came after the last checkpoint is done once more
            assert first_after % SAVED_EVERY == 1
            assert last_before - SAVED_EVERY < first_after <= last_before + 1
            said = logs[survivor].read_text(errors="replace")
            # the store's own process may be missed before the ranks are
            assert re.search(r"rank \d lost the others\. The first failure was on .*(no sign of life|gone)", said)
        else:  # nothing is
            assert first_after == last_before + 1
        steps = lineage(seen)
        assert list(steps) == list(range(1, STEPS + 1))
        for step, (loss, samples) in steps.items():
            assert samples == undisturbed[step][1], step
            assert loss == pytest.approx(undisturbed[step][0], rel=2e-6), step
        counts = Counter(sample for _, samples in steps.values() for sample in samples)
        assert set(counts.values()) == {2}  # each once in each of two epochs
        assert checkpoint.verify(f"{server.url}/{folder.name}/last.ckpt", storage_options=server.options).ok
    except BaseException:
        for log in logs:
            print(f"──── {log.name} ────\n{log.read_text(errors='replace')[-8000:]}")
        raise


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve("s3", tmp_path_factory.mktemp("server") / "served") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Lineage:
    """One process that trains through."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(train, 1, str(folder), str(folder / "checkpoints"), {}, elastic=True)
    return lineage(notes(folder))


def row(how: signal.Signals) -> str:
    fate = "is killed" if how == signal.SIGKILL else "gets SIGTERM"
    return f"torchrun on two machines with a store in common: one {fate}, the other goes on"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_when_a_machine_is_lost_the_rest_goes_on_from_the_last_checkpoint(
    tmp_path: Path, server: Server, undisturbed: Lineage, ledger: Callable[..., None]
) -> None:
    run_and_lose(signal.SIGKILL, 0, tmp_path, server, undisturbed)
    ledger(GROUP, row(signal.SIGKILL), tried=1, sample=True)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("survivor", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_time_and_again(
    how: signal.Signals,
    survivor: int,
    tmp_path: Path,
    server: Server,
    undisturbed: Lineage,
    ledger: Callable[..., None],
) -> None:
    for repetition in range(REPETITIONS):
        folder = tmp_path / f"{how.name}-{survivor}-{repetition}"
        folder.mkdir()
        run_and_lose(how, survivor, folder, server, undisturbed)
    ledger(GROUP, row(how), tried=REPETITIONS)
