"""Networks as people write them, on several stages: what crosses the cuts is found, and all is as in one process."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_shard.errors import StepError
from tests.training.pipelines import assert_alike, assert_evaluates_alike, on_stages

WIDTH, WORDS = 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        hidden = self.norm(x)
        if condition is not None:
            hidden = hidden * (1 + condition)
        return x + self.down(F.gelu(self.up(hidden)))


class Net(nn.Module):
    """A plain one; the others differ by what they do around the blocks, or in them."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.through(self.embed(x)))

    def through(self, hidden: Tensor, *given: Any) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, *given)
        return hidden

    def leave(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


class Conditioned(Net):
    """On a timestep, as diffusion models are, through a part with layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.time(x[:, :1, None].float() / WORDS)
        return self.leave(self.through(self.embed(x), condition))


class Given(nn.Module):
    """A block that calls a module that it is given, as x-transformers' attention does with a position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: nn.Module) -> Tensor:
        return x + self.up(x) * positions(torch.arange(x.shape[1]))


class PartInBlocks(Net):
    """Every second block is recomputed."""

    block = Given

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        for i, block in enumerate(self.blocks):
            if i % 2:
                hidden = checkpoint(block, hidden, self.positions, use_reentrant=False)
            else:
                hidden = block(hidden, self.positions)
        return self.leave(hidden)


class Residual(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        return self.leave(self.through(first) + first)


class InPairs(Net):
    """Attention and feedforward in lists that are never called, added up around them: stages may cut within a pair."""

    def __init__(self) -> None:
        super().__init__()

        def pair() -> nn.ModuleList:
            attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            return nn.ModuleList([attention, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())])

        self.blocks = nn.ModuleList(pair() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for attention, feedforward in self.blocks:
            hidden = attention(hidden, hidden, hidden, need_weights=False)[0] + hidden
            hidden = feedforward(hidden) + hidden
        return self.leave(hidden)


class UNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden, skips = self.embed(x), []
        for block in self.blocks[:2]:
            hidden = block(hidden)
            skips.append(hidden)
        for block in self.blocks[2:]:
            hidden = block(hidden + skips.pop())
        return self.leave(hidden)


class Collecting(Net):
    """The mean of all layers' states. Each stage misses several values, in its middle."""

    runs: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(0)
        states = [self.embed(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.leave(torch.stack(states).mean(0))


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden += self.position
        condition = torch.zeros_like(hidden)
        condition[:, 0] = hidden[:, 1]
        for block in self.blocks:
            hidden = block(hidden, condition)
            hidden *= 0.9
        return self.leave(hidden)


class InTurn(Net):
    """Two lists that one loop runs."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block, other in zip(self.blocks, self.others):
            hidden = hidden + other(block(hidden))
        return self.leave(hidden)


class OnBothSides(Net):
    """A parameter and a layer used before the blocks and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.through(self.norm(self.embed(x) * self.scale)) * self.scale)


class LooksIntoBlocks(Net):
    """And asks parts and blocks for their dtype by a parameter, as transformers' models do, wherever they are."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            assert isinstance(block, Block)
            hidden = block(hidden.to(next(block.parameters()).dtype)) * (1 + 1 / block.up.out_features)
        return self.leave(hidden.to(next(self.head.parameters()).dtype))


class Decides(Net):
    """Asks for an unknown value as a number."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        if hidden.square().mean() > 0:
            hidden = -hidden
        return self.leave(self.through(hidden))


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


own_function = OwnFunction.apply


@torch.jit.script
def doubled(x: Tensor) -> Tensor:
    return x * 2


@torch.jit.script
def chosen(x: Tensor) -> Tensor:
    return x.argmax(-1)


def nearest(net: Any, time: Tensor) -> Tensor:
    """What isn't known is not among the arguments."""
    return torch.vmap(lambda each: (each @ net.time.weight).argmax(-1))(torch.ones_like(time))


def one_hot(numbers: Tensor) -> Tensor:
    return F.one_hot(numbers, WIDTH).float()


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "own": lambda net, time: OwnFunction.apply(time) * net.time.bias,
    "scripted": lambda net, time: doubled(time),
    "scripted, of integers": lambda net, time: one_hot(chosen(time)),
    "vmapped": lambda net, time: one_hot(torch.vmap(lambda each: each.argmax(-1))(time)),
    "vmapped inside": lambda net, time: torch.vmap(torch.vmap(lambda each: each * each.argmax(-1)))(time),
    "vmapped closure": lambda net, time: one_hot(nearest(net, time)),
    "captured": lambda net, time: own_function(time),
}
"""Inside of them tensors lose their class; of the last one this package isn't told."""


class ByFunction(Net):
    """A function gives what all blocks take."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.time = nn.Linear(WIDTH, WIDTH)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.leave(self.through(hidden, FUNCTIONS[self.name](self, self.time(hidden))))


class Masked(Net):
    """A mask computed from a parameter: integers and bools are known to be unknown as well."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        mask = (hidden.argmax(-1, keepdim=True) > WIDTH // 2).float()
        return self.leave(self.through(hidden, mask))


class Down(nn.Module):
    """Returns its result, and all results of its layers, as diffusers' parts of a U-Net do: one is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first = self.layers(x)
        second = self.layers(first)
        return second, (first, second)


class ReturnsTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.down = Down()

    def forward(self, x: Tensor) -> Tensor:
        hidden, others = self.down(self.embed(x))
        for block, other in zip(self.blocks, (*others, *others)):
            hidden = block(hidden) + other
        return self.leave(hidden)


class Recurrent(nn.Module):
    """Layers of which each begins with the last one's states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        hidden, states = self.embed(x), None
        for layer in self.layers:
            hidden, states = layer(hidden, states)
        assert states is not None
        return self.head(hidden + states[0].mean())


class EncoderAndDecoder(nn.Module):
    """Of different classes, one after the other, the decoder with the encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, WIDTH)
        self.target = nn.Embedding(WORDS, WIDTH)
        self.both = nn.Transformer(WIDTH, 2, 2, 2, WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.both(self.source(x), self.target(x)))


class BetweenAll(Net):
    """One part, of several layers, runs between all blocks: a stage that doesn't hold it would skip it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden) * self.gate(hidden).sigmoid()
        return self.leave(hidden)


class Sized(nn.Module):
    """Returns an array beside its output, made anew for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, np.ndarray]:
        return x + self.up(x).tanh(), np.array([*x.shape[1:]])


class ReturnsArrays(Net):
    block = Sized

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden, sizes = block(hidden)
        return self.leave(hidden) * float(sizes[0])


class MasksBetween(Net):
    """As XLM: norms in a list of their own, and a mask in place, so that what a stage receives overwrites unknowns."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = self.embed(x), (x > 1).float()[..., None]
        for block, norm in zip(self.blocks, self.norms, strict=True):
            hidden = norm(hidden + block(hidden))
            hidden *= mask
        return self.leave(hidden)


def sequential() -> nn.Module:
    """Unlike children, some without parameters, one that works in place, one nested."""
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.Dropout(0.0),
        nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(inplace=True), nn.Linear(12, WIDTH)),
        nn.Tanh(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WORDS),
    )


