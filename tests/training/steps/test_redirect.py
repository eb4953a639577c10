"""Steps run inside a module's own call."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.utils import _to_kwargs

from lightning_shard.errors import StepError
from lightning_shard.plugin.steps.redirect import call_through, note_sharded


def test_a_call_has_an_argument_as_fsdp2_expects_on_a_cuda_device() -> None:
    """There torch 2.11 moves them so, before each forward of a root; without any, there is no first."""
    module = nn.Linear(2, 2)

    def to_device(_: nn.Module, args: Any, kwargs: Any) -> Any:
        moved, moved_kwargs = _to_kwargs(args, kwargs, torch.device("cpu"), False)
        return moved[0], moved_kwargs[0]

    module.register_forward_pre_hook(to_device, with_kwargs=True)
    x = torch.ones(2)
    assert torch.equal(call_through(module, lambda: module(x) + 1), module(x) + 1), "a step may call the module"
    with pytest.raises(ValueError, match="of the step"):
        call_through(module, _fail)
    assert "forward" not in vars(module)


def test_parameters_of_a_block_that_isnt_called_are_refused() -> None:
    with pytest.raises(StepError, match=r"call block\(x\) and not block\.forward\(x\)"):
        call_through(nn.Linear(2, 2), _meet_a_sharded_parameter)


def test_what_torch_cannot_do_with_sharded_parameters_is_told_of() -> None:
    for error in (
        NotImplementedError("Operator aten.unbind.int does not have a sharding strategy registered."),
        RuntimeError("as_strided not supported with DTensor"),
    ):
        note_sharded(error)
        assert "is a DTensor of which each rank has a part" in error.__notes__[0]


def _meet_a_sharded_parameter() -> None:
    raise RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor")


def _fail() -> None:
    raise ValueError("of the step")
