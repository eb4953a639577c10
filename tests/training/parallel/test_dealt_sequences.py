"""Sequences over ranks: losses, gradients, norms and parameters of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import (
    LENGTH,
    NETWORKS,
    VOCABULARY,
    Model,
    Seen,
    combine,
    largest_difference,
    layout,
    like_llama,
    train,
    world,
)
from tests.training.parallel.small import SaveAtEnd

TWO, FOUR = layout(context=2), layout(context=2, data=2)
WIDTH, HEADS = 32, 4


class OwnBlock(nn.Module):
    """Turns queries and keys by tables, and has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.scale: Tensor | float = 1.0

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], *, bias: Tensor, shift: Tensor) -> Tensor:
        def turned(heads: Tensor) -> Tensor:
            one, other = heads.chunk(2, -1)
            cos, sin = tables
            return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)

        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(turned(query), turned(key), value, attn_mask=bias, scale=0.5)
        return x + shift + self.gate * self.scale * self.output(mixed.transpose(1, 2).flatten(2))


class Own(nn.Module):
    """A user's network: tied weights, attention with a trained bias, and what blocks know of earlier ones' outputs.

    Of a batch's means, so that data ranks would compute something else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH))
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        places = torch.arange(tokens.size(1), device=tokens.device)
        angles = places[:, None] / 100.0 ** torch.arange(WIDTH // HEADS // 2, device=tokens.device)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for block in self.blocks:
            block.scale = 1 + x.square().mean()  # which isn't given to it
            bias = self.bias.masked_fill(later.to(x.device), -torch.inf)
            x = block(x, (angles.cos(), angles.sin()), bias=bias, shift=x.mean((0, 1)))
        return x @ self.embedding.weight.T


class OwnModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.model = Own()


class Sloped(Model):
    """A penalty on slopes: gradients of gradients go in and out of blocks, and through attention."""

    def __init__(self, embedding: str = "token_embedding") -> None:
        super().__init__()
        self.embedding = embedding

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        found: list[Tensor] = []
        embedding = self.model.get_submodule(self.embedding)
        hook = embedding.register_forward_hook(lambda _module, _args, output: found.append(output))
        with hook, sdpa_kernel(SDPBackend.MATH):  # the others' gradients have none
            loss = super().loss(batch)
            if not torch.is_grad_enabled():
                return loss
            (slope,) = torch.autograd.grad(loss, found[0], create_graph=True)
            return loss + 1e4 * slope.square().mean()


class PartlySloped(Sloped):
    """Its blocks take a scale from an attribute, through which a rank's slope is of its part of the sequence."""

    def __init__(self) -> None:
        super().__init__("embedding")
        self.model = Own()


class Padded(Model):
    """Every other sample ends early; transformers make a mask of that."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, y = batch["x"], batch["y"].clone()
        mask = torch.ones_like(x)
        mask[::2, -5:] = 0
        y[mask == 0] = -100
        return F.cross_entropy(self.model(x, attention_mask=mask).logits.flatten(0, 1), y.flatten())


class Encoder(Model):
    """torch's own layers, whose attention isn't causal; outputs are joined where layers are called."""

    def __init__(self, kind: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer) -> None:
        super().__init__()
        layer = kind(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model(self.embedding(batch["x"]))
        return F.cross_entropy((states @ self.embedding.weight.T).flatten(0, 1), batch["y"].flatten())


class Recomputing(nn.TransformerEncoderLayer):
    """Its own code has its attention computed again in the backward."""

    def _sa_block(self, *args: Any, **kwargs: Any) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            return super(Recomputing, self)._sa_block(x, *args[1:], **kwargs)

        return checkpoint(attention, args[0], use_reentrant=False)  # type: ignore[no-any-return]


class Mixture(Model):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.MixtralConfig(**like_llama(), num_local_experts=4)
        self.model = transformers.MixtralForCausalLM(config)


MODULES: dict[str, Any] = {
    "own": OwnModel,
    "sloped": Sloped,
    "partly sloped": PartlySloped,
    "padded": lambda: Padded("llama"),
    "encoder": Encoder,
    "recomputing": lambda: Encoder(Recomputing),
    "mixtral": Mixture,
    **{name: (lambda name=name: Model(name)) for name in NETWORKS},
}


Case = tuple[str, dict[str, Any], dict[str, Any]]
"""A network, the strategy's options and the Trainer's settings."""


def trained(cases: list[Case], sizes: dict[str, int] | None) -> list[Seen]:
    return [
        train(name, sizes, module=MODULES[name], trainer=settings, **(options if sizes else {}))
        for name, options, settings in cases
    ]


def parameters_apart(ours: Seen, plain: Seen) -> float:
    """Without those elements whose gradients are rounding, as of keys' biases: AdamW steps by their sign."""
    known = {name: gradient.abs() > 1e-5 for name, gradient in plain.gradients.items()}
    apart = ((ours.parameters[name] - plain.parameters[name]).abs() * known[name] for name in known)
    return max(float(each.max()) for each in apart)