def like_a_vgg() -> nn.Module:
    """The first part of the second stage works in place."""
    layers = [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(True), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.ReLU(True), nn.Linear(WIDTH, WORDS))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{
        kind.__name__: kind
        for kind in (
            *(Net, Conditioned, Residual, UNet, Collecting, InPlace, InTurn, OnBothSides, LooksIntoBlocks, Decides),
            *(EncoderAndDecoder, BetweenAll, InPairs, MasksBetween, PartInBlocks),
            *(ReturnsTwice, Recurrent, Masked, ReturnsArrays),
        )
    },
    **{name: partial(ByFunction, name) for name in [*FUNCTIONS][:-1]},
    **{"sequential": sequential, "like a VGG": like_a_vgg},
}
EVALUATED = ("UNet", "InPlace", "Decides", "EncoderAndDecoder", "vmapped inside")
CROSSED = {"Net": [1, 1, 1], "Residual": [2, 2, 2], "UNet": [1, 2, 2], "Collecting": [2, 3, 4]}
"""How many values cross each cut: the hidden state alone where nothing else is needed."""


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return make()

    return made


def batches(parts: int = 4) -> Sequence[Tensor]:
    return torch.randint(0, WORDS, (parts, 2, 6), generator=torch.Generator().manual_seed(2)).unbind()


