"""Evaluation steps that call the network several times, on stages: what one process computes, or a refusal by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from tests.training.pipelines import assert_evaluates_alike, evaluated_on_stages

WORDS, WIDTH = 24, 8


class Cache:
    """What blocks keep between calls, as transformers' caches do."""

    def __init__(self, layers: int) -> None:
        self.layers = [Kept() for _ in range(layers)]

    def length(self) -> int:
        return self.layers[0].states.size(1) if self.layers[0].states is not None else 0


class Kept:
    def __init__(self) -> None:
        self.states: Tensor | None = None


class LazyCache(Cache):
    """Makes its layers when they are used."""

    def __init__(self) -> None:
        super().__init__(0)

    def length(self) -> int:
        return super().length() if self.layers else 0


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        seen = x
        if cache is not None:
            while len(cache.layers) <= self.index:
                cache.layers.append(Kept())
            kept = cache.layers[self.index]
            seen = kept.states = x if kept.states is None else torch.cat([kept.states, x], 1)
        means = seen.cumsum(1) / torch.arange(1, seen.size(1) + 1)[:, None]
        return x + self.inner(means[:, -x.size(1) :]).tanh()


@dataclasses.dataclass
class Output:
    logits: Tensor
    cache: Cache | None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(i) for i in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.asked = 0

    def forward(self, x: Tensor, cache: Cache | None = None, keeps: bool = False) -> Output:
        if keeps and cache is None:
            cache = Cache(4)
        start = cache.length() if cache is not None else 0
        hidden = self.embed(x) + self.places(torch.arange(start, start + x.size(1)))
        for block in self.blocks:
            hidden = block(hidden, cache)
        return Output(self.head(hidden), cache)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, WORDS, (size, 3), generator=generator) for size in (4, 4, 2)]


def next_of(output: Output) -> Tensor:
    return output.logits[:, -1:].argmax(-1)


def greedy(root: Any, tokens: Tensor) -> Tensor:
    for call in (root.net, root, root.net):
        tokens = torch.cat([tokens, next_of(call(tokens))], 1)
    return tokens


def until_a_word(root: Any, tokens: Tensor) -> Tensor:
    """How many calls there are depends on what the network returns."""
    for _ in range(6):
        word = next_of(root.net(tokens))
        tokens = torch.cat([tokens, word], 1)
        if word[0] % 2 == 0:
            break
    return tokens


def with_cache(root: Any, tokens: Tensor, make: Callable[[], Any] = lambda: Cache(4)) -> Tensor:
    cache, new = make(), tokens
    for _ in range(3):
        root.net.asked += 1
        new = next_of(root.net(new, cache))
        tokens = torch.cat([tokens, new], 1)
    return tokens


def with_its_own_cache(root: Any, tokens: Tensor) -> Tensor:
    output = root.net(tokens, keeps=True)
    for _ in range(3):
        new = next_of(output)
        tokens = torch.cat([tokens, new], 1)
        output = root.net(new, output.cache)
    return tokens


def with_lazy_cache(root: Any, tokens: Tensor) -> Tensor:
    """Blocks of several stages add to one list."""
    return with_cache(root, tokens, LazyCache)


def sometimes(root: Any, tokens: Tensor) -> Tensor:
    """Some batches need a single call."""
    return greedy(root, tokens) if len(tokens) < 4 else root.net(tokens).logits


STEPS = [greedy, until_a_word, with_cache, with_its_own_cache, with_lazy_cache, sometimes]
SEVERAL = [
    *((step, "Interleaved1F1B") for step in (greedy, with_its_own_cache, with_lazy_cache, sometimes)),
    *((step, "ZBVZeroBubble") for step in (with_cache, with_its_own_cache)),
]


@pytest.mark.parametrize(
    ("step", "ranks", "schedule"),
    [*((step, 4, "1F1B") for step in STEPS), *((step, 2, schedule) for step, schedule in SEVERAL)],
)
def test_several_calls_compute_what_one_process_does(
    step: Callable[[Any, Tensor], Tensor], ranks: int, schedule: str
) -> None:
    assert_evaluates_alike(Net, step, batches(), ranks, schedule=schedule)


LONGEST = 40
"""Of a cache that is written in place: too large for each stage of a rank to have a copy."""


