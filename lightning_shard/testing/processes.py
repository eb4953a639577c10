"""Runs functions and tests on several processes (ranks) of this machine; a test reads as the program of one rank.

    @ranks(4)
    def test_sum(tmp_path):                      # runs on 4 gloo processes; fixtures and parameters pass through
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 4

    run_ranks(train, 4, tmp_path, elastic=True)  # -> [train(tmp_path) of each rank], environment as under torchrun

A run ends in bounded time with a report from every rank: its result, its traceback, or, if it hung or waited for a
failed rank, its Python stacks. No process outlives the run.

The ranks are new processes, forked from a server (``forkserver``) that imports torch and Lightning once per session. So
a run on 4 ranks starts in a tenth of a second, instead of the seconds that four imports take.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from lightning_shard.testing.rank_process import Job, Options, serve

FAILURE_GRACE_S = 3.0
"""How long the other ranks may continue after the first failure, to report their own failures."""
EXIT_GRACE_S = 10.0
"""How long a rank may take to exit after every rank has returned."""
PROBE_S = 5.0
"""In the last seconds before its limit a run's CPU time is sampled: ranks that compute get more time, up to PATIENCE
times the limit."""
PATIENCE = 3
STACKS_GRACE_S = 5.0
"""How long all ranks together may take to write their stacks: on an overloaded machine even a signal handler waits."""

_preloaded = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch",
    "lightning_shard.plugin.strategy",
]


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung.

    Attributes:
        accounts: A text for each rank, in the order of failure.
        errors: The exceptions that ranks raised, in the same order; without those that can't be pickled.
    """

    def __init__(
        self, headline: str, accounts: dict[int, str], errors: Mapping[int, BaseException] | None = None
    ) -> None:
        body = "\n".join(f"──── rank {rank} ────\n{text.rstrip()}" for rank, text in accounts.items())
        super().__init__(f"{headline}\n{body}")
        self.accounts = accounts
        self.errors = dict(errors or {})


def preload(*modules: str) -> None:
    """Have the fork server import more modules, once; call it before the first run (in ``conftest.py``)."""
    _preloaded.extend(modules)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    backend: str = "gloo",
    init: bool | None = None,
    elastic: bool = False,
    start_method: Literal["forkserver", "spawn"] = "forkserver",
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on ``world_size`` processes of this machine and return each rank's result.

    Every rank starts with this process's environment and working directory, plus RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT; with one torch thread, and all generators equally seeded. As under torchrun, the
    rendezvous serves one default process group: a second one in the same run would wait forever. A process has one run
    at a time, not one for each of several threads.

    Args:
        function: Importable by module and name. Arguments and results must be picklable.
        world_size: The number of ranks.
        timeout_s: After so many seconds a run that waits fails with every rank's stacks; a run that still computes, on
            a slow machine, after three times as many. Also the process group's timeout.
        backend: The process group's backend.
        init: Initialise the default process group, and destroy it after all ranks have returned. Default: True, unless
            ``elastic``.
        elastic: Also set the environment variables of ``torchrun``, so that a Lightning Trainer uses these processes
            and initialises the process group itself.
        start_method: "spawn" for code that doesn't survive a fork; every rank then pays for the imports.

    Raises:
        RanksFailed: A rank raised, died, hung, or didn't exit.
    """
    options = Options(world_size, timeout_s, backend, not elastic if init is None else init, elastic, start_method)
    return _run(function, args, kwargs, options)


def ranks(world_size: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorator: run a test's body on ``world_size`` processes; options as for :func:`run_ranks`.

    The ranks import the test by module and name. What pytest passes to it (``tmp_path``, parameters) must be picklable.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        settings = Options(world_size, **options)

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            _run(_Body(body.__module__, body.__qualname__), args, kwargs, settings)

        return test

    return decorate


@dataclass(frozen=True)
class _Body:
    """Picklable handle of a decorated function, whose own name refers to the decorator's wrapper."""

    module: str
    qualname: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = operator.attrgetter(self.qualname)(importlib.import_module(self.module))
        return wrapper.__wrapped__(*args, **kwargs)


