"""Training under a Trainer: an unmodified module with this package's strategy, a rewritten one with Lightning's own."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.lib.by_hand import shard, split
from benchmarks.lib.steps import Size, Tokens, Watch, Way, loss_of, network, optimizer_of
from lightning_shard import HybridShardStrategy
from recipes import plans
from tests import on_gpu

OUR_PLAN = {f"model.{name}": style for name, style in plans.GPT.items()}
OUR_EXPERT_PLAN = {f"model.{name}": style for name, style in plans.EXPERTS.items()}


class Module(L.LightningModule):
    """The unmodified one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.model = network(size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model(batch[:, :-1]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class ModuleThatShardsItself(Module):
    """What Lightning's own strategy asks for."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            split(self.model, mesh["tensor_parallel"])
        if mesh["data_parallel"].size() > 1:
            shard(self.model, mesh["data_parallel"])


class _Tells(L.Callback):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._watch.ended(outputs["loss"])


def _fit(watch: Watch, strategy: Strategy, module: Module, ranks: int, loader: DataLoader[Tensor], **more: Any) -> None:
    on_gpu.place_ranks()
    trainer = L.Trainer(
        accelerator="gpu" if module.size.device == "cuda" else "cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=watch.steps,
        callbacks=[_Tells(watch)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    trainer.fit(module, loader)


def ours(size: Size, ranks: int = 2, data_ranks: int = 1, **settings: Any) -> Way:
    def train(watch: Watch) -> None:
        if settings.get("compile_blocks"):
            torch._dynamo.reset()
        strategy = HybridShardStrategy(data_parallel_size=data_ranks, **settings)
        loader = DataLoader(Tokens(size, watch.steps, data_ranks), batch_size=size.batch)
        _fit(watch, strategy, Module(size), ranks, loader)

    return train


def lightnings(size: Size, data: int, tensor: int) -> Way:
    """Under Lightning's ModelParallelStrategy; each data rank is dealt the same windows as under the others."""

    def train(watch: Watch) -> None:
        strategy = ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
        tokens = Tokens(size, watch.steps, data)
        rank = torch.distributed.get_rank() // tensor
        loader = DataLoader(tokens, batch_size=size.batch, sampler=range(rank, len(tokens), data))
        module = ModuleThatShardsItself(size)
        _fit(watch, strategy, module, data * tensor, loader, use_distributed_sampler=False)

    return train
