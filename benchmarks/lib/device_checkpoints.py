"""Checkpoints of one CUDA device: how long a save and a load take, and how long an asynchronous save holds up steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lib import loading, saving, stall
from benchmarks.lib.device_steps import Size, loss_of, network, optimizer_of
from benchmarks.lib.report import Row, compare
from benchmarks.lib.rounds import Contender, Task, fresh_folders, in_turn, quiet
from benchmarks.lib.saving import memory, own_file
from benchmarks.lib.state import State, gpt_shapes, rows
from lightning_shard import checkpoint

RAW_SAVE = "copied to pinned memory, then pwrite"
RAW_LOAD = "preadv to pinned memory, then copied"
PINNED = "a copy of the same bytes to pinned memory"
MEMCPY = "memcpy of the same bytes on the host"
FIRST = f"{stall.OURS}, the first of a run"


def measure(state_bytes: int, rounds: int, folder: Path) -> list[Row]:
    """On a rank of its own, of one."""
    quiet()
    state = _on_device(State.of(gpt_shapes(state_bytes), rows(1)))
    with fresh_folders(f"{folder}/device") as fresh:
        return [*_saves(state, rounds, fresh), *_loads(state, rounds, folder), *_stalls(state, rounds, fresh)]


def _on_device(state: State) -> State:
    """Plain tensors on the device; step counts stay on the host, where AdamW keeps them."""

    def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to("cuda" if tensor.ndim else "cpu") for name, tensor in tensors.items()}

    local = state.local()
    return State(
        moved({name: local[name] for name in state.model}), moved({name: local[name] for name in state.optimizer})
    )


def _staging(state: State) -> Tensor:
    return torch.empty(max(tensor.nbytes for tensor in state.local().values()), dtype=torch.uint8, pin_memory=True)


def _staged(staging: Tensor, tensor: Tensor) -> Tensor:
    return staging[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _raw_save(staging: Tensor, task: Task) -> None:
    descriptor = os.open(own_file(task), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for tensor in task.state.local().values():
            staged = _staged(staging, tensor)
            staged.copy_(tensor)
            os.write(descriptor, memory(staged))
    finally:
        os.close(descriptor)


def _raw_load(staging: Tensor, task: Task) -> None:
    descriptor, position = os.open(own_file(task), os.O_RDONLY), 0
    try:
        for tensor in task.state.local().values():
            staged = _staged(staging, tensor)
            position += os.preadv(descriptor, [memory(staged)], position)
            tensor.copy_(staged)
    finally:
        os.close(descriptor)
    torch.cuda.synchronize()


def _saves(state: State, rounds: int, fresh: Callable[[], str]) -> list[Row]:
    contenders: dict[str, Contender] = {
        RAW_SAVE: partial(_raw_save, _staging(state)),
        saving.OURS: saving.ours,
        saving.OURS_WITHOUT_DIGESTS: partial(saving.ours, digests=False),
        saving.DCP: saving.torch_dcp,
    }
    timed = in_turn(contenders, rounds, lambda name: Task(state, fresh()))
    return compare("save from the device, no fsync", state.local_bytes, timed, reference=RAW_SAVE, ours=saving.OURS)


def _loads(state: State, rounds: int, folder: Path) -> list[Row]:
    staging = _staging(state)
    writers: dict[str, Contender] = {
        RAW_LOAD: partial(_raw_save, staging),
        loading.OURS: saving.ours,
        loading.DCP: saving.torch_dcp,
    }
    readers: dict[str, Contender] = {
        RAW_LOAD: partial(_raw_load, staging),
        loading.OURS: loading.ours,
        loading.OURS_UNCHECKED: partial(loading.ours, verify=False),
        loading.DCP: loading.torch_dcp,
    }
    folders = {name: folder / "load" / str(number) for number, name in enumerate(writers)}
    folders[loading.OURS_UNCHECKED] = folders[loading.OURS]
    for name, write in writers.items():
        folders[name].mkdir(parents=True)
        write(Task(state, str(folders[name])))
    before = State(_cloned(state.model), _cloned(state.optimizer))

    def emptied(name: str) -> Task:
        state.clear()
        return Task(state, str(folders[name]))

    def check(name: str, task: Task) -> None:
        wrong = task.state.differences(before)
        assert not wrong, f"{len(wrong)} tensors differ from what was saved, such as {wrong[0]}"

    timed = in_turn(readers, rounds, lambda name: Task(state, str(folders[name])), task_of_first=emptied, check=check)
    return compare(
        "load to the device, warm page cache", state.local_bytes, timed, reference=RAW_LOAD, ours=loading.OURS
    )


def _cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _stalls(state: State, rounds: int, fresh: Callable[[], str]) -> list[Row]:
    local = state.local()
    pinned = {name: torch.empty_like(tensor, device="cpu", pin_memory=True) for name, tensor in local.items()}
    on_host = {name: tensor.cpu() for name, tensor in local.items()}

    def copy(task: Task) -> None:
        for name, tensor in local.items():
            pinned[name].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def memcpy(task: Task) -> None:
        for name, tensor in on_host.items():
            memory(pinned[name])[:] = memory(tensor)

    saver = checkpoint.AsyncSaver()
    begin = time.perf_counter()
    stall._ours_async(saver, task := Task(state, fresh()))
    first_s = time.perf_counter() - begin
    task.afterwards.close()
    contenders: dict[str, Contender] = {
        PINNED: copy,
        MEMCPY: memcpy,
        stall.OURS: partial(stall._ours_async, saver),
        stall.DCP: stall._dcp_async,
    }
    timed = in_turn(contenders, rounds, lambda name: Task(state, fresh()))
    found = compare("stall of a save", state.local_bytes, timed, reference=PINNED, ours=stall.OURS)
    found.append(Row("stall of a save", FIRST, first_s, state.local_bytes / first_s / 1e9))
    found += _steps_meanwhile(saver, state, fresh)
    saver.close()
    return found


def _steps_meanwhile(saver: checkpoint.AsyncSaver, state: State, fresh: Callable[[], str]) -> list[Row]:
    """Steps that are bound by the host, alone and while a save is being written behind them."""
    size = Size("", 128, 8, 4, 2, 128, 0, 0)
    model = network(size).cuda()
    optimizer = optimizer_of(model)
    window = torch.randint(0, 256, (size.batch, size.context + 1), device="cuda")

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, window).backward()
        optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for _ in range(10):
        step()
    alone = [step() for _ in range(50)]
    meanwhile: list[float] = []
    while len(meanwhile) < 50:
        saver.save(state.model, fresh(), optimizer=state.optimizer, fsync=False)
        while not saver.done():
            meanwhile.append(step())
        saver.wait()
    what = "a step of many small launches"
    slower = statistics.median(meanwhile) / statistics.median(alone)
    return [
        Row(what, "alone", statistics.median(alone)),
        Row(what, "while a save is written", statistics.median(meanwhile), of_reference=1 / slower, reference="alone"),
    ]
