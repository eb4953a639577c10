"""Norms that a user's own hooks take are the whole model's; what goes over parameters by hand is refused.

Then what they are made of: norms of single gradients, of which weights that stages share count once.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from lightning_shard.errors import StepError
from lightning_shard.parallel.clip import _own_norms, count_elsewhere
from lightning_shard.parallel.fsdp.shard import average_gradients
from lightning_shard.plugin.steps.checks.stage_parameters import StageParameters
from lightning_shard.plugin.steps.gradient_norms import WholeNorms, counted_once
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import Case, Model, assert_alike, layout, train


class Clipping(Model):
    """Clips in each of the ways that Lightning's documentation and torch's show.

    Args:
        by_hand: It also goes over all parameters, which some stages don't hold, and some tensor ranks have split.
    """

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand

    def on_after_backward(self) -> None:
        self.first = clip_grad_norm_(self.parameters(), math.inf, norm_type=1.0)
        if self.by_hand:
            gradients = [cast(Tensor, p.grad) for p in self.parameters()]
            self.log("stacked", torch.stack([gradient.norm() for gradient in gradients]).norm())
            self.log("in a row", torch.cat([gradient.flatten() for gradient in gradients]).norm())
            self.log("added up", sum(gradient.square().sum() for gradient in gradients))
            total = torch.zeros(())
            for gradient in gradients:
                total += gradient.abs().max()
            self.log("written to", total)
            for gradient in gradients:
                gradient.mul_(1 / (1 + gradients[-1].norm()))
                torch.mul(torch.tensor(0.5), gradient, out=gradient)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        self.log("head", clip_grad_norm_(self.model.head.parameters(), 1e-2))
        self.log("largest", torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf, math.inf))
        self.log("first", self.first)
        model: Any = self.model
        embedding = [p.grad for p in [model.token_embedding.weight] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(embedding)  # on a stage that hasn't it too
        self.log("embedding", norm)
        for gradient in embedding:
            gradient.mul_((0.01 / norm).clamp(max=1))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.log("norm", clip_grad_norm_(self.parameters(), 0.05))
        clip_grad_value_(self.model.head.parameters(), 1e-4)

    def optimizer_step(self, _: int, __: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        self.log("own loop", clip_grad_norm_(self.parameters(), 0.04))
        self.log("own loop, of each", grad_norm(self, norm_type=2)["grad_2.0_norm_total"])
        optimizer.step()

    def on_train_batch_start(self, *_: Any) -> None:
        self.log("start", get_total_norm(self.gradients_of_ends()))

    def on_before_zero_grad(self, _: Any) -> None:
        if self.model.head.weight.grad is not None:  # as a condition, alike on all stages
            self.log("before zero_grad", clip_grad_norm_(self.parameters(), math.inf))

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("end", get_total_norm(self.gradients_of_ends()))
        self.log("of something else", get_total_norm([outputs["loss"] * 0 + 3, torch.full((2, 8), 1.0)]))

    def on_validation_model_zero_grad(self) -> None:
        """Keeps gradients."""

    def on_train_epoch_end(self) -> None:
        self.log("epoch", grad_norm(self.model, norm_type=1)["grad_1.0_norm_total"])

    def gradients_of_ends(self) -> list[Tensor]:
        model: Any = self.model
        return [p.grad for p in (model.token_embedding.weight, model.head.weight) if p.grad is not None]


class Plain(Model):
    """SGD, whose steps are as long as gradients are."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = clip_grad_norm_(self.parameters(), math.inf)
        self.of_each = grad_norm(self, norm_type=2)

    def on_train_end(self) -> None:
        assert self.norm.dtype == torch.float64
        assert {norm.dtype for norm in self.of_each.values()} == {torch.float64}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("sizes", [layout(data=2), pytest.param(layout(pipeline=2), marks=pytest.mark.long)], ids=str)
def test_clipping_in_64_bits_rounds_to_no_fewer(sizes: dict[str, int]) -> None:
    """Clipped by a norm in 32 bits, parameters are 1e-10 apart after a step."""
    options = {"steps": 2, "trainer": {"precision": "64-true", "gradient_clip_val": 0.05}}
    assert_alike(sizes, Case(Plain, options=options, norm=1e-13, parameters=1e-14))


