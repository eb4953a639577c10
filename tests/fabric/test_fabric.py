"""``Fabric(strategy="hybrid_shard")``: a loop as litgpt writes it, on data, tensor and expert ranks."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_shard import HybridShardStrategy as OfTrainer
from lightning_shard import checkpoint
from lightning_shard.errors import ConfigurationError, LayoutError, StateMismatchError
from lightning_shard.fabric import HybridShardStrategy
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import QUIET
from tests.training.mixtures import Mixture

WIDTH, LENGTH, GLOBAL_BATCH, ACCUMULATED = 16, 24, 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = Attention()
        self.mlp = Mixture(WIDTH) if mixes else nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mixes) for _ in range(3))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.temperature)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)) * self.temperature  # type: ignore[no-any-return]


class Mixing(GPT):
    def __init__(self) -> None:
        super().__init__(mixes=True)


class Text(Dataset[Tensor]):
    """Rows of the source of a module of Python's library."""

    def __init__(self) -> None:
        self.ids = torch.tensor(list(inspect.getsource(random).encode("ascii", "replace")))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Tensor:
        return self.ids[row * LENGTH : row * LENGTH + LENGTH + 1]


TENSOR_PLAN = {
    "blocks.*.attend.q": "colwise",
    "blocks.*.attend.k": "colwise",
    "blocks.*.attend.v": "colwise",
    "blocks.*.attend.out": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2, "tensor_parallel_plan": TENSOR_PLAN}),
    "dp2 × tp2": (4, {"tensor_parallel_size": 2, "tensor_parallel_plan": TENSOR_PLAN}),
    "hsdp": (4, {"data_parallel_replicas": 2}),
}
EXPERTS = {"expert_parallel_size": 2, "expert_parallel_plan": {"blocks.*.mlp.experts": "experts"}}


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def part_of_loss(model: Any, rows: Tensor) -> Tensor:
    return loss_of(model, rows) / ACCUMULATED


def start(devices: int, settings: dict[str, Any] | None, **of_fabric: Any) -> Fabric:
    strategy: Any = "auto" if settings is None else HybridShardStrategy(**settings)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, **of_fabric)
    fabric.launch()
    return fabric


def data_ranks(fabric: Fabric) -> int:
    return fabric.strategy.distributed_sampler_kwargs["num_replicas"] if fabric.world_size > 1 else 1  # type: ignore[attr-defined,no-any-return]


def made(fabric: Fabric, network: Callable[[], nn.Module] = GPT, *, after: bool = False) -> dict[str, Any]:
    """``after``: the optimizer is made of what the module was set up to be."""
    fabric.seed_everything(3, verbose=False)
    model: Any = network()
    if after:
        model = fabric.setup_module(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if after:
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "note": "first"}


def train(fabric: Fabric, state: dict[str, Any], steps: int, *, by_strategy: bool = False) -> list[float]:
    """A loop with accumulation, clipping by the norm, a schedule, and evaluation; returns losses, those, and norms.

    ``by_strategy``: on several ranks a step is ``strategy.training_step`` or ``evaluation_step``.
    """
    model, optimizer, several = state["model"], state["optimizer"], fabric.world_size > 1
    strategy: Any = fabric.strategy if several and by_strategy else None
    loader = DataLoader(Text(), batch_size=GLOBAL_BATCH // ACCUMULATED // data_ranks(fabric))
    batches, seen = list(fabric.setup_dataloaders(loader)), []
    for step in range(state["step"], state["step"] + steps):
        total = torch.zeros(())
        for part in range(ACCUMULATED):
            batch = batches[step * ACCUMULATED + part]
            with fabric.no_backward_sync(model, enabled=several and part < ACCUMULATED - 1):
                if strategy:
                    total += strategy.training_step(part_of_loss, model, batch)
                else:
                    loss = part_of_loss(model, batch)
                    fabric.backward(loss)
                    total += loss.detach()
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        state["schedule"].step()
        model.eval()
        with torch.no_grad():
            last = batches[-1]
            loss = strategy.evaluation_step(loss_of, model, last) if strategy else loss_of(model, last)
        model.train()
        seen += [float(fabric.all_reduce(each)) for each in (total, loss)] + [float(norm)]
    state["step"] += steps
    return seen


def whole_run(
    devices: int,
    settings: dict[str, Any] | None,
    folder: Path | None,
    network: Callable[[], nn.Module] = GPT,
    *,
    after: bool = False,
    by_strategy: bool = False,
) -> list[float]:
    fabric = start(devices, settings)
    state = made(fabric, network, after=after)
    seen = []
    for name in ("two", "four"):
        seen += train(fabric, state, 2, by_strategy=by_strategy)
        if folder is not None:
            fabric.save(folder / name, state)
    return seen


def resumed(
    devices: int,
    settings: dict[str, Any] | None,
    path: Path,
    network: Callable[[], nn.Module] = GPT,
    *,
    by_strategy: bool = False,
) -> list[float]:
    fabric = start(devices, settings)
    state = made(fabric, network)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.mul_(0.5)
    state |= {"step": 0, "note": ""}
    rest = fabric.load(path, state)
    assert rest == {}
    assert (state["step"], state["note"]) == (2, "first")
    assert state["schedule"].last_epoch == 2
    return train(fabric, state, 2, by_strategy=by_strategy)


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    return whole_run(1, None, None)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name != "dp2 × tp2" else []) for name in LAYOUTS]
)
def test_trains_saves_and_resumes_as_one_process(name: str, one_process: list[float], tmp_path: Path) -> None:
    world, settings = LAYOUTS[name]
    for seen in run_ranks(whole_run, world, world, settings, tmp_path, elastic=True):
        assert seen == pytest.approx(one_process, rel=1e-4)
    assert checkpoint.verify(tmp_path / "two").ok
    other = LAYOUTS["dp2" if "tensor_parallel_size" in settings else "tp2"][1]
    for seen in run_ranks(resumed, 2, 2, other, tmp_path / "two", elastic=True):
        assert seen == pytest.approx(one_process[6:], rel=1e-4)


