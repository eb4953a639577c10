"""Activation checkpointing of single blocks: same numbers, same random numbers, no trace, and what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from lightning_shard.errors import StepError
from lightning_shard.parallel.activation_checkpointing import _policy, chosen, leave_out_caches, recompute
from lightning_shard.plugin.steps import randomness
from tests.training.parallel.test_arguments_of_units import KINDS, Noting, hidden_of
from tests.training.pipeline.test_crossing import batches

WIDTH, SAMPLES, BLOCKS = 8, 16, 3


class Restless(nn.Module):
    """Draws from every generator, counts its calls, and keeps running statistics and what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.seen: Any = None

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls += 1
        self.seen = x.detach()
        hidden = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.5)
        return x + scale * random.random() * float(np.random.rand()) * self.second(hidden)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Restless() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return x


def chain(**options: Any) -> Chain:
    made = Chain()
    for block in made.blocks if options else ():
        recompute(block, lambda: randomness.remember(torch.device("cpu")), **options)
    return made


def losses_of(net: Chain) -> list[Tensor]:
    randomness.seed_all(1)
    losses = [net(torch.randn(SAMPLES, WIDTH)).square().mean() for _ in range(2)]  # two microbatches in flight
    for loss in losses:
        loss.backward()
    return losses


@pytest.mark.parametrize("selective", [False, True], ids=["all", "selective"])
def test_a_recomputed_block_draws_computes_and_leaves_what_a_kept_one_does(selective: bool) -> None:
    plain, ours = chain(), chain(selective=selective)
    with randomness.preserved(torch.device("cpu")):
        expected, drawn = losses_of(plain), (torch.rand(1), random.random(), np.random.rand())
        found, drawn_after = losses_of(ours), (torch.rand(1), random.random(), np.random.rand())
    assert found == expected
    assert drawn_after == drawn
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters()))  # type: ignore[arg-type]
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in plain.named_modules()]
    states = ours.state_dict(), plain.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])  # running statistics too
    assert [block.calls for block in ours.blocks] == [2] * BLOCKS
    assert all(torch.equal(a.seen, b.seen) for a, b in zip(ours.blocks, plain.blocks))


def saved_bytes(run: Callable[[], Any], besides: nn.Module) -> int:
    held = {p.untyped_storage().data_ptr() for p in (*besides.parameters(), *besides.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(kept.values())


def test_of_recomputed_blocks_only_inputs_are_kept() -> None:
    net, x = chain(selective=False), torch.randn(SAMPLES, WIDTH)
    assert saved_bytes(lambda: net(x), net) == BLOCKS * x.nbytes
    plain = chain()
    assert saved_bytes(lambda: plain(x), plain) > 4 * BLOCKS * x.nbytes


def test_selective_keeps_matrix_products_and_attention_but_for_attention_that_draws() -> None:
    x = torch.randn(1, 2, 4, 8)
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    for operation, args, kept in (
        (torch.ops.aten.addmm.default, (x[0, 0, 0], x[0, 0], x[0, 0].T), True),
        (torch.ops.aten.mm.default, (x[0, 0], x[0, 0].T), True),
        (attention, (x, x, x), True),
        (attention, (x, x, x, 0.0), True),
        (attention, (x, x, x, 0.1), False),
        (torch.ops.aten.relu.default, (x,), False),
    ):
        assert (_policy(None, operation, *args) == CheckpointPolicy.MUST_SAVE) == kept, operation


def test_every_nth_block_is_the_same_on_every_layout() -> None:
    assert chosen(5, True) == [0, 1, 2, 3, 4]
    assert chosen(5, "selective") == [0, 1, 2, 3, 4]
    assert chosen(5, 2) == [1, 3]
    assert chosen(5, None) == chosen(5, False) == []


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 1
        self.given: list[Any] = []

    def forward(self, x: Tensor, past_key_values: Any = None, use_cache: bool | None = None) -> Tensor:
        self.given.append((past_key_values, use_cache))
        return x


@dataclass
class Cache:
    """As transformers' is asked."""

    lengths: tuple[int, ...]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.lengths[layer_idx]


class OwnCache:
    """Of one layer."""

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


@pytest.mark.parametrize("own", [OwnCache, lambda length: Cache((4, length))])
def test_blocks_are_trained_without_transformers_cache_unless_it_holds_something(own: Any) -> None:
    block, x = Cached(), torch.ones(1)
    leave_out_caches(block)
    cache = own(0)
    block(x, past_key_values=cache, use_cache=True)
    with torch.no_grad():
        block(x, past_key_values=cache, use_cache=True)
    assert block.given == [(None, False), (cache, True)]
    with pytest.raises(StepError, match=r"Cached is called with past_key_values that aren't empty"):
        block(x, past_key_values=own(4))


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask.logical_not_()
            return x * self.bias
        x += self.bias
        return x.tanh()


@pytest.mark.parametrize("selective", [False, True])
def test_a_block_that_changes_an_argument_is_refused(selective: bool) -> None:
    block, x = Writes(), torch.ones(2, 4)
    recompute(block, lambda: lambda: None, selective=selective)
    for arguments in ((x * 1.0,), (x, torch.ones(2, dtype=torch.bool))):
        with pytest.raises(StepError, match="Writes changes an argument in place, and activation_checkpointing runs"):
            block(*arguments)
    with torch.no_grad():
        assert block(x * 1.0).sum() < 8
    block.requires_grad_(False)
    assert not block(x * 1.0).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_run_finds_what_the_first_was_given_as_it_was_then(kind: str) -> None:
    nets = [Noting(kind) for _ in range(3)]
    for net, selective in zip(nets[1:], (False, True)):
        net.load_state_dict(nets[0].state_dict())
        for block in net.blocks:
            recompute(block, lambda: lambda: None, selective=selective)
    for net in nets:
        net(batches()[0]).square().mean().backward()
        given, expected_of = (each.blocks[0].seen[0] for each in (net, nets[0]))
        torch.testing.assert_close(hidden_of(given), hidden_of(expected_of))
        assert len(getattr(given, "sums", [])) == len(getattr(expected_of, "sums", []))
        for parameter, expected in zip(net.parameters(), nets[0].parameters()):
            torch.testing.assert_close(parameter.grad, expected.grad)