class Slots(Cache):
    """Written in place, as transformers' static cache is."""

    def __init__(self, layers: int, size: int) -> None:
        self.layers: list[Any] = [Written(size) for _ in range(layers)]

    def length(self) -> int:
        return int(self.layers[0].length)


class Written:
    def __init__(self, size: int) -> None:
        self.states, self.length = torch.zeros(size, LONGEST, WIDTH), torch.tensor(0)
        self.latest = torch.zeros(size, WIDTH)


class Writes(Block):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        kept = cache.layers[self.index]
        kept.states[:, kept.length : kept.length + x.size(1)] = x
        kept.length.add_(x.size(1))
        kept.latest.mul_(0.5).add_(x[:, -1])
        return super().forward(x) + kept.states[:, : kept.length].mean(1)[:, None] + kept.latest[:, None]


class NetThatWrites(Net):
    """Its code around the blocks counts, and reads what the first block has written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writes(i) for i in range(4))
        self.calls = 0

    def forward(self, x: Tensor, cache: Cache | None = None, keeps: bool = False) -> Output:
        self.calls += 1
        output = super().forward(x, cache)
        return Output(output.logits * self.calls + self.asked, cache)


def with_slots(root: Any, tokens: Tensor) -> Tensor:
    tokens = with_cache(root, tokens, partial(Slots, 4, len(tokens)))
    return torch.cat([tokens, torch.full_like(tokens, root.net.calls)], 1)


class Scales(NetThatWrites):
    """Leaves a tensor in the cache before its blocks."""

    def forward(self, x: Tensor, cache: Any = None, keeps: bool = False) -> Output:
        cache.scale = self.embed(x).mean() + getattr(cache, "scale", 0)
        return super().forward(x, cache)


class KeepsItsCache(NetThatWrites):
    """Keeps the cache itself."""

    def forward(self, x: Tensor, cache: Any = None, keeps: bool = False) -> Output:
        if cache is None:
            self.cache = cache = Slots(4, len(x))
        return super().forward(x, cache)


def through_what_it_keeps(root: Any, tokens: Tensor) -> Tensor:
    new = next_of(root.net(tokens))
    for _ in range(3):
        new = next_of(root.net(new, root.net.cache))
        tokens = torch.cat([tokens, new], 1)
    return tokens


@pytest.mark.parametrize(("make", "step"), [(Scales, with_slots), (KeepsItsCache, through_what_it_keeps)])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.long)])
def test_caches_that_are_written_in_place_and_state_of_the_network(
    make: Callable[[], nn.Module], step: Callable[[Any, Tensor], Tensor], schedule: str
) -> None:
    assert_evaluates_alike(make, step, batches(), 2, schedule=schedule)


class Keeps(nn.Module):
    """A layer that keeps what it is given, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first: Tensor | None = None
        self.mean = 0.0
        self.means: list[Tensor] = []
        self.register_buffer("largest", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.first = x[0]
        self.mean = float(x.mean())
        self.means.append(x.mean())
        self.largest.copy_(x.max())  # type: ignore[operator]
        return x + torch.tanh(self.linear(x))


class KeepsBetweenCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = Keeps()
        self.blocks = nn.ModuleList(Keeps() for _ in range(4))
        self.head = Keeps()
        self.features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        self.features = {"last": x.mean(0)}
        return self.head(x)


def features(root: Any, x: Tensor) -> Any:
    y = root.net(x)
    return y, root.net(x + root.net.features["last"])


def kept_by(name: str, root: Any, x: Tensor) -> Any:
    y = root.net(x)
    layer = root.net.get_submodule(name)
    largest = layer.largest
    z = root.net(x + layer.first + layer.mean + layer.means[-1])
    return y, z, largest.clone()  # of the second call: the buffer was written in place


class Fills(nn.Module):
    """A layer that adds to what it is given."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.index = index

    def forward(self, x: Tensor, losses: Any) -> Tensor:
        y = self.linear(x)
        if isinstance(losses, list):
            losses.append(y.square().mean())
        else:
            if "sum" in losses:
                losses["sum"] = losses["sum"] + y.square().mean()
                losses["number"] += 1
            losses[self.index] = y.square().mean()
        return x + torch.tanh(y)


class FillingNetwork(nn.Module):
    def __init__(self, losses: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Fills(index) for index in range(4))
        self.fresh = losses

    def forward(self, x: Tensor, losses: Any = None) -> tuple[Tensor, Any]:
        losses = self.fresh.copy() if losses is None else losses
        for block in self.blocks:
            x = block(x, losses)
        return x, losses


def fills(root: Any, x: Tensor) -> Any:
    """What blocks add to what the network makes."""
    y, losses = root.net(x)
    z, _ = root.net(y)
    return y, z, float(len(losses)), sum(losses if isinstance(losses, list) else losses.values())


def gives(root: Any, x: Tensor) -> Any:
    """Gives the network what its blocks add to, in both calls."""
    losses = root.net.fresh.copy()
    y, _ = root.net(x, losses)
    z, _ = root.net(y, losses)
    return y, z, float(len(losses))


FILLED: list[Any] = [[], {"sum": 0.0, "number": 0}, {}]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize(
    ("make", "step"),
    [
        (KeepsBetweenCalls, features),
        *((KeepsBetweenCalls, partial(kept_by, name)) for name in ("embed", "blocks.0", "blocks.3", "head")),
        *((partial(FillingNetwork, losses), step) for losses in FILLED for step in (fills, gives)),
    ],
)
def test_what_is_kept_and_added_to_between_calls_is_as_in_one_process(
    make: Callable[[], nn.Module], step: Callable[[Any, Tensor], Any], schedule: str
) -> None:
    vectors = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()
    assert_evaluates_alike(make, step, vectors, 2, schedule=schedule)


class Replaces(Net):
    """Leaves its first states in the cache, and then its last ones in their place."""

    def forward(self, x: Tensor, cache: Any = None, keeps: bool = False) -> Output:
        cache.states = hidden = self.embed(x).repeat(1, 4, 1)
        for block in self.blocks:
            hidden = block(hidden)
        cache.states = hidden
        return Output(self.head(hidden), cache)


def with_states_of_before(root: Any, tokens: Tensor) -> Tensor:
    cache: Any = Cache(0)
    first = root.net(tokens, cache).logits
    return first * float(cache.states.mean()) + root.net(tokens, cache).logits


class HeadBeside(nn.Module):
    """What returns states; the step has them go through a part that the last stage holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.words = nn.Linear(WORDS, WORDS)


def beside(root: Any, tokens: Tensor) -> Tensor:
    for _ in range(2):
        tokens = torch.cat([tokens, root.net.words(root.net.body(tokens).logits)[:, -1:].argmax(-1)], 1)
    return tokens


def later_than_the_first(root: Any, tokens: Tensor) -> Tensor:
    """Which batch it is decides."""
    root.batches = getattr(root, "batches", 0) + 1
    return greedy(root, tokens) if root.batches == 2 else root.net(tokens).logits


def stages_part(root: Any, tokens: Tensor) -> Tensor:
    """What differs between processes decides."""
    holds_the_head = isinstance(root.net.head.weight, nn.Parameter)
    for _ in range(2 if holds_the_head else 3):
        tokens = torch.cat([tokens, next_of(root.net(tokens))], 1)
    return tokens


def values_part(root: Any, tokens: Tensor) -> Tensor:
    """Each process draws its own."""
    greedy(root, tokens)
    generator = torch.Generator().manual_seed(id(root))
    return root.net(torch.randint(WORDS, (2, 4), generator=generator)).logits


def part_by_part(root: Any, tokens: Tensor) -> Tensor:
    greedy(root, tokens)
    return root.net.blocks[0](root.net.embed(tokens))


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("make", "step", "says"),
    [
        (HeadBeside, beside, r"words\.weight.* have forward compute it"),
        (Replaces, with_states_of_before, "what a cache holds of another stage's blocks"),
        (Net, later_than_the_first, r"called once in the first batch.*batch_idx == 0"),
        (Net, stages_part, r"went different ways.*rank 0 calls .*rank 1 returns"),
        (Net, values_part, "went different ways"),
        (Net, part_by_part, r"blocks\.0 was called by a step that calls the network several times, and not by"),
    ],
)
def test_what_cant_go_call_by_call_is_refused(
    make: Callable[[], nn.Module], step: Any, says: str, schedule: str
) -> None:
    with pytest.raises(StepError, match=f"(?s){says}"):
        evaluated_on_stages(make, step, batches(), 2, schedule=schedule)