class Counting(Model):
    """Counts its parameters before it trains, and freezes some."""

    def on_fit_start(self) -> None:
        self.counts = [self.count(self)]
        for parameter in self.model.head.parameters():
            parameter.requires_grad = False
        self.counts += [self.count(self.model.head), self.count(self.model.token_embedding)]

    def on_validation_start(self) -> None:
        self.counts.append(self.count(self) if self.trainer.sanity_checking else 0)

    def on_train_start(self) -> None:
        self.counts.append(self.count(self.model.blocks))

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(self.count(self.model.head))
        self.log_dict({f"count {i}": float(count) for i, count in enumerate(self.counts[:6])})

    def count(self, module: Any) -> int:
        return sum(p.numel() for p in module.parameters())


def test_norms_and_clipping_in_hooks_are_the_whole_models_and_parameters_are_counted_and_frozen_there() -> None:
    counts = {"steps": 2, "trainer": {"num_sanity_val_steps": 1}}
    clips = Case(Clipping, options={"steps": 2}, loss=1e-4)
    assert_alike(layout(pipeline=2), clips, Case(Counting, options=counts, loss=1e-4))


@pytest.mark.long
def test_norms_and_clipping_by_hand_are_the_whole_models_on_data_and_tensor_ranks() -> None:
    # torch 2.11 flattens no DTensor of which a later dim is sharded: refused
    by_hand = partial(Clipping, torch.__version__ >= "2.12")
    assert_alike(layout(data=2, tensor=2), Case(by_hand, options={"steps": 2}, loss=1e-4))


class Average(Model):
    """Keeps an average by hand, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for mean, parameter in zip(self.average.parameters(), self.model.parameters()):
            mean.lerp_(parameter, 0.1)


class OwnNorm(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = sum(p.grad.square().sum() for p in self.parameters() if p.grad is not None)
        for p in self.parameters():
            p.grad = p.grad / total  # type: ignore[operator]


class OfAnotherStage(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        model: Any = self.model
        float(model.token_embedding.weight.grad.norm())


class Weights(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        model: Any = self.model
        model.token_embedding.weight.detach().norm().item()


def walk(kind: Any) -> None:
    train("gpt", layout(pipeline=2), module=kind, steps=2, pipeline_blocks="model.blocks")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Average, r"iterates over parameters\(\) of model\. .*EMAWeightAveraging"),
        (OwnNorm, r"iterates over parameters\(\) of the LightningModule\. .*EMAWeightAveraging"),
        pytest.param(
            *(
                OfAnotherStage,
                "asks for the gradient of model.token_embedding.weight, which stage 0 holds",
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(Weights, "A hook asks for what is computed from model.token_embedding.weight, .*gather_full_parameters"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_going_over_a_stages_parameters_as_if_they_were_all_is_refused(kind: Any, said: str) -> None:
    with pytest.raises(RanksFailed, match=f"StepError: .*{said}"):
        run_ranks(walk, 2, kind, elastic=True)


class Walks(Model):
    """Takes its part for all, where that does no harm by itself; what treats each parameter by itself takes nothing."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.state_dict()

    def on_before_zero_grad(self, *_: Any) -> None:
        assert next(self.parameters()).device == self.device
        self.requires_grad_(True).zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        dict(self.named_parameters())


