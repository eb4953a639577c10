"""A loss of samples together that isn't the mean of its microbatches' is told of in the first batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.testing import run_ranks
from tests.parity import Model, Seen, layout, train


class Contrastive(Model):
    """Samples' states against each other's."""

    def __init__(self) -> None:
        super().__init__("gpt")

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = F.normalize(self.model(batch["x"])[:, -1], dim=-1)
        return F.cross_entropy(states @ states.T, torch.arange(len(states)))


def told(kind: Any) -> tuple[Seen, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train("gpt", layout(pipeline=2), module=kind, steps=2)
    return seen, [str(each.message) for each in caught if "microbatches together" in str(each.message)]


def plain_and_contrastive() -> list[tuple[Seen, list[str]]]:
    return [told(lambda: Model("gpt")), told(Contrastive)]


@pytest.mark.long
def test_losses_that_compare_samples_are_told_of_on_rank_0_and_means_arent() -> None:
    (of_mean, of_contrast), _ = run_ranks(plain_and_contrastive, 2, elastic=True)
    assert of_mean[1] == []
    assert len(of_contrast[1]) == 1, "once"
    assert of_mean[0].losses == pytest.approx(train("gpt", steps=2).losses, rel=1e-5), "nothing is left behind"