class _Rank:
    """One rank's process, the pipe for its messages, and the file for its stacks."""

    def __init__(self, index: int, job: Job) -> None:
        context: Any = multiprocessing.get_context(job.options.start_method)
        ours, theirs = context.Pipe()
        self.index = index
        self.pipe: connection.Connection = ours
        self.stacks = job.stacks
        self.error: BaseException | None = None
        # no daemon: daemons may not have children, such as a DataLoader's workers
        self.process: BaseProcess = context.Process(target=serve, args=(job, theirs), daemon=False)
        self.process.start()
        theirs.close()

    def message(self) -> tuple[str, Any]:
        """What the rank sent, or how it died; called once the pipe or the process is ready."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                kind, payload, pickled = pickle.loads(self.pipe.recv_bytes())
                if kind == "result":
                    try:
                        return "result", pickle.loads(payload)
                    except Exception:
                        return "error", "its result can't be unpickled here:\n" + traceback.format_exc()
                with contextlib.suppress(Exception):
                    self.error = pickle.loads(pickled)
                return kind, payload
        self.process.join(EXIT_GRACE_S)
        return "error", self.death()

    def death(self) -> str:
        """How the process ended, and the stacks that faulthandler has written."""
        code = self.process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"died ({how})\n{self._read_stacks()}"

    def ask_for_stacks(self) -> None:
        """Have a signal handler in C write the stacks of all of the rank's threads: it works even in a blocked call."""
        if self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)

    def stacks_by(self, deadline: float) -> str:
        """The requested stacks, or the reason why there are none."""
        found = last = ""
        while not (found and found == last) and self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
            last, found = found, self._read_stacks()
        if not self.process.is_alive():
            return f"exited with code {self.process.exitcode}\n{self._read_stacks()}"
        return f"{found or 'no stacks came'}\n{_doing(self.process.pid)}"

    def _read_stacks(self) -> str:
        return self.stacks.read_text(errors="replace") if self.stacks.exists() else ""

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"done")

    def kill(self) -> None:
        pid = self.process.pid
        if pid is not None:
            # each rank leads a process group, which includes its DataLoader workers
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            if self.process.is_alive():
                self.process.kill()
            self.process.join(EXIT_GRACE_S)
        self.pipe.close()


def _run(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], options: Options) -> list[Any]:
    __tracebackhide__ = True
    from torch.distributed import TCPStore

    call = pickle.dumps((function, tuple(args), kwargs))
    multiprocessing.get_context("forkserver").set_forkserver_preload(_preload_list())
    # The store lives in this process, and its port is bound before the ranks start: no race for a free port.
    # The ranks find it as they would find torchrun's.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    started: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(options.world_size):
                job = Job(
                    call,
                    options,
                    _environment(rank, store.port, options),
                    Path(folder, f"rank-{rank}.txt"),
                    under_pytest="pytest" in sys.modules,
                    parent_start_method=multiprocessing.get_start_method(allow_none=True),
                )
                started.append(_Rank(rank, job))
            return _collect(started, options)
        finally:
            for process in started:
                process.kill()


def _collect(processes: list[_Rank], options: Options) -> list[Any]:
    """Each rank's result, in rank order; raises if a rank fails or the time is over."""
    __tracebackhide__ = True
    limit = _Limit(processes, options.timeout_s)
    pending = {rank.index: rank for rank in processes}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    skipped: list[str] = []
    while pending and (left := limit.left()) > 0:
        by_handle = {h: rank for rank in pending.values() for h in (rank.pipe, rank.process.sentinel)}
        for rank in dict.fromkeys(by_handle[h] for h in connection.wait(list(by_handle), left)):  # type: ignore[index]
            kind, payload = rank.message()
            del pending[rank.index]
            if kind == "result":
                results[rank.index] = payload
            elif kind == "skip":
                skipped.append(payload)
            else:
                if not failures:
                    limit.end_within(FAILURE_GRACE_S)
                failures[rank.index] = payload
    if not failures and not pending:
        for rank in processes:
            rank.release()
        _await_exit(processes)
        if skipped:
            import pytest

            pytest.skip(skipped[0])
        return [results[index] for index in range(len(processes))]
    waited = "hung" if not failures else "was still running"
    accounts = dict(failures)
    for index, stacks in _all_stacks(pending.values()).items():
        accounts[index] = f"{waited}; its stacks, the innermost call first:\n{stacks}"
    for rank in processes:
        accounts.setdefault(rank.index, "returned")
    errors = {rank.index: rank.error for rank in processes if rank.error is not None}
    in_order = {index: errors[index] for index in accounts if index in errors}
    raise RanksFailed(_headline(failures, errors, list(pending), options), accounts, in_order)


