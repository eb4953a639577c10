"""State that code keeps outside of objects is found where the code finds it."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_shard.namespaces import namespaces
from lightning_shard.plugin.steps.state.python_state import reachable

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


def test_classes_of_one_name_are_two() -> None:
    def made() -> type[nn.Module]:
        class Keeps(nn.Module):
            losses: list[float] = []  # noqa: RUF012

        return Keeps

    first, second = made(), made()
    found = [id(value) for _, value in reachable(nn.ModuleList([first(), second()]))]
    assert {id(vars(first)["losses"]), id(vars(second)["losses"])} <= {*found}
