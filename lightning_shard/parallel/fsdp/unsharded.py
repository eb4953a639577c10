"""A replacement for FSDP2 where nothing is sharded: one data rank, and no expert parallelism.

FSDP2 would copy each parameter in every all-gather, keep the original beside the copy, and run hooks for each unit.
Here, too, the module holds DTensors between steps (checkpoints, averaging callbacks and optimizers ask which part of
the full tensor a rank holds). During a step it holds *running* parameters over the same memory instead: plain ones, or
DTensors if a tensor-parallel plan has split them. So unshard and reshard, as
:mod:`lightning_shard.parallel.fsdp.shard` calls them, only exchange references. As with FSDP2, a parameter has no
gradient before the last backward.

Private: ``DTensor._local_tensor`` and ``DTensor(local, spec)`` (torch 2.11 to 2.14), used for each parameter in each
step. ``to_local()`` and ``from_local()`` are autograd operations, which take at least ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.watched_parameters import REPLACED, TAKEN, refusal, show_writes, was_written
from lightning_shard.sharding import parameter_like, share_attributes

_OF: WeakKeyDictionary[nn.Module, UnshardedParameters] = WeakKeyDictionary()
_OF_PART: WeakKeyDictionary[nn.Module, UnshardedParameters] = WeakKeyDictionary()
unsharded_of: Callable[[nn.Module], UnshardedParameters | None] = _OF.get
"""The :class:`UnshardedParameters` that :func:`hold_unsharded` made for a root, if any."""
_PLACEMENT = (Shard(0),)
COPIED = (
    "A copy of {kind} was called that was made after its parameters were sharded: copy it in __init__, or keep a"
    " state_dict."
)
SPARSE_GRADIENT = (
    "A gradient is sparse, as F.embedding(…, sparse=True) gives them, and sparse gradients can't be reduced over ranks"
    " in parts: use sparse=False."
)
_CHANGED = (
    "was changed in place in a step, which runs once for each microbatch: make the change in on_train_batch_start or"
    " on_train_batch_end, or keep it as a buffer."
)


class _Slot(NamedTuple):
    """Where a module has a parameter.

    The module's entries in the two dictionaries above hold this, so its references to the module are weak: else neither
    would ever be freed.
    """

    module_ref: ref[nn.Module]
    name: str
    held: nn.Parameter
    running: nn.Parameter
    put: Callable[[str, Any], None]


def hold_unsharded(root: nn.Module, mesh: DeviceMesh) -> None:
    """Make ``root``'s parameters DTensors on a mesh of one rank, in place; calls of ``root`` use running parameters.

    Args:
        root: The model, on any device or on meta. Parameters without dimensions or elements, and DTensors, are left
            unchanged.
        mesh: A mesh with one axis, of this rank alone.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.ndim and parameter.numel() and not isinstance(parameter, DTensor):
                if parameter not in made:
                    own = DTensor.from_local(parameter.detach(), mesh, _PLACEMENT, run_check=False)
                    made[parameter] = parameter_like(own, parameter)
                _put_into(module)(name, made[parameter])
    whole = _OF[root] = UnshardedParameters(mesh)
    root.register_forward_pre_hook(_gather, prepend=True)
    for module in root.modules():
        _OF_PART[module] = whole  # a copy of a module has the hooks too, but isn't in this dict
        module.register_state_dict_pre_hook(_free)
        module.register_load_state_dict_pre_hook(_free)


def _gather(root: nn.Module, _: Any) -> None:
    held = unsharded_of(root)
    if held is None:
        raise StepError(COPIED.format(kind=type(root).__name__), breaks=9)
    if not held.is_gathered:
        held.gather(root)


def _free(module: nn.Module, *_: Any, **__: Any) -> None:
    if (whole := _OF_PART.get(module)) is not None:
        whole.free()


