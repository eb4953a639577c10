"""Blocks through ``torch.compile``."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lightning_shard.parallel.activation_checkpointing import recompute
from lightning_shard.parallel.compiled_blocks import compile_block
from lightning_shard.plugin.steps import randomness


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("recomputes", [False, True])
def test_blocks_alike_are_compiled_once_and_keep_their_names(recomputes: bool) -> None:
    blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True) for _ in range(3))
    names, counter, seen = list(blocks.state_dict()), CompileCounter(), list[str]()
    for block in blocks:
        if recomputes:
            recompute(block, lambda: randomness.remember(torch.device("cpu")), is_compiled=True)
        compile_block(block, counter)
        block.register_forward_hook(lambda *_: seen.append("hook"))

    def run() -> Tensor:
        x = torch.ones(4, 2, 8, requires_grad=True)
        for block in blocks:
            x = block(x)
        return x

    run().sum().backward()
    assert counter.frame_count == 1
    assert len(seen) == 3
    assert list(blocks.state_dict()) == names
