"""What a test needs: markers by what its code reaches, and a check that no other test starts a process.

A test is marked when it is collected, by the harnesses that it reaches: the test, its fixtures and parameters, and what
these use in ``tests``. A test that starts processes in another way, such as a DataLoader's workers, has
``pytest.mark.ranks``, or fails at the first one.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
HARNESSES = {
    "lightning_shard.testing.alike": "ranks",
    "lightning_shard.testing.processes": "ranks",
    "multiprocessing": "ranks",
    "subprocess": "ranks",
    "tests.servers": "server",
}
"""Modules that start processes, and the marker of those who call their functions."""


def mark(test: pytest.Function) -> None:
    """Mark a test by the harnesses that it reaches. Private part of pytest 8 and 9: a test's ``_fixtureinfo``."""
    fixtures = [each.func for named in test._fixtureinfo.name2fixturedefs.values() for each in named]
    parameters = test.callspec.params.values() if hasattr(test, "callspec") else ()
    functions = [getattr(test.obj, "__func__", test.obj), *fixtures]
    for marker in reached(*parameters).union(*map(_of_function, functions)):
        test.add_marker(marker)


@functools.cache
def _of_function(function: FunctionType) -> set[str]:
    """Once for all parameters of a test, and all tests of a fixture."""
    return reached(function)


def reached(*values: Any) -> set[str]:
    """The markers of the harnesses that functions reach."""
    seen: set[int] = set()
    return {marker for value in values for marker in _reached(value, seen)}


def _reached(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    seen.add(id(value))
    value = getattr(value, "__func__", value)
    if isinstance(value, ModuleType) and value.__name__ in HARNESSES:
        yield HARNESSES[value.__name__]
    elif isinstance(value, functools.partial):
        yield from _reached(value.func, seen)
    elif isinstance(value, type) and value.__module__.startswith("test"):
        for member in vars(value).values():
            yield from _reached(member, seen)
    elif isinstance(value, FunctionType):
        if (home := value.__globals__["__name__"]) in HARNESSES:
            yield HARNESSES[home]
        elif HERE in Path(value.__code__.co_filename).parents:
            names = set(_names(value.__code__))
            for used in [value.__globals__[name] for name in names if name in value.__globals__]:
                yield from _reached(used, seen)
                if isinstance(used, ModuleType) and used.__name__.startswith("tests."):
                    for name in names & vars(used).keys():
                        yield from _reached(vars(used)[name], seen)
        if hasattr(value, "__wrapped__"):  # decorated: ``ranks``, a context manager
            yield from _reached(value.__wrapped__, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


running: list[pytest.Item] = []
"""The test that runs, if one does; its fixtures included."""
_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
"""Python's audit events of a new process. There is none when the fork server of multiprocessing starts one."""


def watch() -> None:
    """From now on fail each test that starts a process and isn't marked."""
    started = multiprocessing.process.BaseProcess.start

    def start(process: multiprocessing.process.BaseProcess) -> None:
        _check("multiprocessing.Process.start")
        started(process)

    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]
    sys.addaudithook(_audit)


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in _STARTS:  # 0.3 µs for any other event, such as each call of `id`
        _check(event)


def _check(door: str) -> None:
    if running and not any(running[0].get_closest_marker(marker) for marker in ("ranks", "server")):
        # raises what is no Exception, so that the code that is tested doesn't handle it
        pytest.fail(f"a test that starts a process ({door}) needs a marker: @pytest.mark.ranks")
