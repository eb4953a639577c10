"""What blocks and parts keep, in attributes and in objects that they are given, which code around the blocks reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from tests.training.pipeline.test_crossing import WIDTH, WORDS, Block, Net, batches, loss, seeded
from tests.training.pipelines import assert_alike, on_stages

TWO_EACH: dict[str, Any] = {"stages": 2, "schedule": "Interleaved1F1B"}


class Keeping(Block):
    aux: Any = None
    """What the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        pass

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        result = super().forward(x)
        self.keep(x, result)
        return result

    def keep(self, x: Tensor, result: Tensor) -> None:
        raise NotImplementedError


class CachesAtFirst(Keeping):
    """Makes a value fewer in later microbatches."""

    mask: Tensor | None = None

    def keep(self, x: Tensor, result: Tensor) -> None:
        if self.mask is None:
            self.mask = torch.ones(1)
        self.aux = result.square().mean() * self.mask
        self.entropy = result.mean()


class CountsByValue(Keeping):
    """Another number for each microbatch."""

    aux = property(lambda self: (self.positive + self.most) / 100)

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.positive = int((x > 0).sum())
        self.most = float(x.detach().max())


class Writes(Keeping):
    """Into a buffer, also by ``.data``, which leaves its version as it was; into a tensor that is none; in a dict."""

    aux = property(lambda self: self.usage / self.calls + self.total + self.stats["mean"])

    def begin(self) -> None:
        self.register_buffer("usage", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.calls = torch.zeros(())
        self.stats = {"mean": torch.zeros(())}

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.usage.copy_(result.detach().square().mean())  # type: ignore[operator]
        self.total.data.zero_().add_(result.detach().mean())  # type: ignore[operator]
        self.calls.fill_(2)
        self.stats["mean"].copy_(result.detach().mean())


@dataclass
class Told:
    loss: Any = None
    calls: int = 0


class Containers(Keeping):
    """Entries with gradients and without, in private attributes too; a dict of nothing but ``None`` is one as well."""

    def begin(self) -> None:
        self.losses: list[Tensor] = []
        self.stats: dict[str, Any] = {"inner": {}}
        self.told = Told()
        self._hidden: Any = None

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.losses.clear()
        self.losses.append(result.square().mean())
        self.stats["inner"]["mean"] = result.detach().mean()
        self.told.loss = result.square().mean()
        self._hidden = {"square": result.square().mean(), "all": [result.mean(), 2.0]}
        self.nothing = {"loss": None}
        self.number = 2**70  # more than a tensor holds

    @property
    def aux(self) -> Any:  # type: ignore[override]
        hidden = self._hidden["square"] + self._hidden["all"][0] * self._hidden["all"][1]
        listed = sum(self.losses) * self.stats["inner"]["mean"]
        return (hidden + listed + self.told.loss) * (2 if self.nothing["loss"] is None else self.number)


class InADeque(Keeping):
    aux = property(lambda self: sum(self.last))

    def begin(self) -> None:
        self.last: deque[Tensor] = deque(maxlen=1)

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.last.append(result.detach().mean())


class InANamespace(Keeping):
    aux = property(lambda self: self.told.loss)

    def begin(self) -> None:
        self.told = SimpleNamespace(loss=None)

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.told.loss = result.square().mean()


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def reset(self) -> None:
        self.total = 0.0


class InAMeter(Keeping):
    aux = property(lambda self: self.meter.total)

    def begin(self) -> None:
        self.meter = Meter()

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.meter.total += float(result.detach().mean())


class SetLater(Keeping):
    """In the third microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.aux: Tensor | None = None

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.calls += 1
        self.aux = result.square().mean() if self.calls > 2 else None


class BySign(Keeping):
    """Nothing, depending on values."""

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.aux = result.square().mean() if result.sum() > 0 else None


class NoneBySign(Keeping):
    aux = property(lambda self: self.told["loss"])

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.told = {"loss": result.square().mean() if result.sum() > 0 else None}


class Of(Net):
    """With such blocks."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))


def with_aux(root: nn.Module, x: Tensor) -> Tensor:
    return loss(root, x) * (1 + sum(block.aux for block in root.net.blocks if block.aux is not None))


@pytest.mark.parametrize(
    "on", [pytest.param({"stages": 3}, marks=pytest.mark.long), TWO_EACH], ids=["3", "4 on 2 ranks"]
)
@pytest.mark.parametrize("kind", [CachesAtFirst, CountsByValue, Writes, Containers])
def test_what_blocks_keep_is_as_in_one_process(kind: type[Keeping], on: dict[str, Any]) -> None:
    assert_alike(seeded(partial(Of, kind)), with_aux, batches(), **on)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (InADeque, "uses a deque of what net.blocks.0 keeps as last"),
        (InAMeter, "uses a Meter of what net.blocks.0 keeps as meter"),
        (InANamespace, "net.blocks.0 changes its SimpleNamespace told"),
        (BySign, r"net\.blocks\.\d\.aux is .*and was"),
        (NoneBySign, r"net\.blocks\.\d\.told is .*and was"),
    ],
)
def test_what_cant_be_right_is_refused(kind: type[Keeping], says: str) -> None:
    with pytest.raises(StepError, match=says):
        on_stages(seeded(partial(Of, kind)), with_aux, batches(), 2)


