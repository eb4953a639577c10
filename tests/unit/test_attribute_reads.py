"""The class of a module whose attributes are watched."""

from __future__ import annotations

from abc import ABC, ABCMeta
from typing import Any, Generic, TypeVar

import pytest
from torch import nn

from lightning_shard.plugin.steps.state.attribute_reads import Watched


class Own(nn.Linear):
    pass


class Other(Own):
    """As a parametrization makes one."""


def test_a_class_that_is_set_between_steps_or_within_one_stays() -> None:
    module, read = Own(2, 2), list[str]()
    watched = Watched(module, ["in_features"], read.append, read.append)
    for _ in range(2):
        watched.begin()
        assert (type(module) == Own, module.in_features) == (True, 2)  # noqa: E721
        watched.end()
        assert type(module) is Own
    assert read == ["in_features"] * 2
    module.__class__ = Other
    watched.begin()
    assert (type(module) == Other, module.in_features) == (True, 2)  # noqa: E721
    module.__class__ = Own
    watched.end()
    assert type(module) is Own
    assert len(read) == 3


REGISTERED: dict[str, type] = {}


class OfRegistry(nn.Linear):
    def __init_subclass__(cls, key: str) -> None:
        REGISTERED[key] = cls


class ByArgument(OfRegistry, key="argument"):
    pass


class Registry(ABCMeta):
    def __new__(cls, name: str, bases: Any, held: dict[str, Any], *, key: str) -> Any:
        REGISTERED[key] = made = super().__new__(cls, name, bases, held)
        return made

    def __init__(cls, name: str, bases: Any, held: dict[str, Any], *, key: str) -> None:
        super().__init__(name, bases, held)


class ByMetaclass(nn.Linear, metaclass=Registry, key="metaclass"):
    pass


class Abstract(nn.Linear, ABC):
    pass


class Slotted(nn.Linear):
    __slots__ = ("other",)


@pytest.mark.parametrize("kind", [ByArgument, ByMetaclass, Abstract, Slotted])
def test_the_users_code_for_subclasses_is_not_called_for_the_watching_one(kind: type[nn.Linear]) -> None:
    before = dict(REGISTERED)
    module, read = kind(2, 2), list[str]()
    watched = Watched(module, ["in_features"], read.append, read.append)
    watched.begin()
    assert (type(module) == kind, module.in_features) == (True, 2)  # noqa: E721
    assert isinstance(module, kind)
    assert not isinstance(nn.Linear(2, 2), kind)
    watched.end()
    assert type(module) is kind
    assert before == REGISTERED
    assert read == ["in_features"]


@pytest.mark.parametrize("base", [ABC, Generic[TypeVar("T")]])  # type: ignore[misc]
def test_a_class_whose_first_base_is_no_module_is_watched(base: Any) -> None:
    """Python refused to change the class of its objects: ``object layout differs``."""

    class Net(base, nn.Module):  # type: ignore[misc]
        flag = 1

    seen: list[str] = []
    module = Net()
    watched = Watched(module, {"flag"}, seen.append, seen.append)
    watched.begin()
    assert (module.flag, seen) == (1, ["flag"])
    watched.end()
    assert type(module) is Net
