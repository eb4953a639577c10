"""Small mixtures of experts, and other networks whose tensor-parallel plans take more than linear layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import VOCABULARY, Model, Seen, combine, largest_difference, like_llama, train, world
from tests.training.parallel.small import SaveAtEnd
from tests.training.routing import Routed, Routing, assert_routed_alike

EXPERTS = 4
NOISY = 8
"""The width of :class:`Noisy`."""


class Experts(nn.Module):
    """A user's own: every parameter has a row per expert. ``routed`` counts what came, by expert."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, width, inner) / width**0.5)
        self.bias = nn.Parameter(torch.randn(count, inner) / 10)
        self.down = nn.Parameter(torch.randn(count, inner, width) / inner**0.5)

    def forward(self, tokens: Tensor, choice: Tensor, scale: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, slot = torch.where(choice == expert)
            # weights are applied to what goes in: an expert isn't linear in them
            inner = F.silu((tokens[row] * scale[row, slot, None]) @ self.up[expert] + self.bias[expert])
            out = out.index_add(0, row, inner @ self.down[expert])
        return out


class Mixture(nn.Module):
    """Routes each token to two experts, and adds a shared one."""

    def __init__(self, width: int, only: int | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.shared = nn.Linear(width, width)
        self.experts = Experts(EXPERTS, width, 24)
        self.only = only

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        if self.only is not None:  # all tokens to one: the other ranks' experts have none
            chosen = torch.full_like(chosen, self.only)
        return x + self.shared(x) + self.experts(flat, choice=chosen, scale=weights).view_as(x)


class Mixtures(nn.Module):
    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Mixture(16, only) for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ListedMixture(nn.Module):
    """Experts that are modules of their own; ``how`` says which of the usual loops calls them.

    Keeps what a second run of its forward would change: a count, a buffer, random numbers, and where it ``keeps`` it, a
    list (which pipelines refuse).
    """

    def __init__(self, width: int, how: str, keeps: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.SiLU(), nn.Linear(24, width)) for _ in range(EXPERTS)
        )
        self.how, self.keeps = how, keeps
        self.calls = 0
        self.losses: list[Tensor] = []
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(2)
        if self.how == "one":
            chosen = torch.full_like(chosen, EXPERTS - 1)
        self.calls += 1
        self.load += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        if self.keeps:
            self.losses.append(scores.square().sum(-1).view(x.shape[:2]))
        torch.rand(1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            if self.how == "dense":
                out = out + scores[:, number, None] * expert(flat)
            elif self.how == "chained":
                out = expert(flat + out)
            elif self.how == "all" or len(row):
                out[row] += weights[row, slot, None] * expert(flat[row])
        return x + out.view_as(x)


class Noisy(nn.Module):
    """Noise in the router, dropout in the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(NOISY, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(NOISY, NOISY), nn.Dropout(0.5)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        weights, chosen = (scores + torch.randn_like(scores)).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            out[row] += weights[row, slot, None] * expert(x[row])
        return out


class Listed(Mixtures):
    """What its blocks keep of each token reaches the loss."""

    def __init__(self, how: str, keeps: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ListedMixture(16, how, keeps) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        out = super().forward(input_ids)
        for block in self.blocks:
            assert isinstance(block, ListedMixture)
            for loss in block.losses:
                out = out * (1 + 0.1 * loss.unsqueeze(-1))
            block.losses.clear()
        return out


def transformers_model(kind: str, **more: Any) -> nn.Module:
    import transformers as hf

    model: nn.Module = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**{**like_llama(), **more}))
    return model


def adapted() -> nn.Module:
    import peft

    model = transformers_model("Llama")
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    wanted = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, wanted)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # else A has no gradient
    return adapted


_OF_TWO = {"num_experts_per_tok": 2}
_DEEPSEEK = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, **_OF_TWO},
}
_QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 16, **_OF_TWO}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "mixtral of two experts": ("Mixtral", {"num_local_experts": 2}),
    "qwen3": ("Qwen3Moe", _QWEN | {"head_dim": 8, "norm_topk_prob": True}),
    "gpt-oss": ("GptOss", {"intermediate_size": 16, "head_dim": 8, "num_local_experts": EXPERTS, **_OF_TWO}),
    "deepseek": ("DeepseekV2", _DEEPSEEK),
    "deepseek-v3": ("DeepseekV3", _DEEPSEEK | {"n_group": 2, "topk_group": 1}),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS, **_OF_TWO}),
    "granite": ("GraniteMoe", {"num_local_experts": EXPERTS, **_OF_TWO}),
    "qwen2": ("Qwen2Moe", _QWEN | {"shared_expert_intermediate_size": 16}),
    "tied llama": ("Llama", {"tie_word_embeddings": True}),
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "own": Mixtures,
    "own, all tokens to one expert": partial(Mixtures, 3),
    "list, called with all": partial(Listed, "all"),
    "list, called where chosen": partial(Listed, "chosen", keeps=False),
    "list, all tokens to one expert": partial(Listed, "one"),
    "list, dense": partial(Listed, "dense"),
    "llama with LoRA": adapted,
    **{name: partial(transformers_model, kind, **more) for name, (kind, more) in TRANSFORMERS.items()},
}


OWN_PLANS = {
    "expert_parallel_plan": {"experts": "experts"},
    "tensor_parallel_plan": {"head": "colwise_gather_output"},
}
"""Of networks that declare none."""


class MixtureModel(Model):
    def __init__(self, kind: str) -> None:
        L.LightningModule.__init__(self)
        self.on_meta = False
        torch.manual_seed(1)
        self.model = NETWORKS[kind]()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


class Sloped(MixtureModel):
    """A penalty on slopes: gradients of gradients go to other ranks' experts and back."""

    @property
    def entrance(self) -> nn.Module:
        """What is given the samples, since the step doesn't call the network itself."""
        return self.model.get_submodule("embed")

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        model: Any = self.model
        x = y = model.embed(batch["x"])
        for block in model.blocks:
            y = block(y)
        each = F.cross_entropy(model.head(y).flatten(0, 1), batch["y"].flatten(), reduction="none")
        if not torch.is_grad_enabled():
            return each.mean()
        (slope,) = torch.autograd.grad(each.sum(), x, create_graph=True)
        return each.mean() + slope.square().mean()


class OnMeta(L.LightningModule):
    """A mixture whose weights the strategy makes, from the seed and their names."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = NETWORKS["mixtral"]()

    training_step = Model.training_step
    loss = Model.loss
    configure_optimizers = MixtureModel.configure_optimizers


@dataclass
class Mixed(Seen):
    """And which experts were chosen."""

    routed: Routed = field(default_factory=Routed)


def trained(
    sizes: dict[str, int] | None, kinds: list[str], folder: Path | None = None, **options: Any
) -> dict[str, Mixed]:
    """Each kind of network in turn, by the same processes: on a layout, or on this process alone.

    Args:
        folder: Where each is saved at its end, by its name.
    """
    seen = {}
    for kind in kinds:
        routed = Routed()
        callbacks = [Routing(routed), *([SaveAtEnd(str(folder / kind))] if folder is not None else [])]
        plans = OWN_PLANS if sizes and kind.startswith(("own", "list")) else {}
        name, _, how = kind.partition(": ")
        made = partial(Sloped if how == "sloped" else MixtureModel, name)
        ran = train("llama", sizes, module=made, callbacks=callbacks, **plans, **options)
        seen[kind] = Mixed(**vars(ran), routed=routed)
    return seen


def assert_alike(
    sizes: dict[str, int], kinds: list[str], folder: Path | None = None, *, timeout_s: float = 120, **options: Any
) -> None:
    """Networks on a layout against one process; what is saved in ``folder`` is what was trained."""
    ours = run_ranks(trained, world(sizes), sizes, kinds, folder, elastic=True, timeout_s=timeout_s, **options)
    for kind, plain in trained(None, kinds, **options).items():
        seen = assert_same([rank[kind] for rank in ours], plain, sizes, kind)
        if folder is not None:
            stored = checkpoint.read(folder / kind)
            assert all(torch.equal(stored[name][...], value.cpu()) for name, value in seen.parameters.items()), kind


def assert_same(ranks: list[Mixed], plain: Mixed, sizes: dict[str, int], what: str) -> Seen:
    """All ranks' runs of one network against one process's; gives the former, joined."""
    seen = combine(ranks, sizes)
    assert_routed_alike([rank.routed for rank in ranks], plain.routed, sizes)
    assert seen.losses == pytest.approx(plain.losses, rel=3e-6), what
    assert seen.norm == pytest.approx(plain.norm, rel=1e-5), what
    assert largest_difference(seen.initial, plain.initial) == 0, what
    assert largest_difference(seen.gradients, plain.gradients) < 2e-6, what
    assert largest_difference(seen.parameters, plain.parameters) < 2e-4, what  # of AdamW's steps of 1e-3
    assert seen.metrics == pytest.approx(plain.metrics, rel=1e-5), what
    return seen
