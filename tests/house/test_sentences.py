"""Refusals of steps name a sentence of the contract, but for what an axis or a setting asks; so do some at setup."""

import ast
import pickle
import re
from collections.abc import Iterator

from lightning_shard.errors import BatchError, ConfigurationError, PlacementError, StepError
from tests.paths import ROOT

PACKAGE = ROOT / "lightning_shard"
#: What is refused there, at least in part, is beyond the contract: recomputation, BatchNorm over ranks, sequences,
#: experts, data ranks that compute differently, schedules with split backwards.
ASK_MORE = {
    *("parallel/activation_checkpointing.py", "parallel/batch_norm.py", "parallel/kept_results.py"),
    *("parallel/context/attention.py", "parallel/context/blocks.py", "parallel/context/check_positions.py"),
    *("parallel/experts/module_lists.py", "parallel/fsdp/part_calls.py", "parallel/fsdp/unsharded.py"),
    *("pipeline/runtime/network_calls.py", "pipeline/runtime/known_crossings.py", "pipeline/runtime/split_backward.py"),
    *("plugin/steps/checks/agreement.py", "plugin/steps/checks/tensor_ranks.py", "plugin/steps/checks/rehearsal.py"),
    *("plugin/steps/redirect.py", "testing/recorder.py"),
}


#: What setup refuses by a sentence; else by the sizes and settings of a layout, which the contract doesn't speak of.
AT_SETUP = {
    "plugin/assembly/placing.py": {3, 6},
    "plugin/assembly/parameters.py": {9, None},
    "plugin/limits.py": {9, None},
    "plugin/optimizers/sharded.py": {9, 11, None},
    "plugin/optimizers/whole_tensors.py": {11},
    "plugin/steps/loss_weight.py": {11},
}


def refusals(*kinds: str) -> Iterator[tuple[str, int | None]]:
    """The file and the sentence of each error of these kinds that code makes; ``None`` if that is no number there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in kinds:
                named = [each.value for each in node.keywords if each.arg == "breaks"]
                sentence = named[0].value if named and isinstance(named[0], ast.Constant) else None
                yield str(path.relative_to(PACKAGE)), sentence


def test_each_refusal_of_a_step_names_a_sentence_of_the_contract() -> None:
    sentences = {int(number) for number in re.findall(r"^## (\d+)\. ", (ROOT / "docs/contract.md").read_text(), re.M)}
    assert sentences == {*range(1, 13)}
    found = [*refusals("StepError", "BatchError")]
    assert len(found) > 150
    assert {file for file, sentence in found if sentence is None} == ASK_MORE
    assert {sentence for _, sentence in found if sentence is not None} <= sentences


def test_refusals_at_setup_name_the_sentence_that_they_rest_on() -> None:
    found: dict[str, set[int | None]] = {}
    for file, sentence in refusals("ConfigurationError", "PlacementError", "LayoutError", "PlanError"):
        found.setdefault(file, set()).add(sentence)
    assert {file: sentences for file, sentences in found.items() if sentences != {None}} == AT_SETUP


def test_an_error_keeps_its_sentence_on_its_way_to_another_rank() -> None:
    for kind in (StepError, BatchError, ConfigurationError, PlacementError):
        error = pickle.loads(pickle.dumps(kind("No.", breaks=6)))
        assert (type(error), str(error), error.breaks) == (kind, "No. (Sentence 6 of the contract.)", 6)
        assert str(kind("No.")) == "No."