def assert_alike(cases: list[Case], sizes: dict[str, int]) -> None:
    ranks = run_ranks(trained, world(sizes), cases, sizes, elastic=True, timeout_s=300)
    for case, plain, *found in zip(cases, trained(cases, None), *ranks):
        ours, is_rounded = combine(found, sizes), "precision" in case[2]
        assert ours.losses == pytest.approx(plain.losses, rel=2e-3 if is_rounded else 2e-6), case
        assert ours.metrics == pytest.approx(plain.metrics, rel=2e-3 if is_rounded else 2e-6), case
        assert ours.norm == pytest.approx(plain.norm, rel=1e-2 if is_rounded else 2e-5), case
        if not is_rounded:
            assert largest_difference(ours.gradients, plain.gradients) < 1e-6, case
            assert parameters_apart(ours, plain) < 2e-5, case  # of steps of 1e-3


def test_sequences_over_two_ranks_train_as_one_process() -> None:
    assert_alike([("llama", {}, {}), ("own", {}, {"gradient_clip_val": 0.5})], TWO)


@pytest.mark.long
def test_attention_that_a_blocks_own_code_recomputes_sees_all_positions_again() -> None:
    twice = {"activation_checkpointing": True}
    assert_alike([("recomputing", {}, {}), ("recomputing", twice, {})], TWO)
    assert "apply" not in vars(CheckpointFunction)  # as torch has it


@pytest.mark.long
def test_networks_and_settings() -> None:
    mixed = {"precision": "bf16-mixed"}
    assert_alike(
        [
            ("gpt", {"activation_checkpointing": True}, {}),
            ("llama", {"activation_checkpointing": "selective"}, {}),
            ("own", {"cpu_offload": True, "reshard_after_forward": False}, {}),
            ("sloped", {}, {}),
            ("padded", {}, {}),
            ("encoder", {}, {}),
            ("gpt2", {}, {}),
            ("qwen3", {}, {}),
            ("mixtral", {}, {}),
            ("llama", {}, mixed),
            ("own", {"activation_checkpointing": 2}, mixed),
        ],
        TWO,
    )


@pytest.mark.long
def test_slopes_that_pass_blocks_by_are_refused() -> None:
    with pytest.raises(RanksFailed, match="StepError: The ranks that share a sequence have different losses"):
        run_ranks(trained, 2, [("partly sloped", {}, {})], TWO, elastic=True)


@pytest.mark.long
def test_more_ranks() -> None:
    assert_alike([("llama", {}, {"accumulate_grad_batches": 2})], FOUR)
    assert_alike([("llama", {}, {})], layout(context=4))


@pytest.mark.long
@pytest.mark.parametrize("data", [2, 4])
def test_data_ranks_in_replicas(data: int) -> None:
    """Of one data rank each, whose parameters only context ranks share, and of two."""
    clipped = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    replicas: list[Case] = [
        ("llama", {}, clipped),
        ("gpt", {"activation_checkpointing": "selective", "cpu_offload": True}, {}),
        ("qwen3", {"reshard_after_forward": False}, {"precision": "bf16-mixed"}),
    ]
    assert_alike(replicas, {**layout(context=2, data=data), "data_parallel_replicas": 2})


def saved(sizes: dict[str, int], path: str) -> Seen:
    return train("llama", sizes, steps=2, callbacks=[SaveAtEnd(path)], shuffle=True)


def resumed(sizes: dict[str, int], path: str) -> Seen:
    return train("llama", sizes, steps=4, resume=path, shuffle=True)


@pytest.mark.long
def test_saved_on_any_layout_and_resumed_on_any_other(tmp_path: Path) -> None:
    in_replicas = {**FOUR, "data_parallel_replicas": 2}
    layouts = {"cp2": TWO, "dp2": layout(data=2), "one": layout(), "cp2×dp2 in replicas": in_replicas}
    expected = run_ranks(straight, 1, elastic=True)[0].losses
    for begins, first in layouts.items():
        path = str(tmp_path / f"{begins}.ckpt")
        run_ranks(saved, world(first), first, path, elastic=True)
        for goes_on in ("cp2",) if begins != "cp2" else layouts:
            sizes = layouts[goes_on]
            losses = [seen.losses for seen in run_ranks(resumed, world(sizes), sizes, path, elastic=True)]
            assert losses == [pytest.approx(expected[2:], rel=2e-6)] * world(sizes), (begins, goes_on)


def straight() -> Seen:
    return train("llama", layout(), steps=4, shuffle=True)


class Generating(Model):
    def __init__(self) -> None:
        super().__init__("llama")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.model.generate(batch["x"][:3], max_new_tokens=3, do_sample=False, pad_token_id=0)


def generated() -> None:
    train("llama", TWO, steps=1, module=Generating, trainer={"val_check_interval": 1})


def test_text_that_is_generated_by_a_cache_is_refused() -> None:
    with pytest.raises(RanksFailed, match=r"keys and values of an earlier call, as by generate\(\)"):
        run_ranks(generated, 2, elastic=True)