class UnshardedParameters:
    """Running parameters, which replace a module's own ones in steps: plain ones where the module's are on ``mesh``."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._running: dict[nn.Parameter, nn.Parameter] = {}
        self._slots: list[_Slot] = []
        self._watched: set[nn.Parameter] = set()
        self.is_gathered = False
        self.in_microbatches = False
        """Set for a pipeline stage: a step's code runs once per microbatch, and so would each change of a parameter.
        Parts aren't called between steps."""
        self._versions: list[int] = []

    def gather(self, root: nn.Module) -> None:
        """Put the running parameters in place, with the present memory and ``requires_grad`` of the module's own."""
        if self.is_gathered:
            return
        if not self._slots:  # not earlier: weights may be materialised or moved until the first call
            self._slots = list(self._find(root))
            if self.in_microbatches:
                for slot in self._slots:
                    show_writes(slot.running)
        for module_ref, name, held, running, put in self._slots:
            module: Any = module_ref()  # there, since its root is called
            if module._parameters.get(name) is not held:
                raise refusal(name, module, held, REPLACED)
            if isinstance(running, DTensor):
                running._local_tensor = held._local_tensor  # type: ignore[attr-defined]
            else:
                running.data = held._local_tensor  # type: ignore[attr-defined]
            if running.requires_grad != held.requires_grad:
                running.requires_grad_(held.requires_grad)
            # not on stages: with this hook, a split backward couldn't leave a weight's gradient to its second part
            # (pipeline/runtime/split_backward.py)
            if not self.in_microbatches and held.requires_grad and held not in self._watched:
                self._watched.add(held)
                running.register_post_accumulate_grad_hook(_moves_at_once(ref(self), held))
            put(name, running)
        self._versions = self._seen_versions()
        self.is_gathered = True

    def _find(self, root: nn.Module) -> Iterator[_Slot]:
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    if parameter not in self._running:
                        same: Tensor = parameter._local_tensor if parameter.device_mesh == self._mesh else parameter
                        self._running[parameter] = nn.Parameter(same.detach(), parameter.requires_grad)
                        share_attributes(self._running[parameter], parameter)
                    yield _Slot(ref(module), name, parameter, self._running[parameter], _put_into(module))

    def free(self) -> None:
        """Put the module's own parameters in place, with what a step has set on the running ones.

        Raises:
            StepError: On a pipeline stage, a step changed a parameter in place.
        """
        if self.is_gathered:
            assigned_others: set[nn.Parameter] = set()
            for module_ref, name, held, running, put in self._slots:
                module: Any = module_ref()
                if module._parameters.get(name) is not running:
                    raise refusal(name, module, running, REPLACED)
                put(name, held)
                if held.requires_grad != running.requires_grad:
                    held.requires_grad_(running.requires_grad)
                own: Tensor = held._local_tensor  # type: ignore[attr-defined]
                assigned: Tensor = running._local_tensor if isinstance(running, DTensor) else running
                if own.data_ptr() != assigned.data_ptr():  # a step ran p.data = …
                    if self.in_microbatches and not torch.equal(own, assigned):
                        assigned_others.add(running)
                    own.data.copy_(assigned.data)
            self.is_gathered = False
            was_taken = bool(TAKEN)
            for slot, before, now in zip(self._slots, self._versions, self._seen_versions()):
                written = before != now or (was_taken and was_written(slot.running))
                if written or slot.running in assigned_others:
                    module = slot.module_ref()
                    raise refusal(slot.name, module, slot.running, _CHANGED)

    def _seen_versions(self) -> list[int]:
        return [slot.running._version for slot in self._slots] if self.in_microbatches else []

    def move_gradients(self) -> None:
        """Move the gradients of the running parameters to the module's own."""
        self._move_gradients(self._running.items())

    @torch.no_grad()
    def _move_gradients(self, of: Iterable[tuple[Any, Any]]) -> None:
        for held, running in of:
            if (own := running.grad) is None:
                continue
            running.grad, local = None, held._local_tensor
            if (
                not isinstance(own, DTensor)
                and (own.layout, own.shape, own.dtype) == (torch.strided, local.shape, local.dtype)
                and own.stride() == local.stride()
            ):
                # past __init__, which does nothing, and takes five times as long
                gradient: Tensor = DTensor.__new__(DTensor, own, held._spec, requires_grad=False)
            else:
                gradient = self._laid_out(own, held)
            held.grad = gradient if held.grad is None else held.grad + gradient
            for hook in (getattr(held, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(held)

    def move_at_once(self, held: nn.Parameter, running: nn.Parameter) -> None:
        """Move the gradient at once if it comes from a part that was called between steps."""
        if not self.is_gathered:
            self._move_gradients([(held, running)])

    def _laid_out(self, gradient: Tensor, like: Tensor) -> Tensor:
        """The gradient in the parameter's layout. Of a split parameter it may be replicated or partial instead.

        Raises:
            StepError: It is sparse, which data ranks couldn't train with.
        """
        assert isinstance(like, DTensor)
        if not isinstance(gradient, DTensor):
            if gradient.is_sparse:
                raise StepError(SPARSE_GRADIENT)
            return DTensor.from_local(gradient, self._mesh, _PLACEMENT, run_check=False)
        if gradient.placements == like.placements:
            return gradient
        return gradient.redistribute(placements=like.placements)

    def drop_unreduced_gradients(self) -> None:
        for running in self._running.values():
            running.grad = None


def _moves_at_once(whole: ref[UnshardedParameters], held: nn.Parameter) -> Callable[[Any], None]:
    """A hook of a running parameter. Python's collector doesn't see what such hooks hold: hence a weak reference."""

    def move(running: nn.Parameter) -> None:
        if (owner := whole()) is not None:
            owner.move_at_once(held, running)

    return move


def _put_into(module: nn.Module) -> Callable[[str, Any], None]:
    """A setter of parameters: ``setattr`` if a class overrides it, as recurrent layers, which also keep a list."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        return module._parameters.__setitem__
    weak = ref(module)
    return lambda name, parameter: setattr(weak(), name, parameter)
