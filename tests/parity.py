"""One recipe on any layout and on one plain process, and what both must agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_shard import HybridShardStrategy
from lightning_shard.plugin.steps.checks.stage_parameters import seen_as_parts
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from recipes import plans
from tests import on_gpu

on_gpu.place_ranks()

VOCABULARY = 64
LENGTH = 16
GLOBAL_BATCH = 16

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def layout(pipeline: int = 1, data: int = 1, tensor: int = 1, context: int = 1) -> dict[str, int]:
    sizes = {"pipeline_parallel_size": pipeline, "data_parallel_size": data, "tensor_parallel_size": tensor}
    return sizes if context == 1 else {**sizes, "context_parallel_size": context}


def world(sizes: Mapping[str, int]) -> int:
    ranks = sizes["pipeline_parallel_size"] * sizes["data_parallel_size"] * sizes["tensor_parallel_size"]
    return ranks * sizes.get("context_parallel_size", 1)


LAYOUTS = {
    "dp4": layout(data=4),
    "tp2": layout(tensor=2),
    "pp2": layout(pipeline=2),
    "dp2×tp2": layout(data=2, tensor=2),
    "pp2×dp2": layout(pipeline=2, data=2),
    "pp2×tp2": layout(pipeline=2, tensor=2),
    "pp4": layout(pipeline=4),
    "pp2×dp2×tp2": layout(pipeline=2, data=2, tensor=2),
}


def trainer_of(options: Mapping[str, Any] | None, devices: int = 2, **settings: Any) -> Any:
    """A quiet Trainer: on so many ranks, by a strategy with these options; without any, on one plain process."""
    if options is None:
        return L.Trainer(**{**QUIET, "devices": 1, **settings})
    return L.Trainer(strategy=HybridShardStrategy(**options), **{**QUIET, "devices": devices, **settings})


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int = 96) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        self.y = (self.x * 7 + 3) % VOCABULARY

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def gpt() -> nn.Module:
    from recipes.gpt import GPT

    return GPT(vocabulary=VOCABULARY, context=LENGTH, width=32, layers=4, heads=4)


def llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**like_llama()))


def qwen3() -> nn.Module:
    import transformers

    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**like_llama(), head_dim=8))


def gpt2() -> nn.Module:
    import transformers

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 4, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **quiet, tie_word_embeddings=False))


def like_llama() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }


NETWORKS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "llama": llama, "qwen3": qwen3, "gpt2": gpt2}

#: transformers' Llama and Qwen3 bring their own plans.
PLANS: dict[str, dict[str, str] | None] = {
    "gpt": plans.GPT,
    "llama": None,
    "qwen3": None,
    "gpt2": {
        "h.*.attn.c_attn": "colwise_gather_output",
        "h.*.attn.c_proj": "rowwise_split_input",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}


class Model(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows of any layout."""

    def __init__(self, network: str = "gpt", on_meta: bool = False) -> None:
        super().__init__()
        self.kind = network
        self.on_meta = on_meta
        if not on_meta:
            torch.manual_seed(1)
            self.model = NETWORKS[network]()

    def configure_model(self) -> None:
        if self.on_meta and not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = NETWORKS[self.kind]()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.model(batch["x"])
        logits = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass
class Seen:
    """What a run computed; parameters and gradients are whole ones of the rank's stage."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0
    initial: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Recorder(L.Callback):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.initial = whole(module)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 0:
            gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            self.seen.gradients = {name: full_tensor(gradient).clone() for name, gradient in gradients.items()}
            self.seen.norm = float(_norm(trainer, module))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.parameters = whole(module)
        self.seen.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def whole(module: L.LightningModule) -> dict[str, Tensor]:
    """This stage's parameters, whole."""
    return {name: full_tensor(parameter).clone() for name, parameter in module.named_parameters()}


def _norm(trainer: L.Trainer, module: L.LightningModule) -> Tensor:
    if isinstance(trainer.strategy, HybridShardStrategy):
        from lightning_shard.parallel.clip import gradient_norm

        strategy = trainer.strategy
        mesh = strategy.device_mesh[strategy.layout.stage_axes]
        with seen_as_parts(module):
            return gradient_norm(module.parameters(), mesh, strategy.root_device)
    return torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]))


def loader(batch_size: int, *, shuffle: bool = False, samples: int = 96) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Tokens(samples), batch_size=batch_size, shuffle=shuffle)


