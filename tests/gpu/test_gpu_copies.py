"""What is saved of a CUDA device is what was there when ``save`` was called; what is loaded is there when it returns.

A device works behind the host's back: what a program launched before a call may run after it, and what it launches
after the call may run before a copy that the call left under way. ``busy`` makes both happen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import checkpoint
from lightning_shard.checkpoint.loading import ranges
from lightning_shard.checkpoint.saving import background, part
from lightning_shard.errors import CorruptCheckpointError

WIDTH = 2048
MIB = 2**20


def busy() -> None:
    """Give the current stream a fifth of a second to do, so that what follows on it is late."""
    torch.cuda._sleep(400_000_000)


def default() -> AbstractContextManager[object]:
    return nullcontext()


def of_its_own() -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream())


STREAMS = pytest.mark.parametrize("stream", [default, of_its_own])
Stream = Callable[[], AbstractContextManager[object]]


@pytest.fixture
def saver() -> Iterator[checkpoint.AsyncSaver]:
    saver = checkpoint.AsyncSaver()
    yield saver
    saver.close()


class Training:
    """A model of 96 MiB whose state of 288 MiB changes in every element at each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """The memory that is saved, by the names in the checkpoint."""
        moments = {
            f"0/{name}/{key}": self.optimizer.state[parameter][key]
            for name, parameter in self.model.named_parameters()
            for key in ("exp_avg", "exp_avg_sq", "step")
        }
        return {**dict(self.model.named_parameters()), **moments}

    def clone(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.state().items()}


def stored(path: Path) -> dict[str, Tensor]:
    found = checkpoint.read(path)
    return {name: tensor.full() for name, tensor in [*found.items(), *found.optimizer.items()]}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors of which any byte differs."""
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(_bytes(found[name]), _bytes(expected[name]))]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def save_amid_steps(saver: checkpoint.AsyncSaver, training: Training, path: Path) -> dict[str, Tensor]:
    """Steps before and after a save, without any wait; returns what the state was in between."""
    busy()
    for _ in range(3):
        training.step()
    before = training.clone()
    saver.save(training.model, path, optimizer=training.optimizer)
    for _ in range(3):
        training.step()
    return before


@STREAMS
def test_steps_right_after_an_asynchronous_save_do_not_change_what_is_saved(
    tmp_path: Path, saver: checkpoint.AsyncSaver, stream: Stream
) -> None:
    training = Training()
    torch.cuda.synchronize()
    for number in range(3):  # later ones into memory that is pinned already
        with stream():
            before = save_amid_steps(saver, training, tmp_path / str(number))
        saver.wait()
        assert not differences(stored(tmp_path / str(number)), before)
        assert len(differences(training.state(), before)) == len(before), "no tensor is what it was"


def test_without_a_wait_for_the_copies_other_bytes_would_be_saved(
    tmp_path: Path, saver: checkpoint.AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would see it."""
    training = Training()
    save_amid_steps(saver, training, tmp_path / "first")
    saver.wait()
    for module in (background, part):
        monkeypatch.setattr(module, "settle", lambda tensors: None)
    before = save_amid_steps(saver, training, tmp_path / "second")
    busy()
    saver.wait()
    with suppress(CorruptCheckpointError):  # where the bytes changed between being hashed and being written
        assert differences(stored(tmp_path / "second"), before)


@STREAMS
def test_a_synchronous_save_has_what_was_launched_before_it(tmp_path: Path, stream: Stream) -> None:
    training = Training()
    torch.cuda.synchronize()
    with stream():
        busy()
        training.step()
        before = training.clone()
        checkpoint.save(training.model, tmp_path / "c", optimizer=training.optimizer)
        training.step()
    assert not differences(stored(tmp_path / "c"), before)


def load_amid_writes(path: Path, stream: Stream) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load where the stream has yet to write to the tensors; returns what they hold, and what they should."""
    saved = {f"w{i}": torch.randn(WIDTH, WIDTH) for i in range(8)}
    checkpoint.save(saved, path)
    target = {name: torch.empty_like(tensor, device="cuda") for name, tensor in saved.items()}
    torch.cuda.synchronize()
    with stream():
        busy()
        for tensor in target.values():
            tensor.zero_()
        checkpoint.load(path, target)
        found = {name: tensor.clone() for name, tensor in target.items()}
    torch.cuda.synchronize()
    return found, saved


@STREAMS
def test_a_load_is_not_overwritten_by_what_was_launched_before_it(tmp_path: Path, stream: Stream) -> None:
    found, expected = load_amid_writes(tmp_path / "c", stream)
    assert sum(tensor.nbytes for tensor in expected.values()) > 64 * MIB, "read in place, by several threads"
    assert not differences(found, expected)


def test_without_a_wait_for_the_stream_a_load_would_be_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would see it."""
    monkeypatch.setattr(ranges, "settle", lambda tensors: None)
    assert differences(*load_amid_writes(tmp_path / "c", of_its_own))


def every_kind() -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    return {
        "plain": random(1000, 3000),
        "half": random(77, dtype=torch.bfloat16),
        "transposed": random(1000, 3000).t(),
        "strided": random(100, 100)[::3, ::7],
        "expanded": random(1, 50).expand(40, 50),
        "conjugate": random(512, 512, dtype=torch.complex64).conj(),
        "negative": random(512, 512, dtype=torch.complex64).conj().imag,
        "negative row": random(512, 512, dtype=torch.complex64).conj().imag[0],
        "conjugate column": random(512, 512, dtype=torch.complex64).conj()[:, 3],
        "float8": random(7).to(torch.float8_e4m3fn),
        "flag": torch.tensor(True, device="cuda"),
        "none": torch.empty(0, 3, device="cuda"),
        "host": torch.randn(100),
    }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_kind_of_tensor_comes_back(tmp_path: Path, saver: checkpoint.AsyncSaver, asynchronous: bool) -> None:
    state = every_kind()
    before = {name: tensor.resolve_conj().resolve_neg().cpu() for name, tensor in state.items()}
    busy()
    if asynchronous:
        saver.save(state, tmp_path / "c", trainer_state={"also": state["half"]})
        saver.wait()
    else:
        checkpoint.save(state, tmp_path / "c", trainer_state={"also": state["half"]})
    assert not differences(stored(tmp_path / "c"), before)
    assert torch.equal(checkpoint.read(tmp_path / "c").trainer_state()["also"], before["half"])
    into = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for name, tensor in before.items()}
    into["plain"] = torch.empty(3000, 1000, device="cuda").t()
    checkpoint.load(tmp_path / "c", into)
    assert not differences(into, before)
    cast = {"half": torch.empty(77, device="cuda")}
    checkpoint.load(tmp_path / "c", cast, strict=False, cast=True)
    assert torch.equal(cast["half"].cpu(), before["half"].float())


def test_copies_lie_in_pinned_memory_of_their_size_which_is_used_again_and_freed(tmp_path: Path) -> None:
    state = {"w": torch.randn(700 * MIB // 4, device="cuda")}  # torch's own pinned memory would be 1 GiB
    torch.cuda.synchronize()
    before = _resident_bytes()
    saver = checkpoint.AsyncSaver()
    places = set()
    for number in range(3):
        saver.save(state, tmp_path / f"c{number}")
        saver.wait()
        checkpoint.remove(tmp_path / f"c{number}")
        memory = saver._copies._memory
        assert memory.is_pinned()
        places.add(memory.data_ptr())
        del memory
    assert len(places) == 1
    assert _resident_bytes() - before < 764 * MIB
    saver.close()
    assert _resident_bytes() - before < 64 * MIB


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
