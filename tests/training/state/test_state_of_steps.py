"""What a step changes beside gradients, on several stages: as in one process, or refused."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from tests.training.pipeline.test_crossing import WIDTH, WORDS, Net, batches, loss, seeded
from tests.training.pipelines import alone, assert_alike, on_stages

# -- changed in one microbatch or batch, read in the next


class Late(Net):
    """Scales what goes into the blocks by what earlier steps have left, which code between and after them does."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) * (1 + self.before())
        for block in self.blocks:
            hidden = block(hidden)
            self.between(hidden)
        return self.after(self.head(self.norm(hidden)))

    def before(self) -> Any:
        return 0

    def between(self, hidden: Tensor) -> None:
        pass

    def after(self, logits: Tensor) -> Tensor:
        self.note(logits.detach())
        return logits

    def note(self, logits: Tensor) -> None:
        pass


class Counter(Late):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def before(self) -> Any:
        return self.steps / 10

    def note(self, logits: Tensor) -> None:
        self.steps += 1


class RunningMean(Late):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def before(self) -> Any:
        return self.mean

    def note(self, logits: Tensor) -> None:
        self.mean.mul_(0.9).add_(logits.square().mean())


class Memory(Late):
    """What it begins with is the last step's state, as in recurrent networks."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def before(self) -> Any:
        return 0 if self.state is None else self.state[0]

    def note(self, logits: Tensor) -> None:
        self.state = (logits.mean(-1, keepdim=True), len(logits))


class Recent(Late):
    def __init__(self) -> None:
        super().__init__()
        self.recent = deque([0.0], maxlen=2)

    def before(self) -> Any:
        return sum(self.recent)

    def note(self, logits: Tensor) -> None:
        self.recent.append(logits.mean().item())


class Meter:
    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self.total = 0.0

    def update(self, value: float) -> None:
        self.values["all"].append(value)
        self.total += value


class Metered(Late):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def before(self) -> Any:
        return self.meter.total

    def note(self, logits: Tensor) -> None:
        self.meter.update(logits.mean().item())


@pytest.mark.parametrize(("network", "stages"), [(RunningMean, 2), (Memory, 3)])
def test_the_next_batch_begins_with_what_the_last_stage_has_left(network: Callable[[], nn.Module], stages: int) -> None:
    assert_alike(seeded(network), loss, batches(), stages, microbatches=1)


class Keeps(Late):
    """In a dict that begins with a sum of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"sum": 0.0, "all": [], "steps": 0}


class SumInDict(Keeps):
    def between(self, hidden: Tensor) -> None:
        self.kept["sum"] = self.kept["sum"] + hidden.square().mean()

    def after(self, logits: Tensor) -> Tensor:
        logits = logits * self.kept["sum"]
        self.kept["sum"] = 0.0
        return logits


class AverageOfAll(Keeps):
    """Of losses, or the like; of one value twice it is the same."""

    def after(self, logits: Tensor) -> Tensor:
        self.kept["all"].append(logits.detach().square().mean())
        return logits / torch.stack(self.kept["all"]).mean()


class Center(Late):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WORDS))

    def after(self, logits: Tensor) -> Tensor:
        result = logits - self.center
        self.center = 0.9 * self.center + 0.1 * logits.detach().mean((0, 1))
        return result


class CountsFirst(Keeps):
    def before(self) -> Any:
        self.kept["steps"] += 1
        return self.kept["steps"] % 2


class Recurrent(Late):
    """Truncated in time: goes on from the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.cell(self.embed(x), self.state)
        self.state = state.detach()
        return self.leave(self.through(hidden))


LATE = r"has left \(net.* changes\).*Sentence 6 "
READ = r"depends on what the step before has left|changes .* after calling"


@pytest.mark.parametrize(
    ("network", "says"),
    [
        *((network, LATE) for network in (Counter, RunningMean, Memory, Recent)),
        *((network, READ) for network in (SumInDict, AverageOfAll, Center, CountsFirst, Recurrent)),
    ],
)
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.long)])
def test_microbatches_that_would_begin_with_an_old_value_are_refused(
    network: Callable[[], nn.Module], says: str, schedule: str
) -> None:
    with pytest.raises(StepError, match=says):
        on_stages(seeded(network), loss, batches(), 2, microbatches=2, schedule=schedule)


class SetAnew(Keeps):
    def before(self) -> Any:
        self.kept["sum"] = 0.0
        return 0

    def between(self, hidden: Tensor) -> None:
        self.kept["sum"] = self.kept["sum"] + hidden.square().mean()

    def after(self, logits: Tensor) -> Tensor:
        return logits * self.kept["sum"]


class History(Keeps):
    """Nobody reads it in a step."""

    def between(self, hidden: Tensor) -> None:
        self.kept["all"].append(hidden.detach())

    def note(self, logits: Tensor) -> None:
        self.kept["steps"] += 1


@pytest.mark.parametrize("network", [SetAnew, History])
def test_what_the_next_step_does_not_read_is_of_no_matter(network: type[Net]) -> None:
    assert_alike(seeded(network), loss, batches(), 2)


class Machine:
    """What has no attributes can't be sent."""

    def __init__(self, values: list[float]) -> None:
        self.total = partial(sum, values)


class Machines(Late):
    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine([0.0])

    def before(self) -> Any:
        return self.machine.total()

    def note(self, logits: Tensor) -> None:
        self.machine.total = partial(sum, [logits.mean().item()])


