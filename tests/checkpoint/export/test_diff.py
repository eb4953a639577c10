"""``checkpoint.diff`` and its verb: every kind of difference is told, equal chunks aren't read, any layouts will do."""

import json
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from lightning_shard import checkpoint
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.checkpoint.tools.diff import differing
from lightning_shard.cli import main
from lightning_shard.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from tests.checkpoint.save.test_plan_of_a_save import save_simulated


def save(path, model=None, **parts):
    checkpoint.save(model or {}, path, fsync=False, **parts)
    return path


def found(report):
    return [(d.section, d.name, d.kind) for d in report.differences]


STATE = {
    "w": torch.randn(70, 30),
    "b": torch.randn(30, dtype=torch.bfloat16),
    "n": torch.tensor([1.0, math.nan, math.inf]),
    "i": torch.arange(5),
    "scale": torch.tensor(2.0),
    "empty": torch.empty(0, 3),
}


def test_equal_checkpoints_are_equal_and_nothing_is_read(tmp_path):
    trainer = {"epoch": 1, "nan": math.nan, "rng": torch.arange(4), "path": tmp_path}
    parts = {"optimizer": {"m": torch.ones(3)}, "trainer_state": trainer, "rank_state": {"seed": torch.tensor(1)}}
    a, b = save(tmp_path / "a", STATE, **parts), save(tmp_path / "b", STATE, **parts)
    report = checkpoint.diff(a, b)
    assert report
    assert report.tensors == len(STATE) + 3
    assert report.bytes_read == 0
    assert "equal" in str(report)
    c = tmp_path / "c"
    checkpoint.save(STATE, c, digests=False, **parts)
    report = checkpoint.diff(a, c)
    assert report.ok
    assert report.bytes_read == 2 * report.bytes > 0


def test_every_kind_of_difference_is_told_by_name(tmp_path):
    changed = STATE["w"].clone()
    changed[3, 4] += 0.5
    changed[69, 29] -= 2
    nan = STATE["n"].clone()
    nan[0] = math.nan
    a = save(
        tmp_path / "a", {**STATE, "mine": torch.ones(2, 3), "shape": torch.ones(4)}, optimizer={"m": torch.ones(3)}
    )
    b = save(
        tmp_path / "b",
        {
            **STATE,
            "w": changed,
            "n": nan,
            "shape": torch.ones(2, 2),
            "b": STATE["b"].float() + 1,
            "theirs": torch.ones(1),
        },
        optimizer={"m": torch.zeros(3)},
    )
    report = checkpoint.diff(a, b)
    assert not report
    by_name = {d.name: d for d in report.differences}
    assert found(report)[-1] == ("optimizer", "m", "value")
    assert set(by_name) == {"w", "n", "b", "mine", "theirs", "shape", "m"}
    assert (by_name["w"].different, by_name["w"].elements) == (2, 2100)
    assert by_name["w"].max_difference == pytest.approx(2)
    assert (by_name["n"].different, by_name["n"].max_difference) == (1, math.inf)
    assert (by_name["b"].kind, by_name["b"].different) == ("dtype", 30)
    assert by_name["mine"].what == "only in a: F32 2 × 3"
    assert by_name["theirs"].what == "only in b: F32 1"
    assert by_name["shape"].what == "F32 4 in a, F32 2 × 2 in b"
    assert str(report).count("\n") == 7
    # only of "w", "n", "m" and the two dtypes of "b" are the bytes read
    assert report.bytes_read == 2 * (STATE["w"].nbytes + 12 + 12) + 60 + 120
    assert found(checkpoint.diff(a, b, sections=["optimizer"])) == [("optimizer", "m", "value")]


def test_chunks_without_digests_and_equal_bytes_of_other_dtypes_are_not_taken_for_equal(tmp_path):
    for name, tensor in {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(3).view(torch.int32)}.items():
        checkpoint.save({"w": tensor}, tmp_path / name, digests=name == "c", fsync=False)
    assert found(checkpoint.diff(tmp_path / "a", tmp_path / "b")) == [("model", "w", "value")]
    a = save(tmp_path / "d", {"w": torch.ones(3)})
    (difference,) = checkpoint.diff(a, tmp_path / "c").differences
    assert (difference.kind, difference.different) == ("dtype", 3)


