"""What a loss was divided by, as its graph shows it, and what of it is a mean over nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_shard.plugin.steps.checks.unequal_means import divisions
from lightning_shard.plugin.steps.loss_weight import weighted_for_backward

TARGETS = torch.tensor([1, 2, -100, 3, -100, 0])
COUNTS = TARGETS != -100
PER_CLASS = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


def each(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, TARGETS, reduction="none")


class Mean(torch.autograd.Function):
    """Of a user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape
        return x.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(ctx.size) / ctx.size.numel()


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "cross entropy": (lambda x: F.cross_entropy(x, TARGETS), [4]),
    "of images": (lambda x: F.cross_entropy(x.T[None], TARGETS[None]), [4]),
    "with weights of classes": (lambda x: F.cross_entropy(x, TARGETS, PER_CLASS), [2 + 4 + 8 + 1]),
    "smoothed": (lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1), [4, 4]),
    "masked by hand": (lambda x: (each(x) * COUNTS).sum() / COUNTS.sum(), [4]),
    "selected": (lambda x: each(x)[COUNTS].mean(), [4]),
    "selected, of another kind": (lambda x: F.mse_loss(x[COUNTS], torch.zeros(4, 5)), [20]),
    "a sum by a number": (lambda x: each(x).sum() / int(COUNTS.sum()), [4]),
    "a sum alone": (lambda x: F.cross_entropy(x, TARGETS, reduction="sum"), []),
    "several": (lambda x: 0.1 * each(x)[COUNTS].mean() - torch.stack([x.mean(), x.sum() / 3])[1], [4, 30, 3]),
    "a mean of several": (lambda x: torch.stack([F.cross_entropy(x, TARGETS), x.mean()]).mean(), [2, 4, 30]),
    "a sum of several": (lambda x: torch.cat([(x.sum() / 3)[None], x.mean(0)]).sum(), [3, 30]),
    "a sum of one": (lambda x: F.cross_entropy(x, TARGETS)[None].sum(), [4]),
    "of nested samples": (lambda x: torch.nested.as_nested_tensor([x, x[:2]], layout=torch.jagged).sum() / 7, [7]),
    "a sum of samples": (lambda x: (x * x.mean()).sum(), []),
    "by what is trained": (lambda x: x.sum() / x.abs().sum(), []),
    "half": (lambda x: F.cross_entropy(x.bfloat16(), TARGETS).float(), [4]),
    "recomputed": (lambda x: checkpoint(F.cross_entropy, x, TARGETS, use_reentrant=False), []),
    "of a function of one's own": (Mean.apply, []),
    "none": (lambda x: x.detach().sum(), []),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_what_a_loss_was_divided_by_is_in_its_graph_and_can_be_read_before_its_backward(kind: str) -> None:
    loss_of, expected = LOSSES[kind]
    logits = torch.randn(6, 5, requires_grad=True)
    loss = loss_of(logits)
    assert [float(number) for _, number in divisions(loss)] == expected
    if loss.requires_grad:
        loss.backward()


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_a_mean_over_nothing_that_counts_for_nothing_has_no_gradient(weight: float) -> None:
    logits = torch.randn(6, 5, requires_grad=True)
    counts = COUNTS * (weight > 0)
    loss = torch.stack([(each(logits) * counts).sum() / counts.sum(), torch.zeros(())]).mean()
    weighted_for_backward(loss, torch.tensor(weight)).backward()
    plain = torch.randn(6, 5).copy_(logits.detach()).requires_grad_()
    F.cross_entropy(plain, TARGETS).backward()
    torch.testing.assert_close(logits.grad, plain.grad * (weight / 2))


def test_a_mean_over_nothing_that_counts_stays_nan() -> None:
    logits = torch.randn(6, 5, requires_grad=True)
    loss = (each(logits) * 0).sum() / torch.zeros(())
    weighted_for_backward(loss, torch.tensor(2.0)).backward()
    assert logits.grad.isnan().any()