def loss(root: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(root.net(x).flatten(0, 1), (x * 5 + 3).flatten() % WORDS)


@pytest.mark.parametrize("stages", [*(pytest.param(n, marks=pytest.mark.long) for n in (2, 3)), 4])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_on_stages_is_the_network_alone(network: str, stages: int) -> None:
    seen = assert_alike(seeded(NETWORKS[network]), loss, batches(), stages)
    if stages == 4 and network in CROSSED:
        assert seen.crossed == CROSSED[network]


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(
    "network", [n if n in EVALUATED else pytest.param(n, marks=pytest.mark.long) for n in NETWORKS]
)
def test_a_network_is_evaluated_on_stages_as_alone(network: str, stages: int) -> None:
    assert_evaluates_alike(seeded(NETWORKS[network]), loss, batches(), stages)


def test_a_step_runs_once_for_each_microbatch_on_each_stage() -> None:
    Collecting.runs.clear()
    on_stages(seeded(Collecting), loss, batches(), 3, microbatches=1)
    assert len(Collecting.runs) == 3 * len(batches())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class InPagesOfTheirOwn(nn.Module):
    """Its values are so large that each lies in pages of its own, which the next value gets once they are free."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Scale() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).repeat_interleave(100_000, 1)
        for block in self.blocks:
            hidden = hidden * 1
            hidden *= 2
            changed = block(hidden)
            hidden = hidden + changed
        return self.head(hidden[:, ::100_000])


def test_what_is_written_in_place_and_fetched_leaves_its_memory_to_others() -> None:
    assert_evaluates_alike(seeded(InPagesOfTheirOwn), loss, batches(1), 2)


class Leaving(Net):
    """Calls some of its blocks, always the same."""

    def __init__(self, *called: int) -> None:
        super().__init__()
        self.called = called

    def through(self, hidden: Tensor, *given: Any) -> Tensor:
        for i in self.called:
            hidden = self.blocks[i](hidden)
        return hidden


class LeavingWithMore(Leaving):
    """With residuals around the blocks, and values of all of them after the last one."""

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = self.embed(x)
        states = []
        for i in self.called:
            hidden = hidden + self.blocks[i](hidden * 2) / 2
            states.append(hidden)
        if hidden.mean() > 1e6:  # a stage without the last block can't know this
            raise AssertionError
        return self.leave(torch.stack([first, *states]).sum(0) + self.embed.weight[0])


class LeavingWithHooks(Leaving):
    """Gradients' hooks act once, before the blocks and after them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        hidden = self.through(hidden) * 3
        hidden.register_hook(lambda gradient: gradient * 5)
        return self.leave(hidden)


@pytest.mark.parametrize(
    ("network", "called", "stages"),
    [
        *[(Leaving, (1,), 2), (Leaving, (0, 3), 4), (Leaving, (0,), 4)],
        *[(LeavingWithMore, (0,), 3), (LeavingWithMore, (1, 2), 3), (LeavingWithMore, (0, 2), 3)],
        *[(LeavingWithHooks, (1,), 4)],
    ],
)
def test_a_step_may_leave_blocks_out(network: Callable[..., Net], called: Sequence[int], stages: int) -> None:
    seen = assert_alike(seeded(partial(network, *called)), loss, batches(), stages)
    others = [i for i in range(4) if i not in called]
    assert not any(name.startswith(f"net.blocks.{i}.") for name in seen.gradients for i in others)


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("GPipe", "InterleavedZeroBubble")]


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble", *LONG])
def test_every_schedule_goes_on_where_stages_have_nothing_to_do(schedule: str) -> None:
    for called in [(2,), (1, 3)]:
        assert_alike(seeded(partial(LeavingWithMore, *called)), loss, batches(), 2, schedule=schedule)


class NeedsByShape(UNet):
    """What crosses, and which blocks run, depends on the length."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 4:
            return super().forward(x)
        first = hidden = self.embed(x)
        for block in self.blocks[: None if x.shape[1] < 7 else 1]:
            hidden = block(hidden)
        return self.leave(hidden * 2 if x.shape[1] == 5 else hidden + first)


@pytest.mark.parametrize(("lengths", "stages"), [((4, 5, 6, 7, 8), 4), ((8, 7, 4, 4), 2), ((6, 3, 6, 3), 4)])
def test_another_shape_begins_with_what_the_last_one_needed(lengths: Sequence[int], stages: int) -> None:
    generator = torch.Generator().manual_seed(2)
    parts = [torch.randint(0, WORDS, (2, length), generator=generator) for length in lengths]
    assert_alike(seeded(NeedsByShape), loss, parts, stages)


class LeavingByParity(Net):
    """Another number of blocks for each value."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks[: self.numbers[int(x.sum()) % 2]]:
            hidden = block(hidden)
        return self.leave(hidden)