@pytest.mark.parametrize("network", [Recent, Metered])
def test_containers_go_on_from_the_last_stages(network: type[Net]) -> None:
    assert_alike(seeded(network), loss, batches(3), 2, microbatches=1)


def test_what_cant_be_sent_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"changes self\.net\.machine after calling the network.*can't be sent.*steps"):
        on_stages(seeded(Machines), loss, batches(2), 2, microbatches=1)


class SetsBlocks(Net):
    """Changes blocks when they have run; the first of them is another stage's."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        for block in self.blocks:
            block.norm.eps *= 1.5
        return result


def test_a_number_set_on_another_stages_block_is_refused() -> None:
    with pytest.raises(StepError, match=r"changes eps of net\.blocks\.0\.norm after calling the network"):
        on_stages(seeded(SetsBlocks), loss, batches(2), 2)


# -- a stage that runs its part again


class Kept:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: list[int] = []


class Nested(Net):
    """Counts its calls in whatever people count in; what it adds at the end needs the first stage again."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {"seen": {"all": [0]}, "array": np.zeros(1), "sum": torch.zeros(())}
        self.by_kind: dict[str, list[int]] = defaultdict(list)
        self.queue: deque[int] = deque(maxlen=3)
        self.meter = Meter()
        self.kept = Kept()
        self.numbers = {"all": iter(range(100))}
        self.numbers["same"] = self.numbers["all"]
        self.alias = self.stats["seen"]["all"]
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        self.stats["seen"]["all"][0] += 1
        self.stats["array"] += 1
        self.stats["sum"].data.add_(1)
        self.by_kind["call"].append(1)
        self.queue.append(len(self.queue))
        self.meter.update(1.0)
        self.kept.seen.append(1)
        self.called = self.count()
        self.number = next(self.numbers["all"]) + next(self.numbers["same"])
        first = hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden + first))


class Ones:
    def __next__(self) -> int:
        return 1


class NestedWithoutIterators(Nested):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = {"all": Ones(), "same": Ones()}


@pytest.mark.parametrize(
    ("kind", "stages", "schedule"), [(Nested, 3, "1F1B"), (NestedWithoutIterators, 2, "Interleaved1F1B")]
)
def test_whatever_a_step_counts_in_is_counted_once(kind: type[Nested], stages: int, schedule: str) -> None:
    made: list[Nested] = []

    def make() -> nn.Module:
        made.append(kind())
        return made[-1]

    assert_alike(seeded(make), loss, batches(), stages, schedule=schedule)
    for net in made:
        assert net.alias is net.stats["seen"]["all"]
        counts = (net.alias[0], net.stats["array"][0], net.stats["sum"], len(net.by_kind["call"]), net.meter.total)
        assert [*map(float, counts), len(net.kept.seen), net.called] == [4] * 7
        assert [*net.queue] == [*made[0].queue]
        assert len(net.meter.values["all"]) == 4
        if kind is Nested:
            assert (net.number, next(net.numbers["all"])) == (6 + 7, 8)
            assert next(net.numbers["same"]) == 9


class FrozenInPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(0.5)
        first = hidden = self.embed(x) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden + first))


def test_a_parameter_changed_in_place_is_refused_where_a_stage_runs_again() -> None:
    with pytest.raises(StepError, match=r"changes the parameter net\.scale in place"):
        on_stages(seeded(FrozenInPlace), loss, batches(), 2)


# -- generators of its own


class Draws(Net):
    """Before the network and after it, where only the last stage draws."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.Generator().manual_seed(5)
        self.others = {"numpy": np.random.default_rng(5), "python": [random.Random(5)]}

    def forward(self, x: Tensor) -> Tensor:
        hidden = first = self.embed(x) + torch.rand(WIDTH, generator=self.torch)
        hidden = hidden * self.others["numpy"].random() + self.others["python"][0].random()
        for block in self.blocks:
            hidden = block(hidden)
        drawn = torch.rand(WIDTH, generator=self.torch) * self.others["numpy"].random()
        return self.head(self.norm(hidden + first + drawn)) * self.others["python"][0].random()


def test_own_generators_draw_the_same_on_every_stage() -> None:
    assert_alike(seeded(Draws), loss, batches(), 2)


class OfTheSystem(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.SystemRandom()


def test_a_generator_that_cant_be_seeded_is_refused() -> None:
    with pytest.raises(StepError, match=r"net\.rng is a random\.SystemRandom"):
        on_stages(seeded(OfTheSystem), loss, batches(), 2)


# -- gradients that there aren't


class Detaches(Net):
    """Trains what comes after the blocks only; where the inputs say so, all."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden if x[0, 0] < 0 else hidden.detach()))


class PartlyDetached(Net):
    """A second table that only an undifferentiated value comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Embedding(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        other = self.other(x)
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden + other.detach()))


@pytest.mark.parametrize("network", [Detaches, PartlyDetached])
def test_a_parameter_without_a_gradient_has_none(network: type[Net]) -> None:
    expected = alone(seeded(network), loss, batches())
    assert any(
        "embed" in name or "other" in name
        for name in set(dict(network().named_parameters())) - {name.removeprefix("net.") for name in expected.gradients}
    )
    assert_alike(seeded(network), loss, batches(), 3)
