"""Ranks of a process that has no script to run again: a notebook, ``python -c``, and a script from standard input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_shard import checkpoint
from tests.paths import ROOT

FIT = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader
import lightning_shard
from lightning_shard import HybridShardStrategy
from tests.parity import QUIET

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def training_step(self, batch, _):
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        loss = batch.square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.set_num_threads(2)
(torch.randn(1000, 1000) @ torch.randn(1000, 1000)).sum()  # with threads, which forks don't have
torch.manual_seed(0)
model, rows = Model(), torch.randn(16, 8)
before = {name: value.clone() for name, value in model.state_dict().items()}
strategy = HybridShardStrategy(DEVICES)
trainer = L.Trainer(**QUIET, devices=DEVICES, num_nodes=NODES, strategy=strategy, max_steps=3)
trainer.fit(model, DataLoader(list(rows), batch_size=8))
assert trainer.global_step == 3 or DEVICES > 1
after = model.state_dict()
assert all(type(value) is torch.Tensor for value in after.values()) or DEVICES == 1
print(trainer.callback_metrics["loss"].item(), sum(float(after[n].norm()) for n in after), flush=True)
"""
OF_FABRIC = """
import torch
from lightning.fabric import Fabric
import lightning_shard

def loop(fabric):
    model = fabric.setup_module(torch.nn.Linear(4, 4))
    return fabric.all_gather(torch.tensor(fabric.global_rank)).tolist(), type(model.weight).__name__

fabric = Fabric(devices=2, accelerator="cpu", strategy="hybrid_shard")
print(fabric.launch(loop))
"""


def run(*command: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], input=given, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )


def fit(devices: int, nodes: int = 1) -> str:
    return FIT.replace("DEVICES", str(devices)).replace("NODES", str(nodes))


def test_ranks_are_forks_and_bring_back_what_they_trained() -> None:
    one, two = run("-c", fit(1)), run("-", given=fit(2))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    seen = [[float(number) for number in each.stdout.splitlines()[-1].split()] for each in (one, two)]
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


def test_several_machines_need_a_script() -> None:
    failed = run("-c", fit(2, nodes=2))
    assert failed.returncode
    assert "ConfigurationError: num_nodes=2 needs a script" in failed.stderr


def test_a_loop_of_fabric() -> None:
    done = run("-", given=OF_FABRIC)
    assert done.stdout.splitlines()[-1] == "([0, 1], 'DTensor')", done.stderr


@pytest.mark.ranks
def test_the_notebook_trains_on_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "recipes" / "notebook.ipynb", 4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=where).execute()  # raises what a cell does
    [saved] = (tmp_path / "notebook" / "checkpoints").iterdir()
    assert checkpoint.inspect(saved).layout["pipeline_parallel_size"] == 2
