"""Checks that tensor ranks compute equal values wherever nothing is split, so that an incomplete plan is refused.

A parameter that the plan doesn't split has the same gradient on all tensor ranks, unless it is used on split features:
then each rank has one summand of the gradient, and the ranks' copies of the parameter would diverge.

Ranks that share sequences (context parallelism) compute equal values around blocks; their losses are compared too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard.errors import PlanError, ShardError, StepError
from lightning_shard.parallel.tensor.check_handed_on import norm_and_sum
from lightning_shard.sharding import local_tensor

STEPS = frozenset({1, 2, 3, 4, 8, 16, 32, 64})
"""The steps, and optimizer steps, of a run that are checked. An adapter's gradients may be zero in the first, and a
loss may have an effect only later. Not all steps are: equal values may drift by rounding where sums have no fixed
order."""
ROUNDING = 0.01
"""Sums taken in different orders by ranks differ by less, also in 16 bits. Relative to the norm."""
_NOISE = 1e-6
"""A gradient that is zero but for rounding may be up to this large, relative to the largest gradient's norm."""
_SAME = 1e-6
"""Relative to the norm, gradients of a rank's own part differ by more, and gradients of equal computations by less."""
_LOSS_ROUNDING = {True: 1e-5, False: 1e-3}
"""Relative difference allowed between losses that are computed alike: in 32 bits or more, and in fewer."""
_STYLES = (
    'Give a module that runs on such features the style "replicated_with_grad_allreduce", and one that runs on whole'
    ' ones, and whose output meets them (a gate, or keys of a single head), "shared_output": these add gradients up.'
)


def check_whole_gradients(parameters: Iterable[tuple[str, Tensor]], tensor_axis: DeviceMesh) -> None:
    """Compare the gradients of parameters that aren't split over the tensor axis; a collective call over it.

    Args:
        parameters: This stage's, by name; a missing gradient counts as zeros.
        tensor_axis: A mesh of that one named dimension.

    Raises:
        PlanError: On every rank of the axis, if a gradient differs.
    """
    whole = {name: parameter for name, parameter in parameters if not is_split(parameter, tensor_axis)}
    if not whole:
        return
    wrong = _apart({name: _norm_and_sum(parameter) for name, parameter in whole.items()}, tensor_axis)
    if wrong:
        raise PlanError(
            f"{first_of(wrong)}: the tensor ranks have different gradients of it, so it, or what is computed with it,"
            f" is used on features that tensor_parallel_plan splits. {_STYLES} Or leave the layers around it out of"
            " the plan."
        )


def check_outputs(gradients: Mapping[str, Tensor], tensor_axis: DeviceMesh) -> None:
    """Compare gradients of the unsplit outputs of split modules; a collective call over the tensor axis.

    Args:
        gradients: Norms and sums by module, ``[2]``; of the same modules on all ranks.

    Raises:
        PlanError: On every rank of the axis, if one differs.
    """
    wrong = _apart(gradients, tensor_axis) if gradients else []
    if wrong:
        raise PlanError(
            f"{first_of(wrong)}: the output of this layer isn't split, but the tensor ranks have different gradients"
            " of it, so what follows uses it, or what is computed from it, for a part of the features or heads that"
            " tensor_parallel_plan splits, and the weights' gradients would be wrong. Split it as what it is used"
            f" with. {_STYLES} Or leave the layers around it out of the plan."
        )


def check_summands(seen: Mapping[str, Tensor], tensor_axis: DeviceMesh) -> None:
    """Check modules whose outputs' gradients are summed over the ranks; a collective call over the tensor axis.

    Args:
        seen: Norms and sums by module, of its output, and of the output's gradients before they are summed, ``[2, 2]``;
            of the same modules on all ranks.

    Raises:
        PlanError: On every rank of the axis, if output and gradients are both equal on all ranks: then the ranks
            computed the same, and the sum is too large.
    """
    if not seen:
        return
    everyone = _over(tensor_axis, torch.stack(list(seen.values())))
    norms = everyone[..., 0].amax(0)
    are_same = (everyone.amax(0) - everyone.amin(0)).amax(-1) <= _SAME * norms
    is_wrong = are_same.all(-1) & (norms[..., 1] > 0)
    wrong = [name for name, each in zip(seen, is_wrong.tolist()) if each]
    if wrong:
        raise PlanError(
            f"{first_of(wrong)}: tensor_parallel_plan gives it a style that sums its output's gradients over the"
            " tensor ranks, as for parts of features, of heads or of a sequence. But all ranks compute the same with"
            f" its output, so they would be {tensor_axis.size()} times too large. Leave it out of the plan: then all"
            ' ranks compute the same gradients; or, of styles for sequences, begin with "scatter_sequence" at the first'
            " block."
        )


def _apart(values: Mapping[str, Tensor], axis: DeviceMesh) -> list[str]:
    """The names whose norms and sums differ; a collective call over the axis."""
    is_wrong = differ(_over(axis, torch.stack(list(values.values()))), ROUNDING, _NOISE)
    return [name for name, is_apart in zip(values, is_wrong.tolist()) if is_apart]