def test_trainer_states_differ_by_key_path(tmp_path):
    state = {
        "epoch": 1,
        "lr": [0.1, 0.2],
        "callbacks": {"EMA": {"decay": 0.9, "weights": torch.ones(4)}},
        1: "int key",
        "where": tmp_path,
        "range": (1, 2),
    }
    other = {
        "epoch": 1.0,
        "lr": [0.1, 0.2001],
        "callbacks": {"EMA": {"decay": 0.9, "weights": torch.tensor([1.0, 1, 1, 3])}, "new": None},
        1: "int Key",
        "where": tmp_path,
        "range": [1, 2],
    }
    a, b = save(tmp_path / "a", trainer_state=state), save(tmp_path / "b", trainer_state=other)
    report = checkpoint.diff(a, b)
    assert [(d.name, d.what) for d in report.differences] == [
        ("epoch", "1 in a, 1.0 in b"),
        ("lr[1]", "0.2 in a, 0.2001 in b"),
        ("callbacks.new", "only in b: null"),
        ("[1]", '"int key" in a, "int Key" in b'),
        ("range", '{"$": "tuple", "v": [1, 2]} in a, [1, 2] in b'),
        ("callbacks.EMA.weights", "1 of 4 elements differ, by at most 2"),
    ]
    assert {d.section for d in report.differences} == {"trainer"}
    assert "lr[1]" not in {d.name for d in checkpoint.diff(a, b, rtol=1e-3).differences}
    assert [d.name for d in checkpoint.diff(a, save(tmp_path / "c", {})).differences] == ["the state"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_elements_of_every_dtype_are_compared_as_numbers(dtype):
    data = torch.arange(24 * dtype.itemsize, dtype=torch.int64).remainder(2 if dtype is torch.bool else 60)
    a = data.to(torch.uint8).view(dtype)
    assert differing(a, a.clone()) == (0, 0.0)
    b = a.clone()
    raw = b.view(torch.uint8)
    raw[5 * dtype.itemsize : 6 * dtype.itemsize] = a.view(torch.uint8)[6 * dtype.itemsize : 7 * dtype.itemsize]
    count, most = differing(a, b)
    assert count == 1
    expected = {torch.bool: 1.0, torch.uint8: 1.0, torch.int8: 1.0}
    assert most == expected.get(dtype, most) > 0


def test_differences_of_integers_are_exact():
    assert differing(torch.tensor([2**62, 5]), torch.tensor([2**62 + 1, 5])) == (1, 1.0)
    assert differing(torch.tensor([-(2**63)]), torch.tensor([2**63 - 1])) == (1, 2.0**64)
    big = torch.tensor([2**63 - 1, 0]).view(torch.uint64)
    assert differing(big, (big.view(torch.int64) + 1).view(torch.uint64)) == (2, 1.0)


@given(st.data())
def test_tolerance_is_that_of_allclose(data):
    floats = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf]))
    a = torch.tensor(data.draw(st.lists(floats, min_size=1, max_size=8)))
    b = torch.where(torch.rand(len(a)) < 0.5, a, torch.tensor(data.draw(floats)))
    rtol, atol = data.draw(st.sampled_from([(0, 0), (0.1, 0), (0, 1.0), (1e-3, 1e-6)]))
    count, _ = differing(a, b, rtol, atol)
    assert count == int((~torch.isclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)).sum())


def test_layouts_do_not_matter_and_memory_is_bounded(tmp_path, monkeypatch):
    batch_bytes = 256
    module = sys.modules[differing.__module__]
    monkeypatch.setattr(module, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(module, "STEP_ELEMENTS", 100)
    seen = []
    fetch = checkpoint.Checkpoint.fetch

    def counted(self, reads, **options):
        reads = list(reads)
        seen.append(sum(read.target.nbytes for read in reads))
        return fetch(self, reads, **options)

    monkeypatch.setattr(checkpoint.Checkpoint, "fetch", counted)
    state = {"w": torch.randn(70, 30), "v": torch.randn(5, 7, 9).bfloat16(), "u": torch.randn(2000)}
    a = save(tmp_path / "a", state)
    save_simulated(tmp_path / "b", state, (8,), {name: (Shard(t.ndim - 1),) for name, t in state.items()}, 1)
    seen.clear()
    done = []
    assert checkpoint.diff(a, tmp_path / "b", progress=lambda *step: done.append(step))
    assert max(seen) <= batch_bytes
    total = sum(tensor.nbytes for tensor in state.values())
    assert sum(seen) == 2 * total
    assert done[-1] == (total, total)
    assert done == sorted(done)
    state["v"][4, 6, 8] += 1
    report = checkpoint.diff(save(tmp_path / "c", state), tmp_path / "b")
    assert [(d.name, d.different) for d in report.differences] == [("v", 1)]


def test_damage_and_nonsense_are_errors(tmp_path):
    a, b = save(tmp_path / "a", {"w": torch.ones(9)}), save(tmp_path / "b", {"w": torch.zeros(9)})
    with pytest.raises(ConfigurationError, match="sections has weights"):
        checkpoint.diff(a, b, sections=["weights"])
    with pytest.raises(ConfigurationError, match="negative"):
        checkpoint.diff(a, b, rtol=-1)
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.diff(a, tmp_path / "c")
    (file,) = (b / "model").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(CorruptCheckpointError, match="differ from their digest"):
        checkpoint.diff(a, b)
    assert not checkpoint.diff(a, b, verify=False)
    c = save(tmp_path / "c", trainer_state={"t": torch.ones(2)})
    (state,) = (c / "trainer").glob("*.json")
    state.write_text(state.read_text().replace('"v":"t"', '"v":"u"'))
    with pytest.raises(CorruptCheckpointError, match="trainer state is damaged: KeyError 'u'"):
        checkpoint.diff(c, c, verify=False)


# -- the verb ---------------------------------------------------------------------------------------------------------


def test_the_verb_tells_by_its_exit_code_and_in_a_table(tmp_path, capsys):
    names = [f"model.layers.{i}.a_rather_long_module_name.gate_projection.weight" for i in range(30)]
    a = str(save(tmp_path / "a", {name: torch.ones(5) for name in names}, trainer_state={"epoch": 1}))
    b = str(save(tmp_path / "b", {name: torch.ones(5) + 1e-3 for name in names}, trainer_state={"epoch": 2}))
    assert main(["diff", a, a]) == 0
    assert "equal (30 tensors" in capsys.readouterr().out
    assert main(["diff", a, b]) == 1
    out = capsys.readouterr().out
    assert out.startswith("31 differences (30 tensors, 600 B)")
    assert "5 of 5 elements" in out
    assert "and 11 more" in out
    assert main(["diff", a, b, "--atol", "0.01", "--only", "model", "--only", "optimizer"]) == 0
    capsys.readouterr()
    assert main(["diff", a, b, "--rtol", "0.01", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    (difference,) = report["differences"]
    assert (difference["section"], difference["name"]) == ("trainer", "epoch")
    assert main(["diff", a, str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("lightning-shard: ")
