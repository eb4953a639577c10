"""A backward in two parts is a whole one: of random graphs, with hooks, shared weights and values that bypass."""

from __future__ import annotations

import random
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_shard.errors import StepError
from lightning_shard.pipeline.runtime.split_backward import Product, backward_but_products, backward_of_products

WIDTH, ROWS, MICROBATCHES = 4, 3, 3
some = settings(max_examples=60, deadline=None, database=None, derandomize=True)


class Fickle(torch.autograd.Function):
    """Changes in its backward what it has saved, so that a second run of it would give something else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = weight.detach().clone()
        ctx.x = x.detach()
        return x * weight.sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.kept.mul_(2.0)
        return gradients[0] * ctx.kept.sum(0) / 2, (gradients[0] * ctx.x).sum(0).expand(WIDTH, WIDTH)


class Graphs:
    """Random graphs over the same parameters, a new one for each seed; the same each time it is built."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        made = torch.Generator().manual_seed(seed)
        draw = random.Random(seed)
        self.parameters = {
            **{f"w{i}": torch.randn(WIDTH, WIDTH, generator=made, dtype=torch.float64) for i in range(5)},
            **{f"b{i}": torch.randn(WIDTH, generator=made, dtype=torch.float64) for i in range(2)},
            "like the rows": torch.randn(ROWS, WIDTH, generator=made, dtype=torch.float64),
            "positions": torch.randn(1, ROWS, WIDTH, generator=made, dtype=torch.float64),
            "stacked": torch.randn(2, WIDTH, WIDTH, generator=made, dtype=torch.float64),
        }
        for parameter in self.parameters.values():
            parameter.requires_grad_(draw.random() < 0.9)
        self.received = [torch.randn(ROWS, WIDTH, generator=made, dtype=torch.float64) for _ in range(MICROBATCHES * 2)]
        self.gradients = [torch.randn(ROWS, WIDTH, generator=made, dtype=torch.float64) for _ in range(8)]
        self.seen: dict[str, list[Tensor]] = defaultdict(list)  # by hooks
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and draw.random() < 0.15:
                parameter.register_hook(self.noting(name, 3.0))
            if parameter.requires_grad and draw.random() < 0.1:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: self.seen[f"after {name}"].append(p.grad.clone())
                )

    def noting(self, name: Any, factor: float) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            self.seen[str(name)].append(gradient.clone())
            return gradient / (1 + gradient.abs().sum()) * factor  # not linear: it needs all of the gradient

        return hook

    def forward(self, microbatch: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """What is received, what goes out, and its gradients."""
        draw = random.Random(f"{self.seed} {microbatch}" if self.seed % 2 else self.seed)
        received = [r.clone().requires_grad_(draw.random() < 0.9) for r in self.received[2 * microbatch :][:2]]
        values = [r.clone() for r in received]
        values.append(self.gradients[0].clone())  # of the batch, which needs no gradient
        for number in range(draw.randint(2, 12)):
            values.append(self.operation(draw, values, (microbatch, number)))
        count = draw.randint(1, 3)
        outputs = [v.clone() for v in [values[-1], *draw.sample(values, count)] if v.requires_grad]
        return received, outputs, [gradient.clone() for gradient in self.gradients[: len(outputs)]]

    def operation(self, draw: random.Random, values: list[Tensor], name: Any) -> Tensor:
        x, y = draw.choice(values[-3:]), draw.choice(values)
        weights = [self.parameters[f"w{i}"] for i in range(5)]
        w, v = draw.choice(weights), draw.choice(weights)
        b, stacked, rows = self.parameters[f"b{draw.randint(0, 1)}"], self.parameters["stacked"], "like the rows"
        made: list[Callable[[], Tensor]] = [
            lambda: functional.linear(x, w, b),
            lambda: functional.linear(x.view(1, ROWS, WIDTH), w).squeeze(0).tanh(),
            lambda: functional.linear(functional.linear(x, w).relu(), w),  # twice the same
            lambda: x @ w,
            lambda: (x @ w).tanh() @ v.t() + y,
            lambda: torch.addmm(y, x, w),
            lambda: torch.addmm(self.parameters[rows], x, w),
            lambda: torch.addmm(y, x, w, alpha=0.5, beta=2.0),
            lambda: functional.linear(x, stacked[draw.randint(0, 1)]),
            lambda: functional.linear(x, w + 0.5 * (v @ w)),  # an adapter, merged
            lambda: functional.linear(x, w * b),
            lambda: x * b + y,
            lambda: x @ y.t() @ y,  # both are activations
            lambda: w[:ROWS] @ w,  # bypasses what was received
            lambda: x + (w @ w).mean(),
            lambda: functional.layer_norm(x, (WIDTH,), b, b),
            lambda: Fickle.apply(x, w),
            lambda: checkpoint(lambda a: functional.linear(a, w, b).tanh(), x, use_reentrant=False),
            lambda: functional.linear(x, w) + self.parameters["positions"].view(ROWS, WIDTH),
            lambda: functional.linear(x.detach(), w) + y,
        ]
        out = draw.choice(made)()
        if out.requires_grad and draw.random() < 0.2:
            out.register_hook(self.noting(name, 1.0))
        return out


def run(graphs: Graphs, *, splits: bool, late: int = 1) -> tuple[dict[str, Any], list[Any], dict[str, Any], int]:
    """Gradients of the parameters and of what was received, what hooks saw, and how many products waited.

    Args:
        late: How many microbatches a second part comes after its first.
    """
    received_gradients: list[Any] = []
    owed: list[list[Product]] = []
    waited = 0
    for microbatch in range(MICROBATCHES):
        received, outputs, gradients = graphs.forward(microbatch)
        if outputs and splits:
            owed.append(backward_but_products(outputs, gradients, received, checks=False))
            waited += len(owed[-1])
        elif outputs:
            torch.autograd.backward(outputs, gradients)
        received_gradients += [r.grad for r in received]
        if len(owed) > late:
            backward_of_products(owed.pop(0))
    for products in owed:
        backward_of_products(products)
    by_name = {name: parameter.grad for name, parameter in graphs.parameters.items()}
    return by_name, received_gradients, dict(graphs.seen), waited


@some
@given(seed=st.integers(0, 10**6), late=st.integers(0, MICROBATCHES))
def test_two_parts_are_a_whole(seed: int, late: int) -> None:
    expected, seen = run(Graphs(seed), splits=False), run(Graphs(seed), splits=True, late=late)
    for ours, theirs in zip(seen[:3], expected[:3]):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_random_graphs_have_products_that_wait() -> None:
    waited = [run(Graphs(seed), splits=True)[3] for seed in range(20)]
    assert sum(count > 0 for count in waited) > 5


# -- single cases


def first_part(output: Tensor, *, checks: bool = False) -> list[Product]:
    return backward_but_products([output], [torch.ones_like(output)], [], checks=checks)


def test_only_weights_of_products_wait_and_all_else_is_freed() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh())
    hidden: list[Any] = []
    net[1].register_forward_hook(lambda module, args, output: hidden.append(weakref.ref(args[0])))
    left = first_part(net(torch.randn(3, 4, requires_grad=True)))
    assert {name for name, p in net.named_parameters() if p.grad is None} == {"0.weight", "2.weight"}
    assert hidden[0]() is None
    backward_of_products(left)
    assert all(p.grad is not None for p in net.parameters())


