"""What several blocks keep in one list, tensor or object, which code around the blocks reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.pipeline.test_crossing import Block, Net, batches, loss, seeded
from tests.training.pipeline.test_kept import TWO_EACH, Meter
from tests.training.pipelines import assert_alike, on_stages


class Collects(Block):
    """All add to one list."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.losses = losses

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        result = super().forward(x)
        self.losses.append(result.square().mean())
        return result


class Collecting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.blocks = nn.ModuleList(Collects(self.losses) for _ in range(4))


@pytest.mark.parametrize("on", [(4, {}), TWO_EACH], ids=["4", "4 on 2 ranks"])
def test_blocks_may_collect_in_one_list(on: tuple[int, dict[str, Any]]) -> None:
    """With more than two stages, what the first had added was asked for by a wrong name, and refused."""

    def step(root: nn.Module, x: Tensor) -> Tensor:
        root.net.losses.clear()
        return loss(root, x) * (1 + sum(root.net.losses))

    stages, options = on
    assert_alike(seeded(Collecting), step, batches(), stages, **options)


class Sums(Block):
    """All write to one tensor, and count in one object."""

    def __init__(self, total: Tensor, meter: Meter) -> None:
        super().__init__()
        self.total, self.meter = total, meter

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        self.total.add_(x.detach().mean())
        self.meter.total += 1
        return super().forward(x)


class Summing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.meter = torch.zeros(()), Meter()
        self.blocks = nn.ModuleList(Sums(self.total, self.meter) for _ in range(4))


@pytest.mark.parametrize("name", ["total", "meter"])
def test_what_blocks_of_several_stages_change_together_is_warned_of(name: str) -> None:
    """Code around the blocks had what one stage's blocks had added, and nothing said so."""
    with pytest.warns(UserWarning, match=rf"net\.blocks\.0\.{name} is one .* with net\.{name}, and changed"):
        on_stages(seeded(Summing), loss, batches(), 2)
