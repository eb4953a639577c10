"""The search for a layout: complete, right against trying all, and honest about what it threw out."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.dryrun.counting.counts import Counts
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.moments import stage_memories
from lightning_shard.dryrun.memory.optimizer import OptimizerState, ask
from lightning_shard.dryrun.memory.peak import Held, Stage
from lightning_shard.dryrun.search import search as searching
from lightning_shard.dryrun.search import workshop
from lightning_shard.dryrun.search.found import Choice, Found, Why
from lightning_shard.dryrun.search.search import search
from lightning_shard.dryrun.search.workshop import Space, Workshop, layouts
from lightning_shard.dryrun.timing.devices import Device, Rates, device
from lightning_shard.dryrun.timing.layout import Timing
from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.pipeline.placement import place
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.assembly.placing import as_run
from lightning_shard.plugin.settings import Settings
from recipes import plans
from recipes.gpt import MLP, LanguageModel

WIDTH, BLOCKS, DEVICES, BATCH = 16, 4, 4, 8
SLOW = replace(device("h100"), per_machine=2)
Module = partial(LanguageModel, width=WIDTH, heads=4, layers=BLOCKS, context=16)
TOKENS = torch.zeros(8, 17, dtype=torch.long)


@pytest.fixture(scope="module")
def model() -> Model:
    settings = Settings("auto", None, tensor_parallel_plan=plans.GPT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Model.of(Module, TOKENS, settings, stages=BLOCKS)


@pytest.fixture(scope="module")
def optimizer(model: Model) -> OptimizerState:
    return ask(model)


def space(memory: float = 1e12, **options: Any) -> Space:
    return Space(DEVICES, BATCH, int(memory), most_samples=2, **options)


def rates(profile: Device = SLOW) -> Rates:
    return Rates(profile, "float32")


@pytest.fixture(scope="module")
def everything(model: Model, optimizer: OptimizerState) -> Found:
    return search(model, optimizer, space(), rates(), most=10**6)


def sizes(choice: Choice) -> tuple[Any, ...]:
    layout = choice.layout
    return (
        layout.pipeline_parallel_size,
        layout.tensor_parallel_size,
        layout.data_parallel_replicas,
        choice.schedule,
        choice.samples,
        choice.microbatches,
        choice.activation_checkpointing,
    )


def test_all_layouts_of_all_devices_are_considered() -> None:
    found = set(layouts(8, 4))
    by_hand = {
        Layout(stages, data, replicas, tensor, 0, experts)
        for stages in (1, 2, 4)
        for tensor in (1, 2, 4, 8)
        for data in (1, 2, 4, 8)
        for replicas in (1, 2, 4, 8)
        for experts in (1, 2, 4, 8)
        if stages * tensor * data == 8 and data % replicas == 0 and data // replicas % experts == 0
    }
    assert found == by_hand
    assert {layout.world_size for layout in found} == {8}


def order_of(name: str | None, ranks: int, microbatches: int) -> Schedule | None:
    """``None`` where there is none for these numbers, or for so many blocks."""
    if name is None:
        return build("1F1B", 1, 1)
    if microbatches < SCHEDULES[name].microbatches * ranks or SCHEDULES[name].usual * ranks > BLOCKS:
        return None
    return build(name, ranks, microbatches)


def test_the_search_finds_what_trying_all_finds(model: Model, optimizer: OptimizerState, everything: Found) -> None:
    """Each choice planned by itself: its whole order, and every stage of it."""
    tried: dict[tuple[Any, ...], tuple[float, int]] = {}
    for stages, tensor in ((s, t) for s in (1, 2, 4) for t in (1, 2, 4) if DEVICES % (s * t) == 0):
        data = DEVICES // stages // tensor
        for samples in (n for n in (1, 2) if BATCH // data % n == 0):
            microbatches = BATCH // data // samples
            if microbatches < stages:
                continue
            (plain,) = workshop.count_each(model, tensor, 1, [samples])
            for schedule, way in product(SCHEDULES if stages > 1 else (None,), (None, "selective", True)):
                order = order_of(schedule, stages, microbatches)
                if order is None or (way is not None and order.splits_backwards):
                    continue
                counts = workshop.count_two_parts(model, plain) if order.splits_backwards else plain
                cost = as_run(model.cost, way)  # type: ignore[arg-type]
                placed = place(cost, order.stages, "auto" if stages > 1 else "even").stages
                blocks = [stage.blocks for stage in placed]
                held = Held(way, accumulates=1 if schedule else microbatches)  # type: ignore[arg-type]
                for replicas in (n for n in (1, 2, 4) if data % n == 0):
                    layout = Layout(stages, data, replicas, tensor)
                    made = [Stage(counts, layout, own, held, optimizer) for own in blocks]
                    timing, memory = Timing.of(made, order, rates()), stage_memories(made, order)
                    peak = max(stage.peak.total for stage in memory)
                    name = (stages, tensor, replicas, schedule, samples, microbatches, way)
                    tried[name] = timing.simulated().step, peak
    assert {name[3] for name in tried} == {None, *SCHEDULES}
    found = {sizes(choice): choice for choice in everything.choices}
    assert found.keys() == tried.keys()
    for name, (step, peak) in tried.items():
        choice = found[name]
        assert choice.step.step == pytest.approx(step)
        assert choice.peak_bytes == peak, name
    assert [c.step.step for c in everything.choices if c.step] == sorted(step for step, _ in tried.values())


def test_the_quick_search_lists_the_same_and_simulates_few(
    model: Model, optimizer: OptimizerState, everything: Found
) -> None:
    quick = search(model, optimizer, space(), rates(), most=5)
    seconds = [choice.step.step for choice in quick.choices if choice.step]
    assert seconds == [choice.step.step for choice in everything.choices[:5] if choice.step]
    assert quick.simulated < everything.simulated / 2
    assert quick.considered == everything.considered
    assert len(quick.choices) + sum(quick.dropped.values()) == quick.considered
    reasons = {why.partition(" (")[0] for why in everything.dropped}
    assert reasons <= {Why.TOO_FEW, Why.TOO_FEW_BLOCKS, Why.NOT_IN_PARTS, Why.CANT_BE_CUT}


def test_of_small_devices_those_that_fit_are_listed(model: Model, optimizer: OptimizerState, everything: Found) -> None:
    peaks = sorted(choice.peak_bytes for choice in everything.choices)
    small = peaks[len(peaks) // 3]
    fitting = [choice for choice in everything.choices if choice.peak_bytes <= small]
    found = search(model, optimizer, space(small), rates(), most=3)
    assert [c.step for c in found.choices] == [c.step for c in fitting[:3]]
    assert found.dropped[Why.DOESNT_FIT] > 0
    none = search(model, optimizer, space(1000), rates())
    assert none.choices == ()
    assert none.dropped[Why.DOESNT_FIT] == len(everything.choices)


@pytest.mark.long
def test_a_bound_is_below_the_step_of_every_candidate(model: Model, optimizer: OptimizerState) -> None:
    made = Workshop(model, optimizer, replace(space(), most_samples=4), rates())
    ways = list(made.bounded(Counter()))
    assert {way.samples for way in ways} == {1, 2, 4}
    for way in ways:
        assert made.peak(way)
        assert 0 < way.bound <= made.timing(way).simulated().step


def test_the_best_is_a_line_for_the_recipe() -> None:
    several = Choice(Layout(8, 8, 2, 8), "1F1B", 1, 32, True)
    assert several.overrides == (
        "strategy.pipeline_parallel_size=8 strategy.data_parallel_size=8 strategy.data_parallel_replicas=2"
        " strategy.tensor_parallel_size=8 strategy.schedule=1F1B strategy.microbatches=32"
        " strategy.activation_checkpointing=true data.batch_size=32"
    )
    single = Choice(Layout(1, 4, 1, 2), None, 2, 8, "selective")
    assert single.overrides == (
        "strategy.pipeline_parallel_size=1 strategy.data_parallel_size=4 strategy.tensor_parallel_size=2"
        " strategy.activation_checkpointing=selective data.batch_size=2 trainer.accumulate_grad_batches=8"
    )


def test_reasons_are_counted(model: Model, optimizer: OptimizerState) -> None:
    dropped: Counter[str] = Counter(search(model, optimizer, replace(space(), global_batch=2), rates()).dropped)
    assert dropped[Why.DOESNT_DIVIDE] == sum(layout.data_parallel_size == 4 for layout in layouts(4, BLOCKS))
    assert dropped[Why.TOO_FEW] > 0
    [no_experts] = [why for why in dropped if why.startswith(Why.CANT_BE_CUT)]
    assert "(expert_parallel_size=2 needs experts, and LanguageModel has no" in no_experts
    assert no_experts.endswith('such as {"layers.*.moe.experts": "experts"})')
    whole = replace(model, settings=replace(model.settings, tensor_parallel_plan=None))
    reasons = " ".join(search(whole, optimizer, space(), rates()).dropped)
    assert (
        f"{Why.CANT_BE_CUT} (tensor_parallel_size=2 needs a plan and LanguageModel brings none: pass tensor_" in reasons
    )


class OfFixedWidth(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().view(*x.shape[:-1], 4 * WIDTH))


class CutInVain(LanguageModel):
    def __init__(self) -> None:
        super().__init__(**Module.keywords)
        for block in self.model.blocks:
            block.mlp = OfFixedWidth(WIDTH, 4 * WIDTH)


def test_what_runs_whole_only_is_thrown_out_with_its_reason(
    model: Model, optimizer: OptimizerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    plain = workshop.count_each

    def counted(model: Model, tensor: int, expert: int, samples: Sequence[int]) -> list[Counts]:
        tried.append((tensor, expert))
        return plain(model, tensor, expert, samples)

    monkeypatch.setattr(workshop, "count_each", counted)
    in_vain = Model.of(CutInVain, model.batch, model.settings, stages=BLOCKS)
    found = search(in_vain, optimizer, space(), rates(), most=10**6)
    [why] = [why for why in found.dropped if "without values" in why]
    assert why.startswith(f"{Why.CANT_BE_CUT} (The step with tensor_parallel_size=2 can't be run on")
    assert "(RuntimeError: " in why
    whole = {layout for layout in layouts(DEVICES, BLOCKS) if layout.tensor_parallel_size == 1}
    assert {choice.layout for choice in found.choices} <= whole
    assert found.choices
    assert tried.count((2, 1)) == 1  # whatever the microbatch


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"devices": 0}, r"devices \(0\) must be an integer of at least 1"),
        ({"global_batch": 2.5}, r"global_batch \(2.5\) must be an integer"),
        ({"most": 0}, r"most \(0\) must be an integer"),
    ],
)
def test_what_cant_be_searched_is_refused(changed: dict[str, Any], said: str) -> None:
    given = {"devices": 2, "device": "h100", "global_batch": 8, **changed}
    with pytest.raises(ConfigurationError, match=said):
        searching.search_module(Module, TOKENS, **given)


def test_a_step_that_cant_be_counted_is_refused(model: Model, optimizer: OptimizerState) -> None:
    class Broken(LanguageModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise RuntimeError("reads a file")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken = Model.of(Broken, model.batch, model.settings, stages=BLOCKS)
    with pytest.raises(ConfigurationError, match=r"can't be run on tensors without values .*reads a file"):
        search(broken, optimizer, space(), rates())


def test_a_search_with_an_optimizer_that_cant_be_asked_is_refused() -> None:
    """What it keeps isn't known, and so isn't whether anything fits."""

    class Unasked(LanguageModel):
        def configure_optimizers(self) -> Any:
            raise RuntimeError("needs a cluster")

    with pytest.raises(ConfigurationError, match=r"optimizer's state isn't known \(RuntimeError: needs a cluster\)"):
        searching.search_module(Unasked, TOKENS, devices=2, device="h100", global_batch=8)