@pytest.mark.parametrize(
    ("numbers", "stages", "is_right"),
    [((4, 3), 2, True), ((3, 4), 4, True), ((1, 2), 2, False), ((2, 1), 4, False), ((4, 2), 4, False)],
)
def test_blocks_that_depend_on_values_are_refused_or_right(
    numbers: tuple[int, int], stages: int, is_right: bool
) -> None:
    parts = [torch.tensor([[value, 2, 4], [6, 8, 2]]) for value in (2, 4, 3, 2)]  # the third is odd
    make = seeded(partial(LeavingByParity, *numbers))
    with nullcontext() if is_right else pytest.raises(StepError, match=r"net\.blocks\..*microbatch of the same shapes"):
        assert_alike(make, loss, parts, stages)


class Backwards(Net):
    def through(self, hidden: Tensor, *given: Any) -> Tensor:
        for block in self.blocks[::-1]:
            hidden = block(hidden)
        return hidden


class OtherMethods(Net):
    def through(self, hidden: Tensor, *given: Any) -> Tensor:
        for block in self.blocks[::-1]:
            hidden = block.down(block.up(hidden))
        return hidden


def test_blocks_run_in_another_order_if_that_is_said() -> None:
    assert_alike(seeded(Backwards), loss, batches(), 2, blocks=[f"net.blocks.{i}" for i in (3, 2, 1, 0)])


# -- steps


def penalized(root: nn.Module, x: Tensor) -> Tensor:
    """With something of the first stage in the loss."""
    return loss(root, x) + root.net.embed.weight.square().mean()


class ByHand(Net):
    """The first block's weights are used beside the block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.blocks[0].norm.weight.sum()


@pytest.mark.parametrize(("network", "step"), [(Net, penalized), (ByHand, loss)])
def test_parameters_of_other_stages_may_be_used_after_the_blocks(network: type[Net], step: Any) -> None:
    assert_alike(seeded(network), step, batches(), 3)


class WithFeatures(Net):
    """Hooks inside of blocks collect features, and an attribute of the network counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.calls = 0
        seen: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, output: self.features.append(output))
            block.down.register_forward_hook(
                lambda module, args, kwargs, output: seen.append(args[0]), with_kwargs=True
            )
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def with_features(root: nn.Module, x: Tensor) -> Tensor:
    net: Any = root.net
    value = loss(root, x) + sum(feature.square().mean() for feature in (*net.features, *net.seen))
    assert len(net.features) == len(net.seen) == len(net.blocks)
    net.features.clear()
    net.seen.clear()
    return value


@pytest.mark.parametrize(("ranks", "schedule"), [(4, "1F1B"), (2, "Interleaved1F1B")])
def test_hooks_inside_of_blocks_and_counters_see_each_microbatch_once(ranks: int, schedule: str) -> None:
    made: list[WithFeatures] = []

    def make() -> nn.Module:
        made.append(WithFeatures())
        return made[-1]

    assert_alike(seeded(make), with_features, batches(), ranks, schedule=schedule)
    assert [net.calls for net in made] == [4] * (1 + ranks)  # also where a stage ran its part again


# -- what blocks do beside what they return


class AddsToCondition(Block):
    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        result = super().forward(x)
        assert condition is not None
        condition.add_(result.detach())
        return result


class Sums(Net):
    block = AddsToCondition

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        total = torch.zeros_like(hidden).detach()
        return self.leave(self.through(hidden, total) + total)


@dataclass
class State:
    """What blocks are given, and change."""

    hidden: Any


class Plain:
    """The same, of no kind that is looked into."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


def put(hidden: Any, held: Any) -> None:
    if isinstance(held, (dict, list)):
        held["hidden" if isinstance(held, dict) else 0] = hidden
    else:
        held.hidden = hidden


def held_by(held: Any) -> Any:
    return held["hidden"] if isinstance(held, dict) else held[0] if isinstance(held, list) else held.hidden


class Passes(Block):
    """Changes what it is given."""

    returns = True

    def forward(self, held: Any, condition: Tensor | None = None) -> Any:  # type: ignore[override]
        put(super().forward(held_by(held)), held)
        return held if self.returns else None


class PassesState(Net):
    """Through blocks whose output it doesn't look at: they change what they are given."""

    block = Passes
    kind: Callable[[Any], Any] = State
    returns = True

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.returns = self.returns  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        held = type(self).kind(self.embed(x))
        for block in self.blocks:
            block(held)
        return self.leave(held_by(held))


