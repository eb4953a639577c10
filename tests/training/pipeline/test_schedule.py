"""Schedules: complete, runnable in every rank's order, and as lean as they claim; orders from files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as of_torch

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Action, Schedule, read_csv, to_csv
from lightning_shard.pipeline.schedules.simulate import Costs, simulate


@st.composite
def built(draw: st.DrawFn, *, keeps_busy: bool = False) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    least, most = SCHEDULES[name].stages
    ranks = draw(st.integers(1, 5))
    stages = draw(st.integers(least, most or 3))
    fewest = 1 if SCHEDULES[name].can_have_fewer and not keeps_busy else 2 * ranks
    return build(name, ranks, draw(st.integers(fewest, 4 * ranks + 1)), stages)


@given(schedule=built())
def test_an_independent_walk_meets_no_deadlock_and_every_message_where_it_is_expected(schedule: Schedule) -> None:
    """By the rules of the runtime: sends don't wait, a receive takes whatever its link brings next."""
    links: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    local: set[tuple[str, int, int]] = set()
    waiting = [list(row) for row in schedule.rows]
    last = schedule.stages - 1

    def receive(source: int, rank: int, kind: str, microbatch: int) -> bool:
        """Whether what a stage sends is there; takes it."""
        holder = schedule.rank_of[source]
        if holder == rank:
            return (kind, source, microbatch) in local
        messages = links.get((holder, rank, kind == "F"), [])
        if not messages:
            return False
        assert messages.pop(0) == (source, microbatch)
        return True

    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(waiting):
            while row:
                stage, kind, microbatch = row[0]
                if kind == "F" and stage > 0 and not receive(stage - 1, rank, "F", microbatch):
                    break
                if kind in "BI" and stage < last and not receive(stage + 1, rank, "B", microbatch):
                    break
                assert kind == "F" or ("F" if kind in "BI" else "B", stage, microbatch) in local
                local.add(("F" if kind == "F" else "B", stage, microbatch))
                to = schedule.rank_of.get(stage + 1 if kind == "F" else stage - 1)
                if kind != "W" and to not in (None, rank):
                    links.setdefault((rank, to, kind == "F"), []).append((stage, microbatch))
                row.pop(0)
                progress = True
    assert not any(waiting), "deadlock"
    assert not any(links.values()), "sent and not received"


@given(schedule=built())
def test_what_is_in_flight_is_bounded_as_claimed(schedule: Schedule) -> None:
    ranks = len(schedule.rows)
    stages = schedule.stages // ranks
    count = max(1, schedule.microbatches // ranks)
    largest_round = -(-schedule.microbatches // count)
    for rank in range(ranks):
        bound = {
            "GPipe": schedule.microbatches,
            "1F1B": ranks - rank,
            "Eager1F1B": 2 * (ranks - 1 - rank) + 1,
            "Interleaved1F1B": (stages - 1) * largest_round + 2 * (ranks - 1 - rank) + 1,
            "InterleavedZeroBubble": (stages - 1) * largest_round + ranks,
            "ZBVZeroBubble": 2 * ranks,
            "DualPipeV": 2 * ranks + 1,
        }[schedule.name]
        assert schedule.in_flight(rank) <= min(bound, stages * schedule.microbatches)


@settings(max_examples=60)
@given(schedule=built(keeps_busy=True), times=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)))
def test_bubbles_are_no_longer_than_in_theory(schedule: Schedule, times: tuple[int, int, int]) -> None:
    forward, inputs, weights = times
    if schedule.name in ("ZBVZeroBubble", "DualPipeV"):
        inputs = weights = forward
    ranks = len(schedule.rows)
    bubble = {
        "ZBVZeroBubble": forward,
        "DualPipeV": forward,
        "InterleavedZeroBubble": forward + inputs - min(times),
    }.get(schedule.name, forward + inputs + weights)
    one = (1,) * schedule.stages
    costs = Costs([forward * each for each in one], [inputs * each for each in one], [weights * each for each in one])
    timeline = simulate(schedule, costs)
    assert max(map(timeline.idle, range(ranks))) <= (ranks - 1) * bubble


@given(schedule=built(), microbatches=st.integers(1, 20))
def test_a_smaller_last_batch_runs_in_the_same_order(schedule: Schedule, microbatches: int) -> None:
    fewer = schedule.first(microbatches)
    fewer.check()
    assert fewer.microbatches == min(microbatches, schedule.microbatches)
    assert all(fewer.in_flight(rank) <= schedule.in_flight(rank) for rank in range(len(schedule.rows)))


