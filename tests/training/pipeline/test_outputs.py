"""What steps return for microbatches is put together as for the batch, or refused."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.runtime.outputs import Lengths, lengths, merge, with_losses
from lightning_shard.plugin.steps.checks.rehearsal import as_long

Pair = namedtuple("Pair", "x y")
X = torch.arange(24.0).reshape(8, 3)
NAMES = [f"s{i}" for i in range(8)]


@dataclass
class Found:
    logits: Tensor
    names: list[str]


STEPS: dict[str, Any] = {
    "a tensor": lambda x, names: x * 2,
    "a flat one": lambda x, names: x.flatten(),
    "a flat one with two for each": lambda x, names: x.repeat_interleave(2, 0)[:, 0],
    "what was found": lambda x, names: x[(x[:, 0] == 0) | (x[:, 0] == 3) | (x[:, 0] == 15)],
    "an array": lambda x, names: x.numpy() + 1,
    "floats": lambda x, names: [float(v) for v in x[:, 0]],
    "texts": lambda x, names: [name.upper() for name in names],
    "a tuple of texts": lambda x, names: tuple(names),
    "dicts": lambda x, names: [{"name": n, "row": row} for n, row in zip(names, x)],
    "tensors of any length": lambda x, names: [row[: 1 + int(row[0]) % 3] for row in x],
    "as many as there are": lambda x, names: [n for n in names if n in ("s0", "s1", "s5")],
    "parts in a list": lambda x, names: [x, x + 1, x.mean()],
    "different parts in a list": lambda x, names: [x, {"mean": x.mean(), "names": [*names]}],
    "parts in a tuple": lambda x, names: (x, [*names]),
    "parts by name": lambda x, names: {"pair": Pair(x, x[:, 0]), "found": Found(x, list(names)), "none": None},
    "means": lambda x, names: {"loss": x.mean(), "plain": float(x.mean()), "numpy": x.numpy().mean()},
    "a tuple of rows": lambda x, names: tuple(x.unbind()),
    "by number, a row per sample": lambda x, names: {0: x, 1: x + 1},
    "means by number": lambda x, names: {n: x.mean() for n in range(9)},
    "integers that were found": lambda x, names: x[x[:, 0] != 3].long(),
    "integers that begin with small ones": lambda x, names: torch.stack([x[:, 0] * 0 + 1, -x[:, 1]], 1)[
        x[:, 0] != 3
    ].long(),
    "what doesn't differ": lambda x, names: {"split": "train", "ok": True, "dtype": x.dtype},
}


def same(ours: Any, whole: Any) -> bool:
    if isinstance(whole, (Tensor, np.ndarray)):
        return type(ours) is type(whole) and ours.shape == whole.shape and bool((ours == whole).all())
    if tree.is_node(whole):
        pairs = zip(tree.children(ours), tree.children(whole), strict=True)
        return type(ours) is type(whole) and all(key == other and same(a, b) for (key, a), (other, b) in pairs)
    return type(ours) is type(whole) and ours == whole


def seen(one: Any, other: Any, joined: Any, size: int) -> Lengths:
    """What is known after a rehearsal of two microbatches."""
    runs = [lengths(result, of) for result, of in ((one, size), (other, size), (joined, 2 * size))]
    return as_long(*runs)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("step", STEPS)
def test_results_are_those_of_the_whole_batch(step: str, parts: int) -> None:
    size, run = 8 // parts, STEPS[step]
    results = [run(**batch) for batch in tree.split({"x": X, "names": NAMES}, parts)]
    known = seen(*results[:2], run(X[: 2 * size], NAMES[: 2 * size]), size) if parts > 1 else Lengths()
    assert same(merge(results, size, known), run(X, NAMES))


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (
            lambda x: {"a": {"n": len(x)}},
            r"returned\['a'\]\['n'\] can't be .*: it is 2, .*counts samples.*return a float",
        ),
        (lambda x: {"n": torch.tensor(len(x))}, r"\['n'\].*it is 2, .*counts samples"),
        (lambda x: {"n": np.int64(len(x))}, r"\['n'\].*counts samples"),
        (lambda x: x.shape, r"returned can't be .*it is torch\.Size\(\[2, 3\]\)"),
        (lambda x: {"who": str(float(x[0, 0]))}, r"\['who'\].*a str that differs"),
        (lambda x: [x, x + 1], r"a list of 2, which may be one for each sample"),
        (lambda x: [x, {"y": x}], r"a list of 2, which may be one for each sample"),
        (lambda x: x.flatten(), r"shape \(6,\) for each, of 2 samples"),
        (lambda x: {"x": x[:, : 1 + int(x[0, 0]) % 4]}, r"\['x'\].*shapes \[\(2, 1\), \(2, 3\), .*pad all"),
        (lambda x: {"per_class": x.sum(0)}, r"\['per_class'\].*shape \(3,\) for each, of 2 samples.*a row for each"),
        (lambda x: x.T @ x, r"shape \(3, 3\) for each"),
        (lambda x: [float(x.mean()), float(x.std()), 0.0], r"a list of 3 for each, of 2 samples"),
        (lambda x: ["cat", "dog", "cow"], r"a list of 3 for each"),
        (lambda x: {"k" + str(int(x[0, 0])): x}, r"other keys"),
        (lambda x: x if float(x[0, 0]) else [], r"another type"),
        (lambda x: {"cache": object()}, r"\['cache'\].*an? object that differs"),
    ],
)
def test_what_cant_be_known_is_refused_by_its_key(step: Any, says: str) -> None:
    with pytest.raises(StepError, match=says):
        merge([step(batch) for batch in tree.split(X, 4)], 2)


def test_a_list_that_is_as_long_for_more_samples_has_a_result_at_each_index() -> None:
    """With microbatches of one sample, its entries were strung together."""
    batches = X.split(1)
    merged = merge([[{"x": x}, {"y": x + 1}] for x in batches], 1, Lengths(fixed={()}))
    assert same(merged, [{"x": X}, {"y": X + 1}])


def test_a_dict_with_a_key_for_each_sample_is_refused() -> None:
    """The places of samples in a microbatch aren't those in the batch."""
    results = [{"p": {i: float(row[0]) for i, row in enumerate(part)}} for part in (*X.split(4), X)]
    with pytest.raises(StepError, match=r"\['p'\].*more keys for more samples"):
        merge(results[:2], 4, seen(*results, 4))