class PassesDict(PassesState):
    kind = staticmethod(lambda hidden: {"hidden": hidden, "steps": 3})


class PassesList(PassesState):
    kind = staticmethod(lambda hidden: [hidden])


class ChangesDict(PassesDict):
    returns = False


class ChangesState(PassesState):
    returns = False


class Appending(Block):
    def forward(self, x: Tensor, condition: Any = None) -> Tensor:
        condition.append(x.mean())
        return super().forward(x)


class Appends(Net):
    block = Appending

    def forward(self, x: Tensor) -> Tensor:
        means: list[Tensor] = []
        return self.leave(self.through(self.embed(x), means)) * sum(means)


class Collector:
    """An object that is passed through blocks, in which they leave what code behind them takes."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.by_name: dict[str, Any] = {}
        self.calls = 0


class WithTotal(Collector):
    """Holds one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())
        self.states.append(self.total)


class Collected(Block):
    def forward(self, x: Tensor, held: Any = None) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        self.collect(x, held)
        return x

    def collect(self, x: Tensor, held: Any) -> None:
        held.calls += 1
        held.states.append(x.tanh())
        held.by_name[f"mean {held.calls}"] = (Plain(x.mean(0)), held.calls)


class Collects(Net):
    """Losses and features in an object, of lists and dicts, that no block returns."""

    block = Collected
    made: Callable[[], Any] = Collector

    def forward(self, x: Tensor) -> Tensor:
        held = type(self).made()
        hidden = self.through(self.embed(x), held)
        means = sum((mean.hidden * number for mean, number in held.by_name.values()), torch.zeros(()))
        states = sum(held.states, torch.zeros(()))
        return self.leave(hidden + states) * (1 + held.calls * (1 + means.mean()) + states.mean())


def collecting(collect: Callable[[Any, Tensor, Any], None], made: Callable[[], Any] = Collector) -> type[Net]:
    """With blocks that leave something else there."""
    block = type("Block", (Collected,), {"collect": collect})
    return type(collect.__name__, (Collects,), {"block": block, "made": made})


def collects_densely(block: Collected, x: Tensor, held: Any) -> None:
    """Computes with what earlier blocks have left."""
    Collected.collect(block, x + sum(held.states), held)


def adds_to_total(block: Collected, x: Tensor, held: Any) -> None:
    held.total += x.mean()


def leaves_one_twice(block: Collected, x: Tensor, held: Any) -> None:
    held.first = held.second = [x]


def takes(block: Collected, x: Tensor, held: Any) -> None:
    if held.states:
        held.states.pop()
    else:
        held.states.append(x)


def queues(block: Collected, x: Tensor, held: Any) -> None:
    held.append(x)


def counts_by_value(block: Collected, x: Tensor, held: Any) -> None:
    held.calls += int(x.detach().sum() * 1e6)


class Store(UserDict[str, Any]):
    """As graphs of torch_geometric have it."""


