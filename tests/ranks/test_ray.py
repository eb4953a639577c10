"""Inside of Ray Train: a local cluster of two machines loses one, and the run goes on from its last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import os, pathlib, sys, threading, time
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

folder = pathlib.Path(sys.argv[1])


def loop(config):
    import lightning as L
    import torch
    from ray.train.lightning import RayLightningEnvironment
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_shard import HybridShardStrategy, ModelCheckpoint

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def training_step(self, batch, _):
            x = batch[0]
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Told(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.world_size > 1:
                time.sleep(0.3)
            if trainer.is_global_zero:
                with (folder / "steps").open("a") as file:
                    file.write(f"{trainer.world_size} {trainer.global_step}\\n")

    L.seed_everything(1)
    context = ray.train.get_context()
    ranks, here = context.get_world_size(), context.get_local_world_size()
    trainer = L.Trainer(
        accelerator="cpu", devices=here, num_nodes=ranks // here, max_steps=40, logger=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[RayLightningEnvironment()],
        strategy=HybridShardStrategy(pipeline_parallel_size=ranks),
        callbacks=[ModelCheckpoint(str(folder / "checkpoints"), every_n_train_steps=5, save_last=True), Told()],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8), ckpt_path="last")
    ray.train.report({"step": trainer.global_step})


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)


def lose_one():
    steps = folder / "steps"
    while not (steps.exists() and len(steps.read_text().splitlines()) > 12):
        time.sleep(0.2)
    cluster.remove_node(second, allow_graceful=False)


threading.Thread(target=lose_one, daemon=True).start()
spread = ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}, placement_strategy="SPREAD")
kept = RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3))
assert TorchTrainer(loop, scaling_config=spread, run_config=kept).fit().error is None
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_lost_machine_leaves_a_run_on_the_others(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = tmp_path / "run.py"
    script.write_text(RUN)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, "RAY_DISABLE_IMPORT_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [tuple(map(int, line.split())) for line in (tmp_path / "steps").read_text().splitlines()]
    of_two, of_one = ([step for ranks, step in steps if ranks == count] for count in (2, 1))
    assert of_two == list(range(1, of_two[-1] + 1))
    assert (of_one[0] - 1) % 5 == 0  # from a checkpoint
    assert of_two[-1] - 5 <= of_one[0] <= of_two[-1] + 1
    assert of_one == list(range(of_one[0], 41))