def train(
    network: str,
    sizes: Mapping[str, int] | None = None,
    *,
    steps: int = 3,
    module: Callable[[], L.LightningModule] | None = None,
    trainer: Mapping[str, Any] | None = None,
    callbacks: Sequence[L.Callback] = (),
    shuffle: bool = False,
    samples: int = 96,
    resume: str | None = None,
    **options: Any,
) -> Seen:
    """Train on this process's rank of a layout, or plainly on one process; global batches are the same."""
    L.seed_everything(3)
    seen = Seen()
    strategy: Any = "auto"
    data = devices = 1
    if sizes is not None:
        if sizes["tensor_parallel_size"] > 1:
            options.setdefault("tensor_parallel_plan", PLANS.get(network))
        strategy = HybridShardStrategy(**sizes, **options)
        data, devices = sizes["data_parallel_size"], world(sizes)
    settings = {"max_steps": steps, "val_check_interval": 2, "devices": devices, **QUIET, **(trainer or {})}
    made = L.Trainer(strategy=strategy, callbacks=[Recorder(seen), *callbacks], **settings)
    made.fit(
        module() if module else Model(network),
        loader(GLOBAL_BATCH // data, shuffle=shuffle, samples=samples),
        loader(GLOBAL_BATCH // data, samples=32),
        ckpt_path=resume,
    )
    return seen


def combine(seen: list[Seen], sizes: Mapping[str, int]) -> Seen:
    """One account of all stages'; every rank must have logged the same."""
    first = seen[0]
    for other in seen[1:]:
        assert other.losses == first.losses
        assert other.metrics == first.metrics
        assert other.norm == first.norm
    stage_size = world(sizes) // sizes["pipeline_parallel_size"]
    for stage in range(1, sizes["pipeline_parallel_size"]):
        for part in ("gradients", "initial", "parameters"):
            own, others = getattr(first, part), getattr(seen[stage * stage_size], part)
            assert all(torch.equal(own[name], others[name]) for name in own.keys() & others.keys())  # tied
            own.update(others)
    return first


def on_ranks(sizes: Mapping[str, int], function: Callable[..., Seen], *args: Any, **options: Any) -> Seen:
    """What a function sees on all ranks of a layout, which it is given first."""
    return combine(run_ranks(function, world(sizes), sizes, *args, elastic=True, **options), sizes)


@dataclass(frozen=True)
class Case:
    """A fit that is one process's on a layout.

    Attributes:
        module: Makes it; without one the network ``network`` is trained.
        options: Of :func:`train`, on one process as on the layout.
        callbacks: Make those of one fit.
        strategy: Options of the layout's strategy.
        loss: How much losses and metrics may differ, as a part of them.
        norm: The same of the first gradients' norm; None: it isn't compared.
        gradients: How much the first ones may differ.
        parameters: How much the last ones may differ.
    """

    module: Callable[[], L.LightningModule] | None = None
    network: str = "gpt"
    options: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callable[[], L.Callback]] = ()
    strategy: Mapping[str, Any] = field(default_factory=dict)
    loss: float = 2e-6
    norm: float | None = None
    gradients: float | None = None
    parameters: float = 2e-5

    def fit(self, sizes: Mapping[str, int] | None) -> Seen:
        options = {**self.options, **(self.strategy if sizes is not None else {})}
        return train(self.network, sizes, module=self.module, callbacks=[make() for make in self.callbacks], **options)


EXACT: dict[str, Any] = {"norm": 1e-6, "gradients": 1e-7}
"""Of a case whose gradients are compared too."""


def _fit_each(sizes: Mapping[str, int], cases: Sequence[Case]) -> list[Seen]:
    return [case.fit(sizes) for case in cases]


def assert_alike(sizes: Mapping[str, int], *cases: Case) -> list[Seen]:
    """Each case on the same ranks, one after the other, compared with one process; returns the layout's accounts."""
    per_rank = run_ranks(_fit_each, world(sizes), sizes, cases, elastic=True, timeout_s=60 + 30 * len(cases))
    found = [combine([*seen], sizes) for seen in zip(*per_rank)]
    for case, ours in zip(cases, found, strict=True):
        compare(ours, case.fit(None), case)
    return found


def compare(ours: Seen, plain: Seen, case: Case, what: object = None) -> None:
    what = what or case
    assert ours.losses == pytest.approx(plain.losses, rel=case.loss), what
    assert ours.metrics == pytest.approx(plain.metrics, rel=case.loss, abs=1e-7), what
    if case.norm is not None:
        assert ours.norm == pytest.approx(plain.norm, rel=case.norm), what
    if case.gradients is not None:
        assert largest_difference(ours.gradients, plain.gradients) < case.gradients, what
    assert largest_difference(ours.parameters, plain.parameters) < case.parameters, what


def largest_difference(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> float:
    """Over all tensors of equal names; the names must be the same."""
    assert ours.keys() == plain.keys()
    return max(float((ours[name].cpu() - plain[name].cpu()).abs().max()) for name in plain)