class Graph:
    """Its values are in a mapping of its own, it can be called, and attributes are entries."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["store"] = Store(values)

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("store", {}):
            raise AttributeError(name)
        return self.__dict__["store"][name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["store"][name] = value

    def __call__(self) -> Any:
        return iter(self.store.items())


class OfGraph(Block):
    def forward(self, graph: Any, condition: Any = None) -> Any:
        graph.x = super().forward(graph.x) * graph.scale
        return graph


class PassesAGraph(Net):
    block = OfGraph

    def forward(self, x: Tensor) -> Tensor:
        graph: Any = Graph(x=self.embed(x), scale=x.float().mean())
        returned = self.through(graph)
        assert (returned is graph) == (self.block is OfGraph)
        return self.leave(returned.x)


class CopiesGraph(OfGraph):
    def forward(self, graph: Any, condition: Any = None) -> Any:
        return super().forward(Graph(x=graph.x, scale=graph.scale))


class ReturnsANewGraph(PassesAGraph):
    block = CopiesGraph


class Holding(Block):
    def forward(self, x: Tensor, condition: Any = None) -> Tensor:
        self.held.states.append(x.mean())
        return super().forward(x)


class HoldsACollector(Net):
    """One object, that all blocks hold."""

    block = Holding

    def __init__(self) -> None:
        super().__init__()
        held = Collector()
        for block in self.blocks:
            block.held = held  # type: ignore[assignment]


class ReturnsNested(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nested.as_nested_tensor(list(self.embed(x)), layout=torch.jagged)
        return self.leave(self.through(hidden).to_padded_tensor(0.0))


class WorksInPlace(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.scale)


class Aliases(Net):
    """An older name of what blocks change in place."""

    block = WorksInPlace

    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x) * 1
        return self.leave(self.through(first) + first)


def halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


class HooksGradients(Net):
    """On what a block returned, and on a skip that crosses."""

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = self.embed(x)
        hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        for block in self.blocks:
            hidden = block(hidden)
            hidden.register_hook(halved)
        return self.leave(hidden + first)


class HooksGradientsOfTied(Net):
    """Before the blocks, of an embedding that the last stage holds too."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(WORDS, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.positions(x)
        if hidden.requires_grad:
            hidden.register_hook(halved)
        return self.leave(self.through(hidden))


