"""How much CPU does a checkpoint cost beside its bytes: what a rank spends on hundreds of tiny tensors?

A state of a few bytes per tensor is saved again and again, and loaded. What is left then is the fixed cost: planning,
talking, opening files. It is told in seconds of CPU, which a busy machine changes little, of the first rank, which
makes the manifest of a save and reads that of a load for all, and of the slowest of the others.

    python benchmarks/profile_planning.py                  # half a minute; results/profile_planning-<date>.json
    python benchmarks/profile_planning.py --profile save   # and the functions that rank 1 spends it in
"""

from __future__ import annotations

# ruff: noqa: E402
import argparse
import cProfile
import io
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.report import RESULTS, Row, Target, show, write_result
from benchmarks.lib.rounds import TIMEOUT_S, everyone, quiet
from benchmarks.lib.state import MOMENTS, State, columns, rows
from lightning_shard import checkpoint
from lightning_shard.testing import preload, run_ranks

FIRST, AGAIN = "the first save of a run", "a repeated save"
LOAD, OTHER = "a load, same layout", "a load, other layout"
FIRST_RANK, OTHERS = "first rank", "slowest of the others"
TARGETS = {AGAIN: Target("seconds", 0.005, most=True), LOAD: Target("seconds", 0.015, most=True)}
WIDTH = 8


def main() -> None:
    options = _options()
    preload()
    with tempfile.TemporaryDirectory(prefix="planning-", dir=options.folder) as folder:
        found, profile = run_ranks(
            _on_rank,
            options.ranks,
            folder,
            options.tensors,
            options.rounds,
            options.profile,
            timeout_s=TIMEOUT_S,
        )[0]
    table = [
        Row(what, who, statistics.median(times), target=TARGETS.get(what), rounds_s=list(times))
        for what, per_rank in found.items()
        for who, times in zip((FIRST_RANK, OTHERS), zip(*((of[0], max(of[1:])) for of in per_rank)))
    ]
    show(f"CPU of a rank, {options.tensors} tensors of {options.ranks} ranks", table)
    if profile:
        print(profile)
    if options.results is not None:
        print(write_result("profile_planning", table, options.results, tensors=options.tensors, ranks=options.ranks))


def _on_rank(folder: str, tensors: int, rounds: int, profiled: str | None) -> tuple[dict[str, list[list[float]]], str]:
    quiet()
    count = -(-tensors // (2 + len(MOMENTS)))
    shapes = {f"model.layers.{number}.weight": (WIDTH, WIDTH) for number in range(count)}
    import torch.distributed as dist

    here, there = State.of(shapes, rows(dist.get_world_size())), State.of(shapes, columns(dist.get_world_size()))
    path = f"{folder}/checkpoint"

    def save() -> None:
        checkpoint.save(here.model, path, optimizer=here.optimizer, fsync=False)

    def load(state: State) -> None:
        checkpoint.load(path, state.model, optimizer=state.optimizer)

    found = {FIRST: _cpu_s(save, 1), AGAIN: _cpu_s(save, rounds)}
    load(here)
    found[LOAD] = _cpu_s(lambda: load(here), rounds)
    found[OTHER] = _cpu_s(lambda: load(there), rounds)
    wrong = there.differences(State.of(shapes, columns(dist.get_world_size())))
    assert not wrong, f"{wrong[0]} isn't what was saved"
    text = ""
    if profiled is not None:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(rounds):
            save() if profiled == "save" else load(here)
        profile.disable()
        out = io.StringIO()
        pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(30)
        text = everyone(out.getvalue())[-1]
    return found, text


def _cpu_s(work: Callable[[], None], rounds: int) -> list[list[float]]:
    """CPU seconds of each rank's process, all its threads together, per round."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(everyone(time.process_time() - start))
    return times


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=300, help="parameters and AdamW's three of each (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (the system's for temporary files)")
    parser.add_argument("--profile", choices=["save", "load"], help="print where the last rank spends it")
    parser.add_argument("--quick", action="store_true", help="small, to try; no result unless --results is given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes (benchmarks/results)")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(tensors=20, ranks=2, rounds=2, results=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
