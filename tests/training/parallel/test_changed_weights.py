"""Weights, and what they are trained by, changed by a user's code in a step or between steps: kept, or refused.

Parameters are gathered for steps on data ranks, and are DTensors between steps everywhere: a change could be made to
what is thrown away.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.errors import StepError
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import trainer_of
from tests.training.parallel.small import Descends

BATCH = 4
SAMPLES = torch.linspace(-3, 3, 4 * 4 * BATCH).view(-1, 4).sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


class Plain(Descends):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def on_validation_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))


class Complex(nn.Module):
    """Of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=torch.complex64) * 1j)
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.fft.ifft(torch.fft.fft(x) @ self.weight).real


class OfTypes(Plain):
    """Of several types in a block and around them, and one whose elements aren't in order."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Complex() for _ in range(2))
        self.net.last.double()
        self.net.first.weight = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6).T)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net.first(batch)
        for block in self.net.blocks:
            x = block(x).tanh()
        return (self.net.last(x.double()) - 1).square().mean()


class Freezes(Plain):
    """In a step, before and after what is frozen was used."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.net.last.requires_grad_(False)
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            self.net.first.requires_grad_(False)
        return loss


class Clips(Plain):
    """Each parameter in another way."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for place, parameter in enumerate(self.net.parameters()):
            if place % 4 == 0:
                parameter.clamp_(-0.2, 0.2)
            elif place % 4 == 1:
                parameter.data = parameter.data.clamp(-0.2, 0.2)
            elif place % 4 == 2:
                parameter.copy_(torch.full(parameter.shape, 0.1))
            else:
                parameter.data = torch.full(parameter.shape, 0.1)


class Swaps(Plain):
    """The usual lines of an average of weights, swapped in for validations."""

    def on_train_start(self) -> None:
        self.shadow = {name: p.data.clone() for name, p in self.named_parameters()}

    def on_before_zero_grad(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            self.shadow[name] = 0.5 * parameter.data + 0.5 * self.shadow[name]

    def on_validation_epoch_start(self) -> None:
        self.backup = {}
        for name, parameter in self.named_parameters():
            self.backup[name] = parameter.data
            parameter.data = self.shadow[name]

    def on_validation_epoch_end(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.data = self.backup[name]


class Teaches(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - self.teacher(batch) - 1).square().mean()

    def on_before_zero_grad(self, *_: Any) -> None:
        for old, new in zip(self.teacher.parameters(), self.net.parameters()):
            old.data.mul_(0.5).add_(new.data, alpha=0.5)


class Loads(Plain):
    def on_train_start(self) -> None:
        self.load_state_dict({name: value * 0.5 for name, value in Plain().state_dict().items()})
        self.kept = {name: value.clone() for name, value in self.state_dict().items()}

    def on_train_batch_end(self, _outputs: Any, _batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.load_state_dict(self.kept)


class Looks(Plain):
    """Also for what torch takes of each rank's part as if it were of the whole."""

    def on_after_backward(self) -> None:
        gradient = self.net.blocks[0].weight.grad
        self.seen += [float(f"{gradient.norm():.3f}"), gradient.sum().tolist(), float(gradient.norm().numpy())]
        self.seen.append(float(f"{self.net.first.weight.mean():.3f}"))  # which needs gradients

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.net.blocks[1].weight
        self.seen += [float(weight.detach().norm()), weight.abs().sum().item(), float(bool((weight > 0.3).any()))]
        for weight in (self.net.first.weight.detach(), self.net.blocks[1].weight.detach()):
            for of in (0, 1):
                self.seen.append(float((weight > 0.2).any(of).sum()))
                self.seen.append(float((weight > 0.2).any(of).float().mean()))
                self.seen.append(float(weight.norm(dim=of).sum()))
                self.seen.append(float(weight.amax(of).norm(torch.inf)))


class Calls(Plain):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += [float(self.net(SAMPLES[:2]).sum()), float(self.net.blocks[0](torch.ones(1, 6)).sum())]

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        self.seen += [float(self.net(SAMPLES[:2]).sum()), float(self.net.last(torch.ones(1, 6)).sum())]


class SetsRows(Plain):
    """Of weights and of gradients: by a number, an index, a mask."""

    def on_after_backward(self) -> None:
        gradients = [block.weight.grad for block in self.net.blocks]
        gradients[0][:2] = 0
        gradients[1][gradients[1].abs() < 1e-3] = 0
        self.net.last.bias.grad[2:] = 0  # type: ignore[index]

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.net.first.weight[0] = 0.1
        self.net.last.weight.data[torch.tensor([0, 2])] = torch.full((2, 6), 0.1)


