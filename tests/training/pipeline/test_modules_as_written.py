"""LightningModules as people write them, which stages have to see through: they train as in one process."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

from lightning_shard import checkpoint
from lightning_shard.errors import ConfigurationError, StepError
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.alike import Trains, assert_train_alike
from tests.parity import trainer_of
from tests.training.habits.harness import Net
from tests.training.models.unets import Diffusion, Towers, noisy_images, pairs
from tests.training.parallel.small import INTERLEAVED, WIDTH, Descends, Layer, Trained, batches


class Module(Trained):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))


# -- batches


class TakesBatchesApart(Module):
    """Takes entries out of its batch, and writes to it, though a stage runs a microbatch more than once."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        y = batch.pop("y")
        batch["x"].mul_(2)
        batch["x"] = batch["x"].tanh()
        return F.cross_entropy(self(batch["x"]), y)


def classified() -> list[dict[str, Tensor]]:
    return [{"x": x, "y": x.argmax(-1)} for x in batches()]


def count(batch: dict[str, Tensor]) -> Tensor:
    """Of what a step has taken out by the end."""
    return (batch["y"] >= 0).sum()


class Masked(Descends):
    """The mean over what a mask leaves; nothing but the mask keeps the rest out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        errors = (self.net(batch["x"]).sum(1) - batch["y"]).square()
        loss = (errors * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)
        self.log("train_loss", loss, batch_size=int(left(batch)))
        self.log("samples", float(len(errors)) / len(batch["x"]))
        return loss


def masked() -> list[dict[str, Tensor]]:
    """Of 8 samples 5 count, then none, then 7."""
    x, y = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(4)).split([4, 1], dim=2)
    masks = (torch.arange(8) < torch.tensor([[5], [0], [7]])).int()
    return [{"x": x[i], "y": y[i, :, 0], "mask": masks[i]} for i in range(3)]


def left(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


class Grows(Descends):
    """A loss of the first block's result is added in the second epoch, and blocks in the third and fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        number, states = (2, 2, 3, 4, 4)[self.current_epoch], [batch]
        for block in self.blocks[:number]:
            states.append(states[-1] + block(states[-1]))
        loss = F.mse_loss(self.head(states[-1]), batch)
        loss = loss + states[1].square().mean() if self.current_epoch else loss
        self.log("loss", loss, sync_dist=True)
        return loss

    validation_step = training_step


def of_two_shapes() -> list[Tensor]:
    """From the second epoch on the second one is known."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, length, WIDTH, generator=generator) for length in (3, 5, 3, 5)]


def repeated() -> list[Tensor]:
    """Microbatches alike: what isn't linear in samples is then the whole batch's."""
    return [batch[:2].repeat(8, 1) for batch in batches()]


class Numbers(Trained):
    """That torch or Python take from an earlier stage's tensors, and a metric of several stages' values."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def loss(self, batch: Tensor) -> Tensor:
        x, states = batch, []
        for block in self.blocks:
            x = block(x)
            states.append(x.detach())
            self.mean.update(states[-1].mean())
        weight = self.weight(states[0].abs().mean())
        self.log("weight", weight)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return F.mse_loss(x, batch.roll(1, -1)) * weight

    def weight(self, mean: Tensor) -> Tensor:
        count = (mean * 100).long() % 5 + 2
        sizes = len(torch.zeros(count)) + torch.eye(count).sum() + F.pad(torch.ones(2), (0, count)).numel()
        limits = torch.linspace(0, 9, 10).clamp(0, count).sum() + torch.full_like(sizes, count)
        copied = torch.full((2,), count).sum() + pickle.loads(pickle.dumps(count))
        shown = float(f"{count}") + float(f"{mean:.2f}") + len(f"{count!r}")
        return sizes + limits + copied + shown

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


# -- what the step runs


