"""States of all kinds of optimizers and schedulers: saved on one layout, resumed on another as on one process.

For parameters of another dtype a state is what torch's own ``load_state_dict`` makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import lr_scheduler as schedulers
from transformers.optimization import Adafactor

from lightning_shard import checkpoint
from lightning_shard.errors import ConfigurationError, UnsupportedStateError
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from lightning_shard.tree import walk
from tests.parity import GLOBAL_BATCH, VOCABULARY, Model, layout, loader, trainer_of, world

SAVED, TRAINED = 3, 5


class Nested(torch.optim.Optimizer):
    """Keeps what no optimizer of torch does: nested containers of tensors and values, and a factored statistic."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2, "label": "x", "limits": (0.0, None)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    rows, whole = p.abs().sum(dim=-1), p.detach()
                    if isinstance(p, DTensor):  # of another shape than the parameter, or of another placement
                        rows = rows.redistribute(placements=[Replicate()] * p.device_mesh.ndim)
                        whole = whole.redistribute(placements=[Replicate()] * p.device_mesh.ndim)
                    state |= {"past": [], "inner": {"rate": torch.ones(2), "kind": None, "deep": ({"v": p * 0},)}}
                    state |= {"rows": rows * 0, "whole": whole * 0}
                state["past"] = [*state["past"][-1:], p.grad.clone()]
                state["inner"]["rate"] *= 0.9
                state["inner"]["deep"][0]["v"].lerp_(p.grad, 0.5)
                state["rows"] += p.grad.abs().sum(dim=-1)
                state["whole"] += p.grad.abs()
                mean = sum(state["past"]) / len(state["past"]) + state["inner"]["deep"][0]["v"]
                mean /= 1 + state["whole"]
                scale = (1 + state["rows"]).rsqrt()
                p.sub_(group["lr"] * float(state["inner"]["rate"][0]) * mean * scale.unsqueeze(-1))
        return loss


def momentum(p: Any) -> Any:
    return torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)


def adamw(p: Any, **options: Any) -> Any:
    return torch.optim.AdamW(p, lr=1e-2, **options)


def one_cycle(p: Any) -> Any:
    optimizer = torch.optim.Adam(p, lr=1e-2)
    return optimizer, schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def sequential(p: Any) -> Any:
    optimizer = momentum(p)
    parts = [
        schedulers.LinearLR(optimizer, 0.1, total_iters=3),
        schedulers.CosineAnnealingLR(optimizer, T_max=4),
    ]
    return optimizer, schedulers.SequentialLR(optimizer, parts, milestones=[3])


def by_lambda(p: Any) -> Any:
    optimizer = torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True)
    return optimizer, schedulers.LambdaLR(optimizer, lambda step: 0.8**step)


def plateau(p: Any) -> Any:
    optimizer = torch.optim.NAdam(p, lr=1e-2)
    plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=1e9)
    # Lightning steps it after a batch's checkpoint is saved, which lacks a step of the same batch: once in two batches
    return optimizer, {"scheduler": plateau, "frequency": 2}


def matrices_only(p: Any) -> Any:
    return torch.optim.Muon([q for q in p if q.ndim == 2])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": momentum,
    "fused": lambda p: adamw(p, fused=True),
    "amsgrad": lambda p: adamw(p, amsgrad=True, foreach=True),
    "rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "OneCycleLR": one_cycle,
    "SequentialLR": sequential,
    "RMSprop, LambdaLR": by_lambda,
    "NAdam, ReduceLROnPlateau": plateau,
    "Muon": matrices_only,
    "nested": Nested,
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
    "transformers' Adafactor": lambda p: Adafactor(p, lr=1e-2, relative_step=False, scale_parameter=True),
}


class Parted(torch.optim.SGD):
    """Keeps a plain tensor of each rank's own, as of its shard."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["part"] = p.detach().to_local().clone()[:1]
        return loss


class Apart(torch.optim.SGD):
    """Keeps state where no base class knows of it."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": [1.0]}


