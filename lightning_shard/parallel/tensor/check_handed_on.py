"""Record output gradients of split modules, to detect styles that take whole gradients for summands or vice versa.

``plugin/steps/checks/tensor_ranks.py`` compares what is recorded here between the tensor ranks.

*Whole outputs.* A layer whose output is all-gathered or all-reduced returns the same output on every tensor rank, and
its style assumes that each rank's gradient of the output is whole. If the following code uses the output for each
rank's own features or heads (such as one head's keys and values, of a ``colwise_gather_output`` layer, beside split
queries), each rank's gradient is only a summand. The forward is correct then, and so may be the gradients of all
parameters that aren't split; only gradients of split parameters are wrong. Detected by gradients of the output that
differ between ranks.

*Summed gradients.* Styles that all-reduce gradients (``shared_output``, ``replicated_with_grad_allreduce``, those of
sequence parallelism) assume that each rank's gradient of the output is a summand. If the following code computes the
same on all ranks, each rank has the whole gradient, and the sum is too large by the number of ranks. The forward is
correct then too, and the resulting gradients are equal on all ranks. Detected by output gradients that are equal on all
ranks before they are summed. With sequence parallelism and a mean over the sequence they are rightly equal; but there
the outputs differ, since each rank has its part. So outputs are recorded as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard.parallel.tensor.styles import SharedOutput, Split, SummedGradients, SummedOutput

_WHOLE_OUTPUTS: WeakSet[nn.Module] = WeakSet()
_SUMMED_GRADIENTS: WeakSet[nn.Module] = WeakSet()


def mark_outputs(root: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Remember which split modules return whole outputs, and for which gradients are all-reduced."""
    _WHOLE_OUTPUTS.update(root.get_submodule(name) for name, style in styles.items() if _has_whole_output(style))
    _SUMMED_GRADIENTS.update(root.get_submodule(name) for name, style in styles.items() if _sums_gradients(style))


def _has_whole_output(style: ParallelStyle) -> bool:
    if isinstance(style, Split):
        return isinstance(style.output_layout, Replicate)
    # torch's styles have layouts of the module's output, and some the layouts that they convert it to
    layouts = getattr(style, "desired_output_layouts", getattr(style, "output_layouts", ()))
    of_torch = isinstance(layouts, tuple) and layouts and all(isinstance(each, Replicate) for each in layouts)
    return isinstance(style, SummedOutput) or bool(of_torch)


def _sums_gradients(style: ParallelStyle) -> bool:
    if isinstance(style, Split):
        return style.output_layout == Shard(1)  # dim 1 is the sequence
    layouts = getattr(style, "sequence_sharding", getattr(style, "output_layouts", ()))  # of torch's styles
    of_sequences = isinstance(layouts, tuple) and Shard(1) in layouts
    return isinstance(style, (SummedGradients, SharedOutput)) or of_sequences


class OutputGradients:
    """Norms and sums of the gradients of split modules' outputs (and of some outputs), added up over calls.

    Args:
        root: The model, or a stage of it, after :func:`mark_outputs`.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = {
            name: module
            for name, module in root.named_modules()
            if module in _WHOLE_OUTPUTS or module in _SUMMED_GRADIENTS
        }
        self._seen: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Calls inside are recorded; so are backwards through them, also after this context."""
        handles = [module.register_forward_hook(partial(self._at_call, name)) for name, module in self._modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _at_call(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if type(output) is Tensor and output.requires_grad:
            output.register_hook(partial(_add_to, self._seen, name))
            if self._modules[name] in _SUMMED_GRADIENTS:
                _add_to(self._outputs, name, output)

    def take(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what was recorded, and clear it.

        Returns:
            Two dicts by module name, with zeros if nothing was recorded. For modules with whole outputs, ``[2]``: norm
            and sum of the output gradients. For modules whose gradients are summed, ``[2, 2]``: norm and sum of the
            outputs, then of their gradients.
        """
        device = next((seen.device for seen in self._seen.values()), torch.device("cpu"))
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        outputs, gradients = (
            {name: seen.get(name, nothing) for name in self._modules} for seen in (self._outputs, self._seen)
        )
        self._outputs.clear()
        self._seen.clear()
        whole = {name: seen for name, seen in gradients.items() if self._modules[name] in _WHOLE_OUTPUTS}
        added = [name for name, module in self._modules.items() if module in _SUMMED_GRADIENTS]
        return whole, {name: torch.stack([outputs[name], gradients[name]]) for name in added}


@torch.no_grad()
def _add_to(seen: dict[str, Tensor], name: str, values: Tensor) -> None:
    own, before = norm_and_sum(values), seen.get(name)
    seen[name] = own if before is None else before + own


def norm_and_sum(values: Tensor) -> Tensor:
    """Norm and sum, ``[2]`` in float64; computed in 32 bits for 16-bit values, without a copy: logits are large."""
    values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    wide = torch.float32 if values.dtype.itemsize < 4 else None
    return torch.stack([torch.linalg.vector_norm(values, dtype=wide), values.sum(dtype=wide)]).double()
