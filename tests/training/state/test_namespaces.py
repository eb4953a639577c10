"""State that code keeps outside of objects is found where the code finds it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from lightning_shard.namespaces import Namespace, namespaces
from lightning_shard.state.walk import reachable

CODE = """
class Counts:
    def step(self):
        global steps
        steps += 1

steps = 0
"""


def test_globals_are_those_of_the_code_and_not_a_copy_that_sys_modules_has() -> None:
    here: dict[str, Any] = {"__name__": __name__}  # as a spawned process runs its script
    exec(CODE, here)
    kind = here["Counts"]
    kind().step()
    of_module = namespaces(kind)[0]
    assert of_module.held == {"steps": 1}
    of_module.put("steps", 5)
    kind().step()
    assert here["steps"] == of_module.held["steps"] == 6
    of_module.remove("steps")
    assert of_module.held == {}


HELPER = """
import functools

called = other = decorated = cached = imported = 0

def call():
    global called
    called += 1

def call_other():
    global other
    other += 1

def call_imported():
    global imported
    imported += 1

def counted(function):
    inside = [0]
    def inner(*args):
        global decorated
        decorated += 1
        inside[0] += 1
        return function(*args)
    return inner

@functools.cache
def of_cache():
    global cached
    cached += 1

class Base:
    steps = 0

class Annealer(Base):
    count = 0

    def weight(self):
        call_other()
        Annealer.count += 1
        Base.steps += 1
"""

MODEL = """
import a_helper
from a_helper import of_cache, counted
from torch import nn

own = 0

class Calls(nn.Module):
    def forward(self, x):
        return a_helper.call()

class CallsTwo(nn.Module):
    def first(self):
        return a_helper.call()

    def forward(self, x):
        return a_helper.call_other()

class Imports(nn.Module):
    def forward(self, x):
        from a_helper import call_imported
        return call_imported()

class Decorated(nn.Module):
    @counted
    def forward(self, x):
        global own
        own += 1

class Cached(nn.Module):
    def forward(self, x):
        return of_cache()

class Nested(nn.Module):
    class State:
        n = 0

    def forward(self, x):
        self.State.n += 1

class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.annealers = [a_helper.Annealer()]

class Function(nn.Module):
    def __init__(self):
        super().__init__()
        self.made = lambda: a_helper.call()

class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(a_helper.call_other)
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Writes two files of a user's into a folder, and imports the model's."""

    def imported(folder: str) -> ModuleType:
        place = tmp_path / folder
        place.mkdir(parents=True)
        (place / "a_helper.py").write_text(HELPER)
        (place / "a_model.py").write_text(MODEL)
        monkeypatch.syspath_prepend(place)
        return importlib.import_module("a_model")

    yield imported
    for name in ("a_helper", "a_model"):
        sys.modules.pop(name, None)


def _held(root: nn.Module) -> dict[str, Any]:
    found = (each for _, each in reachable(root) if isinstance(each, Namespace))
    return {f"{each.name}.{key}": value for each in found for key, value in each.held.items()}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Calls", {"a_helper.called"}),
        ("CallsTwo", {"a_helper.called", "a_helper.other"}),
        ("Imports", {"a_helper.imported"}),
        ("Decorated", {"a_model.own", "a_helper.decorated"}),
        ("Cached", {"a_helper.cached"}),
        ("Nested", {"a_model.Nested.State.n"}),
        ("Annealed", {"a_helper.Annealer.count", "a_helper.Base.steps", "a_helper.other"}),
        ("Function", {"a_helper.called"}),
        ("Hooked", {"a_helper.other"}),
    ],
)
def test_state_in_another_of_the_users_files_is_found(
    files: Callable[[str], ModuleType], kind: str, names: set[str]
) -> None:
    held = {key for key, value in _held(getattr(files("project"), kind)()).items() if value == 0}
    assert held == names


def test_state_of_an_installed_package_is_not_followed(
    files: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = files("project")
    monkeypatch.setattr(sys.modules["a_helper"], "__file__", "/usr/lib/python3/site-packages/a_helper.py")
    assert not _held(model.Calls())
    assert not _held(model.Annealed())
