"""Experts dealt to ranks compute what one process computes, and their checkpoints are any other's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import checkpoint
from lightning_shard.errors import PlanError
from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.parity import (
    GLOBAL_BATCH,
    Seen,
    combine,
    largest_difference,
    layout,
    loader,
    train,
    trainer_of,
    world,
)
from tests.refusals import Refusal, assert_refused
from tests.training.mixtures import MixtureModel, OnMeta, assert_alike, trained
from tests.training.parallel.small import Descends

EP2 = {**layout(data=2), "expert_parallel_size": 2}
SAFE = "own, all tokens to one expert"


def test_experts_of_two_ranks() -> None:
    clipped = {"trainer": {"gradient_clip_val": 0.5}}
    assert_alike(EP2, ["mixtral", SAFE, "list, called where chosen"], **clipped)


class Dropped(nn.Module):
    """Tokens of little weight are sent to no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen.masked_fill(weights < 0.3, -1), weights)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        results = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(indices == expert)
            rows = (hidden[token] @ self.weight[expert]).tanh() * weights[token, place, None]
            results = results.index_add(0, token, rows)
        return results


class OfDropped(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropped() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


class Capped(Experts):
    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        results = super().forward(hidden, indices, weights)
        for expert in range(self.num_experts):
            of_expert = (indices == expert).any(1)
            results = torch.where((of_expert & (of_expert.cumsum(0) > 10))[:, None], 0, results)
        return results


class WithCapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), Capped()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


class OfCapped(OfDropped):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithCapped() for _ in range(2))


def tokens() -> list[Tensor]:
    return [torch.linspace(-1, 1, 64).view(8, 8).sin()]


def many_tokens() -> list[Tensor]:
    return [torch.randn(32, 8, generator=torch.Generator().manual_seed(1))]


DEALT = {"expert_parallel_plan": {"blocks.*.experts": "experts"}}


def test_experts_whose_rows_depend_on_each_other_and_tokens_of_no_expert_are_refused_on_all_ranks() -> None:
    capped = r"blocks\.0\.experts computes something else for a row among others"
    dropped = r"blocks.0.experts was called with \d+ indices that aren't of its 4 experts"
    assert_refused(
        {
            "capped": Refusal(EP2, OfCapped, PlanError, capped, DEALT, many_tokens),
            "dropped": Refusal(EP2, OfDropped, PlanError, dropped, DEALT, tokens),
        }
    )


class Selecting(nn.Module):
    """Has only those samples computed by experts whose first number is positive: of some batches none."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        weights, indices = self.router(x[chosen]).softmax(-1).topk(2)
        return x.index_put((chosen,), x[chosen] + self.experts(x[chosen], indices, weights))


class OfSelecting(OfDropped):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Selecting() for _ in range(2))


def samples_of_the_first_data_rank() -> list[Tensor]:
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    batch[:4, 0], batch[4:, 0] = 4.0, -4.0
    return [batch]


def test_a_data_rank_may_have_no_tokens() -> None:
    assert_trains_alike(OfSelecting, samples_of_the_first_data_rank, "ep2", **DEALT)


@pytest.mark.long
def test_lists_of_experts_however_they_are_called() -> None:
    assert_alike(EP2, ["list, called with all", "list, all tokens to one expert", "list, dense"])


@pytest.mark.long
def test_penalties_on_slopes() -> None:
    assert_alike(EP2, ["own: sloped", f"{SAFE}: sloped", "list, called where chosen: sloped", "list, dense: sloped"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss", "deepseek", "deepseek-v3", "olmoe", "granite", "qwen2"])
def test_experts_of_other_models(kind: str) -> None:
    assert_alike(EP2, [kind])


def in_halves(sizes: dict[str, int] | None, kinds: list[str]) -> dict[str, Seen]:
    return trained(sizes, kinds, trainer={"precision": "bf16-mixed"})


@pytest.mark.long
def test_experts_under_mixed_precision_compute_what_lightnings_own_does() -> None:
    """By the bounds of ``test_memory_settings.py``; a router's near ties may fall otherwise, so of one step."""
    kinds = ["mixtral", "list, called where chosen"]
    ours, plain = run_ranks(in_halves, 2, EP2, kinds, elastic=True, timeout_s=120)[0], in_halves(None, kinds)
    for kind in kinds:
        assert ours[kind].losses[0] == pytest.approx(plain[kind].losses[0], rel=1e-4), kind
        assert ours[kind].norm == pytest.approx(plain[kind].norm, rel=2e-2), kind
        for name, expected in plain[kind].gradients.items():
            assert float((ours[kind].gradients[name] - expected).abs().max() / expected.abs().max()) < 2e-2, name


@pytest.mark.long
def test_experts_in_64_bits_are_not_rounded_on_their_way() -> None:
    kinds, whole = ["own", "list, called where chosen"], {"trainer": {"precision": "64-true"}}
    ours = run_ranks(trained, 2, EP2, kinds, elastic=True, timeout_s=120, **whole)[0]
    for kind, plain in trained(None, kinds, **whole).items():
        assert largest_difference(ours[kind].gradients, plain.gradients) < 1e-14, kind


