"""A tensor-parallel plan that leaves out what runs on split features: completed where that is known, else refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.errors import PlanError
from lightning_shard.testing import run_ranks
from tests.alike import Trains, assert_train_alike
from tests.parity import layout, like_llama, trainer_of
from tests.refusals import Refusal, assert_refused
from tests.training.parallel.small import Descends, random_batches

WIDTH = 16
SPLIT = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Feed(nn.Module):
    """Between its layers: a trained slope for all features, or a norm over all of them."""

    def __init__(self, between: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between = between()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Model(Descends):
    def __init__(self, between: Callable[[], nn.Module] = nn.PReLU) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Feed(between) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return F.mse_loss(batch, torch.ones_like(batch))


batches = partial(random_batches, 8, WIDTH, count=2)


LIKE_PHI: dict[str, Any] = {**like_llama(), "num_hidden_layers": 2}
#: A norm for all heads, and weights for each.
NORMS_ON_HEADS: dict[str, Callable[[], nn.Module]] = {
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**LIKE_PHI, qk_layernorm=True)),
    "cohere": lambda: hf.CohereForCausalLM(
        hf.CohereConfig(**{**LIKE_PHI, "tie_word_embeddings": True}, use_qk_norm=True, pad_token_id=0)
    ),
}


class OnHeads(Descends):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = NORMS_ON_HEADS[kind]()
        for name, parameter in self.model.named_parameters():
            if "norm" in name:  # which begin alike on all heads
                nn.init.normal_(parameter, 1.0, 0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


def texts() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        yield torch.randint(1, 64, (8, 12), generator=generator)


class Gated(nn.Module):
    """What is computed from whole features meets split ones. No parameter is computed alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh() * self.gate(x).sum(-1, keepdim=True))


def gated() -> Model:
    model = Model()
    model.layers = nn.ModuleList(Gated() for _ in range(2))
    return model


SUMMED = SPLIT | {"layers.*.between": "replicated_with_grad_allreduce"}
ALIKE = {
    "what runs on split features, where the plan says so": Trains(
        Model, batches, "tp2", options={"tensor_parallel_plan": SUMMED}
    ),
    "shared outputs that meet split features": Trains(
        gated, batches, "tp2", options={"tensor_parallel_plan": SPLIT | {"layers.*.gate": "shared_output"}}
    ),
    "norms on heads that a model's own plan forgets": Trains(partial(OnHeads, "phi"), texts, "tp2"),
}
ALIKE_TOO = {"also of Cohere": Trains(partial(OnHeads, "cohere"), texts, "tp2")}


@pytest.mark.parametrize("cases", [ALIKE, pytest.param(ALIKE_TOO, marks=pytest.mark.long)], ids=["some", "others"])
def test_what_is_known_is_completed(cases: dict[str, Trains]) -> None:
    assert_train_alike(cases)


