"""Makes gradient norms that a user's hooks compute cover the whole model, as those of Lightning's clipping do.

A hook that calls ``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` or Lightning's ``grad_norm`` gets what one
process would: the norm over all stages and shards of the tensors that the ranks pass. These functions become collective
calls, so the hooks must run on every rank. Of tensors that aren't the model's gradients, they give what they always do.

Private in torch (2.11 to 2.14), and replaced from a run's setup to its end by way of ``torch_private``:
``torch.nn.utils.clip_grad``'s ``_get_total_norm`` and ``_clip_grads_with_norm_``, which ``clip_grad_norm_`` calls, and
``_group_tensors_by_device_and_dtype``, with which ``clip_grad_value_`` fails if it gets no gradients.

What is of a weight that another stage holds too, and counts, is left out of a total norm. Gradients and weights are
known by identity: of copies it can't be told which are of such a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.grads import grad_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from lightning_shard.errors import StepError
from lightning_shard.parallel.clip import (
    clip_by_value,
    gradient_norm,
    is_counted_elsewhere,
    norm_over_ranks,
    norms_over_stage,
    scale_to_norm,
    type_of_norm,
)
from lightning_shard.pipeline.dataflow.taint import Hollow, refuse
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps.checks.stage_parameters import StageParameters
from lightning_shard.torch_private import functions_replaced, replaced


def counted_once(given: Sequence[Tensor], named: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that count on this stage."""
    own = {name: {id(p), id(p.grad)} for name, p in named.items()}
    elsewhere = {name: own[name] for name, p in named.items() if is_counted_elsewhere(p)}
    passed, known = {id(tensor) for tensor in given}, set().union(*own.values())
    left_out = next((name for name, ids in elsewhere.items() if not ids & passed), None)
    if left_out is not None and not passed <= known:
        raise StepError(
            f"A total norm is given tensors that are no parameters' gradients. One may be computed from that of"
            f" {left_out}, which another stage holds too, and counts: pass the gradients themselves,"
            " get_total_norm([p.grad for p in …]), and scale the norm.",
            breaks=10,
        )
    return [tensor for tensor in given if not any(id(tensor) in ids for ids in elsewhere.values())]


# in a tuple: functions are replaced wherever a module holds them by a name
_OWN: Any = (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_, grad_norm)
_GROUP: Any = clip_grad._group_tensors_by_device_and_dtype


