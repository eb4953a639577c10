"""Makes gradient norms that a user's hooks compute cover the whole model, as those of Lightning's clipping do.

A hook that calls ``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` or Lightning's ``grad_norm`` gets what one
process would: the norm over all stages and shards of the tensors that the ranks pass. These functions become collective
calls, so the hooks must run on every rank.

Private, and replaced while ``on_after_backward``, ``on_before_optimizer_step`` and ``configure_gradient_clipping`` run:

* ``torch.nn.utils.clip_grad._get_total_norm`` and ``_clip_grads_with_norm_`` (torch 2.11 to 2.13), which
  ``clip_grad_norm_`` calls, however a hook has imported it; also ``_group_tensors_by_device_and_dtype`` there, with
  which ``clip_grad_value_`` fails if it gets no gradients;
* the code of ``lightning.pytorch.utilities.grads.grad_norm`` (2.6), since most code imports that function by name;
* ``Precision._after_closure`` (2.6), which calls the latter two hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.grads import grad_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad

from lightning_shard.parallel.clip import (
    clip_by_norm,
    clip_by_value,
    is_counted_elsewhere,
    norm_over_ranks,
    norms_over_stage,
    scale_to_norm,
    type_of_norm,
)
from lightning_shard.pipeline.dataflow.taint import Hollow, refuse
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps.checks.parameter_walks import Walks

_TOTALS: list[tuple[Any, str]] = [(clip_grad, "_get_total_norm"), (nn.utils, "get_total_norm")]
_CLIPS: list[tuple[Any, str]] = [(clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_")]

_GROUP: Any = clip_grad._group_tensors_by_device_and_dtype


class WholeNorms:
    """Computes norms over all ranks. To make one is a collective call over the pipeline.

    Args:
        module: Cut and sharded.
        stage_mesh: The mesh of the ranks that hold this rank's stage.
        groups: This rank's groups.
        device: The device of the resulting norms.
        walks: The guard over parameters of incomplete modules; only with several stages.
    """

    _current: WholeNorms | None = None

    def __init__(
        self,
        module: pl.LightningModule,
        stage_mesh: DeviceMesh,
        groups: Groups,
        device: torch.device,
        walks: Walks | None = None,
    ) -> None:
        self._module = module
        self._mesh = stage_mesh
        self._groups = groups
        self._device = device
        self._walks = walks
        # by all stages' parameters: scales rounded to different dtypes would let tied copies part
        of_stages = groups.gather_over_stages(type_of_norm(nn.Module.parameters(module)))
        self._dtype = reduce(torch.promote_types, of_stages)

    def take_over(self, plugin: Precision) -> None:
        """Make a precision plugin clip by these norms, and provide them to the hooks that it calls.

        Lightning chooses the plugin, which clips its own parameters by ``torch.nn.utils``. Only these methods of the
        plugin are replaced.
        """

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            clip_by_norm(plugin.main_params(optimizer), clip_val, self._mesh, self._device, dtype=self._dtype)

        def clip_grad_by_value(optimizer: Any, clip_val: float) -> None:
            clip_by_value(plugin.main_params(optimizer), clip_val)

        methods: dict[str, Any] = {"clip_grad_by_norm": clip_grad_by_norm, "clip_grad_by_value": clip_grad_by_value}
        for hook in ("post_backward", "_after_closure"):
            methods[hook] = partial(self._within, getattr(type(plugin), hook).__get__(plugin))
        plugin.__dict__.update(methods)

    def _within(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        walks = self._walks
        told = nullcontext() if walks is None else walks.showing_gradients(self._module.trainer.optimizers)
        with self.of_functions(), told:
            return function(*args, **kwargs)

    @contextmanager
    def of_functions(self) -> Iterator[None]:
        """Inside, torch's and Lightning's functions return whole norms, and are collective calls over all ranks."""
        meanwhile = [
            (grad_norm, "__code__", _grad_norm.__code__),
            *((place, name, self.total) for place, name in _TOTALS),
            *((place, name, _clip_with_norm) for place, name in _CLIPS),
            (clip_grad, _GROUP.__name__, _grouped),
            (WholeNorms, "_current", self),
        ]
        before = [(place, name, getattr(place, name)) for place, name, _ in meanwhile]
        try:
            for place, name, value in meanwhile:
                setattr(place, name, value)
            yield
        finally:
            for place, name, value in before:
                setattr(place, name, value)

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
            StepError: A tensor is computed from a value that isn't known on this stage.
        """
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        tied = {id(p.grad) for p in nn.Module.parameters(self._module) if is_counted_elsewhere(p)}
        counted = [tensor for tensor in given if id(tensor) not in tied and not isinstance(tensor, Hollow)]
        refuse(counted, "A total norm")
        norm = norm_over_ranks(counted, self._mesh, self._device, float(norm_type), self._dtype)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite: it can't be clipped.")
        return norm

    @torch.no_grad()
    def of_each(self, module: nn.Module, norm_type: float, group_separator: str) -> dict[str, Any]:
        """Lightning's ``grad_norm``, over all stages' parameters."""
        named = [(name, p) for name, p in module.named_parameters() if p.grad is not None]
        gradients = [p.grad for _, p in named if p.grad is not None]
        norms = norms_over_stage(gradients, self._mesh, self._device, norm_type).cpu() if named else ()
        own = {f"grad_{norm_type}_norm{group_separator}{name}": norm for (name, _), norm in zip(named, norms)}
        every = {name: norm for stage in self._groups.gather_over_stages(own) for name, norm in stage.items()}
        total = self.total(gradients, norm_type)
        return every and {**every, f"grad_{norm_type}_norm_total": total}


@torch.no_grad()
def _clip_with_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    scale_to_norm([parameters] if isinstance(parameters, Tensor) else parameters, float(max_norm), total_norm)


def _grouped(tensors: Any, *args: Any) -> Any:
    """As torch's function, which fails without tensors: a stage may have none of them."""
    return _GROUP(tensors, *args) if tensors[0] else {}


def _grad_norm(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
    """The replacement code of Lightning's function, which runs with the globals of Lightning's module."""
    from lightning_shard.plugin.steps.gradient_norms import WholeNorms

    norm_type = float(norm_type)
    if norm_type <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {norm_type}")
    assert WholeNorms._current is not None
    return WholeNorms._current.of_each(module, norm_type, group_separator)
