"""Asynchronous saving in one process: what is saved is what was there when save returned."""

import threading
import warnings
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


def test_the_memory_of_the_copies_is_used_again(tmp_path, saver):
    state = {"w": torch.arange(1000.0)}
    places = set()
    for step in range(3):
        saver.save(state, tmp_path / f"c{step}")
        saver.wait()
        places.add(saver._copies._memory.data_ptr())
    assert len(places) == 1


def test_a_save_waits_for_the_one_before_it_and_says_so_once(tmp_path, gate, saver):
    state = {"w": torch.zeros(4)}
    saver.save(state, tmp_path / "first")
    threading.Timer(0.2, gate.set).start()
    with pytest.warns(UserWarning, match=r"first is still being written: the next one waits"):
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
        saver.save({}, tmp_path / "c", trainer_state={"model": test_the_memory_of_the_copies_is_used_again})
    assert not (tmp_path / "c").exists()


def test_close_brings_a_save_to_its_end(tmp_path, gate):
    saver = checkpoint.AsyncSaver()
    saver.save({"w": torch.ones(4)}, tmp_path / "c")
    threading.Timer(0.1, gate.set).start()
    saver.close()
    assert checkpoint.verify(tmp_path / "c").ok


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