def test_what_is_checkpointed_is_computed_again_once() -> None:
    linear, runs = nn.Linear(4, 4), []

    def run(x: Tensor) -> Tensor:
        runs.append(1)
        return linear(linear(x).tanh())

    assert not first_part(checkpoint(run, torch.randn(3, 4, requires_grad=True), use_reentrant=False))
    assert len(runs) == 2


def test_a_product_whose_factor_changes_meanwhile_is_refused() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True).exp()
    kept = x * 2
    left = first_part(linear(kept).tanh())
    kept.detach().add_(1)
    with pytest.raises(StepError, match=r"a tensor of shape \(3, 4\).*changed in place before the second part.*1F1B"):
        backward_of_products(left)


def beside_a_hook_that_writes(*, first: bool) -> tuple[nn.Linear, Tensor]:
    """A product and another branch, which is computed first or last; autograd gives both one gradient."""
    torch.manual_seed(0)
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    branches = [x * 2, linear(x)] if first else [linear(x), x * 2]
    branches[not first].register_hook(lambda gradient: gradient.mul_(2))
    return linear, branches[0] + branches[1]


def test_a_gradient_that_a_hook_changes_in_place_is_used_as_it_was_or_refused() -> None:
    (plain, expected), (linear, output) = (beside_a_hook_that_writes(first=False) for _ in range(2))
    expected.backward(torch.ones(3, 4))
    backward_of_products(first_part(output))
    torch.testing.assert_close(linear.weight.grad, plain.weight.grad)
    with pytest.raises(StepError, match="changed in place before the second part"):
        first_part(beside_a_hook_that_writes(first=True)[1])  # the product's turn was before the hook's


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_hook_that_would_not_see_the_weights_gradient_is_found() -> None:
    def doubling(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
        return tuple(None if gradient is None else 2 * gradient for gradient in of_inputs)

    for register, is_seen in (("register_full_backward_hook", True), ("register_backward_hook", False)):
        linear = nn.Linear(4, 4)
        getattr(linear, register)(doubling)
        output = linear(torch.randn(3, 4, requires_grad=True)).tanh()
        if is_seen:
            assert not first_part(output, checks=True)
            continue
        with pytest.raises(StepError, match=r"isn't that of a plain matrix product.*register_backward_hook"):
            first_part(output, checks=True)
