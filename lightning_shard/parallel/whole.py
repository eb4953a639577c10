"""Parameters that nothing is sharded over: one data rank, one tensor rank, no experts.

FSDP2 would copy them for every gather, beside the ones that it keeps, and run hooks for each unit. Here the module
holds, as everywhere between steps, DTensors (a checkpoint, a callback's averages and an optimizer ask what a rank holds
of a whole), and while steps run in their place plain parameters over the same memory. What is gathered and freed by
:mod:`lightning_shard.parallel.data` elsewhere is an exchange of references then.

Private: ``DTensor._local_tensor`` (torch 2.11 to 2.13), for each parameter in each step; ``to_local()`` is an operation
of autograd, and takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_shard.errors import StepError

_OF: WeakKeyDictionary[nn.Module, WholeParameters] = WeakKeyDictionary()
_PLACEMENT = (Shard(0),)
_Slot = tuple[nn.Module, str, nn.Parameter, nn.Parameter]


def hold_whole(root: nn.Module, mesh: DeviceMesh) -> None:
    """Make ``root``'s parameters DTensors of one rank, in place; a call of ``root`` runs on plain ones.

    Args:
        root: The model, on any device or on meta. Parameters without dimensions or elements are left as they are.
        mesh: Of this rank alone, with one axis.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.ndim and parameter.numel():
                if parameter not in made:
                    own = DTensor.from_local(parameter.detach(), mesh, _PLACEMENT, run_check=False)
                    made[parameter] = nn.Parameter(own, parameter.requires_grad)
                    made[parameter].__dict__.update(parameter.__dict__)
                _put(module, name, made[parameter])
    whole = _OF[root] = WholeParameters(mesh)
    root.register_forward_pre_hook(_gather, prepend=True)
    for module in root.modules():
        module.register_state_dict_pre_hook(lambda *_, **__: whole.free())
        module.register_load_state_dict_pre_hook(lambda *_: whole.free())


def _gather(root: nn.Module, _: Any) -> None:
    held = whole_of(root)
    if held is None:
        raise StepError(
            f"A copy of {type(root).__name__} was called, that was made after its parameters were laid out on ranks:"
            " copy it in __init__, or keep a state_dict."
        )
    held.gather(root)


def whole_of(root: nn.Module) -> WholeParameters | None:
    """What :func:`hold_whole` made, if it did."""
    return _OF.get(root)


class WholeParameters:
    """The plain parameters that run in place of a module's DTensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._plain: dict[nn.Parameter, nn.Parameter] = {}
        self._slots: list[_Slot] = []
        self._gathered = False

    def gather(self, root: nn.Module) -> None:
        """Put the plain parameters in place; what trains, and what memory they are over, may have changed."""
        if self._gathered:
            return
        if not self._slots:  # not before: weights may be materialised, and moved, until the first call
            self._slots = list(self._find(root))
        for module, name, sharded, plain in self._slots:
            _check_same(module, name, sharded)
            held: Any = sharded
            plain.data = held._local_tensor
            if plain.requires_grad != sharded.requires_grad:
                plain.requires_grad_(sharded.requires_grad)
            _put(module, name, plain)
        self._gathered = True

    def _find(self, root: nn.Module) -> Iterator[_Slot]:
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    if parameter not in self._plain:
                        held: Any = parameter
                        self._plain[parameter] = nn.Parameter(held._local_tensor.detach(), parameter.requires_grad)
                    yield module, name, parameter, self._plain[parameter]

    def free(self) -> None:
        """Put the DTensors in place, with what a step has set on the plain parameters."""
        if self._gathered:
            for module, name, sharded, plain in self._slots:
                _check_same(module, name, plain)
                _put(module, name, sharded)
                if sharded.requires_grad != plain.requires_grad:
                    sharded.requires_grad_(plain.requires_grad)
                held: Any = sharded
                if held._local_tensor.data_ptr() != plain.data_ptr():  # by an assignment to its data
                    held._local_tensor.data.copy_(plain.data)
            self._gathered = False

    def hand_over_gradients(self) -> None:
        """Give the DTensors the gradients that backwards left on the plain parameters."""
        for sharded, plain in self._plain.items():
            if plain.grad is None:
                continue
            gradient: Any = DTensor.from_local(plain.grad, self._mesh, _PLACEMENT, run_check=False)
            plain.grad = None
            sharded.grad = gradient if sharded.grad is None else sharded.grad + gradient
            hooks: Any = getattr(sharded, "_post_accumulate_grad_hooks", None) or {}
            for hook in hooks.values():
                hook(sharded)

    def forget_gradients(self) -> None:
        for plain in self._plain.values():
            plain.grad = None


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Some modules keep their parameters in other places too, as recurrent layers do."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def _check_same(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if module._parameters.get(name) is not parameter:
        raise StepError(
            f"The parameter {name!r} of a {type(module).__name__}, of shape {tuple(parameter.shape)}, was replaced or"
            " removed after the module was laid out on ranks, and the optimizer trains the former one: change its"
            " values in place, as by copy_, or replace it before the fit."
        )
