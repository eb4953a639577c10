"""Ranks of a process that has no script to run again: a notebook, ``python -c``, and a script from standard input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_shard import checkpoint
from tests.paths import ROOT

FIT = """
import json
import lightning as L, torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
import lightning_shard
from lightning_shard import HybridShardStrategy
from lightning_shard.errors import ConfigurationError
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

def fit(strategy, devices, **settings):
    torch.manual_seed(0)
    model, rows = Model(), torch.randn(16, 8)
    trainer = L.Trainer(**QUIET, devices=devices, strategy=strategy, max_steps=3, **settings)
    trainer.fit(model, DataLoader(list(rows), batch_size=8))
    after = model.state_dict()
    assert all(type(value) is torch.Tensor for value in after.values())
    return trainer.callback_metrics["loss"].item(), sum(float(after[n].norm()) for n in after)

def loop(fabric):
    model = fabric.setup_module(torch.nn.Linear(4, 4))
    return fabric.all_gather(torch.tensor(fabric.global_rank)).tolist(), type(model.weight).__name__

torch.set_num_threads(2)
(torch.randn(1000, 1000) @ torch.randn(1000, 1000)).sum()  # with threads, which forks don't have
fabric = Fabric(devices=2, accelerator="cpu", strategy="hybrid_shard")
try:
    fit(HybridShardStrategy(2), 2, num_nodes=2)
except ConfigurationError as error:
    refused = str(error)
print(json.dumps([fabric.launch(loop), refused, fit(HybridShardStrategy(2), 2), fit("auto", 1)]), flush=True)
"""


def test_ranks_are_forks_and_bring_back_what_they_trained() -> None:
    """Of a Trainer as of Fabric; several machines are refused."""
    done = subprocess.run(
        [sys.executable, "-"], input=FIT, capture_output=True, text=True, cwd=ROOT, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    looped, refused, ours, plain = json.loads(done.stdout.splitlines()[-1])
    assert looped == [[0, 1], "DTensor"]
    assert refused.startswith("num_nodes=2 needs a script")
    assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.long
@pytest.mark.ranks
def test_the_notebook_trains_on_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "recipes" / "notebook.ipynb", 4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=where).execute()  # raises what a cell does
    [saved] = (tmp_path / "notebook" / "checkpoints").iterdir()
    assert checkpoint.inspect(saved).layout["pipeline_parallel_size"] == 2