class ChangesRows(Plain):
    """A part is a copy, where it lies on other ranks."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.net.first.weight[0].zero_()


class ChangesRowsOfGradients(Plain):
    def on_after_backward(self) -> None:
        self.net.first.weight.grad[:4].mul_(0.5)  # type: ignore[index]


class Draws(Plain):
    """Layers begun again, and noise."""

    def on_train_batch_end(self, _outputs: Any, _batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)  # steps draw from generators of their own
        if batch_idx == 1:
            self.net.last.reset_parameters()
            nn.init.trunc_normal_(self.net.blocks[0].weight, std=0.2)
            nn.init.eye_(self.net.blocks[1].weight)
        with torch.no_grad():
            for parameter in self.net.first.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


class DrawsByValues(Plain):
    """Masks, slopes and samples: by torch each shard had those of the first one."""

    @torch.no_grad()
    def on_train_batch_end(self, _outputs: Any, _batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)
        for part in (self.net.first, self.net.last):
            for parameter in part.parameters():
                parameter.mul_(torch.bernoulli(torch.full_like(parameter, 0.7)))
                parameter.copy_(F.rrelu(parameter, training=True))
                parameter.add_(torch.normal(parameter, 0.1), alpha=0.1)
                parameter.add_(torch.normal(parameter, parameter.abs() + 0.1), alpha=0.1)
                parameter.add_(torch.normal(0.5, parameter.abs() + 0.1), alpha=0.1)
                parameter.sub_(torch.distributions.Normal(parameter, 0.1).sample(), alpha=0.1)
                parameter.add_(torch.poisson(parameter.abs()), alpha=0.01)
                parameter.add_(torch.binomial(torch.full_like(parameter, 9), parameter.sigmoid()), alpha=0.01)
                parameter.add_(F.dropout(parameter), alpha=0.1)
                ones = torch.ones_like(parameter)
                parameter.add_(torch.distributions.Gamma(parameter.abs() + 1, ones).sample(), alpha=0.01)
                parameter.add_(torch.distributions.Dirichlet(parameter.abs() + 1).sample(), alpha=0.01)
                self.seen.append(float((torch.multinomial(parameter.abs() + 0.1, 2) + 1.0).norm()))


class WritesByPlace(Plain):
    """Of a bias torch made a replicated tensor of a part; of weights it refused most."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        rows = torch.tensor([1, 2])
        for parameter in (self.net.first.weight, self.net.last.bias, self.net.last.weight):
            values = torch.full((2, *parameter.shape[1:]), 0.1)
            parameter.index_add_(0, torch.tensor([1]), values[:1])
            parameter.index_add_(0, rows, values, alpha=0.5)
            self.seen.append(float(parameter.norm()))
            parameter.index_copy_(0, torch.tensor([0]), values[:1])
            parameter.index_fill_(0, torch.tensor([2]), 0.3)
            parameter.index_put_((rows,), values, accumulate=True)
            parameter.scatter_(0, torch.zeros(1, *parameter.shape[1:], dtype=torch.long), 0.2)
            parameter.scatter_add_(0, torch.ones(1, *parameter.shape[1:], dtype=torch.long), values[:1])
            parameter.put_(rows, values.flatten()[:2])
            parameter.masked_scatter_(parameter > 0.25, torch.linspace(0, 0.1, parameter.numel()))
        self.net.blocks[0].weight.tril_()


class WritesToSums(Plain):
    """As AdaLoRA's penalty: each rank has a summand of the product, and so of what is made like it."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.net.blocks[0].weight.detach()
        product = weight.T @ weight
        one = torch.eye(6, out=torch.empty_like(product))
        self.seen.append(float((product - one).norm()))
        self.seen.append(float(product.copy_(torch.ones(6, 6)).sum()))


class KeepsList(Plain):
    """Of what its optimizer trains."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.kept)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.kept = list(self.net.last.parameters())
        return super().configure_optimizers()