def test_what_a_block_first_leaves_unset_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"net\.blocks\.\d\.aux was None after the first microbatch"):
        on_stages(seeded(partial(Of, SetLater)), with_aux, batches(), 2, microbatches=1)


# -- what several blocks keep together


class Shares(Block):
    """All add to one list, write to one tensor, and count in one object."""

    def __init__(self, losses: list[Tensor], total: Tensor, meter: Meter) -> None:
        super().__init__()
        self.losses, self.total, self.meter = losses, total, meter

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        self.losses.append(super().forward(x).square().mean())
        self.total.add_(x.detach().mean())
        self.meter.total += 1
        return super().forward(x)


class Sharing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.losses, self.total, self.meter = list[Tensor](), torch.zeros(()), Meter()
        self.blocks = nn.ModuleList(Shares(self.losses, self.total, self.meter) for _ in range(4))


def with_losses(root: nn.Module, x: Tensor) -> Tensor:
    root.net.losses.clear()
    return loss(root, x) * (1 + sum(root.net.losses))


@pytest.mark.parametrize("on", [{"stages": 4}, TWO_EACH], ids=["4", "4 on 2 ranks"])
def test_blocks_may_collect_in_one_list(on: dict[str, Any]) -> None:
    assert_alike(seeded(Sharing), with_losses, batches(), **on)


@pytest.mark.parametrize("name", ["total", "meter"])
def test_what_blocks_of_several_stages_change_together_is_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"net\.blocks\.0\.{name} is one .* with net\.{name}, and changed"):
        on_stages(seeded(Sharing), with_losses, batches(), 2)


# -- arguments that are handed on, and parts


class HandsOnAtFirst(Block):
    """Returns its argument or something else, depending on values."""

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return x if x.sum() > 0 else super().forward(x)


class Supervised(Net):
    """All hidden states are used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = HandsOnAtFirst()

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.embed(x), 0
        for place, block in enumerate(self.blocks):
            hidden = block(hidden)
            total = total + hidden * (place + 1)
        return self.leave(total)


class Mask(Block):
    """Hands a mask on, which has no gradients, and later makes a new one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        assert mask is not None
        return super().forward(x) * mask, mask if mask.sum() < 10 else mask * 0.5


class Masked(Net):
    block = Mask

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = self.embed(x), (x > 3).float().unsqueeze(-1)
        for block in self.blocks:
            hidden, mask = block(hidden, mask)
        return self.leave(hidden)


def test_an_argument_that_is_handed_on_for_some_microbatches_only_is_right_or_refused() -> None:
    assert_alike(seeded(Supervised), loss, batches(), **TWO_EACH)
    with pytest.raises(StepError, match=r"net\.blocks\.\d returns something new in place of an argument"):
        on_stages(seeded(Masked), loss, batches(), 2)