class WholeNorms:
    """Computes norms over all ranks. To make one is a collective call over the pipeline."""

    current: WholeNorms | None = None
    """Whose norms the functions give; ``None``: their own."""

    def __init__(
        self,
        module: nn.Module,
        stage_mesh: DeviceMesh,
        groups: Groups,
        device: torch.device,
        guard: StageParameters,
    ) -> None:
        self._module: Any = module
        self._mesh = stage_mesh
        self._groups = groups
        self._device = device
        self.guard = guard
        # by all stages' parameters: scales rounded to different dtypes would let tied copies part
        of_stages = groups.gather_over_stages(type_of_norm(self._own()))
        self._dtype = reduce(torch.promote_types, of_stages)
        self._has_ties = any(groups.gather_over_stages(any(map(is_counted_elsewhere, self._own()))))

    def take_over(self, plugin: Precision) -> None:
        """Make a precision plugin clip by these norms.

        Lightning chooses the plugin, which clips its own parameters by ``torch.nn.utils``. Only these methods of the
        plugin are replaced.
        """

        def own(optimizer: Any) -> list[nn.Parameter]:
            with self.guard.aside():  # a hook's own clip_gradients is right
                return [*plugin.main_params(optimizer)]

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            parameters = own(optimizer)
            norm = gradient_norm(parameters, self._mesh, self._device, dtype=self._dtype)
            scale_to_norm(parameters, clip_val, norm)

        def clip_grad_by_value(optimizer: Any, clip_val: float) -> None:
            clip_by_value(own(optimizer), clip_val)

        plugin.__dict__.update(clip_grad_by_norm=clip_grad_by_norm, clip_grad_by_value=clip_grad_by_value)

    def _own(self) -> list[nn.Parameter]:
        return [*dict(nn.Module.named_parameters(self._module)).values()]  # not by what guards the user's iteration

    def _gives(self) -> bool:
        """Whether a hook sees unknown gradients of other stages' parameters: if there are any now."""
        if not self.guard.is_in_hook:
            return False
        training = [p for p in self._own() if p.requires_grad]
        return not training or any(p.grad is not None for p in training)

    @contextmanager
    def of_functions(self) -> Iterator[None]:
        """Inside, torch's and Lightning's functions return whole norms, and are collective calls over all ranks."""
        before, WholeNorms.current = WholeNorms.current, self
        whole = functions_replaced(zip(_OWN, (_total_norm, _clip_with_norm, _grad_norm)))
        try:
            with whole, replaced((clip_grad, _GROUP.__name__, _grouped)), Hollow.given_gradients(self._gives):
                yield
        finally:
            WholeNorms.current = before

    @staticmethod
    @contextmanager
    def aside() -> Iterator[None]:
        """Inside, which is a pipelined step that stages run at different times, the functions give their own norms."""
        before, WholeNorms.current = WholeNorms.current, None
        try:
            with Hollow.given_gradients(None):
                yield
        finally:
            WholeNorms.current = before

    @torch.no_grad()
    def total(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """``torch.nn.utils.get_total_norm`` over all ranks' tensors; each gradient counts on one stage only.

        Raises:
            StepError: A tensor is computed from a value that isn't known on this stage, or may be computed from the
                gradient of a weight that several stages hold.
        """
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self.guard.take_whole()
        if self._are_others(given):
            return _OWN[0](given, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        counted = [tensor for tensor in given if not isinstance(tensor, Hollow)]
        refuse(counted, "A total norm")
        if self._has_ties:
            counted = self._counted_once(counted)
        norm = norm_over_ranks(counted, self._mesh, self._device, float(norm_type), self._dtype)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite: it can't be clipped.")
        return norm

    def _counted_once(self, given: list[Tensor]) -> list[Tensor]:
        """Without what other stages count. All stages raise alike, since those that don't would wait for the others."""
        counted, said = given, None
        try:
            named = dict(nn.Module.named_parameters(self._module))
            counted = counted_once(given, named)
        except StepError as error:
            said = error
        for of_stage in self._groups.gather_over_stages(said):
            if of_stage is not None:
                raise of_stage
        return counted

    @torch.no_grad()
    def of_each(self, module: nn.Module, norm_type: float, group_separator: str) -> dict[str, Any]:
        """Lightning's ``grad_norm``, over all stages' parameters."""
        with self.guard.aside():
            named = [(name, p) for name, p in module.named_parameters() if p.grad is not None]
        gradients = [p.grad for _, p in named if p.grad is not None]
        if self._are_others(gradients):
            return _OWN[2](module, norm_type, group_separator)  # type: ignore[no-any-return]
        norms = norms_over_stage(gradients, self._mesh, self._device, norm_type).cpu() if named else ()
        own = {f"grad_{norm_type}_norm{group_separator}{name}": norm for (name, _), norm in zip(named, norms)}
        every = {name: norm for stage in self._groups.gather_over_stages(own) for name, norm in stage.items()}
        total = self.total(gradients, norm_type)
        return every and {**every, f"grad_{norm_type}_norm_total": total}

    def _are_others(self, tensors: list[Tensor]) -> bool:
        """Whether these are another network's gradients, or what a step returned; a collective call over the pipeline.

        They are none of the module's gradients, nor computed of these, and the same on all stages.
        """
        own = {id(p.grad) for p in self._own() if p.grad is not None}
        whole = [tensor for tensor in tensors if not isinstance(tensor, (DTensor, Hollow)) and id(tensor) not in own]
        norms = [(tuple(tensor.shape), float(_OWN[0]([tensor]))) for tensor in whole]
        of_stages = self._groups.gather_over_stages(norms if len(whole) == len(tensors) else None)
        return bool(of_stages[0]) and all(each == of_stages[0] for each in of_stages)


def _total_norm(tensors: Any, norm_type: Any = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
    total = _OWN[0] if WholeNorms.current is None else WholeNorms.current.total
    return total(tensors, norm_type, error_if_nonfinite, foreach)


def _clip_with_norm(parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None) -> None:
    if WholeNorms.current is None:
        return _OWN[1](parameters, max_norm, total_norm, foreach)  # type: ignore[no-any-return]
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    scale_to_norm((p for p in given if not isinstance(p, Hollow)), float(max_norm), total_norm)


def _grad_norm(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
    norm_type = float(norm_type)
    if WholeNorms.current is None or norm_type <= 0:
        return _OWN[2](module, norm_type, group_separator)
    return WholeNorms.current.of_each(module, norm_type, group_separator)


def _grouped(tensors: Any, *args: Any) -> Any:
    """As torch's function, which fails without tensors: a stage may have none of them."""
    if WholeNorms.current is not None:
        WholeNorms.current.guard.take_whole()
    own = [[tensor for tensor in each if not isinstance(tensor, Hollow)] for each in tensors]
    return _GROUP(own, *args) if own[0] else {}
