"""Blocks that can't be run on parts of sequences are refused before they are; in one process, without a collective."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import ConfigurationError, LayoutError, StepError
from lightning_shard.parallel.context.attention import Part
from lightning_shard.parallel.context.blocks import ShardedSequences, sequence_dim
from lightning_shard.plugin.assembly.probe import trial_runs

WIDTH, LENGTH = 8, 16


class Attention(nn.Module):
    """What is refused is derived from it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        return x + self.output(self.mixed(*self.project(x).chunk(3, -1)))

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], is_causal=True)[:, 0]


class ByProducts(Attention):
    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT).softmax(-1) @ value


class BeginningAtZero(ByProducts):
    """Its attention can't be seen in what it returns before it is trained."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)


class CountingPositions(Attention):
    """Turns queries and keys by the place in what it is given."""

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        angles = torch.arange(query.size(1))[:, None] / 100.0 ** torch.arange(WIDTH // 2)

        def turned(x: Tensor) -> Tensor:
            one, other = x.chunk(2, -1)
            return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)

        return super().mixed(turned(query), turned(key), value)


class OverTokens(Attention):
    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().mixed(query, key, value - value.mean(1, keepdim=True))


class Dropping(Attention):
    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        return F.dropout(super().forward(x), 0.1)


class Keeping(Attention):
    auxiliary: Tensor | None = None

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.auxiliary = query.square().mean()
        return super().mixed(query, key, value)


class Returning(Attention):
    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        return super().forward(x), x.square().mean()


class OwnMask(Attention):
    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(query.size(1), query.size(1), dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], attn_mask=mask)[:, 0]


class DroppingAttention(Attention):
    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)


MIXES = "mixes or counts positions by more than its attention does.*sdpa.*context_parallel_size=1"


def dealt(block: nn.Module) -> nn.Module:
    sequences = ShardedSequences(Part(cast(Any, None), 0, 2), lambda module: trial_runs(torch.device("cpu"), module))
    sequences.deal(block, sequences.attend(block))
    return block


def example(samples: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randn(samples, length, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (ByProducts, MIXES),
        (BeginningAtZero, MIXES),
        (CountingPositions, MIXES),
        (OverTokens, MIXES),
        (Dropping, "draws random numbers.*dropout to 0"),
        (Keeping, "changes its attributes in its forward"),
        (Returning, r"returns a tensor of shape \(\) for 8 positions"),
        (OwnMask, "mask of 8 rows and 8 columns, and its sequences have 16"),
        (DroppingAttention, "dropout_p=0.1.*to 0"),
    ],
)
def test_a_block_that_is_no_function_of_each_position_is_refused(kind: type[nn.Module], says: str) -> None:
    torch.manual_seed(0)
    block = dealt(kind())
    before = {name: value.clone() for name, value in block.state_dict().items()}
    with pytest.raises(StepError, match=says):
        block(example())
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in block.parameters())


class Cache:
    def __init__(self, length: int = 0) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((example(length=LENGTH + 2),), r"Sequences of 18 positions.*multiple of 4"),
        ((example(), object()), "is given a object"),
        ((example(), torch.ones(LENGTH, 3, 2)), r"shape \(16, 3, 2\) beside sequences of 16"),
        ((example()[0],), r"shape \(16, 8\) first"),
        ((example(), Cache(3)), "keys and values of an earlier call, as by generate"),
    ],
)
def test_arguments_that_arent_known_to_be_of_sequences_are_refused(given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(StepError, match=says):
        dealt(Attention())(*given)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Any) -> Tensor:
        new: Tensor = self.linear(x)
        if isinstance(seen, dict):
            seen["hidden"] = new
        else:
            seen.append(new)
        return new


@pytest.mark.parametrize("seen", [{}, []])
def test_a_block_that_writes_into_what_it_is_given_a_copy_of_is_refused(seen: Any) -> None:
    with pytest.raises(StepError, match=f"Writing writes into a {type(seen).__name__} that it is given.*return what"):
        dealt(Writing())(example(), seen)


def test_hooks_within_a_block_are_refused() -> None:
    block = dealt(Attention())
    block.get_submodule("output").register_forward_hook(lambda *_: None)
    with pytest.raises(StepError, match="A Linear within Attention has a forward hook"):
        block(example())


@pytest.mark.parametrize(
    ("shape", "dtype", "dim"),
    [
        ((3, 16, 8), torch.float, 1),
        ((3, 16, 16), torch.float, None),
        ((1, 16, 4), torch.bfloat16, 1),
        ((16, 4), torch.complex64, 0),
        ((1, 16), torch.long, 1),
        ((3, 16), torch.bool, None),
        ((16, 16), torch.bool, None),
        ((16,), torch.long, 0),
        ((3, 1, 16, 16), torch.bool, None),
        ((3, 1, 1, 16), torch.float, None),
        ((1, 1, 16, 4), torch.float, 2),
        ((3, 1, 16), torch.bool, None),
        ((3, 8), torch.float, None),
    ],
)
def test_which_dim_of_an_argument_is_cut(shape: tuple[int, ...], dtype: torch.dtype, dim: int | None) -> None:
    assert sequence_dim(torch.zeros(shape, dtype=dtype), 16) == dim


def test_what_it_doesnt_go_with_is_refused_before_any_process() -> None:
    for name in ("pipeline_parallel_size", "tensor_parallel_size", "expert_parallel_size"):
        with pytest.raises(LayoutError, match=rf"context_parallel_size \(2\).*use {name}=1"):
            HybridShardStrategy(context_parallel_size=2, **{name: 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="compile_blocks with context_parallel_size=2"):
        HybridShardStrategy(context_parallel_size=2, compile_blocks=True)
    with pytest.raises(LayoutError, match=r"context_parallel_size \(0\) must be an integer"):
        HybridShardStrategy(context_parallel_size=0)