@pytest.mark.long
def test_fewer_experts_than_ranks_that_share_them() -> None:
    assert_alike({**layout(data=4), "expert_parallel_size": 2}, ["mixtral of two experts"])


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        {**layout(data=4), "expert_parallel_size": 2},
        {**layout(data=4), "expert_parallel_size": 4},
        {**layout(data=4), "expert_parallel_size": 2, "data_parallel_replicas": 2},
        {**layout(pipeline=2, data=2), "expert_parallel_size": 2},
        {**layout(data=2, tensor=2), "expert_parallel_size": 2},
        {**layout(pipeline=2, data=2, tensor=2), "expert_parallel_size": 2},
    ],
    ids=["ep2×dp2", "ep4", "ep2×dp2 replicas", "pp2×ep2", "ep2×tp2", "pp2×ep2×tp2"],
)
def test_experts_beside_other_axes(sizes: dict[str, int], tmp_path: Path) -> None:
    kinds = ["mixtral", "qwen3", "deepseek-v3", "own", SAFE, "list, called where chosen"]
    assert_alike(sizes, kinds, tmp_path, timeout_s=300)


class Balanced(MixtureModel):
    """With a load-balancing loss of each part of a batch: of a data rank's samples, by their microbatches."""

    def __init__(self, data_ranks: int = 1, microbatches: int = 1) -> None:
        super().__init__("mixtral")
        self.parts = data_ranks, microbatches
        self.model.config.output_router_logits = True

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        data_ranks, microbatches = self.parts
        shares = [{key: value[rank::data_ranks] for key, value in batch.items()} for rank in range(data_ranks)]
        losses = []
        for share in shares:
            parts = zip(share["x"].chunk(microbatches), share["y"].chunk(microbatches))
            losses += [self._of_part(x, y) for x, y in parts]
        return torch.stack(losses).mean()

    def _of_part(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.model(x)
        return F.cross_entropy(out.logits.flatten(0, 1), y.flatten()) + 0.5 * out.aux_loss


def balanced(sizes: dict[str, int] | None, *parts: int, **options: Any) -> Seen:
    return train("llama", sizes, module=partial(Balanced, *parts), steps=1, trainer={"limit_val_batches": 0}, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "microbatches"), [(EP2, 1), ({**EP2, **layout(pipeline=2, data=2)}, 2)], ids=["ep2", "pp2 ep2"]
)
def test_a_load_balancing_loss_is_each_data_ranks_and_microbatchs_own(sizes: dict[str, int], microbatches: int) -> None:
    options = {"microbatches": microbatches} if microbatches > 1 else {}
    ours = combine(run_ranks(balanced, world(sizes), sizes, elastic=True, **options), sizes)
    plain, of_the_batch = balanced(None, 2, microbatches), balanced(None)
    assert ours.losses == pytest.approx(plain.losses, rel=3e-6)
    assert ours.norm == pytest.approx(plain.norm, rel=1e-5)
    assert largest_difference(ours.gradients, plain.gradients) < 2e-6
    assert largest_difference(ours.gradients, of_the_batch.gradients) > 1e-5
    assert ours.losses != pytest.approx(of_the_batch.losses, rel=3e-6)


def made_on_meta(sizes: dict[str, int]) -> Seen:
    return train("llama", sizes, module=OnMeta, steps=1, trainer={"limit_val_batches": 0})


@pytest.mark.long
def test_experts_made_on_meta_begin_alike() -> None:
    """Dealt, cut in packed halves, and sharded."""
    layouts = (EP2, layout(tensor=2), layout(data=2))
    dealt, *others = (run_ranks(made_on_meta, 2, sizes, elastic=True)[0] for sizes in layouts)
    for other in others:
        assert largest_difference(dealt.initial, other.initial) == 0
        assert dealt.losses == pytest.approx(other.losses, rel=3e-6)


def there_and_back(folder: Path) -> tuple[list[tuple[int, ...]], list[float]]:
    """Loaded and saved on the other layout without a step between, and trained on, by turns on each."""
    placed, losses = [], []
    dp2 = layout(data=2)
    runs = [("a", None, EP2, 2), ("b", "a", dp2, 2), ("c", "b", EP2, 2), ("d", "a-mid", dp2, 3), ("e", "d-mid", EP2, 4)]
    for name, earlier, sizes, steps in runs:
        L.seed_everything(3)
        module, seen = MixtureModel("mixtral"), Seen()
        trainer = trainer_of(sizes, max_steps=steps, callbacks=[Followed(seen, folder / f"{name}-mid")])
        trainer.fit(module, loader(GLOBAL_BATCH // 2), ckpt_path=earlier and str(folder / earlier))
        trainer.save_checkpoint(str(folder / name))
        weight = module.get_parameter("model.model.layers.0.mlp.experts.down_proj")
        assert isinstance(weight, DTensor)
        placed.append((weight.device_mesh.ndim, *weight.to_local().shape))
        losses += seen.losses
    return placed, losses


class Followed(L.Callback):
    """Keeps each step's loss, and saves after the last one, in mid-epoch."""

    def __init__(self, seen: Seen, path: Path) -> None:
        self.seen = seen
        self.path = str(path)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.losses.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self.path)


def test_checkpoints_go_from_dealt_experts_to_whole_ones_and_back(tmp_path: Path) -> None:
    placed, losses = run_ranks(there_and_back, 2, tmp_path, elastic=True)[0]
    dealt, whole = (2, 2, 32, 64), (1, 2, 32, 64)  # of 4 experts: on ranks of their own, and sharded by torch
    assert placed == [dealt, whole, dealt, whole, dealt]
    for name in ("b", "c"):
        # bytes, of the optimizer too; "a" was saved after its fit, which counts the epoch as ended
        differences = checkpoint.diff(tmp_path / "a", tmp_path / name).differences
        assert not [each for each in differences if each.name != "epoch" and "epoch_progress" not in each.name]
    plain = trained(None, ["mixtral"], steps=4, trainer={"limit_val_batches": 0})["mixtral"]
    assert losses == pytest.approx(plain.losses, rel=3e-6)