FIXED: dict[str, Any] = {
    "a vector": lambda x: x[:, :2].mean(0),
    "an array": lambda x: x[:, :2].mean(0).numpy(),
    "floats": lambda x: [float(x.mean()), float(x.std())],
    "texts": lambda x: ["cat", "dog"],
}


@pytest.mark.parametrize("step", FIXED)
def test_what_is_as_long_for_twice_as_many_samples_is_refused(step: str) -> None:
    """With as many classes as a microbatch has samples it was joined as if it had a row for each."""
    fixed = lengths({"x": FIXED[step](X[:2])}, 2).items() & lengths({"x": FIXED[step](X[:4])}, 4).items()
    with pytest.raises(StepError, match=r"\['x'\].*2.* for each, of 2 samples, and as long for twice as many"):
        merge([{"x": FIXED[step](batch)} for batch in tree.split(X, 4)], 2, Lengths(set(dict(fixed))))


@pytest.mark.parametrize(
    ("one", "other", "joined", "known"),
    [(2, 2, 2, "fixed"), (2, 0, 2, "growing"), (1, 1, 2, "growing"), (1, 2, 2, ""), (0, 0, 0, "")],
)
def test_what_varies_in_length_is_no_vector_of_classes(one: int, other: int, joined: int, known: str) -> None:
    """Detections were refused in a later batch, in which a microbatch had as many as samples."""
    found = as_long(*({("x",): n} for n in (one, other, joined)))
    assert [bool(found.fixed), bool(found.growing)] == [known == "fixed", known == "growing"]


@pytest.mark.parametrize("step", [lambda x: x[::2], lambda x: [float(v) for v in x[::2, 0]]], ids=["rows", "floats"])
def test_what_was_seen_to_grow_is_joined_whatever_its_length(step: Callable[[Tensor], Any]) -> None:
    """It was refused in a batch whose microbatches had equally many detections by chance."""
    parts = [step(part) for part in X.split(4)]
    with pytest.raises(StepError, match="for each, of 4 samples"):
        merge(parts, 4)
    assert same(merge(parts, 4, Lengths(growing={()})), step(X))


@pytest.mark.parametrize("kind", [int, np.int64, np.asarray, torch.tensor], ids=["int", "numpy", "array", "tensor"])
def test_a_number_of_samples_is_added_up_where_it_was_seen_to_be_one(kind: Callable[[int], Any]) -> None:
    """MONAI's example returns ``len(outputs)`` beside the loss, and was refused."""
    parts = [{"n": kind(len(part))} for part in X.split(4)]
    found = [lengths({"n": kind(number)}, size).get(("n",)) for number, size in ((4, 4), (8, 8), (4, 8), (5, 4))]
    assert found == [4, 8, None, None]
    with pytest.raises(StepError, match="whether it counts samples"):
        merge(parts, 4)
    assert int(merge(parts, 4, Lengths(growing={("n",)}))["n"]) == len(X)
    with pytest.raises(StepError, match="whether it counts samples"):
        merge([{"n": kind(4)}, {"n": kind(3)}], 4, Lengths(growing={("n",)}))


def test_no_rows_at_all_are_no_rows() -> None:
    assert merge([X[:0], X[:0]], 4).shape == (0, 3)


@pytest.mark.parametrize("step", [lambda x: [x, x + 1], lambda x: ("cat", "dog"), lambda x: (x, {"mean": x.mean()})])
def test_what_is_known_to_be_parts_is_put_together_by_part(step: Callable[[Tensor], Any]) -> None:
    fixed = lengths(step(X[:2]), 2).items() & lengths(step(X[:4]), 4).items()
    assert same(merge([step(batch) for batch in tree.split(X, 4)], 2, Lengths(set(dict(fixed)))), step(X))


def test_losses_take_the_place_of_those_that_were_returned() -> None:
    losses = [torch.tensor(0.0), torch.tensor(1.0)]
    merged = merge(with_losses([{"loss": torch.full((1,), 9.0), "x": X[:1]}] * 2, losses), 1)
    assert merged["loss"] == 0.5
    assert merged["x"].shape == (2, 3)
    assert merge(with_losses([torch.ones(1), torch.zeros(1)], losses), 1) == 0.5