class HooksGradientsLate(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        hidden = self.through(first)
        first.register_hook(halved)
        return self.leave(hidden + first)


def cut_off(module: nn.Module, gradients: Any, *_: Any) -> Any:
    return tuple(gradient.clamp(-1e-3, 1e-3) for gradient in gradients)


def hooked(make: Callable[[], nn.Module], kind: str, *paths: str) -> nn.Module:
    """With backward hooks."""
    net = make()
    for path in paths:
        getattr(net.get_submodule(path), f"register_full_backward_{kind}")(cut_off)
    return net


class Layers(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class AroundBlocks(Net):
    """What is around all blocks is given something with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Layers(*self.blocks)
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.encoder(self.embed(x)))


class Freezes(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.through(self.embed(x))
        return self.leave(hidden)


class Hooked(Net):
    """A hook on each block gives another output."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: output * 1.5)


class Counts(Net):
    """The number of elements depends on what this stage doesn't know."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        many = hidden[hidden > 0].numel()
        return self.leave(self.through(hidden)) * (1 + many / 100)


class Clamps(Net):
    """Changes a tensor that has gradients, without any."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x) * 2
        with torch.no_grad():
            first.clamp_(-1, 1)
        return self.leave(self.through(first) + first)


class Views(Net):
    """Written to as a whole and through a view, after other views were made."""

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.zeros(*x.shape, WIDTH)
        first, last = whole[:, :3], whole[:, 3:]
        whole[:, 0] = self.embed(x[:, 0])
        whole[:, 3:] = self.embed(x[:, 3:])
        return self.leave(self.through(self.embed(x), whole)) * (1 + first.sum() + last.mean())


class ViewHandedOn(Net):
    """A view made before, given to blocks as it is."""

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.zeros(2, *x.shape, WIDTH)
        condition = whole[0]
        whole[:] = self.embed(x)
        return self.leave(self.through(self.embed(x), condition))


class Caches(Net):
    """Computes a table on its first call."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(6.0).cos().sin()[:, None]
        first = self.embed(x) + self.table
        return self.head(self.norm(self.through(first)) + first)


class CheckpointsHead(Net):
    """With the embedding's weights, by a lambda."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        hidden = self.norm(hidden)
        return checkpoint(lambda hidden: (hidden @ self.embed.weight.T).tanh() ** 2, hidden, use_reentrant=False)


class CheckpointedTogether(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[0](self.embed(x))
        hidden = checkpoint(lambda hidden: self.blocks[2](self.blocks[1](hidden)), hidden, use_reentrant=False)
        return self.leave(self.blocks[3](hidden))


class Replacing(Net):
    """A hook inside of a block gives another output than the one that the hook before has collected."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, output: self.seen.append(output))
            block.up.register_forward_hook(lambda module, args, output: output * 2)
            block.up.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        return super().forward(x) * sum(each.square().mean() * i for i, each in enumerate(self.seen))


@pytest.mark.parametrize(
    "network",
    [
        *(Sums, Hooked, Clamps, Counts, HooksGradients, HooksGradientsOfTied),
        *(PassesState, PassesDict, ChangesState, Appends, Collects, PassesAGraph, Aliases),
        *(Views, ViewHandedOn, Caches, CheckpointsHead, Replacing),
        *(collecting(collects_densely), collecting(adds_to_total, WithTotal)),
        # on parts that are used on one stage
        pytest.param(partial(hooked, Net, "pre_hook", "embed", "head"), id="hooks"),
    ],
)
def test_what_networks_do_beside_computing_is_as_in_one_process(network: Callable[[], nn.Module]) -> None:
    assert_alike(seeded(network), loss, batches(), 3)


# -- what can't be right is refused


class Differentiates(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        (slope,) = torch.autograd.grad(first.square().sum(), first, create_graph=True)
        return self.leave(self.through(first + slope))


class HeadFirst(Net):
    """Registered and named last, used first."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        prepare = "late"
        return self.leave(self.through(getattr(self, prepare)(self.embed(x))))


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


class ValuesDecide(Conditioned):
    """What crosses depends on a batch's values."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > WORDS // 2:
            return super().forward(x)
        return Net.forward(self, x)


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (HeadFirst, r"takes what is computed from net\.late\.(weight|bias).*register parts in __init__"),
        (collecting(takes), r"net\.blocks\.1 takes entries out of a list that it is given"),
        (collecting(queues, deque), r"net\.blocks\.0 changes a deque that it is given"),
        (collecting(leaves_one_twice), r"net\.blocks\.0 puts one list into two places of what it is given"),
        (collecting(counts_by_value), r"net\.blocks\.\d changes an object .* otherwise than for an earlier microbatch"),
        (HoldsACollector, r"net\.blocks\.0 changes its Collector held"),
        (ReturnsNested, "net.blocks.0 returns a nested tensor, which can't be sent"),
        (ReturnsANewGraph, "net.blocks.0 returns a Graph, which can't be sent to another pipeline stage"),
        (HooksGradientsLate, "registers a hook on a tensor that an earlier pipeline stage computed"),
        (partial(hooked, Net, "hook", "blocks.0"), r"net\.blocks\.0 has a backward hook \(register_full_backward_hook"),
        (partial(hooked, AroundBlocks, "hook", "encoder"), r"net\.encoder has a backward hook"),
        (partial(hooked, Residual, "pre_hook", "embed"), r"net\.embed has a backward hook"),
        (partial(hooked, UNet, "pre_hook", "blocks.0"), r"net\.blocks\.0 has .*a part of the gradient, or none"),
        (Freezes, r"gradients switched off.*requires_grad_\(False\)"),
        (Differentiates, r"takes gradients itself \(grad\)"),
        (partial(ByFunction, "captured"), r"net\.blocks\.\d.*Its value isn't known there"),
        (CheckpointedTogether, "recomputes net.blocks.[12] together with blocks or other code"),
        (Backwards, r"came to net\.blocks\.3, net\.blocks\.2 before net\.blocks\.1, which an earlier"),
        (OtherMethods, r"none of net\.blocks\.0, .* \(a block's methods other than __call__"),
        (Twice, r"net\.blocks\.0 ran 2 times within one step, and a pipeline expects it 1×"),
        (ValuesDecide, "may depend on a batch's shapes, not on its values"),
    ],
)
def test_what_cant_be_right_is_refused(network: Callable[[], nn.Module], says: str) -> None:
    parts = torch.stack([torch.zeros(2, 6).long(), torch.full((2, 6), WORDS - 1)])
    with pytest.raises(StepError, match=says):
        on_stages(seeded(network), loss, parts.unbind(), 2)


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
def test_a_backward_hook_of_all_modules_is_refused(kind: str) -> None:
    register = getattr(nn.modules.module, f"register_module_full_backward_{kind}")
    hook = register(lambda module, gradients, *_: cut_off(module, gradients) if isinstance(module, Block) else None)
    try:
        with pytest.raises(StepError, match=r"net has a backward hook .*, of all modules"):
            on_stages(seeded(Net), loss, batches(), 2)
    finally:
        hook.remove()


def test_all_parameters_of_what_isnt_whole_here() -> None:
    def step(root: nn.Module, x: Tensor) -> Tensor:
        return loss(root, x) + sum(p.square().sum() for p in root.net.parameters())

    with pytest.raises(StepError, match="goes over all parameters of net"):
        on_stages(seeded(Net), step, batches(), 2)
