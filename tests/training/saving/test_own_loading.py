"""Modules that load old checkpoints, or write their state dict, by code of their own do so on layouts too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_shard.checkpoint import StoredTensor
from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.saving.own_loading import LazyTensor
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import QUIET, Model, Seen, combine, largest_difference, layout, loader, train, trainer_of, world
from tests.training.parallel.small import Descends


class Head(nn.Linear):
    """Once kept its weight the other way round."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if (old := f"{prefix}transposed") in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(old).T.contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)


def rename(_module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if ".feedforward." in key]:
        state_dict[key.replace(".feedforward.", ".mlp.")] = state_dict.pop(key)


def triple(block: Any, _keys: Any) -> None:
    block.mlp.up.weight.data.mul_(3.0)


class Moved(Model):
    """Each road that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0
        head = Head(self.model.head.in_features, self.model.head.out_features, bias=False)
        head.weight.data.copy_(self.model.head.weight)
        self.model.head = head
        self.model.register_load_state_dict_pre_hook(rename)
        self.model.blocks[3].register_load_state_dict_post_hook(triple)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.loaded += 1
        renamed = {key.removeprefix("wrapper."): value for key, value in state_dict.items()}
        renamed["model.norm.weight"] = renamed["model.norm.weight"].to(torch.float32) * 2
        return super().load_state_dict(renamed, strict, assign)


def save(path: str) -> None:
    """A checkpoint of one process."""
    torch.manual_seed(5)
    trainer = L.Trainer(max_steps=1, **QUIET)
    trainer.fit(Model(), loader(16))
    trainer.save_checkpoint(path)


def old(path: str) -> None:
    """One as it was before."""
    save(path)
    checkpoint = torch.load(path, weights_only=False)
    state = {f"wrapper.{key.replace('.mlp.', '.feedforward.')}": v for key, v in checkpoint["state_dict"].items()}
    state["wrapper.model.head.transposed"] = state.pop("wrapper.model.head.weight").T.contiguous()
    torch.save({**checkpoint, "state_dict": state}, path)


def resume(sizes: dict[str, int] | None, path: str) -> Seen:
    return train("gpt", sizes, module=Moved, steps=3, resume=path)


@pytest.mark.parametrize(
    "sizes", [layout(pipeline=2), pytest.param(layout(data=2), marks=pytest.mark.long)], ids=["pp2", "dp2"]
)
def test_old_checkpoints_are_loaded_by_the_modules_own_code(sizes: dict[str, int], tmp_path: Path) -> None:
    path = str(tmp_path / "old.ckpt")
    old(path)
    check_goes_on_alike(resume, sizes, path)


def check_goes_on_alike(go_on: Callable[[dict[str, int] | None, str], Seen], sizes: dict[str, int], path: str) -> None:
    ours, plain = combine(run_ranks(go_on, world(sizes), sizes, path, elastic=True), sizes), go_on(None, path)
    assert largest_difference(ours.initial, plain.initial) == 0
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)


class Keeps(Model):
    """Keeps a checkpoint's tensors beside its own, as an average's; so does a callback."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep(self, checkpoint)


class KeepsToo(L.Callback):
    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        keep(self, checkpoint)


def keep(holder: Any, checkpoint: dict[str, Any]) -> None:
    holder.average = dict(checkpoint["state_dict"])
    holder.pairs = [(name, value) for name, value in checkpoint["state_dict"].items()]


def kept(sizes: dict[str, int] | None, path: str) -> list[dict[str, torch.Tensor]]:
    module, callback = Keeps(), KeepsToo()
    train("gpt", sizes, module=lambda: module, callbacks=[callback], steps=2, resume=path)
    return [dict(held) for each in (module, callback) for held in (each.average, each.pairs)]


class Replaces(Model):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.model.head.weight = nn.Parameter(checkpoint["state_dict"]["model.head.weight"].clone())


def replaced(path: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'model\.head\.weight' was added to the module, or replaced, after it"
    ):
        train("gpt", layout(pipeline=2), module=Replaces, steps=2, resume=path)


def test_what_hooks_keep_of_a_checkpoint_is_read_and_a_parameter_that_they_replace_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "file.ckpt")
    save(path)  # in the middle of an epoch
    stored = torch.load(path, weights_only=False)["state_dict"]
    for held in (each for rank in run_ranks(kept, 2, layout(pipeline=2), path, elastic=True) for each in rank):
        assert held.keys() == stored.keys()
        assert {type(value) for value in held.values()} == {torch.Tensor}
        assert all(torch.equal(value, stored[name]) for name, value in held.items())
    run_ranks(replaced, 2, path, elastic=True)