def differ(everyone: Tensor, rounding: float, noise: float = 0.0) -> Tensor:
    """Where ranks' values differ, ``[values]``.

    Args:
        everyone: Norms and sums, ``[ranks, values, 2]``. What isn't finite on all ranks counts as equal.
        rounding: The difference allowed, relative to the norm.
        noise: Relative to the largest norm.
    """
    finite = everyone.isfinite()
    known = everyone.where(finite, torch.zeros_like(everyone))  # a comparison with NaN is always false
    norms = known[..., 0].amax(0)
    apart = (known.amax(0) - known.amin(0)).amax(-1) > rounding * norms + noise * norms.max()
    return apart | (finite.any(0) & ~finite.all(0)).any(-1)


def first_of(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def check_losses(output: Any, tensor_axis: DeviceMesh, *, in_32_bits: bool) -> None:
    """Compare the losses of a training step; a collective call over the tensor axis.

    Args:
        output: What the step returned: a loss, a dict with one, or none.
        in_32_bits: Whether nothing is computed in fewer bits.

    Raises:
        PlanError: On every rank of the axis, if the losses differ.
    """
    losses = _over(tensor_axis, torch.tensor([_value(output)], dtype=torch.float64)).flatten()
    if losses_differ(losses, in_32_bits=in_32_bits):
        raise PlanError(
            f"The tensor ranks have different losses ({', '.join(f'{each:.7g}' for each in losses.tolist())}), so the"
            " step computes them with features or weights that tensor_parallel_plan splits. A hook on a layer between"
            " a colwise and a rowwise one is given such features: leave the layers around it out of the plan, or give"
            ' the first the style "colwise_gather_output" and the second "rowwise_split_input". Of weights that are'
            " DTensors take p.full_tensor(), as for a penalty over self.parameters()."
        )


def check_losses_of_sequences(output: Any, group: dist.ProcessGroup, device_type: str, *, in_32_bits: bool) -> None:
    """Compare losses over ranks that share each sequence, which compute equal values outside of blocks. Collective.

    Raises:
        StepError: On all of them, if the losses differ.
    """
    own = torch.tensor([_value(output)], dtype=torch.float64, device=device_type)
    losses = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(losses, own, group=group)
    values = torch.stack(losses).flatten()
    if losses_differ(values, in_32_bits=in_32_bits):
        said = ", ".join(f"{each:.7g}" for each in values.tolist())
        raise StepError(
            f"The ranks that share a sequence have different losses ({said})."
            " What a block takes from an attribute, and not as an argument, has on each rank the gradient of its part"
            " of the sequence: right once parameters' gradients are averaged, but not where a step takes gradients"
            " itself, as for a penalty: pass it as an argument, or use context_parallel_size=1."
        )


def losses_differ(losses: Tensor, *, in_32_bits: bool) -> bool:
    """Whether ranks' losses, ``[ranks]``, differ by more than rounding; one that is NaN on some ranks only does."""
    pairs = torch.stack([losses.abs(), losses], -1).unsqueeze(1)
    return bool(differ(pairs, _LOSS_ROUNDING[in_32_bits]))


def _value(output: Any) -> float:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return float(local_tensor(loss.detach())) if isinstance(loss, Tensor) and loss.numel() == 1 else 0.0


_ABOUT_SIZES = (
    *("size", "shape", "reduction dim", "out of bounds", "out of range", "values to unpack", "should contain"),
    "mixed torch.Tensor and DTensor",
)


@contextmanager
def refusing_parts() -> Iterator[None]:
    """Explain errors of the first step, which runs inside, on layers that a plan splits.

    Raises:
        PlanError: The step fails on sizes: most likely a layer was given only a part of its features.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        text = str(error).partition("\n")[0]
        is_about_it = any(word in text for word in _ABOUT_SIZES) and not text.startswith("list ")
        if isinstance(error, ShardError) or not is_about_it:
            raise
        raise PlanError(
            f"The first step fails with tensor_parallel_plan: {text.rstrip('.')}. What runs between a colwise and a"
            " rowwise layer gets this rank's features only, and a custom embedding or layer class may not support"
            " split weights: leave out of the plan what doesn't (it comes with the model, if you gave none), or"
            " use tensor_parallel_size=1. Where the step fails without the plan too, the plan isn't the reason."
        ) from error


def everyones(own: Tensor, ranks: dist.ProcessGroup, device_type: str) -> Tensor:
    """All-gather a tensor over ranks: ``[ranks, *own.shape]``."""
    own, size = own.to(device_type), dist.get_world_size(ranks)
    joined = own.new_empty(size, *own.shape)
    dist.all_gather([*joined], own, group=ranks)  # torch 2.13 deprecates all_gather_into_tensor, and 2.11 has no other
    return joined


def _over(axis: DeviceMesh, own: Tensor) -> Tensor:
    return everyones(own, axis.get_group(), axis.device_type)


def is_split(parameter: Tensor, axis: DeviceMesh) -> bool:
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
    return norm_and_sum(local_tensor(gradient))