class Words(nn.Module):
    """A part with layers of its own, which keeps what the loss needs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.info: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.info["mask"] = (x > 3).float()
        return self.words(x)


class Informed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Words()  # type: ignore[assignment]


def with_mask(root: nn.Module, x: Tensor) -> Tensor:
    return loss(root, x) * root.net.embed.info["mask"].mean()


class Cut(Words):
    """An attribute decides how long its output is, and not only in the first microbatch."""

    keep: int

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x[:, : self.keep])


class Shortened(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = Cut()
        self.extra.keep = 2

    def forward(self, x: Tensor) -> Tensor:
        length = self.extra(x).shape[1]
        return super().forward(x) * length


def with_other_lengths(root: nn.Module, x: Tensor) -> Tensor:
    root.net.extra.keep = 2 + int(x[0, 0]) % 3
    return loss(root, x)


class Noting(Words):
    """Leaves what it computes in a list that it was given when it was made."""

    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self.noted = noted

    def forward(self, x: Tensor) -> Tensor:
        self.noted[0] = {"mean": self.words(x).mean(1, keepdim=True)}
        return self.words(x)


class Noted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = [{}]
        self.extra = Noting(self.noted)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.through(self.embed(x) + self.extra(x))
        return self.head(self.norm(hidden) + self.noted[0]["mean"])


@pytest.mark.parametrize(("network", "step"), [(Informed, with_mask), (Shortened, with_other_lengths)])
def test_what_parts_keep_is_of_each_microbatch_on_all_stages(network: type[Net], step: Any) -> None:
    assert_alike(seeded(network), step, batches(), 2)


def test_what_parts_compute_crosses_only_if_they_return_it() -> None:
    with pytest.raises(StepError, match=r"computed from net\.extra\.words\.weight"):
        on_stages(seeded(Noted), loss, batches(), 2)


# -- objects with tensors that blocks and their submodules are given, return and keep


class Memory:
    """A cache as libraries write them: objects in a list in an object."""

    def __init__(self) -> None:
        self.layers: list[SimpleNamespace] = []

    def add(self, keys: Tensor) -> None:
        self.layers.append(SimpleNamespace(keys=keys))

    def sum(self) -> Tensor:
        return torch.stack([layer.keys for layer in self.layers]).sum(0)


class Attention(nn.Linear):
    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x).tanh()


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Memory) -> Any:
        x = x + self.attention(x, memory=memory)
        memory.add(x.detach())
        return x


class Network(Net):
    block = Remembers

    def forward(self, x: Tensor) -> Tensor:
        memory = Memory()
        hidden = self.through(self.embed(x), memory)
        return self.leave(hidden + memory.sum() + self.more())

    def more(self) -> Any:
        return 0.0


class Hooked(Network):
    """Collects by hooks of submodules that are given the memory too."""

    def collect(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.collected.append(output.square())

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.register_forward_hook(self.collect, with_kwargs=True)

    def forward(self, x: Tensor) -> Tensor:
        self.collected: list[Tensor] = []
        return super().forward(x)

    def more(self) -> Tensor:
        return torch.stack(self.collected).mean(0)


class HookedOnMemory(Hooked):
    def collect(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        layers = kwargs["memory"].layers
        self.collected.append(layers[-1].keys.mean() if layers else output.mean())


class Queues(Remembers):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        x = super().forward(x, memory)
        memory.layers[-1].last = deque([x])
        return x


class Queued(Network):
    block = Queues


class KeepsMemory(Remembers):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        self.seen = [x.mean(-1, keepdim=True) * x.sin(), Memory()]
        self.seen[1].add(x)
        return super().forward(x, memory)


class Kept(Network):
    """Uses what blocks keep beside an object that holds tensors."""

    block = KeepsMemory

    def more(self) -> Any:
        return sum(block.seen[0] for block in self.blocks)


class KeptAndUsed(Kept):
    def more(self) -> Any:
        return super().more() + sum(block.seen[1].sum() for block in self.blocks)


@pytest.mark.parametrize("network", [Hooked, Kept])
def test_objects_that_blocks_share_are_as_in_one_process(network: type[Net]) -> None:
    assert_alike(seeded(network), loss, batches(), 4)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (HookedOnMemory, "uses a Memory of what net.blocks.1.attention computes, on an earlier stage"),
        (KeptAndUsed, "uses a Memory of what net.blocks.0 keeps as seen, on an earlier stage"),
        (Queued, "leaves a deque in what it is given"),
    ],
)
def test_what_would_be_the_first_microbatchs_is_refused(network: type[Net], said: str) -> None:
    with pytest.raises(StepError, match=said):
        on_stages(seeded(network), loss, batches(), 2)
