"""Experts in a list, dealt to two ranks without a Trainer: who computes what, and what is refused."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import StepError
from lightning_shard.parallel.experts import list_weights
from lightning_shard.parallel.experts.module_lists import RestoreAndReplay, TwoRuns
from lightning_shard.parallel.experts.stacked import apply_expert_parallel, resolve_experts
from lightning_shard.plugin.assembly.probe import two_runs
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.parity import QUIET
from tests.training.mixtures import EXPERTS, NOISY, ListedMixture, Noisy

PLAN = {"experts": "experts"}
WIDTH = 6


class Counting(nn.Sequential):
    """An expert that counts the rows that it computes, without those of probes and checks."""

    computed: ClassVar[Counter[int]] = Counter()

    def __init__(self, number: int) -> None:
        super().__init__(nn.Linear(WIDTH, 5), nn.SiLU(), nn.Linear(5, WIDTH))
        self.number = number

    def forward(self, rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
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
        if self.how == "autocast":
            with torch.autocast("cpu"):
                return self.experts[0](x)  # type: ignore[no-any-return]
        out = torch.zeros_like(x)
        for expert in self.experts:
            out = out + (expert(x, x) if self.how == "two" else expert(x))
        return out


@contextmanager
def nothing_to_put_back(_: nn.Module) -> Iterator[RestoreAndReplay]:
    yield (lambda: None), nullcontext


def dealt(module: nn.Module, again: TwoRuns = nothing_to_put_back) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    root = nn.ModuleDict({"mixture": module})
    names = resolve_experts(root, PLAN, 2)
    apply_expert_parallel(root, mesh, names, mesh, again)
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
        for number, rows in {**first, **second}.items():
            assert rows == max(1, plain.get(number, 0)), number


def refused(how: str, *more: Any) -> str:
    module = dealt(Around(how))
    with pytest.raises(StepError) as refusal:
        module(torch.randn(4, WIDTH), *more)
    return str(refusal.value)


def refusals() -> dict[str, str]:
    told = {how: refused(how) for how in ("in place", "two", "hooks", "autocast")}
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
        "autocast": "An expert of mixture.experts is called inside of a torch.autocast in the module around the list",
        "list": "The module around mixture.experts is given a list, which it may change",
        "chained": "The rows that an expert of mixture.experts is called with depend on another expert's results",
        "outside": "was called outside of the module that holds the list",
    }.items():
        assert says in told[how], told[how]
        assert says in other[how]


def as_two_ranks_draw(blocks: list[Noisy], tokens: list[Tensor], seeds: list[int]) -> list[Tensor]:
    """One process with a generator for each data rank: a router draws from its tokens', an expert from its own."""
    states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]

    @contextmanager
    def drawing_as(rank: int) -> Iterator[None]:
        torch.set_rng_state(states[rank])
        yield
        states[rank] = torch.get_rng_state()

    for block in blocks:
        routed = []
        for rank, x in enumerate(tokens):
            with drawing_as(rank):
                scores = block.router(x)
                routed.append((scores + torch.randn_like(scores)).softmax(-1).topk(2))
        out = [torch.zeros_like(x) for x in tokens]
        for number, expert in enumerate(block.experts):
            places = [torch.where(chosen == number) for _, chosen in routed]
            rows = torch.cat([x[row] for x, (row, _) in zip(tokens, places)])
            assert len(rows)
            with drawing_as(number // (EXPERTS // 2)):
                results = expert(rows).split([len(row) for row, _ in places])
            for rank, ((row, slot), result) in enumerate(zip(places, results)):
                out[rank][row] += routed[rank][0][row, slot, None] * result
        tokens = out
    return tokens


def noisy() -> None:
    """Two mixtures with noise in the router and dropout in the experts, also where they are recomputed."""
    torch.manual_seed(0)
    plain = [Noisy(), Noisy()]
    tokens, seeds = [torch.randn(rows, NOISY) for rows in (16, 24)], [100, 101]
    expected = as_two_ranks_draw(plain, tokens, seeds)
    (sum(out.square().sum() for out in expected) / 2).backward()
    rank = torch.distributed.get_rank()
    for recomputes in (False, True):
        modules = [dealt(copy.deepcopy(block), partial(two_runs, torch.device("cpu"))) for block in plain]
        torch.manual_seed(seeds[rank])
        x = tokens[rank].clone().requires_grad_()
        for module in modules:
            x = checkpointed(module, x, use_reentrant=False) if recomputes else module(x)
        torch.testing.assert_close(x, expected[rank], rtol=1e-5, atol=1e-6)
        x.square().sum().backward()
        for module, block in zip(modules, plain):
            for name, parameter in module.named_parameters():
                if "experts" in name:
                    theirs = block.get_parameter(name).grad
                    torch.testing.assert_close(full_tensor(parameter.grad), theirs, rtol=1e-5, atol=1e-6)


def sent_to_gather(module: nn.Module) -> tuple[list[tuple[torch.dtype, int]], dict[str, Tensor]]:
    """Types and bytes of what a rank sends of experts' weights, and of their gradients; and these."""
    sent: list[tuple[torch.dtype, int]] = []
    plain = list_weights.all_to_all

    def noted(rows: Tensor, *args: Any) -> Tensor:
        sent.append((rows.dtype, rows.nbytes))
        return plain(rows, *args)

    list_weights.all_to_all = noted
    try:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(torch.randn(32, WIDTH)).square().mean()
        loss.backward()
    finally:
        list_weights.all_to_all = plain
    gradients = {name: full_tensor(p.grad).clone() for name, p in module.named_parameters() if "experts" in name}
    module.zero_grad()
    return sent, gradients


def in_halves() -> None:
    """What autocast casts is gathered in 16 bits, what it leaves alone in 32, as are gradients; to the same numbers."""
    torch.manual_seed(0)
    around = Around("plain")
    for expert in around.experts:
        expert.append(nn.LayerNorm(WIDTH))  # type: ignore[operator]
    module = dealt(around)
    sent, gradients = sent_to_gather(module)
    shards = {name: p for name, p in module.named_parameters() if "experts" in name}
    held = {name: p.to_local().numel() for name, p in shards.items() if isinstance(p, DTensor)}
    kept = sum(count for name, count in held.items() if name.split(".")[-2] == "3")  # of the norms
    cast = sum(held.values()) - kept
    computed_with = sum(p.numel() for p in shards.values()) // 2
    assert sent == [(torch.bfloat16, 2 * cast), (torch.float32, 4 * kept), (torch.float32, 4 * computed_with)]
    known, list_weights.cast_units = list_weights.cast_units, lambda *_: set()
    try:
        whole, expected = sent_to_gather(module)
    finally:
        list_weights.cast_units = known
    assert whole == [(torch.float32, 4 * (cast + kept)), sent[-1]]
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def right() -> None:
    noisy()
    in_halves()


def test_random_numbers_and_halves_are_those_of_one_process() -> None:
    run_ranks(right, 2)


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
        assert "gradients of different parameters in this step (on this rank ['blocks.0.experts." in told


class BesideShared(L.LightningModule):
    """A list of experts beside a shared one, which a tensor parallel plan splits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), SharedToo()) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SharedToo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = x + self.down(self.up(x).tanh())
        for number, expert in enumerate(self.experts):
            (row,) = torch.where(chosen == number)
            out = out.index_add(0, row, expert(x[row]))
        return out


def rows() -> list[Tensor]:
    return [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(2)]


def test_a_tensor_parallel_plan_may_split_a_shared_expert_beside_the_list() -> None:
    """Its hooks run twice, and keep nothing."""
    assert_trains_alike(
        BesideShared,
        rows,
        ["ep2 x tp2"],
        expert_parallel_plan={"blocks.*.1.experts": "experts"},
        tensor_parallel_plan={"blocks.*.1.up": "colwise", "blocks.*.1.down": "rowwise"},
    )
