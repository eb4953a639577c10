"""An embedding that is also the head's weight, or one layer at all places: one parameter, as on one process."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from lightning_shard import checkpoint
from lightning_shard.errors import ShardError
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from lightning_shard.testing.processes import RanksFailed
from tests.parity import (
    EXACT,
    GLOBAL_BATCH,
    VOCABULARY,
    Case,
    Model,
    Seen,
    assert_alike,
    combine,
    compare,
    layout,
    like_llama,
    loader,
    train,
    trainer_of,
    world,
)

TIED = {
    "gpt2": ("model.transformer.wte.weight", "model.lm_head.weight"),
    "llama": ("model.model.embed_tokens.weight", "model.lm_head.weight"),
}
CLIPPED = {"gradient_clip_val": 0.3}
"""Below the norm, so that one that counted the parameter twice would change every parameter."""


class Tied(Model):
    def __init__(self, network: str) -> None:
        super().__init__(network)
        embedding, head = TIED[network]
        self.get_submodule(head.rpartition(".")[0]).weight = self.get_parameter(embedding)


def fit(network: str, sizes: dict[str, int] | None = None, **options: Any) -> Seen:
    trainer = {**CLIPPED, **options.pop("trainer", {})}
    return train(network, sizes, module=lambda: Tied(network), trainer=trainer, **options)


class Albert(Model):
    """One layer that runs again and again."""

    def __init__(self) -> None:
        import transformers

        L.LightningModule.__init__(self)
        torch.manual_seed(1)
        sizes = {"vocab_size": VOCABULARY, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 64}
        layers = {"num_hidden_layers": 6, "num_attention_heads": 4}
        off = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        self.on_meta = False
        self.model: nn.Module = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**sizes, **layers, **off))


class TakingNorms(Tied):
    """Takes the norm of copies of gradients."""

    def on_before_optimizer_step(self, _: Any) -> None:
        get_total_norm([p.grad.float().clone() for p in self.model.parameters() if p.grad is not None])


def take_norms() -> Seen:
    return train("llama", layout(pipeline=2), module=lambda: TakingNorms("llama"), steps=2)


def test_norms_of_copies_of_gradients_are_refused_where_a_weight_is_tied_over_stages() -> None:
    with pytest.raises(RanksFailed, match="pass the gradients themselves"):
        run_ranks(take_norms, 2)


@pytest.mark.parametrize(
    ("network", "sizes", "options"),
    [
        ("llama", layout(pipeline=2, data=2), {"schedule": "InterleavedZeroBubble"}),
        pytest.param("gpt2", layout(pipeline=3), {"placement": [1, 2, 1], "microbatches": 4}, marks=pytest.mark.long),
    ],
    ids=["pp2×dp2", "pp3"],
)
def test_a_tied_embedding_over_stages_is_that_of_one_process(
    network: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    plain = fit(network)
    per_rank = run_ranks(fit, world(sizes), network, sizes, elastic=True, **options)
    embedding, head = TIED[network]
    assert torch.equal(per_rank[0].parameters[embedding], per_rank[-1].parameters[embedding])
    ours = combine(per_rank, sizes)
    assert head not in ours.parameters  # one parameter, by its first name
    assert plain.norm > CLIPPED["gradient_clip_val"]
    compare(ours, plain, Case(**EXACT))


def saving(sizes: dict[str, int], folder: Path, resume: Path | None = None, module: Any = None) -> Seen:
    keep = L.pytorch.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"trainer": {**CLIPPED, "enable_checkpointing": True}, "callbacks": [keep], "shuffle": True}
    path = str(resume / "step=2.ckpt") if resume else None
    return train("llama", sizes, module=module or partial(Tied, "llama"), steps=4, resume=path, **options)


def saved_and_resumed(folder: Path) -> dict[str, Seen]:
    """On two stages, on two data ranks, and from the middle of each on the other's layout."""
    staged, whole = layout(pipeline=2), layout(data=2)
    return {
        "staged": saving(staged, folder / "staged"),
        "whole": saving(whole, folder / "whole"),
        "whole of staged": saving(whole, folder / "3", folder / "staged"),
        "staged of whole": saving(staged, folder / "4", folder / "whole"),
        "staged ALBERT": saving(staged, folder / "ALBERT", module=Albert),
        "whole of staged ALBERT": saving(whole, folder / "5", folder / "ALBERT", module=Albert),
    }


def test_it_is_saved_once_and_goes_on_on_any_layout(tmp_path: Path) -> None:
    per_rank = run_ranks(saved_and_resumed, 2, tmp_path, elastic=True)
    curves = {}
    for name in per_rank[0]:
        sizes = layout(pipeline=2) if name.startswith("staged") else layout(data=2)
        curves[name] = combine([ran[name] for ran in per_rank], sizes).losses
    assert curves["staged"] == pytest.approx(curves["whole"], rel=2e-6)
    assert curves["whole of staged"] == pytest.approx(curves["whole"][2:], rel=2e-6)
    assert curves["staged of whole"] == pytest.approx(curves["whole"][2:], rel=2e-6)
    assert curves["whole of staged ALBERT"] == pytest.approx(curves["staged ALBERT"][2:], rel=2e-6)
    embedding, head = TIED["llama"]
    found = {name: checkpoint.read(tmp_path / name / "step=2.ckpt") for name in ("staged", "whole", "ALBERT")}
    for stored in found.values():
        assert checkpoint.verify(stored.path).ok
    assert {*found["ALBERT"]} == Albert().state_dict().keys()
    assert found["staged"].alias_of(head) == found["whole"].alias_of(head) == embedding
    assert found["staged"].optimizer.keys() == found["whole"].optimizer.keys()
    assert sum(f.bytes - f.header_bytes for f in found["staged"].manifest.files if f.path.startswith("model/")) == sum(
        stored.nbytes for name, stored in found["staged"].items() if name != head
    )


