"""The benchmarks, at sizes that measure nothing: they run through, check what they time, and write what they say."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def result_of(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script's main here, where the processes to come have been prepared for, and reads what it has written."""

    def run(script: str, results: Path, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", [f"{script}.py", "--quick", "--results", str(results), *arguments])
        importlib.import_module(f"benchmarks.{script}").main()
        (written,) = results.glob("*.json")
        assert written.name.startswith(f"{script}-20")
        return json.loads(written.read_text())

    return run


@pytest.mark.ranks
@pytest.mark.long
def test_the_benchmark_of_checkpoints_measures_all_contenders_in_turn(result_of: Run, tmp_path: Path) -> None:
    sizes = ["--mib", "1", "--gather-mib", "1", "--ranks", "2", "--folder", str(tmp_path)]
    questions = ["save", "load", "stall", "memory", "gather"]
    result = result_of("checkpoint", tmp_path / "results", *sizes, "--only", *questions)
    skipped = {row["contender"] for row in result["rows"] if "seconds" not in row and "mib" not in row}
    assert skipped <= {"torch-checkpointing"}, "the only one that isn't a dependency"
    by_question: dict[str, set[str]] = {}
    for row in result["rows"]:
        by_question.setdefault(row["what"].split(" ")[0], set()).add(row["contender"])
    assert by_question.keys() == {"save,", "load,", "load", "stall", "memory", "gather"}
    assert {"raw pwrite", "lightning_shard", "torch DCP FileSystemWriter"} < by_question["save,"]
    assert {"raw preadv", "lightning_shard", "torch DCP FileSystemReader"} < by_question["load,"]
    assert all(row["of_reference"] > 0 for row in result["rows"] if "reference" in row)
    assert not [path for path in tmp_path.iterdir() if path.name != "results"], "what was measured is removed"


def test_the_benchmark_of_planning_reckons_all_chunks_of_every_parameter(result_of: Run, tmp_path: Path) -> None:
    [size] = result_of("planning_scale", tmp_path)["sizes"]
    assert size["ranks"] == 8
    assert size["files"] == 3 * 8, "a file of each rank: model, optimizer, state"
    whole = 4 * (6 * 2 + 2 * 2)  # of each layer weights and biases of six products, and of two norms
    assert size["tensors"] == whole * (1 + 3)  # two moments and a step
    assert size["chunks"] >= size["tensors"]


@pytest.mark.ranks
@pytest.mark.long
def test_each_setting_saves_the_memory_that_arithmetic_says(result_of: Run, tmp_path: Path) -> None:
    result = result_of("memory", tmp_path)
    judged = {row["contender"]: row["met"] for row in result["rows"] if "met" in row}
    assert len(judged) == 7
    assert all(judged.values()), judged


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_benchmark_of_training_compares_ways_that_train_alike(result_of: Run, tmp_path: Path) -> None:
    result = result_of("training", tmp_path)  # compares their losses itself
    over = result["ours_over"]
    assert {"dp2", "tp2", "pp2", "pp4", "ep2", "pp2 x dp2", "dp2 x tp2", "pp2, DualPipeV", "dp2, cpu_offload"} < {*over}
    assert all("plain torch, by hand" in ways for ways in over.values())
    assert "Lightning's ModelParallelStrategy" in over["dp2 x tp2"]
    assert all(row["seconds"] > 0 and row["mib"] > 0 for row in result["rows"])
    bare, recomputing = result["peak_mib"]["dp2"], result["peak_mib"]["dp2, activation_checkpointing"]
    assert all(recomputing[way] < bare[way] for way in recomputing)
    assert (tmp_path / f"training-{result['date']}.png").exists()