class Metrics(Module):
    """Made before the blocks, and updated after them in evaluations only."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.measure = MeanAbsoluteError()
        self.collection = MetricCollection([MeanAbsoluteError(), MeanSquaredError()])
        self.listed = nn.ModuleList([MeanAbsoluteError()])
        self.named = nn.ModuleDict({"a": MeanAbsoluteError(), "b": MetricCollection([MeanSquaredError()], prefix="b_")})
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        predicted = self(batch)
        for place, measure in enumerate((self.measure, *self.listed, self.named["a"])):
            measure.update(predicted, batch.roll(1, -1))
            self.log(f"measure {place}", measure)  # type: ignore[arg-type]
        for collection in (self.collection, self.named["b"]):
            collection.update(predicted, batch.roll(1, -1))
            self.log_dict(collection)  # type: ignore[arg-type]


class EncoderFirst(Trained):
    """Its forward is the encoder, as in Lightning's own example, and the decoder's layers are the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 6)
        self.decoder = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        code = self(batch)
        self.log("norm", code.norm(dim=-1).mean())
        return {"loss": F.mse_loss(self.decoder(code), batch) + 0.1 * code.abs().mean(), "code": code.detach()}

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        code = self(batch)
        return self.decoder(code) + code.mean(-1, keepdim=True)  # type: ignore[no-any-return]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x).tanh()
        return x

    def decode(self, x: Tensor) -> Tensor:
        for layer in self.decoder:
            x = layer(x.tanh())
        return x


class AutoEncoder(Module):
    """Trains both of its halves, and predicts with the first, which is its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Halves()
        self.sizes: list[float] = []
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.net.encode(x)

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.net.decode(self(batch)), batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        size = self(batch).square().mean()
        self.log("size", size)
        self.sizes.append(float(size))

    def on_validation_epoch_end(self) -> None:
        self.log("mean_size", sum(self.sizes) / len(self.sizes))
        self.sizes.clear()

    def predict_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        embedded = self(batch)
        return {"embedded": embedded, "norm": embedded.norm(dim=-1)}


class EarlyExit(Module):
    """Trains the first three layers only, validates with two and predicts with one; a head comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Layer())
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number: int = 3) -> Tensor:
        for block in self.blocks[:number]:
            x = block(x)
        return self.head(x)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch, 2), batch)
        self.log("val_loss", loss)
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch, 1).tanh()