def test_experts_over_data_ranks(tmp_path: Path) -> None:
    expected = whole_run(1, None, None, Mixing)
    for seen in run_ranks(whole_run, 2, 2, EXPERTS, tmp_path, Mixing, elastic=True):
        assert seen == pytest.approx(expected, rel=1e-4)
    for seen in run_ranks(resumed, 2, 2, {}, tmp_path / "two", Mixing, elastic=True):
        assert seen == pytest.approx(expected[6:], rel=1e-4)


class Trained(L.LightningModule):
    """The same network, trained by a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = GPT()

    def training_step(self, rows: Tensor, _: int) -> Tensor:
        loss = loss_of(self.net, rows)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(Text(), batch_size=2)


def by_a_trainer(devices: int, settings: dict[str, Any], steps: int, save: Path | None, load: Path | None) -> Any:
    strategy: Any = OfTrainer(microbatches=2, **settings) if settings.get("pipeline_parallel_size") else OfTrainer()
    trainer = L.Trainer(**QUIET, devices=devices, strategy=strategy, max_steps=steps)
    trainer.fit(Trained(), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return strategy.gather_full_parameters()


def through_fabric(path: Path, out: Path) -> None:
    """Of a Trainer's checkpoint the network and its optimizer; a step; and a checkpoint of it."""
    fabric = start(2, {})
    state = made(fabric)
    asked = {"model": state["model"], "optimizer": state["optimizer"], "global_step": 0}
    rest = fabric.load(path, asked)
    assert asked["global_step"] == 2
    assert "loops" in rest
    moments = state["optimizer"].optimizer.state[next(iter(state["model"].parameters()))]
    assert float(moments["step"]) == 2
    state["schedule"].step()
    train(fabric, state, 1)
    fabric.save(out, {key: state[key] for key in ("model", "optimizer")})


def test_checkpoints_go_from_a_trainer_to_fabric_and_back(tmp_path: Path) -> None:
    of_pipeline = {"pipeline_parallel_size": 2}
    run_ranks(by_a_trainer, 2, 2, of_pipeline, 2, tmp_path / "trainer", None, elastic=True)
    run_ranks(through_fabric, 2, tmp_path / "trainer", tmp_path / "fabric", elastic=True)
    before, after = (checkpoint.load(tmp_path / name) for name in ("trainer", "fabric"))
    assert {f"net.{name}" for name in after} == before.keys()
    assert not torch.equal(after["lm_head.weight"], before["net.lm_head.weight"])
    full, _ = run_ranks(by_a_trainer, 2, 2, of_pipeline, 0, None, tmp_path / "fabric", elastic=True)
    assert full.keys() == before.keys()
    assert all(torch.equal(full[f"net.{name}"], value) for name, value in after.items())


def of_one_file(path: Path, folder: Path) -> None:
    fabric = start(2, {"save_distributed_checkpoint": False})
    state = made(fabric)
    train(fabric, state, 2)
    fabric.save(path, state)
    kept = {name: value.full_tensor().clone() for name, value in state["model"].named_parameters() if value.ndim}
    other = made(fabric)
    assert fabric.load(path, other) == {}
    assert (other["step"], other["schedule"].last_epoch) == (2, 2)
    for name, value in other["model"].named_parameters():
        assert not value.ndim or torch.equal(value.full_tensor(), kept[name])
    before, after = (each["optimizer"].optimizer.state.values() for each in (state, other))
    assert all(torch.equal(full_tensor(x["exp_avg"]), full_tensor(y["exp_avg"])) for x, y in zip(before, after))
    assert [each.name for each in folder.iterdir()] == [path.name]