class Halved(Model):
    """Saves in half the bytes."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value.bfloat16() for name, value in checkpoint["state_dict"].items()}


def told(trainer: L.Trainer, says: str) -> AbstractContextManager[Any]:
    return pytest.warns(UserWarning, match=says) if trainer.is_global_zero else nullcontext()


def halved(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was loaded, and what should have been."""
    trainer = trainer_of({"data_parallel_size": 2}, max_steps=1)
    trainer.fit(Halved(), loader(8))
    trainer.save_checkpoint(path)
    whole = trainer.strategy.gather_full_parameters()
    trainer = trainer_of({"data_parallel_size": 2})
    trainer.validate(Halved(), loader(8), ckpt_path=path, verbose=False)
    return trainer.strategy.gather_full_parameters(), whole


def evaluated(path: str) -> int:
    """Saved by a Trainer that made no optimizers."""
    sizes = {"pipeline_parallel_size": 2}
    trainer = trainer_of(sizes)
    trainer.validate(Model(), loader(16), verbose=False)
    trainer.save_checkpoint(path)
    trainer = trainer_of(sizes, max_steps=2)
    with told(trainer, "has no optimizer state: optimizers start from scratch"):
        trainer.fit(Model(), loader(16), ckpt_path=path)
    return trainer.global_step


@pytest.mark.long
def test_other_types_are_converted_and_no_optimizers_begin_anew_as_in_plain_lightning(tmp_path: Path) -> None:
    (loaded, saved), _ = run_ranks(halved, 2, str(tmp_path / "half.ckpt"), elastic=True)
    for name, value in saved.items():
        assert torch.equal(loaded[name], value.bfloat16().float()), name
    assert run_ranks(evaluated, 2, str(tmp_path / "evaluated.ckpt"), elastic=True) == [2, 2]


class Lacking(Moved):
    def __init__(self) -> None:
        super().__init__()
        self.model.norm.register_buffer("count", torch.zeros(()))


def lack(path: str) -> None:
    train("gpt", layout(pipeline=2), module=Lacking, steps=3, resume=path)


def test_what_is_missing_then_is_refused_by_name(tmp_path: Path) -> None:
    old(str(tmp_path / "old.ckpt"))
    says = r"StateMismatchError: The module.s own load_state_dict .*Missing key.*model\.norm\.count.*strict_loading"
    with pytest.raises(RanksFailed, match=says):
        run_ranks(lack, 2, str(tmp_path / "old.ckpt"), elastic=True)


class Stored(StoredTensor):
    """Of ones; counts how often it is read."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        vars(self).update(own=shape, kind=dtype, reads=0)

    name = property(lambda self: "weight")
    shape = property(lambda self: torch.Size(self.own))
    dtype = property(lambda self: self.kind)

    def full(self) -> Tensor:
        vars(self)["reads"] += 1
        return torch.ones(self.own, dtype=self.kind)


def test_what_is_computed_is_plain_and_in_place_is_itself() -> None:
    stored = Stored(3, 4)
    given = LazyTensor.of(stored)
    assert (given.shape, given.dtype, given.numel(), stored.reads) == (torch.Size([3, 4]), torch.float32, 12, 0)
    for computed in (given * 2, given.clone(), given.float(), given[:2], torch.zeros_like(given), torch.cat([given])):
        assert type(computed) is Tensor
    assert given.mul_(2) is given
    given[0] = 5
    given[1:].add_(1)
    assert (given + 0)[:, 0].tolist() == [5, 3, 3]
    assert stored.reads == 1


WIDTH = 8


class Quantized(nn.Module):
    """Trains for 8-bit weights. ``FakeQuantize`` puts its scale into the state dict by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.quantize = FakeQuantize(  # type: ignore[no-untyped-call]
            MinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.quantize(self.linear.weight), self.linear.bias).tanh()


class Module(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Quantized() for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]


def fit(path: Path | None = None, resume: Path | None = None) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    data: Any = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
    trainer = trainer_of({"pipeline_parallel_size": 2} if path else None, max_epochs=2 if resume else 1)
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=resume)
    if path is None:
        return {name: value.clone() for name, value in module.state_dict().items()}
    trainer.save_checkpoint(path)
    return {name: full_tensor(value).clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def test_what_modules_write_into_the_state_dict_is_saved_by_their_stage(tmp_path: Path) -> None:
    [plain] = run_ranks(fit, 1, init=False)
    parts = run_ranks(fit, 2, tmp_path / "first", elastic=True)
    assert not parts[0].keys() & parts[1].keys()
    torch.testing.assert_close({**parts[0], **parts[1]}, plain)
    loaded = Module.load_from_checkpoint(tmp_path / "first", map_location="cpu").state_dict()
    torch.testing.assert_close(dict(loaded), plain)

    again = run_ranks(fit, 2, tmp_path / "second", tmp_path / "first", elastic=True)
    assert [part.keys() for part in again] == [part.keys() for part in parts]
