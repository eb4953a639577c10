"""Experts in a list, dealt to two ranks without a Trainer: who computes what, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import DataLoader

from lightning_shard.errors import StepError
from lightning_shard.parallel.experts.module_lists import RestoreAndReplay, TwoRuns
from lightning_shard.parallel.experts.stacked import apply_expert_parallel, resolve_experts
from lightning_shard.plugin.assembly.probe import two_runs
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import trainer_of
from tests.training.mixtures import EXPERTS, NOISY, ListedMixture, Noisy
from tests.training.parallel.small import Descends

PLAN = {"experts": "experts"}
WIDTH = 6


class Around(nn.Module):
    """Code around a list, some of which can't be right."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
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


def test_random_numbers_are_those_of_one_process() -> None:
    run_ranks(noisy, 2)


class Branching(Descends):
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
    trainer = trainer_of(options if devices > 1 else None, devices, max_steps=1)
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
