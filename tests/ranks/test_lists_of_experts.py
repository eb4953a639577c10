"""Experts in a list, dealt to two ranks without a Trainer: who computes what, and what is refused."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import StepError
from lightning_shard.parallel.expert import apply_expert_parallel, resolve_experts
from lightning_shard.parallel.expert_lists import RunsAgain
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.mixtures import EXPERTS, ListedMixture
from tests.parity import QUIET

PLAN = {"experts": "experts"}
WIDTH = 6


class Counting(nn.Sequential):
    """An expert that says when it computes."""

    computed: ClassVar[Counter[int]] = Counter()

    def __init__(self, number: int) -> None:
        super().__init__(nn.Linear(WIDTH, 5), nn.SiLU(), nn.Linear(5, WIDTH))
        self.number = number

    def forward(self, rows: Tensor) -> Tensor:
        self.computed[self.number] += len(rows)
        return super().forward(rows)  # type: ignore[no-any-return]


class Called(nn.ModuleDict):
    """As NLLB's and Switch Transformer's: a dict of experts that calls them itself."""

    def __init__(self) -> None:
        super().__init__({f"expert_{number}": Counting(number) for number in range(EXPERTS)})
        self.dropout = nn.Dropout(0.0)

    def forward(self, flat: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            row, slot = torch.where(chosen == number)
            out.index_add_(0, row, self.dropout(self[f"expert_{number}"](flat[row]) * weights[row, slot, None]))
        return out


class Around(nn.Module):
    """Code around a list, some of which can't be right."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Counting(number) for number in range(EXPERTS))
        if how == "hooks":
            self.router.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        if self.how == "in place":
            x += 1
        out = torch.zeros_like(x)
        for expert in self.experts:
            out = out + (expert(x, x) if self.how == "two" else expert(x))
        return out


@contextmanager
def nothing_to_put_back(_: nn.Module) -> Iterator[RunsAgain]:
    yield (lambda: None), nullcontext


def dealt(module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    root = nn.ModuleDict({"mixture": module})
    names = resolve_experts(root, PLAN, 2)
    apply_expert_parallel(root, mesh, names, mesh, nothing_to_put_back)
    return module


class WithContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Called()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return self.experts(x, chosen, weights)  # type: ignore[no-any-return]


def compared(rank_rows: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Rows that a dealt mixture's experts computed here, and that plain ones would have on all ranks."""
    torch.manual_seed(0)
    plain = WithContainer()
    module = dealt(copy.deepcopy(plain))
    batches = [torch.randn(rows, WIDTH) for rows in rank_rows]
    rank = torch.distributed.get_rank()
    Counting.computed = Counter()
    out = module(batches[rank])
    ours = dict(Counting.computed)
    out.square().sum().backward()

    Counting.computed = Counter()
    for place, batch in enumerate(batches):
        expected = plain(batch)
        (expected.square().sum() / 2).backward()
        if place == rank:
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    of_experts = {name: p for name, p in module.named_parameters() if "experts" in name}
    assert len(of_experts) == 4 * EXPERTS
    for name, parameter in of_experts.items():
        expected_gradient = plain.get_parameter(name).grad
        if expected_gradient is None:  # nobody's tokens
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            torch.testing.assert_close(full_tensor(parameter.grad), expected_gradient, rtol=1e-5, atol=1e-6)
    return ours, dict(Counting.computed)


def test_each_rank_computes_with_its_own_experts_only() -> None:
    """Of ranks with other numbers of tokens, and one with a single one."""
    for rank_rows in ([7, 40], [1, 1]):
        (first, plain), (second, _) = run_ranks(compared, 2, rank_rows)
        assert first.keys() <= {0, 1}
        assert second.keys() == {2, 3} or first.keys() == {0, 1}
        one_row_to_learn_shapes = 1
        for number, rows in {**first, **second}.items():
            probes = one_row_to_learn_shapes if number in (0, 2) else 0
            assert rows == max(1, plain.get(number, 0)) + probes, number


def refused(how: str, *more: Any) -> str:
    module = dealt(Around(how))
    with pytest.raises(StepError) as refusal:
        module(torch.randn(4, WIDTH), *more)
    return str(refusal.value)


def refusals() -> dict[str, str]:
    told = {how: refused(how) for how in ("in place", "two", "hooks")}
    told["list"] = refused("plain", [])
    torch.manual_seed(0)
    chained = dealt(ListedMixture(WIDTH, "chained"))
    with pytest.raises(StepError) as refusal:
        chained(torch.randn(2, 4, WIDTH))
    told["chained"] = str(refusal.value)
    with pytest.raises(StepError) as refusal:
        chained.experts[0](torch.randn(4, WIDTH))  # type: ignore[index, operator]
    told["outside"] = str(refusal.value)
    return told


def test_code_around_a_list_that_cannot_be_right_is_refused_by_name() -> None:
    told, other = run_ranks(refusals, 2)
    assert told.keys() == other.keys()
    for how, says in {
        "in place": "The module around mixture.experts changes its input in place",
        "two": r"An expert of mixture.experts was called with [(4, 6), (4, 6)], and not with rows of one tensor",
        "hooks": "router in the module around mixture.experts has hooks",
        "list": "The module around mixture.experts is given a list, which it may change",
        "chained": "The rows that an expert of mixture.experts is called with depend on another expert's results",
        "outside": "was called outside of the module that holds the list",
    }.items():
        assert says in told[how], told[how]
        assert says in other[how]


class Branching(L.LightningModule):
    """Each sample goes to one of two experts, and an expert without samples isn't called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Branches() for _ in range(3))
        self.seen: dict[str, Tensor] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, chosen = batch
        for block in self.blocks:
            x = block(x, chosen)
        return x.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = {name: full_tensor(p.grad).clone() for name, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            (row,) = torch.where(chosen == number)
            out = out.index_add(0, row, self.experts[number](x[row]))
        return x + out


def gradients(devices: int, **options: Any) -> dict[str, Tensor]:
    module = Branching()
    samples = [(torch.full((4,), 1.0 + number), torch.tensor(number)) for number in range(2)]
    strategy: Any = HybridShardStrategy(**options) if devices > 1 else "auto"
    trainer = L.Trainer(strategy=strategy, devices=devices, max_steps=1, **QUIET)
    trainer.fit(module, DataLoader(samples, batch_size=2 // devices))
    return module.seen


def dealt_and_not() -> tuple[dict[str, Tensor], str]:
    seen = gradients(2, expert_parallel_size=2, expert_parallel_plan=PLAN)
    with pytest.raises(StepError) as refusal:
        gradients(2)
    return seen, str(refusal.value)


def test_data_ranks_that_run_other_experts_are_right_when_dealt_and_refused_otherwise() -> None:
    """FSDP2 would add one expert's gradient to the other's."""
    plain = gradients(1)
    for seen, told in run_ranks(dealt_and_not, 2, elastic=True):
        assert seen.keys() == plain.keys()
        assert all(torch.allclose(seen[name], plain[name], atol=1e-6) for name in plain)
        assert "gradients of different parameters in this step (this rank none of ['blocks.0.experts." in told