class LooksUp(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        dict(self.named_parameters())["1.weight"]


def walked() -> list[str]:
    module, sizes = Walks(), layout(pipeline=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train("gpt", sizes, module=lambda: module, steps=2)
        next(module.parameters())
        sum(p.numel() for p in module.parameters())
        module.state_dict()
    with pytest.raises(KeyError) as caught:
        train("gpt", sizes, module=LooksUp, steps=2)
    assert "iterates over named_parameters() of the LightningModule" in caught.value.__notes__[0]
    return [text for each in said if "iterates over" in (text := str(each.message))]


def test_what_takes_a_part_for_all_is_told_once_a_hook_and_after_a_run_and_its_errors_have_it_in_a_note() -> None:
    first, other = run_ranks(walked, 2, elastic=True)
    assert [text.partition(". ")[0] for text in first if not text.startswith("Recorder.")] == [
        f"{who} iterates over {what} of the LightningModule"
        for who, what in (
            ("Walks.on_train_batch_start", "state_dict()"),
            ("Walks.on_train_batch_end", "named_parameters()"),
            ("Code after a run", "parameters()"),
            ("Code after a run", "state_dict()"),
        )
    ]
    assert all("strategy.gather_full_parameters()" in text for text in first)
    assert not other


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norms_are_those_of_the_elements_and_of_16_bit_ones_not_rounded(norm_type: float) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16]
    gradients = [torch.randn(1000, generator=generator).to(dtype) for dtype in kinds]
    exact = sorted(float(torch.linalg.vector_norm(g.to(torch.complex128), norm_type)) for g in gradients)
    mesh: Any = SimpleNamespace(get_coordinate=lambda: [0], mesh_dim_names=("data_parallel",))
    norms = _own_norms(gradients, mesh, torch.device("cpu"), norm_type)
    assert sorted(norms.tolist()) == pytest.approx(exact, rel=1e-5)


def test_the_norm_of_a_large_gradient_loses_nothing_to_its_size() -> None:
    """Added one after another in 32 bits, the squares of so many elements come to 1e-4 less and more."""
    gradient = torch.full((1 << 11, 1 << 12), 1e-3)
    mesh: Any = SimpleNamespace(get_coordinate=lambda: [0], mesh_dim_names=("data_parallel",))
    [norm] = _own_norms([gradient], mesh, torch.device("cpu"), 2.0).tolist()
    assert norm == pytest.approx(float(gradient[0, 0]) * 2**11.5, rel=1e-5)


def test_a_total_norm_has_one_dtype_on_all_stages() -> None:
    """A scale rounded to each stage's own would let the copies of tied weights part."""
    module: Any = nn.Linear(3, 3)
    mesh: Any = SimpleNamespace(get_coordinate=lambda: [0], mesh_dim_names=("data_parallel",))
    groups: Any = SimpleNamespace(gather_over_stages=lambda own: [own, False if own is False else torch.float64])
    norms = WholeNorms(module, mesh, groups, torch.device("cpu"), StageParameters({}))
    third = torch.tensor([1 / 3], dtype=torch.float32)
    assert norms.total([third]).dtype == torch.float64


def test_averaged_scalar_gradients_keep_their_bits_and_imaginary_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which the other has three times this one's gradients."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(4))
    values = [torch.tensor(1 / 3), torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(1 / 3 + 2j)]
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in [*values, values[0]]]
    for parameter, value in zip(parameters, values):
        parameter.grad = value.clone()
    group: Any = None
    average_gradients(parameters, group)
    for parameter, value in zip(parameters, values):
        assert torch.equal(parameter.grad, value * 2)  # type: ignore[arg-type]
    assert parameters[-1].grad is None


TIED = "embedding.weight"


def stage() -> dict[str, Tensor]:
    """Parameters with gradients, one of them tied; the output's weight has the same shape."""
    torch.manual_seed(0)
    layers = {"embedding": nn.Embedding(8, 6), "inner": nn.Linear(6, 6), "output": nn.Linear(6, 8)}
    named: dict[str, Tensor] = dict(nn.ModuleDict(layers).named_parameters())
    count_elsewhere(named[TIED])
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    return named


def counted(named: dict[str, Tensor], given: list[Tensor]) -> list[int]:
    """The indices of the tensors that count."""
    found = {id(tensor) for tensor in counted_once(given, named)}
    return [i for i, tensor in enumerate(given) if id(tensor) in found]


@pytest.mark.parametrize("made", [lambda p: p.grad, lambda p: p])
def test_each_gradient_and_each_weight_counts_once(made: Callable[[Any], Tensor]) -> None:
    named = stage()
    left_out = list(named).index(TIED)
    everyone = [made(p) for p in named.values()]
    assert counted(named, everyone) == [i for i in range(len(named)) if i != left_out]


def test_some_gradients_count_in_any_order() -> None:
    named = stage()
    given = [cast(Tensor, named[name].grad) for name in ("output.weight", TIED, "inner.bias")]
    assert counted(named, given) == [0, 2]
    assert counted(named, given[::2]) == [0, 1]


@pytest.mark.parametrize("made", [lambda p: p.grad / 7, lambda p: p.grad.half(), lambda p: p.grad.norm()])
def test_what_may_be_computed_from_a_tied_weight_is_refused(made: Callable[[Any], Tensor]) -> None:
    named = stage()
    said = r"tensors that are no parameters' gradients.* from that of embedding\.weight, .*pass the gradients"
    for names in ((TIED, "inner.bias"), named):
        with pytest.raises(StepError, match=said):
            counted(named, [made(named[name]) for name in names])
