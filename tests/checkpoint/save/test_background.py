"""Asynchronous saving in one process: what is saved is what was there when save returned."""

import subprocess
import sys
import threading
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CheckpointError, UnsupportedStateError


@pytest.fixture
def gate(monkeypatch):
    """Holds every write of tensors back until it is set."""
    gate = threading.Event()
    original = LocalStore.write

    def write(self, name, *args, **kwargs):
        assert gate.wait(30)
        return original(self, name, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "write", write)
    yield gate
    gate.set()


@pytest.fixture
def saver():
    saver = checkpoint.AsyncSaver()
    yield saver
    saver.close()


def test_what_is_changed_after_save_returned_is_not_saved(tmp_path, gate, saver):
    generator = torch.Generator().manual_seed(0)
    state = {
        "plain": torch.randn(100, generator=generator),
        "transposed": torch.randn(3, 4, generator=generator).t(),
        "conjugate": torch.randn(5, dtype=torch.complex64, generator=generator).conj(),
        "float8": torch.randn(7, generator=generator).to(torch.float8_e4m3fn),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 3),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    saver.save(state, tmp_path / "c", optimizer={"m": state["plain"]}, trainer_state={"also": state["plain"]})
    assert not checkpoint.exists(tmp_path / "c")
    for name in ("plain", "transposed", "conjugate", "flag"):
        state[name].zero_()
    gate.set()
    saver.wait()
    stored = checkpoint.read(tmp_path / "c")
    for name, tensor in before.items():
        found = stored[name].full()
        assert found.dtype == tensor.dtype
        assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64)), name
    assert torch.equal(stored.optimizer["m"].full(), before["plain"])
    assert torch.equal(stored.trainer_state()["also"], before["plain"])
    assert checkpoint.verify(tmp_path / "c").ok


def test_a_save_waits_for_the_one_before_it_and_says_so_once(tmp_path, gate, saver):
    state = {"w": torch.zeros(4)}
    saver.save(state, tmp_path / "first")
    threading.Timer(0.2, gate.set).start()
    with pytest.warns(UserWarning, match=r"first, was still being written, so the next one waited"):
        saver.save(state, tmp_path / "second")
    assert checkpoint.exists(tmp_path / "first")
    saver.wait()
    gate.clear()
    saver.save(state, tmp_path / "third")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threading.Timer(0.1, gate.set).start()
        saver.save(state, tmp_path / "fourth")
    assert checkpoint.exists(tmp_path / "third")


def test_a_failed_write_is_raised_by_the_next_save_and_leaves_the_checkpoint_before(tmp_path, monkeypatch, saver):
    saver.save({"w": torch.ones(4)}, tmp_path / "c")
    saver.wait()
    done = []
    with monkeypatch.context() as patch:
        patch.setattr(
            LocalStore, "write", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        saver.save({"w": torch.zeros(4)}, tmp_path / "c")
        saver.then(lambda: done.append("removed what it was to replace"))
        with pytest.raises(CheckpointError, match=r"could not be written.*No space left"):
            saver.save({"w": torch.zeros(4)}, tmp_path / "d")
    assert not done
    assert not checkpoint.exists(tmp_path / "d")
    assert torch.equal(checkpoint.read(tmp_path / "c")["w"].full(), torch.ones(4))
    saver.save({"w": torch.zeros(4)}, tmp_path / "d")
    saver.then(lambda: done.append("removed"))
    saver.wait()
    assert done == ["removed"]


def test_a_value_that_cannot_be_held_is_refused_before_save_returns(tmp_path, saver):
    with pytest.raises(UnsupportedStateError, match=r"'model' is a builtins\.function"):
        saver.save({}, tmp_path / "c", trainer_state={"model": lambda: None})
    assert not (tmp_path / "c").exists()


def test_an_interrupted_wait_keeps_the_save_and_its_memory(tmp_path, gate, saver, monkeypatch):
    saver.save({"w": torch.ones(4)}, tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            saver.save({"w": torch.zeros(4)}, tmp_path / "second")
    threading.Timer(0.1, gate.set).start()
    saver.save({"w": torch.zeros(4)}, tmp_path / "third")
    saver.wait()
    assert torch.equal(checkpoint.read(tmp_path / "first")["w"].full(), torch.ones(4))
    assert torch.equal(checkpoint.read(tmp_path / "third")["w"].full(), torch.zeros(4))


def test_a_closed_saver_says_so_and_saves_nothing(tmp_path):
    with checkpoint.AsyncSaver() as saver:
        saver.save({"t": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"closed, so .*b isn't saved"):
        saver.save({"t": torch.ones(2)}, tmp_path / "b")
    done = []
    saver.then(lambda: done.append(True))
    assert done
    assert saver.wait() is None
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_as_a_context_manager_it_tells_when_it_is_done_and_what_it_wrote(tmp_path, gate):
    with checkpoint.AsyncSaver() as saver:
        assert saver.done()
        assert saver.wait() is None
        saver.save({"w": torch.ones(4)}, tmp_path / "c")
        assert not saver.done()
        gate.set()
        report = saver.wait()
        assert saver.done()
        saver.save({"w": torch.ones(4)}, tmp_path / "d")
    assert checkpoint.exists(tmp_path / "d")
    stored = checkpoint.read(tmp_path / "c")
    assert (report.path, report.attempt) == (str(tmp_path / "c"), stored.manifest.attempt)
    assert report.bytes == report.rank_bytes == sum(file.bytes for file in stored.manifest.files)
    assert report.seconds > 0


def test_the_end_of_the_block_raises_a_failure_or_adds_it_to_the_error_that_ended_it(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "write", full)
    with pytest.raises(CheckpointError, match="No space left"), checkpoint.AsyncSaver() as saver:
        saver.save({"w": torch.ones(4)}, tmp_path / "c")

    def fail():
        with checkpoint.AsyncSaver() as saver:
            saver.save({"w": torch.ones(4)}, tmp_path / "c")
            raise ValueError("first")

    with pytest.raises(ValueError, match="first") as caught:
        fail()
    assert "No space left" in caught.value.__notes__[0]


# Without the package's own __init__, which imports much that isn't needed here.
ENDS_WITHOUT_WAITING = """
import sys, time, torch, types
sys.modules["lightning_shard"] = types.ModuleType("lightning_shard")
sys.modules["lightning_shard"].__path__ = [sys.argv[2]]
from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import LocalStore
write = LocalStore.write
def slow(self, name, *args, **kwargs):
    time.sleep(0.5)
    if "fails" in self.root:
        raise OSError(28, "No space left on device")
    write(self, name, *args, **kwargs)
LocalStore.write = slow
saver = checkpoint.AsyncSaver()
saver.save({"w": torch.ones(4)}, sys.argv[1])
print("the program ends")
"""


def test_at_the_end_of_a_program_a_save_is_finished_and_a_failure_is_told(tmp_path):
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS_WITHOUT_WAITING, tmp_path / name, Path(checkpoint.__file__).parents[1]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("works", "fails")
    ]
    (works, works_error), (fails, fails_error) = [program.communicate(timeout=120) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], works_error + fails_error
    assert works == fails == "the program ends\n"
    assert checkpoint.verify(tmp_path / "works").ok
    assert "fails failed, and nobody waited for it" in fails_error
    assert "No space left on device" in fails_error
    assert not checkpoint.exists(tmp_path / "fails")
