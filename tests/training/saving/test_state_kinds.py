"""What callbacks, hyperparameters and buffers hold: saved on one layout, back on another, refused by key if need be."""

from __future__ import annotations

import datetime
import enum
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.errors import ConfigurationError, UnsupportedStateError
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, VOCABULARY, Model, layout, loader, trainer_of, world


class Kind(enum.Enum):
    SMALL = "small"


@dataclass
class Range:
    low: int
    high: int


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(12.0).view(3, 4).t())  # not contiguous
        self.register_buffer("phase", torch.tensor([1 + 2j]))
        self.register_buffer("scale", torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out


class Everything(Model):
    def __init__(self, **given: Any) -> None:
        super().__init__("gpt", on_meta=True)
        torch.manual_seed(1)
        self.model = Network()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if not hasattr(self, "grid"):
            mesh = self.device_mesh["data_parallel"]
            self.register_buffer("grid", distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))


class Configured(Model):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


class Average(L.Callback):
    """An average of its own, kept by parameters' names; and tensors of other kinds."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not self.state:
            self.state = {
                "average": {name: p.detach().clone() for name, p in module.named_parameters()},
                "plain": torch.arange(3),
                "rank": torch.tensor(trainer.global_rank),
                "count": 0,
            }

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.state["count"] += 1
        for name, p in module.named_parameters():
            self.state["average"][name].lerp_(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict
        self.loaded = {**state_dict, "average": whole(state_dict["average"])}


Whole = tuple[torch.dtype, tuple[int, ...], bytes]


def whole(state: dict[str, Tensor]) -> dict[str, Whole]:
    """Whole tensors as values that pickle and compare, which those of float8 don't."""
    return {name: as_bytes(full_tensor(value)) for name, value in state.items()}


def as_bytes(tensor: Tensor) -> Whole:
    data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), data


def hyperparameters() -> dict[str, Any]:
    config = OmegaConf.create({"width": 8, "twice": "${.width}", "list": [1, {"a": "${width}"}], "open": "???"})
    return {
        "config": config,
        "path": Path("/data/x"),
        "kind": Kind.SMALL,
        "when": datetime.datetime(2024, 5, 6, tzinfo=datetime.UTC),
        "pair": (1, None),
    }


def fit(sizes: dict[str, int], path: str, resume: bool) -> Any:
    L.seed_everything(3)
    average = Average()
    trainer = trainer_of(
        {**sizes, "tensor_parallel_plan": {"blocks.*.0": "colwise_gather_output"}},
        world(sizes),
        max_steps=2 if resume else 1,
        callbacks=[average],
    )
    module = Everything(**hyperparameters())
    started: dict[str, Whole] = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            started.update(whole(module.state_dict()))

    trainer.callbacks.append(Look())
    trainer.fit(module, loader(GLOBAL_BATCH // sizes["data_parallel_size"]), ckpt_path=path if resume else None)
    if not resume:
        started.update(whole(module.state_dict()))
        trainer.save_checkpoint(path)
    kinds = {name: type(value) for name, value in average.state["average"].items()}
    return started, average.loaded, all(kind is DTensor for kind in kinds.values()), average.state["count"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(layout(data=2), layout(tensor=2), marks=pytest.mark.long),
        (layout(pipeline=2), layout(data=2)),
        pytest.param(layout(data=2), layout(pipeline=2), marks=pytest.mark.long),
    ],
    ids=["dp2 to tp2", "pp2 to dp2", "dp2 to pp2"],
)
def test_what_callbacks_and_buffers_hold_comes_back_on_another_layout(
    source: dict[str, int], target: dict[str, int], tmp_path: Path
) -> None:
    path = str(tmp_path / "one.ckpt")
    saved = run_ranks(fit, 2, source, path, False, elastic=True)
    resumed = run_ranks(fit, 2, target, path, True, elastic=True)
    assert checkpoint.verify(path).ok
    stored = checkpoint.read(path)
    first = {}
    for state, *_ in reversed(saved):
        first |= state  # of two ranks with one buffer, the first's
    back: dict[str, Whole] = {}
    average: dict[str, Whole] = {}
    for state, loaded, sharded, count in resumed:
        assert all(value == back.setdefault(name, value) for name, value in state.items())
        average |= loaded["average"]
        assert sharded
        assert count == 2
        assert (loaded["plain"].tolist(), int(loaded["rank"])) == ([0, 1, 2], 0)
    assert {name: as_bytes(value.full()) for name, value in stored.items()} == first
    assert back == first
    held = {name: as_bytes(value.full()) for name, value in stored.optimizer.items() if name.startswith("state/")}
    assert held == {f"state/callbacks/Average/average/{name}": value for name, value in average.items()}
    read = stored.trainer_state()["hyper_parameters"]
    resolved = {"width": 8, "twice": 8, "list": [1, {"a": 8}], "open": "???"}
    assert read == {**hyperparameters(), "config": resolved}


class Odd(L.Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [self.value]}


class Listing(L.Callback):
    """Holds DTensors where no name says whose they are."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.held = [p.detach().clone() for p in module.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}


def hold_or_refuse(folder: str) -> None:
    sizes = layout(data=2)
    path = str(Path(folder, "one.ckpt"))
    fit(sizes, path, False)
    before = sorted(str(file) for file in Path(folder).rglob("*"))
    for value, match in [(Range(1, 2), "Range"), (torch.ones(2).to_sparse(), "layout"), (iter(()), "iterator")]:
        trainer = trainer_of(sizes, max_steps=1, callbacks=[Odd(value)])
        trainer.fit(Everything(), loader(8))
        with pytest.raises(UnsupportedStateError, match=rf"callbacks\.Odd\.deep\[0\].*{match}"):
            trainer.save_checkpoint(path)
        dist.barrier()
        assert sorted(str(file) for file in Path(folder).rglob("*")) == before
    trainer = trainer_of(sizes, max_steps=1)
    module = Everything(span=Range(1, 2))
    trainer.fit(module, loader(8))
    on_rank_zero = pytest.warns(UserWarning, match=r"hyperparameter 'span' .* left out .*register_codec\(Range")
    with on_rank_zero if dist.get_rank() == 0 else nullcontext():
        trainer.save_checkpoint(path)
    assert "span" not in checkpoint.read(path).trainer_state()["hyper_parameters"]
    checkpoint.register_codec(Range, lambda r: [r.low, r.high], lambda v: Range(*v), name="range")
    trainer.save_checkpoint(path)
    assert checkpoint.read(path).trainer_state()["hyper_parameters"]["span"] == Range(1, 2)
    config = OmegaConf.create({"width": 8, "twice": "${width}"})
    trainer = trainer_of(sizes, max_steps=1)
    trainer.fit(Configured(config), loader(8))
    trainer.save_checkpoint(path)
    assert checkpoint.read(path).trainer_state()["hyper_parameters"] == {"width": 8, "twice": 8}
    trainer = trainer_of(layout(pipeline=2), max_steps=1, callbacks=[Listing()])
    trainer.fit(Everything(), loader(8))
    with pytest.raises(UnsupportedStateError, match=r"'state/callbacks/Listing/held/0' is a DTensor in a list"):
        trainer.save_checkpoint(path)
    swa = StochasticWeightAveraging(0.1)
    with pytest.raises(ConfigurationError, match="StochasticWeightAveraging of a module with BatchNorm"):
        trainer_of(layout(pipeline=2), max_epochs=1, callbacks=[swa]).fit(Everything(), loader(8))


def test_what_cannot_be_held_is_refused_by_its_key_and_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    run_ranks(hold_or_refuse, 2, str(tmp_path), elastic=True)
