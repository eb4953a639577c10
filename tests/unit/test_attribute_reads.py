"""The class of a module whose attributes are watched."""

from __future__ import annotations

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