class Watched(Model):
    """A hook looks at features that are split: it has the loss depend on them, or counts them in a buffer."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("largest", torch.zeros(()))
        self.penalty: Tensor | float = 0.0
        for layer in self.layers:
            layer.between = nn.Tanh()
        self.layers[0].between.register_forward_hook(self.look)

    def look(self, _: nn.Module, __: Tensor, features: Tensor) -> None:
        if self.what == "loss":
            self.penalty = features.square().mean()
        else:
            largest = self.largest.data if self.what == "data" else self.largest
            largest.add_(features.detach().abs().max())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.penalty


class WatchedLate(Watched):
    """After some steps."""

    def __init__(self) -> None:
        super().__init__("loss")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx > 4 else loss - 0.1 * self.penalty


def fit(module: L.LightningModule, plan: dict[str, str] = SPLIT) -> None:
    trainer_of({"tensor_parallel_size": 2, "tensor_parallel_plan": plan}, max_steps=1).fit(
        module, DataLoader(torch.randn(8, WIDTH), batch_size=8)
    )


def warned_of(module: L.LightningModule, word: str, plan: dict[str, str] = SPLIT) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, plan)
    return [str(warning.message) for warning in caught if word in str(warning.message)]


class Drops(Model):
    """Drops features where they are split, or behind that."""

    def __init__(self, splits: bool, always: bool) -> None:
        super().__init__()
        for layer in self.layers:
            layer.between = Noise() if always else nn.Dropout(0.5 if splits else 0.0)
            if not splits:
                layer.down = nn.Sequential(layer.down, nn.Dropout(0.5))


class Noise(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return F.dropout(features, 0.5, training=True)


def draws_warned_of() -> list[int]:
    """How often, for each."""
    found = []
    for splits, always in ((True, False), (True, True), (False, False)):
        plan = SPLIT if splits else {"layers.*.up": "colwise", "layers.*.down.0": "rowwise"}
        found.append(len(warned_of(Drops(splits, always), "draws random numbers", plan)))
    return found


def test_random_numbers_for_split_features_are_told_of() -> None:
    assert run_ranks(draws_warned_of, 2, elastic=True) == [[1, 1, 0], [0, 0, 0]]


class Keeps(nn.Module):
    """As attention that is asked for its weights: what it computes is seen past the block."""

    def forward(self, features: Tensor) -> Tensor:
        self.kept = features.detach()
        return features.tanh()


class Shows(Model):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        for layer in self.layers:
            layer.between = Keeps()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        features = self.layers[0].between.kept
        if self.how == "returned":
            return {"loss": loss, "features": features}
        size = features.square().mean()
        self.log("size", size if self.how == "logged" else size.item())
        self.log("loss", loss)
        return loss


def refused_and_told() -> tuple[str, list[str], list[str]]:
    with pytest.raises(PlanError) as error:
        fit(Shows("returned"))
    return str(error.value), warned_of(Shows("logged"), "tensor ranks"), warned_of(Shows("a number"), "tensor ranks")


def test_split_features_that_a_step_returns_are_refused_and_told_of_where_it_logs_them() -> None:
    (refused, *told), (same, *nothing) = run_ranks(refused_and_told, 2, elastic=True)
    assert refused == same
    assert refused.startswith("What training_step returns (features) isn't the same on the tensor ranks (of shape (8, ")
    for [said] in told:
        assert said.startswith("training_step logs 'size', which is ")
        assert "If it is no time or the like" in said
    assert nothing == [[], []]


class After(nn.Module):
    """A gate on whole features, and a norm of whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        return x + self.down(self.up(given).tanh()) * self.gate(given).sigmoid()


def of_whole() -> Model:
    model = Model()
    model.layers = nn.ModuleList(After() for _ in range(2))
    return model


sequences = partial(random_batches, 4, 2, WIDTH, count=2)


def refused(make: Any, says: str, batches: Any = batches, steps: int = 2, **more: str) -> Refusal:
    """By a plan that has more, of layers' modules."""
    plan = SPLIT | {f"layers.*.{name}": style for name, style in more.items()}
    options, trainer = {"tensor_parallel_plan": plan}, {"max_steps": steps}
    return Refusal(layout(tensor=2), make, PlanError, says, options, batches, trainer=trainer)


SLOPE = r"layers\.0 computes something else .* the gradient of between\.weight"
GRADIENT = r"layers\.[01] computes something else .* first in the gradient of"
LOSSES = "The tensor ranks have different losses"
SHARED, ADDED_UP, LATER = "shared_output", "replicated_with_grad_allreduce", partial(random_batches, 8, WIDTH, count=8)
REFUSED = {
    "a slope for all features isn't summed": refused(Model, SLOPE),
    "whole outputs meet split features": refused(gated, GRADIENT, gate="colwise_gather_output"),
    "the gate's own gradients are summed, not its input's": refused(gated, GRADIENT, gate=ADDED_UP),
    "a hook has the loss depend on split features": refused(partial(Watched, "loss"), LOSSES),
    "that begins after some steps": refused(WatchedLate, LOSSES, LATER, steps=8),
    "a hook counts split features": refused(partial(Watched, "buffer"), "largest: the tensor ranks have"),
    "by data": refused(partial(Watched, "data"), "largest: the tensor ranks have"),
    "gradients of a gate on whole features are added up": refused(of_whole, GRADIENT, sequences, gate=SHARED),
    "those of a norm of whole ones": refused(of_whole, GRADIENT, sequences, norm=ADDED_UP),
    "and of one by sequences": refused(of_whole, GRADIENT, sequences, norm="sequence"),
}


def test_what_a_plan_forgets_that_isnt_known_is_refused() -> None:
    assert_refused(REFUSED)