class Scaled(Tied):
    """A scalar, too, is used on both stages. It isn't sharded, so each batch's gradients are added to its own."""

    def __init__(self, network: str) -> None:
        super().__init__(network)
        scale = nn.Parameter(torch.tensor(1.0))
        for part in (self.model.get_input_embeddings(), self.model.lm_head):
            part.scale = scale
            part.register_forward_hook(lambda part, _, out: out * part.scale)


class KeepsGradients(Tied):
    """Sums gradients over all steps: ``zero_grad`` does nothing."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.named_parameters(), lr=0.1)

    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


ACCUMULATED = {"steps": 2, "trainer": {**CLIPPED, "accumulate_grad_batches": 3}}
"""With a validation every two batches, so in mid-accumulation too."""
IN_TWO_PARTS = {"reduce_each_microbatch": True, "schedule": "ZBVZeroBubble"}


@pytest.mark.long
def test_gradients_that_are_accumulated_or_kept_over_steps_are_added_once_however_often_they_are_reduced() -> None:
    """At the last batch, or at each of them, by FSDP2's units."""
    scaled = [
        Case(partial(Scaled, "llama"), "llama", options=ACCUMULATED, strategy=strategy, gradients=1e-7)
        for strategy in ({}, IN_TWO_PARTS)
    ]
    assert_alike(layout(pipeline=2), *scaled, Case(partial(KeepsGradients, "llama"), "llama", parameters=2e-6))


class Grouped(Tied):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        rank = self.trainer.strategy.layout.pipeline_rank
        return torch.optim.AdamW([{"params": list(self.parameters()), "lr": 1e-3 if rank else 1e-4}])


class Untried(torch.optim.SGD):
    """Takes steps of one length, of all of a stage's parameters. It can't be made by its settings, nor copied."""

    def __init__(self, parameters: Any, lr: float, norm: str) -> None:
        super().__init__(parameters, lr=lr)
        self.norms = torch.zeros(3)

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(gradients, torch.stack([full_tensor(gradient).norm() for gradient in gradients]).norm())
        super().step()
        return loss


class Drifts(Tied):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Untried(self.parameters(), 0.1, norm="of all")


class FreezesByPlace(Tied):
    def on_train_start(self) -> None:
        first = self.trainer.strategy.layout.pipeline_rank == 0
        self.get_parameter(TIED["llama"][0]).requires_grad_(not first)


class Shared(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x)


class BuffersOnBothSides(L.LightningModule):
    def __init__(self, _: str) -> None:
        super().__init__()
        shared = Shared()
        self.model = nn.Sequential(
            OrderedDict(
                before=nn.Sequential(nn.Embedding(64, 32), shared),
                layers=nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))),
                after=nn.Sequential(shared, nn.Linear(32, 64)),
            )
        )

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


REFUSED = {
    Grouped: r"embed_tokens\.weight is on two .*stages.*'lr': 0\.0001.*'lr': 0\.001",
    Drifts: r"embed_tokens\.weight is tied over two pipeline stages, and their copies have parted",
    FreezesByPlace: r"embed_tokens\.weight is on pipeline ranks .* only some of them train it: freeze",
    BuffersOnBothSides: r"training_step changes model\.before\.1\.seen, and several pipeline stages hold",
}


def fit_refused() -> None:
    for kind, says in REFUSED.items():
        trainer = trainer_of({"pipeline_parallel_size": 2, "pipeline_blocks": "layers"}, max_steps=1)
        with pytest.raises(ShardError, match=says):
            trainer.fit(kind("llama"), loader(GLOBAL_BATCH))


def test_copies_that_would_part_are_refused_on_every_rank() -> None:
    run_ranks(fit_refused, 2, elastic=True)


class OnMeta(L.LightningModule):
    """Tied by the network itself."""

    training_step, loss, configure_optimizers = Model.training_step, Model.loss, Model.configure_optimizers
    validation_step = Model.validation_step

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            import transformers

            with torch.device("meta"):
                settings = {**like_llama(), "tie_word_embeddings": True}
                self.model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
                self.kind = "llama"


def initial(sizes: dict[str, int]) -> Seen:
    return train("llama", sizes, steps=1, module=OnMeta)


@pytest.mark.long
def test_a_network_that_was_tied_on_meta_stays_so_and_begins_alike_on_every_layout() -> None:
    embedding, head = TIED["llama"]
    seen = {}
    for name, sizes in {"dp2": layout(data=2), "pp2": layout(pipeline=2)}.items():
        seen[name] = combine(run_ranks(initial, 2, sizes, elastic=True), sizes).initial
        assert embedding in seen[name]
        assert head not in seen[name]
    assert seen["dp2"].keys() == seen["pp2"].keys()
    assert all(torch.equal(seen["dp2"][name], seen["pp2"][name]) for name in seen["dp2"])