def test_one_file_for_all_other_strategies(tmp_path: Path, one_process: list[float]) -> None:
    path = tmp_path / "whole.ckpt"
    run_ranks(of_one_file, 2, path, tmp_path, elastic=True)
    assert resumed(1, None, path) == pytest.approx(one_process[6:], rel=1e-4)


def in_many_ways(folder: Path) -> None:
    fabric = start(2, {"data_parallel_size": 2}, precision="bf16-mixed")
    with fabric.init_module(empty_init=True):
        first = GPT()
    assert all(parameter.is_meta for parameter in first.parameters())
    first = fabric.setup_module(first)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9))
    second = fabric.setup_module(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    own = Text()[fabric.global_rank][None]
    fabric.backward(loss_of(first, own) + second(torch.randn(8, 4)).square().mean())
    optimizer.step()
    state = {"net.a": first, "b": second, "optimizer": optimizer, "list": [1, 2.5, None], "tensor": torch.arange(3)}

    fabric.save(folder / "two", state)
    names = checkpoint.load(folder / "two").keys()
    assert {"net_a.lm_head.weight", "b.0.weight", "b.1.running_mean"} <= names
    asked = {"b": second, "list": None}
    with torch.no_grad():
        second.get_parameter("0.weight").zero_()
    rest = fabric.load(folder / "two", asked)
    assert asked["list"] == [1, 2.5, None]
    assert torch.equal(rest["tensor"], torch.arange(3))
    assert second.get_parameter("0.weight").full_tensor().any()

    fabric.save(folder / "part", {"model": first, "of": {"x": 1, "y": 2}}, filter={"model": _is_head, "of": _is_x})
    assert [*checkpoint.load(folder / "part")] == ["lm_head.weight"]
    with pytest.raises(StateMismatchError, match="wte"):
        fabric.load(folder / "part", {"model": first})
    with pytest.raises(StateMismatchError, match="'epoch'"):
        fabric.load(folder / "part", {"epoch": 0})
    asked = {"model": first, "epoch": 0, "of": None}
    fabric.load(folder / "part", asked, strict=False)
    assert (asked["epoch"], asked["of"]) == (0, {"x": 1})

    fabric.save(folder / "raw", {"model": first})
    with torch.no_grad():
        first.get_parameter("lm_head.weight").zero_()
    fabric.load_raw(folder / "raw", first)
    assert first.get_parameter("lm_head.weight").full_tensor().any()
    with pytest.raises(ConfigurationError, match="alone"):
        fabric.load_raw(folder / "raw", optimizer)
    everything = fabric.load(folder / "two")
    assert everything["b"].keys() == second.state_dict().keys()

    gathered = fabric.all_gather(torch.tensor([fabric.global_rank]))
    assert gathered.flatten().tolist() == [0, 1]
    for parameter in first.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    with pytest.raises(RuntimeError, match="nan"):
        fabric.clip_gradients(first, optimizer, max_norm=1.0)
    with pytest.raises(ConfigurationError, match="no module"):
        fabric.setup_optimizers(torch.optim.SGD([nn.Parameter(torch.ones(2))]))


def _is_head(name: str, _: Any) -> bool:
    return name.startswith("lm_head")


def _is_x(name: str, _: Any) -> bool:
    return name == "x"


def test_modules_optimizers_and_values_in_the_ways_of_fabric(tmp_path: Path) -> None:
    run_ranks(in_many_ways, 2, tmp_path, elastic=True)

    plain = Fabric(accelerator="cpu", devices=1)  # another strategy takes the same keys from the folder
    model, second = GPT(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, optimizer = plain.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = {"net.a": model, "b": second, "optimizer": optimizer, "list": None}
    rest = plain.load(tmp_path / "two", state)
    stored = checkpoint.load(tmp_path / "two")
    assert rest.keys() == {"tensor"}
    assert state["list"] == [1, 2.5, None]
    assert torch.equal(model.get_parameter("lm_head.weight"), stored["net_a.lm_head.weight"])
    assert torch.equal(second[0].weight, stored["b.0.weight"])
    assert len(optimizer.optimizer.state) == len([*model.parameters()])
    assert plain.load(tmp_path / "two").keys() == state.keys() | {"tensor"}


def fails(world: int) -> None:
    start(world, {"tensor_parallel_size": 3})


def test_sizes_that_do_not_fit_are_refused_on_every_rank() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(fails, 2, 2, elastic=True)
    assert len(failed.value.errors) == 2
    assert all(isinstance(error, LayoutError) for error in failed.value.errors.values())