def test_1f1b_reads_as_in_the_paper() -> None:
    text = to_csv(build("1F1B", 2, 3))
    assert text == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


# -- next to torch's


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_torch_takes_our_orders(name: str) -> None:
    schedule = build(name, 4, 8)
    rows = to_csv(schedule).splitlines()
    read = {rank: [of_torch._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}
    rank_of = of_torch._validate_schedule(read, 4, schedule.stages, 8)  # type: ignore[arg-type]
    assert rank_of == schedule.rank_of
    of_torch._add_send_recv(read, rank_of.__getitem__, schedule.stages)  # type: ignore[arg-type]


# -- files


@settings(max_examples=20)
@given(schedule=built())
def test_a_schedule_reads_back_as_it_was_written(schedule: Schedule, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "order.csv"
    path.write_text(to_csv(schedule))
    assert read_csv(str(path)).rows == schedule.rows


def test_a_v_that_begins_on_its_first_row_is_turned_so_that_the_last_stage_is_on_the_last_rank(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text("0F0,3F0,(;3B0)OVERLAP_F_B,0UNSHARD,0RECV_B0,0B0\n,1F0,2F0,2I0,2W0,1I0,1W0\n")
    schedule = read_csv(str(path))
    assert [schedule.stages_of(rank) for rank in range(2)] == [[1, 2], [0, 3]]
    assert schedule.rows[1] == (Action(0, "F", 0), Action(3, "F", 0), Action(3, "B", 0), Action(0, "B", 0))


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it has no actions"),
        ("0F0,0X1\n", r"has '0X1' in row 0, column 1"),
        ("0F0,0F\n", r"has '0F' in row 0, column 1"),
        (GOOD.replace("0F1,", ""), "lacks 0F1"),
        (GOOD.replace(",1B1", ""), "lacks 1I1, nor 1B1"),
        (GOOD.replace("1B1", "1I1"), "lacks 1W1"),
        (GOOD.replace("1B1", "1B0"), "runs 1I0 twice"),
        (GOOD.replace("1B1", "1W1,1I1"), "wait for each other.*1W1 for 1I1"),
        (GOOD.replace("0F0,0F1", "0F1,0F0"), "0F1 runs before 0F0; run a stage's forwards in ascending order"),
        ("0F0,0B0,0B1,0F1\n1F0,1B0,1F1,1B1\n", "rank 0 at 0B1 for 0F1"),
        (GOOD.replace("1F0,1B0,1F1,1B1", "1F0,1F1,1B1,1B0"), "takes gradients of stage 1, microbatch 0 from rank 1"),
        (GOOD.replace("0F0,0F1,0B0", "0F0,0B0,0F1").replace("1F0,1B0,1F1", "1F0,1F1,1B0"), "would wait for each other"),
        (GOOD + "\n1F2\n", "stage 1 is on rank"),
        (GOOD.replace("1", "2"), "its stages are"),
        ("0F0,0B0\n2F0,2B0\n1F0,1B0\n", r"its last stage \(2\) is on rank 1 of 3"),
    ],
)
def test_a_file_that_cant_run_is_refused_by_what_is_wrong(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        read_csv(str(path))


def test_a_file_is_of_one_layout(tmp_path: Path) -> None:
    path = tmp_path / "good.csv"
    path.write_text(GOOD)
    assert build(str(path), 2).microbatches == 2
    with pytest.raises(ConfigurationError, match=r"an order for pipeline_parallel_size=2, and that is 4: use 2"):
        build(str(path), 4)
    with pytest.raises(ConfigurationError, match=r"an order for microbatches=2, and that is 8"):
        build(str(path), 2, 8)
    with pytest.raises(ConfigurationError, match=r"can't be read.*give the path of a CSV file"):
        build(str(tmp_path / "none.csv"), 2)


# -- settings


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages", "says"),
    [
        ("1F", 2, 4, None, "isn't one of"),
        ("DualPipeV", 4, 7, None, r"at least 2 × pipeline_parallel_size \(4\).*use 8 or more"),
        ("GPipe", 2, 0, None, "integer of at least 1"),
        ("GPipe", 2, True, None, "integer of at least 1"),
        ("1F1B", 2, 4, 2, "can't have 2 stages on each rank: use 1."),
        ("Interleaved1F1B", 2, 4, 1, "can't have 1 stages on each rank: use 2 or more"),
        ("ZBVZeroBubble", 2, 4, 3, "can't have 3 stages on each rank: use 2."),
    ],
)
def test_what_cant_run_is_refused(name: str, ranks: int, microbatches: int, stages: int | None, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build(name, ranks, microbatches, stages)
