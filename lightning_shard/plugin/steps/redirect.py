"""Runs a function inside a module's own ``__call__``, so that its forward hooks (FSDP2's) run around the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard.errors import StepError, in_one_line
from lightning_shard.parallel.fsdp.units import within_its_call
from lightning_shard.parallel.fsdp.unsharded import SPARSE_GRADIENT

_NOT_GATHERED = "mixed torch.Tensor and DTensor"
"""torch's message (2.11 to 2.14) where a plain tensor meets a parameter that is still sharded."""
_AS_VALUES = "not supported for tensor subclasses"
"""torch's message for ``p.numpy()`` and ``p.tolist()``."""
_NOT_FOR_SHARDED = (
    *(_NOT_GATHERED, "not supported with DTensor", "Sharding propagation failed", "sharding strategy"),
    "its data is not allocated yet",  # torch.tensor([p.norm()])
    _AS_VALUES,
)
"""All of torch's messages about sharded parameters, including those for operations that DTensors don't support."""


_OF_SHARDED = (
    "Outside of steps a parameter, and its gradient, is a DTensor of which each rank has a part: make what it is"
    " computed with from it (torch.ones_like(p), p.detach().clone() in on_train_start), have p.copy_() take a whole"
    " tensor, or take p.full_tensor(); of numbers torch.stack([p.norm(), …]) or float(p.norm())."
)


_FOR_SPARSE = "Could not run 'fsdp::chunk_cat' with arguments from the 'Sparse"
"""torch's message (2.13) where FSDP2 reduces a sparse gradient."""


def note_sharded(exception: BaseException) -> None:
    """Add a note to an exception of user code that used a sharded parameter, or gave it a sparse gradient."""
    note, _ = _why(exception)
    if note and note not in getattr(exception, "__notes__", ()):
        exception.add_note(note)


def sharded_refusal(error: Exception) -> StepError | None:
    """The same explanation as a StepError; ``None`` for other exceptions."""
    text, breaks = _why(error)
    return StepError(f"{text} torch said: {in_one_line(error)}", breaks=breaks) if text else None


def _why(error: BaseException) -> tuple[str, int | None]:
    """What an exception comes from, and the contract's sentence; an empty text for other exceptions."""
    if str(error).startswith(_FOR_SPARSE):
        return SPARSE_GRADIENT, None
    said = str(error) if type(error) in (RuntimeError, NotImplementedError) else ""
    return (_OF_SHARDED, 9) if any(text in said for text in _NOT_FOR_SHARDED) else ("", None)


def refuse_sharded(loss: Any) -> None:
    """Refuse a loss that is still a DTensor.

    Raises:
        StepError: It was computed from a parameter that isn't gathered, and from others that are.
    """
    if isinstance(loss, DTensor):
        raise StepError(
            "The loss is computed from a parameter as it is between steps, a DTensor of which each rank has a part, as"
            " one of a repeated block outside of its call is, or one from a list that was made in configure_optimizers;"
            " so its gradients would be lost: take parameters from the module in the step, and of those that are"
            " DTensors there p.full_tensor(), as for a penalty over self.parameters().",
            breaks=8,
        )


def call_through(module: nn.Module, function: Callable[[], Any]) -> Any:
    """Return ``function()``, run between the module's forward hooks, which see ``function`` as the one argument.

    Steps are methods other than ``forward``, but the root FSDP module gathers its parameters in hooks around
    ``forward``. The step itself may call ``module(x)``: the real ``forward`` is restored before the step begins.
    """
    own = module.__dict__.get("forward")

    def restore() -> None:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own

    def forward(function: Callable[[], Any]) -> Any:
        restore()
        with within_its_call(module):
            return function()

    module.__dict__["forward"] = forward
    try:
        # FSDP2 moves the arguments to a CUDA device, and in torch 2.11 it fails if there is no argument at all
        return module(function)
    except RuntimeError as error:
        if not any(text in str(error) for text in (_NOT_GATHERED, _AS_VALUES)):
            raise
        raise StepError(
            f"The step computes with parameters that are sharded ({error}). Each of the model's repeated blocks is"
            " gathered while it is called: call block(x) and not block.forward(x), and elsewhere take p.full_tensor()"
            " of its parameters that are DTensors; or name modules inside of them that are called, by pipeline_blocks:"
            " the others are gathered for a whole step. Change parameters in on_train_batch_start or"
            " on_train_batch_end, where each rank has its own part. Or use one process, or another strategy.",
            breaks=8,
        ) from error
    finally:
        if module.__dict__.get("forward") is forward:
            restore()
