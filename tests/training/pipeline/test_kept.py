"""What blocks and parts keep in attributes and containers of their own, which code around the blocks reads."""

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

TWO_EACH = (2, {"schedule": "Interleaved1F1B"})


class Keeping(Block):
    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        result = super().forward(x)
        self.keep(x, result)
        return result

    def keep(self, x: Tensor, result: Tensor) -> None:
        raise NotImplementedError


class CachesAtFirst(Keeping):
    """What follows the mask had another number where it was there already, and one value was taken for another."""

    mask: Tensor | None = None

    def keep(self, x: Tensor, result: Tensor) -> None:
        if self.mask is None:
            self.mask = torch.ones(1)
        self.aux = result.square().mean() * self.mask
        self.entropy = result.mean()


class HidesADict(Keeping):
    """It was left out, as libraries' private attributes are."""

    _aux: Any = None

    def keep(self, x: Tensor, result: Tensor) -> None:
        self._aux = {"square": result.square().mean(), "all": [result.mean(), 2.0]}

    @property
    def aux(self) -> Tensor:
        return self._aux["square"] + self._aux["all"][0] * self._aux["all"][1]


class CountsByValue(Keeping):
    """Another number for each microbatch."""

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.positive = int((x > 0).sum())
        self.most = float(x.detach().max())

    @property
    def aux(self) -> Any:
        return (self.positive + self.most) / 100


class Lists(Keeping):
    """Refused before, since its entries have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.stats: dict[str, Any] = {"inner": {}}

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.losses.clear()
        self.losses.append(result.square().mean())
        self.stats["inner"]["mean"] = result.detach().mean()

    @property
    def aux(self) -> Tensor:
        return sum(self.losses) * self.stats["inner"]["mean"]  # type: ignore[return-value]


class PastVersions(Keeping):
    """BatchNorm and ``.data`` leave a tensor's version as it was: it had its first value on later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.total.data.zero_().add_(result.detach().mean())  # type: ignore[operator]

    @property
    def aux(self) -> Tensor:
        return self.total  # type: ignore[return-value]


@dataclass
class Told:
    loss: Any = None
    calls: int = 0


class InADataclass(Keeping):
    """It was as at the beginning on later stages, where the loss was left out."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.told.loss = result.square().mean()

    @property
    def aux(self) -> Tensor:
        return self.told.loss  # type: ignore[no-any-return]


class NothingInADict(Keeping):
    """A dict that holds nothing but ``None`` was taken for an attribute that isn't there."""

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.told = {"loss": None}
        self.number = 2**70  # more than a tensor holds

    @property
    def aux(self) -> Tensor | None:
        return self.told["loss"]


class Writes(Keeping):
    """Into a tensor within a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = {"mean": torch.zeros(())}

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.stats["mean"].copy_(result.detach().mean())

    @property
    def aux(self) -> Tensor:
        return self.stats["mean"]


class InADeque(Keeping):
    """Of what has no gradients: it was empty on later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Tensor] = deque(maxlen=1)

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.last.append(result.detach().mean())

    @property
    def aux(self) -> Tensor:
        return sum(self.last)  # type: ignore[return-value]


class NoneBySign(Keeping):
    """In a dict: where it was None at first, it was left out on later stages."""

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.told = {"loss": result.square().mean() if result.sum() > 0 else None}

    @property
    def aux(self) -> Tensor | None:
        return self.told["loss"]


class InANamespace(Keeping):
    """Of what has gradients: it was left out on later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.told = SimpleNamespace(loss=None)

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.told.loss = result.square().mean()

    @property
    def aux(self) -> Tensor | None:
        return self.told.loss  # type: ignore[no-any-return]


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def reset(self) -> None:
        self.total = 0.0


class InAMeter(Keeping):
    """A number in an object: it was 0 on later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.meter.total += float(result.detach().mean())

    @property
    def aux(self) -> float:
        return self.meter.total


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

    aux: Any = None

    def keep(self, x: Tensor, result: Tensor) -> None:
        self.aux = result.square().mean() if result.sum() > 0 else None


class Of(Net):
    """With such blocks."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))


def with_aux(root: nn.Module, x: Tensor) -> Tensor:
    return loss(root, x) * (1 + sum(block.aux for block in root.net.blocks if block.aux is not None))


@pytest.mark.parametrize("on", [pytest.param((3, {}), marks=pytest.mark.long), TWO_EACH], ids=["3", "4 on 2 ranks"])
@pytest.mark.parametrize(
    "kind", [CachesAtFirst, HidesADict, CountsByValue, Lists, Writes, PastVersions, InADataclass, NothingInADict]
)
def test_what_blocks_keep_is_as_in_one_process(kind: type[Keeping], on: tuple[int, dict[str, Any]]) -> None:
    stages, options = on
    assert_alike(seeded(partial(Of, kind)), with_aux, batches(), stages, **options)


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


class HandsOnAtFirst(Block):
    """Its output was taken for its argument ever after."""

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return x if x.sum() > 0 else super().forward(x)


class Supervised(Net):
    """All hidden states are used."""

    def __init__(self, second: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks[1] = second()

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.embed(x), 0
        for place, block in enumerate(self.blocks):
            hidden = block(hidden)
            total = total + hidden * (place + 1)
        return self.head(self.norm(total))


def test_a_block_may_hand_its_argument_on_for_some_microbatches() -> None:
    stages, options = TWO_EACH
    assert_alike(seeded(partial(Supervised, HandsOnAtFirst)), loss, batches(), stages, **options)


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
        return self.head(self.norm(hidden))


def test_an_argument_that_is_handed_on_for_some_microbatches_only_is_refused() -> None:
    with pytest.raises(StepError, match=r"net\.blocks\.\d returns something new in place of an argument"):
        on_stages(seeded(Masked), loss, batches(), 2)


class Embedding(nn.Module):
    """A part with layers of its own, which keeps what the loss needs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.info: dict[str, Tensor] = {}
        self.scale = 1

    def forward(self, x: Tensor) -> Tensor:
        self.info["mask"] = (x > 3).float()
        return self.words(x)


class Informed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()  # type: ignore[assignment]


def with_mask(root: nn.Module, x: Tensor) -> Tensor:
    return loss(root, x) * root.net.embed.info["mask"].mean()


def test_a_part_that_keeps_something_in_a_dict_runs_for_each_microbatch() -> None:
    """It was taken for one that does nothing but return."""
    assert_alike(seeded(Informed), with_mask, batches(), 2)


class Cut(nn.Module):
    """A part whose attribute decides how long its output is."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.keep = 2

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x[:, : self.keep])


class Shortened(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = Cut()

    def forward(self, x: Tensor) -> Tensor:
        length = self.extra(x).shape[1]
        return super().forward(x) * length


def test_a_part_whose_attribute_decides_its_outputs_shape_has_it_changed() -> None:
    """What stages that don't hold it took for its output had the shape of the first microbatch's."""

    def step(root: nn.Module, x: Tensor) -> Tensor:
        root.net.extra.keep = 2 + int(x[0, 0]) % 3
        return loss(root, x)

    assert_alike(seeded(Shortened), step, batches(), 2)


class Noting(nn.Module):
    """A part that leaves what it computes in a list that it was given."""

    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
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
        hidden = self.embed(x) + self.extra(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden) + self.noted[0]["mean"])


def test_a_list_that_a_part_shares_with_the_network_stays_one_list() -> None:
    """The part was given a list of its own, and code around it read what the microbatch before had left."""
    assert_alike(seeded(Noted), loss, batches(), 2)