def _headline(
    failures: dict[int, str], errors: Mapping[int, BaseException], pending: list[int], options: Options
) -> str:
    if failures:
        rank, account = next(iter(failures.items()))
        lines = [line for line in account.splitlines() if line and not line[0].isspace()]
        reason = lines[0] if lines[0].startswith("died") else lines[-1]
        if rank in errors:  # an account may end with notes
            reason = traceback.format_exception_only(type(errors[rank]), errors[rank])[0].splitlines()[0]
        return f"rank {rank} of {options.world_size} failed first: {reason}"
    return f"ranks {pending} of {options.world_size} didn't finish within {options.timeout_s:g} s"


def _all_stacks(processes: Collection[_Rank]) -> dict[int, str]:
    deadline = time.monotonic() + STACKS_GRACE_S
    for rank in processes:
        rank.ask_for_stacks()
    return {rank.index: rank.stacks_by(deadline) for rank in processes}


class _Limit:
    """The deadline of a run: at its limit if its ranks wait, later if they compute, soon after a failure."""

    def __init__(self, processes: list[_Rank], timeout_s: float) -> None:
        self._pids = [rank.process.pid for rank in processes]
        self._probe_s = min(PROBE_S, timeout_s / 2)
        now = time.monotonic()
        self._next, self._last = now + timeout_s - self._probe_s, now + PATIENCE * timeout_s
        self._used_s: float | None = None

    def left(self) -> float:
        """Seconds until the next check; 0 or less if the run is over."""
        now = time.monotonic()
        if now >= self._next and now < self._last:
            before, self._used_s = self._used_s, sum(_state(pid)[1] for pid in self._pids)
            if before is None or self._used_s - before > self._probe_s / 10:
                self._next = min(self._last, now + self._probe_s)
        return self._next - now

    def end_within(self, seconds: float) -> None:
        self._last = self._next = min(self._last, time.monotonic() + seconds)


def _state(pid: int | None) -> tuple[str, float]:
    """A process's state letter and used CPU time in seconds, on Linux; ``("?", 0)`` elsewhere."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "?", 0.0


def _doing(pid: int | None) -> str:
    """A text of a process's state, CPU time and the machine's load: tells a hang from an overloaded machine."""
    letter, used_s = _state(pid)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"state {letter}, {used_s:.1f} s of processor time used; the machine's load averages: {load}"


def _await_exit(processes: list[_Rank]) -> None:
    deadline = time.monotonic() + EXIT_GRACE_S
    for rank in processes:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    accounts = {rank.index: f"returned, and then {rank.death()}" for rank in processes if rank.process.exitcode}
    for index, stacks in _all_stacks([rank for rank in processes if rank.process.is_alive()]).items():
        accounts[index] = f"returned, but didn't exit within {EXIT_GRACE_S:g} s:\n{stacks}"
    if accounts:
        first = next(iter(accounts.values())).partition("\n")[0]
        raise RanksFailed(f"ranks {list(accounts)} of {len(processes)} didn't exit well: the first {first}", accounts)


def _environment(rank: int, port: int, options: Options) -> dict[str, str]:
    size = str(options.world_size)
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if options.elastic:
        environment |= {
            "TORCHELASTIC_RUN_ID": "ranks",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
        }
    if sys.platform == "linux":
        # otherwise gloo resolves this machine's host name, which may not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _preload_list() -> list[str]:
    # under pytest, pytest is the __main__ that every rank imports
    before = ["pytest", "lightning_shard.testing.assertions"] if "pytest" in sys.modules else []
    return [*before, *dict.fromkeys(_preloaded)]