class Replaces(Plain):
    part = "last"

    def replace(self) -> None:
        part = self.net.get_submodule(self.part)
        part.weight = nn.Parameter(torch.ones(part.weight.shape))

    def on_train_batch_end(self, _outputs: Any, _batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.replace()


class ReplacesOfBlock(Replaces):
    part = "blocks.0"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.replace()
        return loss


class AddsToPlain(Plain):
    """torch fails at that without a word, once it has added two sharded numbers."""

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.net.last.weight.detach()
        for total in (weight.sum().square(), torch.zeros(())):
            total.add_(weight.sum().square())


class MakesArrays(Plain):
    """As loggers do."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += self.net.last.bias.tolist()
        for parameter in self.parameters():
            self.seen += [float(np.asarray(parameter.detach()).sum()), float(parameter.detach().cpu().numpy().max())]
            self.seen.append(float(parameter.numpy(force=True).min()))


class LooksUpSparsely(Plain):
    """By a call that no module tells of at setup."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch + F.embedding(torch.arange(len(batch)), self.table, sparse=True), batch_idx)


class ChangesLater(Plain):
    """Not in the first step, which is looked through anyway."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            with torch.no_grad():
                self.net.last.weight.mul_(0.5)
        return super().training_step(batch, batch_idx)


class Clamps(Plain):
    """Within its bounds, as transformers' Gemma 3n does in each forward; autograd has saved the weight before."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.net.last.weight.data.clamp_(-1e4, 1e4)
        return loss


class ChangesDataLater(Plain):
    """As momentum encoders are: in the first step they are equal to what they follow, and so aren't changed."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.net.last.weight.data.mul_(0.5)
        return super().training_step(batch, batch_idx)


class AssignsLater(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.net.last.weight.data = self.net.last.weight.data * 0.5
        return super().training_step(batch, batch_idx)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.shift += 0.1
            self.count += 1
        return x + self.shift


class Averages(Teaches):
    """Parameters and buffers as one list, as timm's ModelEmaV3."""

    def __init__(self) -> None:
        super().__init__()
        for net in (self.net, self.teacher):
            net.first = nn.Sequential(net.first, Statistics())  # type: ignore[assignment]

    def lists(self) -> tuple[list[Tensor], list[Tensor]]:
        both = zip(self.teacher.state_dict().values(), self.net.state_dict().values())
        old, new = zip(*(pair for pair in both if pair[0].is_floating_point()))
        return list(old), list(new)

    def on_before_zero_grad(self, *_: Any) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(*self.lists(), weight=0.5)


class AveragesByTwo(Averages):
    def on_before_zero_grad(self, *_: Any) -> None:
        old, new = self.lists()
        with torch.no_grad():
            torch._foreach_mul_(old, 0.5)
            torch._foreach_add_(old, new, alpha=0.5)


class Copies(Averages):
    def on_before_zero_grad(self, *_: Any) -> None:
        with torch.no_grad():
            torch._foreach_copy_(*self.lists())


class Mixes(Averages):
    """The values beside the parameters are plain."""

    def on_before_zero_grad(self, *_: Any) -> None:
        with torch.no_grad():
            old, new = self.lists()
            torch._foreach_lerp_(old, [torch.zeros(each.shape) for each in new], weight=0.5)


ALIKE = [Freezes, Clips, Swaps, Loads, Looks, Calls, SetsRows, WritesToSums, AveragesByTwo, Copies]
ALIKE_TOO = [Clamps, Teaches, OfTypes, Draws, DrawsByValues, WritesByPlace]
GATHERED = "It is a copy, gathered from the ranks that hold it, so the change would be lost"
REFUSED: dict[type[Plain], str] = {
    KeepsList: "a list that was made in configure_optimizers",
    Replaces: "was replaced or removed",
    AddsToPlain: "A plain tensor is changed in place by a sharded one",
    MakesArrays: "or take p.full_tensor()",
    LooksUpSparsely: "use sparse=False",
    ChangesDataLater: "was changed in place",
    ChangesRows: GATHERED,
    Mixes: "mixed torch.Tensor and DTensor",
}
REFUSED_TOO: dict[type[Plain], str] = {
    ReplacesOfBlock: "was replaced or removed",
    ChangesLater: "was changed in place",
    AssignsLater: "was changed in place",
    ChangesRowsOfGradients: GATHERED,
}
EVERY_REFUSED = {**REFUSED, **REFUSED_TOO}
#: Where the memory is the same, they are right.
RIGHT_ON_ONE_RANK = [ChangesLater, ChangesDataLater, AssignsLater, ChangesRows, ChangesRowsOfGradients, MakesArrays]


def fit(kind: type[Plain], data_ranks: int | None, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """What it has seen, and its weights; ``None``: by one plain process."""
    L.seed_everything(0)
    module = kind()
    sizes = None if data_ranks is None else {"data_parallel_size": data_ranks, **options}
    trainer = trainer_of(sizes, data_ranks or 1, max_epochs=1, val_check_interval=2)
    loader = DataLoader(SAMPLES, batch_size=BATCH // (data_ranks or 1))  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)
    weights = dict(module.named_parameters()) if data_ranks is None else trainer.strategy.gather_full_parameters()
    return module.seen, {name: weight.detach().clone() for name, weight in weights.items()}


def fits(kinds: Sequence[type[Plain]], data_ranks: int) -> list[Any]:
    found: list[Any] = []
    for kind in kinds:
        try:
            found.append(fit(kind, data_ranks))
        except StepError as error:
            found.append(str(error))
    return found


def check(kinds: Sequence[type[Plain]], found: Sequence[Any], refused: dict[type[Plain], str]) -> None:
    for kind, seen in zip(kinds, found):
        if kind in refused:
            assert refused[kind] in str(seen), kind.__name__
            continue
        numbers, weights = fit(kind, None)
        assert not isinstance(seen, str), f"{kind.__name__}: {seen}"
        assert seen[0] == pytest.approx(numbers, rel=1e-5, abs=1e-6), kind.__name__
        apart = {name: float((seen[1][name] - weight).abs().max()) for name, weight in weights.items()}
        assert max(apart.values()) < 1e-5, f"{kind.__name__}: {apart}"


@pytest.mark.parametrize(
    "kinds",
    [[*ALIKE, *REFUSED], pytest.param([*ALIKE_TOO, *REFUSED_TOO], marks=pytest.mark.long)],
    ids=["some", "others"],
)
def test_on_data_ranks_changes_are_kept_or_refused(kinds: list[type[Plain]]) -> None:
    found, _ = run_ranks(fits, 2, kinds, 2, elastic=True, timeout_s=200)  # the other has no whole weights
    check(kinds, found, EVERY_REFUSED)


def on_stages(kind: type[Plain]) -> dict[str, Tensor]:
    L.seed_everything(0)
    trainer = trainer_of({"pipeline_parallel_size": 2, "microbatches": 2}, max_epochs=1)
    trainer.fit(kind(), DataLoader(SAMPLES, batch_size=BATCH))  # type: ignore[arg-type]
    return trainer.strategy.gather_full_parameters()


class TeachesByName(Teaches):
    def on_before_zero_grad(self, *_: Any) -> None:
        new = dict(self.net.named_parameters())
        for name, old in self.teacher.named_parameters():
            old.data.mul_(0.5).add_(new[name].data, alpha=0.5)


class LooksUp(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.get_parameter("net.first.weight").square().sum()


CHANGED = "was changed in place in a step, which runs once for each microbatch"
ON_STAGES = {
    Teaches: r"iterates over parameters\(\) of net",
    TeachesByName: r"'[\w.]+weight'",  # a KeyError
    # what is assigned to ``data`` was taken over after each microbatch
    **dict.fromkeys((ChangesDataLater, ChangesLater, AssignsLater), CHANGED),
}


@pytest.mark.long  # the other stage waits for some seconds whether it was the first to fail
@pytest.mark.parametrize("kind", ON_STAGES)
def test_what_looks_for_a_whole_network_or_changes_one_for_each_microbatch_is_refused(kind: type[Plain]) -> None:
    with pytest.raises(RanksFailed, match=rf"(?s)failed first: .*Error: .*{ON_STAGES[kind]}"):
        run_ranks(on_stages, 2, kind, elastic=True)


@pytest.mark.long
def test_a_parameter_that_is_looked_up_in_a_step_is_had_from_its_stage() -> None:
    _, weights = fit(LooksUp, None)
    whole, _ = run_ranks(on_stages, 2, LooksUp, elastic=True)
    assert max(float((whole[name] - weight).abs().max()) for name, weight in weights.items()) < 1e-5


@pytest.mark.long
def test_on_one_rank_they_are_too() -> None:
    # torch keeps what it calls from the first DTensor on, and others of this process may have had theirs before
    kinds = [kind for kind in [*ALIKE, *ALIKE_TOO, *EVERY_REFUSED] if kind is not AddsToPlain]
    check(kinds, fits(kinds, 1), {kind: says for kind, says in EVERY_REFUSED.items() if kind not in RIGHT_ON_ONE_RANK})
    recomputed = fit(Swaps, 1, activation_checkpointing=True)
    check([Swaps], [recomputed], {})