ALONE: dict[str, Callable[[Any], Any]] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "SGD": lambda p: torch.optim.SGD(p, fused=True),
    "Parted": Parted,
    "Apart": Apart,
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    """By default of a width that two ranks don't share evenly."""

    def __init__(self, width: int = 7, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out


class Single(Model):
    """One network, which the Trainer optimizes."""

    def __init__(self, optimizer: str) -> None:
        super().__init__("gpt", on_meta=True)
        self.on_meta = False
        torch.manual_seed(1)
        self.model = Network(width=8 if optimizer == "LBFGS" else 7)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        made = (OPTIMIZERS | ALONE)[self.optimizer](list(self.parameters()))
        if not isinstance(made, tuple):
            return made
        scheduler = made[1] if isinstance(made[1], dict) else {"scheduler": made[1]}
        return [made[0]], [{"interval": "step", "monitor": "train_loss", **scheduler}]


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@dataclass
class Seen:
    """Losses and rates of each step, and the state as it is when training begins: whole tensors by name."""

    losses: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


class Watch(L.Callback):
    def __init__(self) -> None:
        self.seen = Seen()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        for index, optimizer in enumerate(trainer.optimizers):
            for parameter, entries in optimizer.state.items():
                for path, value in walk(entries) if isinstance(entries, dict) else [((), entries)]:
                    key = "/".join((str(index), names.get(parameter, str(parameter)), *path))
                    self.seen.state[key] = full_tensor(value).cpu().clone() if isinstance(value, Tensor) else value

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.losses.append([float(value) for value in trainer.callback_metrics.values()])
        self.seen.rates += [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]


def fit(make: str, sizes: dict[str, int] | None, folder: str, resume: bool = False) -> Seen:
    L.seed_everything(3)
    watch, keep = Watch(), ModelCheckpoint(folder, filename=make, every_n_train_steps=SAVED)
    devices, data = (1, 1) if sizes is None else (world(sizes), sizes["data_parallel_size"])
    saves = sizes is not None and not resume
    trainer = trainer_of(
        None if sizes is None else {**sizes, "tensor_parallel_plan": PLAN},
        devices,
        max_steps=SAVED if saves else TRAINED,
        callbacks=[watch, keep] if saves else [watch],
        enable_checkpointing=saves,
    )
    trainer.fit(Single(make), loader(GLOBAL_BATCH // data), ckpt_path=f"{folder}/{make}.ckpt" if resume else None)
    return watch.seen


def fit_all(makes: list[str], sizes: dict[str, int] | None, folder: str, resume: bool = False) -> dict[str, Seen]:
    return {make: fit(make, sizes, folder, resume) for make in makes}


SOME = ["SequentialLR", "nested", "transformers' Adafactor"]


@pytest.mark.parametrize(
    ("makes", "source", "target"),
    [
        pytest.param([*OPTIMIZERS], layout(data=2), layout(tensor=2), marks=pytest.mark.long),
        (["LBFGS"], layout(data=2), layout()),
        (["nested"], layout(tensor=2), layout(pipeline=2)),
        pytest.param(SOME, layout(pipeline=2), layout(data=2, tensor=2), marks=pytest.mark.long),
    ],
    ids=["dp2 to tp2", "dp2 to one", "tp2 to pp2", "pp2 to dp2×tp2"],
)
def test_any_optimizer_goes_on_elsewhere_as_on_one_process(
    makes: list[str], source: dict[str, int], target: dict[str, int], tmp_path: Path
) -> None:
    plain = fit_all(makes, None, "")  # the uninterrupted runs on one process
    run_ranks(fit_all, world(source), makes, source, str(tmp_path), elastic=True, timeout_s=120)
    resumed = run_ranks(fit_all, world(target), makes, target, str(tmp_path), True, elastic=True, timeout_s=120)
    for make in makes:
        stored = checkpoint.read(tmp_path / f"{make}.ckpt")
        expected = {key: value.full() for key, value in stored.optimizer.items()}
        assert expected, make
        seen: dict[str, Any] = {}
        for own in (ranks[make] for ranks in resumed):
            for losses, whole in zip(own.losses, plain[make].losses[SAVED:], strict=True):
                # Muon multiplies in bfloat16, and in another order
                assert losses == pytest.approx(whole, rel=1e-3 if make == "Muon" else 1e-5), make
            assert own.rates == pytest.approx(plain[make].rates[-len(own.rates) :], rel=1e-6), make
            for key, value in own.state.items():
                other = seen.setdefault(key, value)
                assert torch.equal(other, value) if isinstance(value, Tensor) else other == value, (make, key)
        assert expected.keys() <= seen.keys(), make
        for key, value in expected.items():
            assert torch.equal(seen[key], value), (make, key)


REFUSED = [
    ("LBFGS", layout(tensor=2), ConfigurationError, "tensor_parallel_size=1"),
    ("LBFGS", layout(pipeline=2), ConfigurationError, "pipeline_parallel_size=1"),
    ("SGD", layout(data=2), ConfigurationError, "SGD can't step on sharded parameters with fused=True"),
    ("Parted", layout(data=2), UnsupportedStateError, "'0/model.embed.weight/part' is a plain tensor that differs"),
    ("Apart", layout(data=2), UnsupportedStateError, r"Apart\.state_dict\(\) has 'slow' in addition"),
]


def refused(folder: str) -> None:
    for make, sizes, error, message in REFUSED:
        with pytest.raises(error, match=message):
            fit(make, sizes, folder)
        dist.barrier()
        assert not list(Path(folder).iterdir()), make


def test_what_cannot_be_right_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(refused, 2, str(tmp_path), elastic=True)


class KeepsItsOwn(torch.optim.SGD):
    """As optimizers with master weights do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.1, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, 0.1),
    "its own": lambda parameters: KeepsItsOwn(parameters, 0.1, momentum=0.9),
}


def made(dtype: torch.dtype, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(4, 4).to(dtype)
    return module, MAKE[optimizer](module.parameters())


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 4, dtype=next(module.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_it_is_converted_as_torch_does(optimizer: str, dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path) -> None:
    module, saved = made(dtypes[0], optimizer)
    step(module, saved)
    checkpoint.save(module, tmp_path / "c", optimizer=saved)
    found, loaded = made(dtypes[1], optimizer)
    checkpoint.load(tmp_path / "c", into=found, optimizer=loaded, cast=True)
    if optimizer == "its own":
        assert {state["momentum_buffer"].dtype for state in loaded.state.values()} == {dtypes[0]}
        return
    expected, plain = made(dtypes[1], optimizer)
    expected.load_state_dict(module.state_dict())
    plain.load_state_dict(saved.state_dict())
    for (name, parameter), other in zip(expected.named_parameters(), found.parameters()):
        for key, value in plain.state[parameter].items():
            held = loaded.state[other][key]
            assert (type(held), getattr(held, "dtype", None)) == (type(value), getattr(value, "dtype", None)), (
                name,
                key,
            )
            assert bool(torch.as_tensor(held == value).all()), (name, key)
    step(found, loaded)