class ValidatesAfterTheSanityCheck(EarlyExit):
    """An evaluation may call no block."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if self.trainer.sanity_checking else super().validation_step(batch, batch_idx)


class ValidatesOneBatch(EarlyExit):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().validation_step(batch, batch_idx) if batch_idx == 0 else None


def test_a_later_batch_that_calls_no_block_is_refused() -> None:
    with pytest.raises(StepError, match=r"validation_step didn't call blocks\..*its number"):
        assert_trains_alike(ValidatesOneBatch, batches, "pp2")


# -- how networks are put together


class Convolved(nn.Module):
    """With a norm whose statistics are ``None``."""

    def __init__(self, channels: int, others: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(channels, others, 3, padding=1, bias=False)
        self.norm = nn.InstanceNorm1d(others, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


class Level(nn.Module):
    def __init__(self, down: nn.Module, inner: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.inner, self.up = down, inner, up

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return self.up(torch.cat([self.inner(y), y], 1))  # type: ignore[no-any-return]


class Unet(Module):
    """Registers its blocks twice, as MONAI's DynUNet does: in lists, and in the levels that call them."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.downs = nn.ModuleList([Convolved(WIDTH, 8), Convolved(8, 8)])
        self.bottleneck = Convolved(8, 8)
        self.ups = nn.ModuleList([Convolved(16, 8), Convolved(16, 8)])
        self.out = nn.Conv1d(8, WIDTH, 1)
        self.levels = Level(self.downs[0], Level(self.downs[1], self.bottleneck, self.ups[0]), self.ups[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.levels(x[:, :, None] * torch.linspace(1, 2, 8))).mean(-1)  # type: ignore[no-any-return]


class Plus(nn.Module):
    def __init__(self, change: Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.change


class Adapted(nn.Module):
    """Parametrizes a weight and undoes it, as peft's LoRA of parameters (``target_parameters``) does."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(trains)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    @contextmanager
    def adapted(self) -> Iterator[None]:
        trains = self.layer.weight.requires_grad
        parametrize.register_parametrization(self.layer, "weight", Plus(self.b @ self.a))
        self.layer.parametrizations.weight.original.requires_grad_(trains)  # type: ignore[union-attr]
        try:
            yield
        finally:
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)

    def forward(self, x: Tensor) -> Tensor:
        with self.adapted():
            return x + self.layer(x).tanh()


class WithAdapters(Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(trains=bool(place % 2)) for place in range(4))


class Scaling(Layer):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Scaled(Module):
    """Has a parameter of its own, of which it gives blocks of both stages a product."""

    block = Scaling

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.scale * 1.1)
        return x


class PenalisesABlock(Module):
    def loss(self, batch: Tensor) -> Tensor:
        weight: Tensor = self.blocks[1].get_submodule("linear").weight  # type: ignore[assignment]
        return super().loss(batch) + 0.1 * weight.square().sum()


class KeepsFeatures(Module):
    """Itself, in a private attribute, which is used between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self._features = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self._features = x.mean(0)
        return x

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        y = self(batch)
        z = self(batch + self._features)
        self.log("difference", F.mse_loss(y, z))


class Samples(Module):
    """Switches inference mode on itself, as samplers do."""

    @torch.inference_mode()
    def sample(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x - 0.1 * self(x)
        x += 1
        return x

    def loss(self, batch: Tensor) -> Tensor:
        with torch.inference_mode():
            target = batch.tanh()
        return F.mse_loss(self(batch), target.clone())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.sample(batch).mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.inference_mode():
            both: Tensor = self(torch.cat([batch, batch + 1]))
            return both.chunk(2)[0]


class LooksFirst(Trained):
    """Calls its network before the first step, such as to choose inducing points in ``configure_optimizers``."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(x))

    @torch.no_grad()
    def look(self, at: str) -> None:
        if at == self.at:
            self.scale = float(self(torch.ones(2, WIDTH)).abs().mean() + self.embed(torch.ones(2, WIDTH)).mean())

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self(batch) * self.scale, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.look("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.look("on_train_start")


class Attributes(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.__dict__[name] = value

    __setattr__ = __setitem__


class SetsAttribute(Layer):
    def forward(self, x: Tensor, state: Any) -> Tensor:  # type: ignore[override]
        state.aux = state.aux + x.square().mean()
        return super().forward(x)


class ReadsAttributes(Module):
    """Its blocks change a dict of a class that keeps its items as attributes, too."""

    block = SetsAttribute

    def loss(self, batch: Tensor) -> Tensor:
        state, x = Attributes(), batch
        state.aux = batch.new_zeros(())
        for block in self.blocks:
            x = block(x, state)
        return F.mse_loss(x, batch) + state.aux


class KeepsArrays(Layer):
    def forward(self, x: Tensor, kept: Any) -> Tensor:  # type: ignore[override]
        kept["widths"][0] += 1
        kept.update(sizes=np.array([*x.shape[1:], 2]), missing=float("nan"))
        return super().forward(x)


class ReadsArrays(Module):
    """Its blocks set arrays, and change one in place, in a dict that they are given."""

    block = KeepsArrays

    def loss(self, batch: Tensor) -> Tensor:
        names = np.array([(1, "a")], dtype=[("number", int), ("name", object)])  # as of a table of pandas'
        kept: dict[str, Any] = {"widths": np.zeros(2), "names": names}
        x = batch
        for block in self.blocks:
            x = block(x, kept)
        assert math.isnan(kept["missing"])
        return F.mse_loss(x, batch) * float(kept["widths"].sum() + kept["sizes"].sum())


class Peeks(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.side(x)
        return super().forward(x)


class HooksWithoutGradients(Module):
    """Collects, in hooks that are called without gradients, numbers of tensors that have them."""

    block = Peeks

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, Tensor] = {}
        for place, block in enumerate(self.blocks):
            block.get_submodule("side").register_forward_hook(partial(self._see, place))

    def _see(self, place: int, _: nn.Module, args: Any, __: Any) -> None:
        self._seen[place] = args[0].square().mean()

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self(batch), batch) + sum(self._seen.values())


CLIPPED = {"gradient_clip_val": 0.1}
HOOKS = ("configure_optimizers", "on_train_start")
PP2 = {"pipeline_parallel_size": 2}
IN_FOUR = {"microbatches": 4}
ALIKE = {
    "takes its batch apart": Trains(TakesBatchesApart, classified, options=IN_FOUR),
    "takes it apart, by samples that count": Trains(
        TakesBatchesApart, classified, {**INTERLEAVED, "loss_weight": count}, options=IN_FOUR
    ),
    "metrics": Trains(Metrics, batches, "pp2 x dp2"),
    "its forward is the encoder": Trains(EncoderFirst, batches),
    "halves": Trains(AutoEncoder, batches, trainer=CLIPPED),
    "early exits": Trains(EarlyExit, batches, "pp2 x dp2", trainer=CLIPPED),
    "an evaluation that calls no block": Trains(
        ValidatesAfterTheSanityCheck, batches, trainer={"num_sanity_val_steps": 1}
    ),
    "blocks in lists and in levels": Trains(Unet, batches),
    "adapters": Trains(WithAdapters, batches),
    "a parameter of its own": Trains(Scaled, batches, INTERLEAVED),
    "features": Trains(KeepsFeatures, batches),
    "samples": Trains(Samples, batches),
    "samples that count, and a batch of none": Trains(Masked, masked, ["pp2", "dp2"], options={"loss_weight": left}),
    "more in each epoch": Trains(Grows, of_two_shapes, {**PP2, "schedule": "1F1B"}, steps=16),
    **{f"calls itself in {hook}": Trains(partial(LooksFirst, hook), batches, "dp2") for hook in HOOKS},
    "a dict with attributes": Trains(ReadsAttributes, batches),
    "arrays in a dict": Trains(ReadsArrays, batches, options=IN_FOUR),
    "hooks without gradients": Trains(HooksWithoutGradients, batches, options=IN_FOUR),
    "numbers and metrics of other stages' tensors": Trains(Numbers, repeated, INTERLEAVED),
    "a U-Net, between its levels": Trains(Diffusion, noisy_images, tolerance=1e-3),
    "two towers over four stages": Trains(Towers, pairs, "pp4", options={"microbatches": 1}),
}
ALIKE_TOO = {
    "its forward is the encoder": Trains(EncoderFirst, batches, "pp2 x dp2"),
    "halves": Trains(AutoEncoder, batches, "pp4", trainer=CLIPPED),
    "penalises a block": Trains(PenalisesABlock, batches, steps=2),
    "more in each epoch": Trains(Grows, of_two_shapes, INTERLEAVED, steps=16),
}


@pytest.mark.parametrize("cases", [ALIKE, pytest.param(ALIKE_TOO, marks=pytest.mark.long)], ids=["some", "others"])
def test_they_train_as_in_one_process(cases: dict[str, Trains]) -> None:
    assert_train_alike(cases)


def test_a_blocks_parameter_of_which_several_ranks_hold_parts_is_refused_beside_it() -> None:
    with pytest.raises(StepError, match=r"blocks\.1\.linear\.weight, of stage 0, is used on a later .* in parts"):
        assert_trains_alike(PenalisesABlock, batches, "pp2 x dp2")


# -- modules that all blocks are given and use, and that the network registers too, such as a rotary embedding


class Rotary(nn.Module):
    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.1, 1, WIDTH), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


class Projection(nn.Module):
    """Random numbers that are never called, as all adapters of VeRA share them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("down", torch.randn(WIDTH, WIDTH))


class WithShared(Layer):
    def __init__(self, *shared: nn.Module) -> None:
        super().__init__()
        self.shared = nn.ModuleList(shared)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for shared in self.shared:
            y = y @ shared.down if isinstance(shared, Projection) else shared(y)
        return x + self.linear(y).tanh()


class Shares(Module):
    """Registers what its blocks share: with buffers that are saved or not, with parameters, or with neither."""

    def __init__(self, *shared: nn.Module, hooked: bool = False) -> None:
        super().__init__()
        del self.blocks
        self.shared = nn.ModuleList(shared)
        self.blocks = nn.ModuleList(WithShared(*shared) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []
        if hooked:
            for each in shared:
                each.register_forward_hook(self.note)

    def note(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        x = super().forward(x)
        return self.head(x + sum(self.seen))


def sharing(hooked: bool = False) -> L.LightningModule:
    rotary, saved = Rotary(), Rotary(persistent=True)
    return Shares(rotary, saved, Projection(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), hooked=hooked)


def test_what_blocks_share_trains_as_in_one_process() -> None:
    """Held by one stage of each of four ranks, or by the two stages of a rank."""
    hooked = Trains(partial(sharing, True), batches, INTERLEAVED)
    assert_train_alike({"shared": Trains(sharing, batches, "pp4"), "with a hook": hooked})


def fit(path: Path, resume: Path | None, **layout: Any) -> dict[str, Tensor]:
    """One more step, saved, and this rank's parameters and buffers."""
    torch.manual_seed(0 if resume is None else 1)
    module, trainer = sharing(), trainer_of(layout, max_steps=1 if resume is None else 2)
    trainer.fit(module, DataLoader(batches(), batch_size=None), ckpt_path=resume)  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return {name: full_tensor(value) for name, value in module.state_dict().items()}


def test_buffers_of_what_blocks_share_are_saved_once_by_each_of_their_names_and_loaded(tmp_path: Path) -> None:
    pipeline: dict[str, Any] = {"pipeline_parallel_size": 2, "microbatches": 2}
    run_ranks(fit, 2, tmp_path / "one", None, **pipeline, elastic=True)
    torch.manual_seed(0)
    plain = sharing().state_dict()
    assert set(checkpoint.read(tmp_path / "one")) == set(plain)
    for resumed in (pipeline, {"data_parallel_size": 2}):
        for own in run_ranks(fit, 2, tmp_path / "two", tmp_path / "one", **resumed, elastic=True):
            held = {name: value for name, value in own.items() if name.endswith("down")}
            assert held
            assert all(torch.equal(value, plain[name]) for name, value in held.items())


class Counts(nn.Module):
    """Counts its calls, of which a stage makes its own blocks' only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data":
            self.calls.data += 1
        elif self.how == "anew":
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return x


def counting(how: str) -> L.LightningModule:
    return Shares(Counts(how))


@pytest.mark.parametrize("how", ["data", "anew", pytest.param("in place", marks=pytest.mark.long)])
def test_a_shared_module_that_changes_its_buffers_is_refused(how: str) -> None:
    with pytest.raises(StepError, match=r"changes (the buffer )?shared\.0\.calls.*, and .* stage"):
        assert_trains_alike(partial(counting, how), batches, "pp2")


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.jit.script(module)


class Scripted(Trained):
    """The network is the module itself."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(scripted(Layer()) if what == "blocks" else Layer() for _ in range(4)))
        self.criterion = scripted(nn.MSELoss()) if what == "criterion" else nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def loss(self, batch: Tensor) -> Tensor:
        return self.criterion(self(batch), torch.ones(WIDTH))


@pytest.mark.parametrize(("what", "layout"), [("blocks", "pp2"), ("criterion", "dp2")])
def test_modules_made_by_torch_jit_are_refused_by_name(what: str, layout: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{what}.* was made by torch\.jit.*give the plain module"):
        assert_trains_alike(partial(Scripted, what), batches, layouts=[layout], allow_random=True, steps=1)
