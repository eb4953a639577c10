"""What a stage doesn't know is followed through the user's code, and refused where it would count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import Hollow, Unknown

CPU = torch.device("cpu")


def hollow() -> Hollow:
    return Hollow.of(nn.Parameter(torch.ones(4, 3)), CPU, "embed.weight", 0, refused)


def refused(values: Sequence[Unknown], sentence: str) -> NoReturn:
    raise StepError(sentence)


def unknown() -> Tensor:
    return nn.functional.embedding(torch.tensor([1, 2]), hollow())


def written(change: Callable[[Tensor], Any]) -> Tensor:
    tensor = torch.zeros(4, 3)
    change(tensor)
    return tensor


COMPUTED: dict[str, Callable[[], Any]] = {
    "floats": lambda: unknown() * 2,
    "integers": lambda: unknown().argmax(-1),
    "bools": lambda: unknown() > 0,
    "without NaN": lambda: unknown().nan_to_num(),
    "indices": lambda: torch.ones(9)[unknown().nan_to_num().long()],
    "joined with known ones": lambda: torch.cat([torch.ones(2, 3), unknown()]),
    "one of several": lambda: unknown().unbind()[1],
    "a transposed view": lambda: unknown().T,
    "detached": lambda: unknown().detach(),
    "repeated a known number of times": lambda: unknown().repeat_interleave(2, dim=0),
    "as a mask": lambda: torch.ones(2).masked_fill(unknown()[:, 0] > 0, 2),
    "through a layer": lambda: nn.Linear(3, 3)(unknown()),
    "through attention": lambda: nn.functional.scaled_dot_product_attention(*[unknown()[None]] * 3),
    "written into another": lambda: written(lambda t: t.__setitem__(slice(2), unknown())),
    "written into a part of another": lambda: written(lambda t: t[1:].copy_(unknown()[0])),
    "written as an output": lambda: written(lambda t: torch.add(unknown()[:1], 1, out=t)),
    "added in place": lambda: written(lambda t: t.__iadd__(unknown()[0])),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_what_is_computed_from_it_is_unknown(what: str) -> None:
    assert isinstance(COMPUTED[what](), Unknown)


@pytest.mark.parametrize(
    "known",
    [
        lambda: torch.zeros_like(unknown()),
        lambda: unknown().new_ones(3),
        lambda: torch.ones(1, 3).expand_as(unknown()),
        lambda: torch.ones(2).type_as(unknown()),
        lambda: torch.ones(2, dtype=unknown().dtype, device=unknown().device),
    ],
)
def test_its_shape_and_dtype_are_known(known: Callable[[], Tensor]) -> None:
    assert type(known()) is Tensor


def test_known_tensors_beside_it_stay_known() -> None:
    tensor = torch.ones(2, 3)
    torch.broadcast_tensors(tensor[:1], unknown())
    assert type(tensor) is Tensor
    assert type(torch.add(tensor, 1)) is Tensor


@pytest.mark.parametrize(
    "ask", [bool, float, int, Tensor.item, Tensor.tolist, Tensor.numpy, lambda t: torch.equal(t, t), lambda t: 1 in t]
)
def test_python_doesnt_get_its_value(ask: Callable[[Tensor], Any]) -> None:
    with pytest.raises(StepError, match=r"asks for what is computed from embed\.weight, .*, as a number"):
        ask(unknown().sum())


@pytest.mark.parametrize(
    "times", [lambda t: torch.repeat_interleave(t[:, 0].long()), lambda t: t.repeat_interleave(t[:, 0].long(), 0)]
)
def test_a_size_doesnt_depend_on_it(times: Callable[[Tensor], Any]) -> None:
    with pytest.raises(StepError, match="The size of what repeat_interleave gives depends on"):
        times(unknown())
