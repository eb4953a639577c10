"""Tensor-parallel plans that take more than linear layers: packed experts, tied weights, LoRA; and what they refuse."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from lightning_shard.errors import PlanError
from lightning_shard.testing import run_ranks
from tests.alike import Trains, assert_train_alike
from tests.parity import VOCABULARY, layout, trainer_of
from tests.refusals import Refusal, assert_refused
from tests.training.mixtures import NETWORKS, assert_alike
from tests.training.parallel.small import Descends, random_batches


def test_packed_experts_and_tied_weights(tmp_path: Path) -> None:
    assert_alike(layout(tensor=2), ["qwen3", "tied llama"], tmp_path)


@pytest.mark.long
def test_tied_weights_over_stages_and_tensor_ranks(tmp_path: Path) -> None:
    over_two_batches = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_alike(layout(pipeline=2, tensor=2), ["tied llama"], tmp_path, trainer=over_two_batches)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        (layout(tensor=2), ["mixtral", "deepseek", "llama with LoRA"]),
        (layout(data=2, tensor=2), ["qwen3", "llama with LoRA"]),
        (layout(pipeline=2, tensor=2), ["qwen3", "llama with LoRA"]),
    ],
    ids=["tp2", "dp2×tp2", "pp2×tp2"],
)
def test_more_packed_experts(sizes: dict[str, int], kinds: list[str], tmp_path: Path) -> None:
    assert_alike(sizes, kinds, tmp_path)


class Fused(nn.Module):
    """A block whose queries, keys and values are one layer's; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        self.calls += 1
        return x + self.out(attended.transpose(1, 2).flatten(2))


class OfFused(L.LightningModule):
    block: type[nn.Module] = Fused

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([self.block() for _ in range(2)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return (x - batch.roll(1, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


batches = partial(random_batches, 8, 6, 16, count=2)
RIGHT = {"blocks.*.qkv": "colwise_gather_output", "blocks.*.out": "rowwise_split_input"}
WRONG = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}


class Hidden(OfFused):
    """Blocks that add nothing at first, or next to nothing."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        for block in self.blocks:
            for parameter in block.out.parameters():
                parameter.data.mul_(scale)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # Adam's first steps would be of the size of rounding too


class Noisy(Fused):
    """Draws from global generators, and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        own = torch.rand(x.shape, generator=self.generator)
        return F.dropout(super().forward(x), 0.5) + torch.randn_like(x) * own * random.random()


class OfNoisy(OfFused):
    block = Noisy


def noisy_losses(ranks: int) -> list[float]:
    module, losses = OfNoisy(), Losses()
    options = {"tensor_parallel_size": ranks, "tensor_parallel_plan": RIGHT}
    trainer = trainer_of(options, ranks, max_epochs=1, callbacks=[losses])
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return losses.seen


def test_the_look_at_a_plan_leaves_generators_where_they_were() -> None:
    [alone] = run_ranks(noisy_losses, 1, 1, elastic=True)
    assert run_ranks(noisy_losses, 2, 2, elastic=True) == [pytest.approx(alone, rel=1e-5)] * 2


class Sharpened(nn.Module):
    """Its softmax is over the features at hand, which the plan splits; by the layer's number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x))
        return x + self.down(inner.softmax(-1) if self.number % 4 == 3 else inner)


class ByNumber(OfFused):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Sharpened, range(4)))


class InPlace(nn.Module):
    """A block that changes in place what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 16)
        self.gate = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate += 1
        hidden = self.down(self.act(self.up(x)) * gate)
        hidden += x
        return hidden


class OfInPlace(OfFused):
    block = InPlace


class Checkpointed(OfFused):
    """Its step recomputes blocks itself: what a comparison saves and computes isn't taken for the block's."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            selective = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
            x = checkpoint(block, x, use_reentrant=False, context_fn=selective)
        return (x - batch.roll(1, 1)).square().mean()


class FusedBySize(Fused):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split(16, -1)
        return x + self.out(query.sigmoid() * (key + value))


class OfFusedBySize(OfFused):
    block = FusedBySize


BY_SEQUENCE = {"blocks.0": "scatter_sequence", "blocks.*.qkv": "colwise_sequence", "blocks.*.out": "rowwise_sequence"}
DIFFERS = r"blocks\.0 computes something else when it is split"


def refused(make: Any, says: str, plan: dict[str, str] = WRONG, batches: Any = batches) -> Refusal:
    return Refusal(layout(tensor=2), make, PlanError, says, {"tensor_parallel_plan": plan}, batches)


def test_plans_that_take_one_thing_for_another_are_refused() -> None:
    uneven = partial(random_batches, 8, 5, 16)
    two = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    assert_refused(
        {
            "queries, keys and values as one": refused(OfFused, DIFFERS),
            "hidden by weights at first": refused(partial(Hidden, 0.0), DIFFERS),
            "nearly hidden": refused(partial(Hidden, 1e-6), DIFFERS),
            "in blocks that a step recomputes": refused(Checkpointed, DIFFERS),
            "in one of blocks that differ by a setting": refused(ByNumber, DIFFERS.replace("0", "3"), two),
            "beside noise": refused(OfNoisy, DIFFERS),
            "too few parts are left": refused(
                OfFusedBySize, "The first step fails with tensor_parallel_plan: not enough values to unpack"
            ),
            "sequences that ranks don't divide": refused(
                OfFused, r"Sequences of 5 positions can't be split over tensor_parallel_size=2", BY_SEQUENCE, uneven
            ),
        }
    )


def tokens() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(2))
    return [{"x": ids, "y": ids}]


class Slopes(Descends):
    """A penalty on slopes: gradients of gradients through what a plan splits."""

    def __init__(self, network: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model: Any = NETWORKS[network]()
        self.model.set_attn_implementation("eager")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.model.get_input_embeddings()(batch["x"])
        logits = self.model(inputs_embeds=x).logits
        each = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
        (slope,) = torch.autograd.grad(each.sum(), x, create_graph=True)
        return each.mean() + slope.square().mean()


class HeldTwice(Descends):
    """Its network is an attribute of its own, and of another module that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapper = nn.ModuleDict({"net": nn.Sequential(Feed(), Feed())})
        self.net = self.wrapper["net"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


vectors = partial(random_batches, 8, 16, count=2)


def split(make: Any, plan: dict[str, str], batches: Any = batches) -> Trains:
    return Trains(make, batches, "tp2", options={"tensor_parallel_plan": plan})


def held_twice(first: str) -> Trains:
    return split(HeldTwice, {f"{first}.*.up": "colwise", f"{first}.*.down": "rowwise"}, vectors)


WITH_GATE = {"blocks.*.up": "colwise", "blocks.*.gate": "shared_output", "blocks.*.down": "rowwise"}
ALIKE = {
    "one layer for queries, keys and values": split(OfFused, RIGHT),
    "what split layers return, changed in place": split(OfInPlace, WITH_GATE),
    "a module that is held twice": held_twice("net"),
}
ALIKE_TOO = {
    "by its other name": held_twice("wrapper.net"),
    "blocks that a step recomputes": split(Checkpointed, RIGHT),
    **{
        f"gradients of gradients of {network}": Trains(partial(Slopes, network), tokens, "tp2")
        for network in ("mixtral", "deepseek")
    },
}


@pytest.mark.parametrize("cases", [ALIKE, pytest.param(ALIKE_TOO, marks=pytest.mark.long)], ids=["some", "others"])
def test_what_a_plan_splits_computes_what_one_process_does(cases: dict[str, Trains]) -> None:
    assert_train_alike(cases)
