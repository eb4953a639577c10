"""Inside of Ray Train: the guide's script, on a local cluster of two machines that loses one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_shard import checkpoint
from tests.paths import ROOT
from tests.recipes.test_documented_commands import files_of_page

MODULE = """
import os, time
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class MyModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def training_step(self, batch, _):
        x = batch[0]
        for layer in self.layers:
            x = torch.relu(layer(x))
        loss = x.square().mean()
        self.log("loss", loss)
        return loss
    def on_train_batch_end(self, *_):
        if self.trainer.world_size > 1:
            time.sleep(0.3)
        if self.trainer.is_global_zero:
            with open(os.environ["STEPS"], "a") as file:
                file.write(f"{self.trainer.world_size} {self.trainer.global_step}\\n")
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
CLUSTER = """
import runpy, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)

def lose_one(steps):
    while not (steps.exists() and len(steps.read_text().splitlines()) > 12):
        time.sleep(0.2)
    cluster.remove_node(second, allow_graceful=False)

threading.Thread(target=lose_one, args=[Path(sys.argv[1])], daemon=True).start()
script = runpy.run_path("on_ray.py", run_name="__main__")
print("result", script["result"].metrics["step"], script["result"].checkpoint.path)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_lost_machine_leaves_a_run_on_the_others(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    files_of_page(ROOT / "docs" / "guides" / "ray.md", tmp_path)
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "modules.py").write_text(MODULE)
    (tmp_path / "cluster.py").write_text(CLUSTER)
    steps = tmp_path / "steps"
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "cluster.py", str(steps)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "STEPS": str(steps), "RAY_DISABLE_IMPORT_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = [tuple(map(int, line.split())) for line in steps.read_text().splitlines()]
    of_two, of_one = ([step for ranks, step in counts if ranks == count] for count in (2, 1))
    assert of_two == list(range(1, of_two[-1] + 1))
    assert (of_one[0] - 1) % 5 == 0  # from a checkpoint
    assert of_two[-1] - 10 <= of_one[0] <= of_two[-1] + 1  # Ray asks for reports every two seconds
    assert of_one == list(range(of_one[0], 41))
    (result,) = [line.split() for line in done.stdout.splitlines() if line.startswith("result ")]
    assert result[1] == "40"
    assert checkpoint.verify(result[2]).ok
    assert "'loss': " in done.stdout
