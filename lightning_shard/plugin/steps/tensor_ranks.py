"""Tensor ranks compute alike what isn't split, and a plan that forgets a layer is refused, not silently wrong.

A parameter that the plan leaves whole has the same gradient on all tensor ranks, unless it is used on features that are
split: then each has a summand, and the ranks' parameters would part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard.errors import PlanError, ShardError
from lightning_shard.sharding import local_tensor

STEPS = 3
"""So many optimizer steps are looked at: an adapter's gradients may be zero in the first."""
_ROUNDING = 0.01
"""Sums that ranks take in other orders differ by less, also in 16 bits."""
_NOISE = 1e-6
"""A gradient that is zero but for rounding may be anything this small, relative to the largest one's norm."""
_STYLE = "replicated_with_grad_allreduce"


def check_whole_gradients(parameters: Iterable[tuple[str, Tensor]], tensor_axis: DeviceMesh) -> None:
    """Compare the gradients of parameters that aren't split over the tensor axis; a collective call over it.

    Args:
        parameters: This stage's, with their names; those without a gradient count as zeros.
        tensor_axis: Of one dimension, with its name.

    Raises:
        PlanError: On every rank of the axis, where one differs.
    """
    whole = {name: parameter for name, parameter in parameters if not _is_split(parameter, tensor_axis)}
    if not whole:
        return
    own = torch.stack([_norm_and_sum(parameter) for parameter in whole.values()]).to(tensor_axis.device_type)
    joined = own.new_empty(tensor_axis.size() * len(own), 2)
    dist.all_gather_into_tensor(joined, own, group=tensor_axis.get_group())
    everyone = joined.view(tensor_axis.size(), *own.shape)
    norms = everyone[..., 0].amax(0)
    apart = (everyone.amax(0) - everyone.amin(0)).amax(-1)
    is_wrong = apart > _ROUNDING * norms + _NOISE * norms.max()
    wrong = [name for name, is_apart in zip(whole, is_wrong.tolist()) if is_apart]
    if wrong:
        raise PlanError(
            f"{wrong[0]}{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''}: the tensor ranks have different"
            " gradients of it, so it is used on features that tensor_parallel_plan splits. Give its module the style"
            f' "{_STYLE}", which adds them up, or leave the layers around it out of the plan.'
        )


@contextmanager
def refusing_parts() -> Iterator[None]:
    """The first step runs inside, on layers that a plan splits.

    Raises:
        PlanError: Sizes don't fit there: most likely a layer was given a part of its features.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        is_about_it = any(word in text for word in ("size", "shape", "mixed torch.Tensor and DTensor"))
        if isinstance(error, ShardError) or not is_about_it:
            raise
        raise PlanError(
            f"The first step fails with tensor_parallel_plan: {text}. What runs between a colwise and a rowwise layer"
            " gets this rank's features only, and an embedding or layer of a class of its own may not know split"
            " weights: leave out of the plan what doesn't (it comes with the model, if you gave none), or use"
            " tensor_parallel_size=1."
        ) from error


def _is_split(parameter: Tensor, axis: DeviceMesh) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    assert axis.mesh_dim_names is not None
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == axis.mesh_dim_names[0] and not placement.is_replicate()
        for name, placement in zip(names, parameter.placements)
    )


def _norm_and_sum(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None or not gradient.numel():
        return torch.zeros(2, dtype=torch.float64, device=parameter.device)
    local = local_tensor(gradient).double()
    return torch.stack([torch.linalg.vector_norm(local), local.sum()])
