"""What split modules hand on whole, and whether its gradients are whole too; and what they hand on to each rank.

A layer that is gathered or summed gives every tensor rank the same output, and takes each rank's gradient of it for the
whole one. Where what follows uses it for features or heads of each rank's own (one head's keys and values, of a layer
that is ``colwise_gather_output``, beside queries that are split), a rank's gradient is a summand. The forward is right
then, and so may be all parameters that aren't split: only gradients of split ones are wrong.

The other way round, a style that adds gradients up (``shared_output``, ``replicated_with_grad_allreduce``, those of
parts of a sequence) takes each rank's gradient for a summand. Where what follows computes alike on all ranks, each has
the whole one, and the sum is that many times too large. The forward is right then too, and gradients agree: only that
they are the same on all ranks before they are added up tells of it. So are those of parts of a sequence whose mean is
taken, but what is handed on is another part on each rank.
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

from lightning_shard.parallel.tensor.styles import OwnShare, SharedOutput, Split, SummedGradients

_WHOLE: WeakSet[nn.Module] = WeakSet()
_ADDED: WeakSet[nn.Module] = WeakSet()


def remember_outputs(root: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Note which modules, of those that are split, hand on what is whole, and of which gradients are added up."""
    _WHOLE.update(root.get_submodule(name) for name, style in styles.items() if _hands_on_whole(style))
    _ADDED.update(root.get_submodule(name) for name, style in styles.items() if _adds_up(style))


def _hands_on_whole(style: ParallelStyle) -> bool:
    if isinstance(style, Split):
        return isinstance(style.produced, Replicate)
    # torch's own have layouts of their outputs, and some of what they make of these
    layouts = getattr(style, "desired_output_layouts", getattr(style, "output_layouts", ()))
    of_torch = isinstance(layouts, tuple) and layouts and all(isinstance(each, Replicate) for each in layouts)
    return isinstance(style, OwnShare) or bool(of_torch)


def _adds_up(style: ParallelStyle) -> bool:
    if isinstance(style, Split):
        return style.produced == Shard(1)  # a part of the sequence
    layouts = getattr(style, "sequence_sharding", getattr(style, "output_layouts", ()))  # torch's own
    of_sequences = isinstance(layouts, tuple) and Shard(1) in layouts
    return isinstance(style, (SummedGradients, SharedOutput)) or of_sequences


class OutputGradients:
    """Of what a model's split modules hand on: norms and sums of gradients, added up over calls.

    Args:
        root: The model, or a stage of it, after :func:`remember_outputs`.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = {name: module for name, module in root.named_modules() if module in _WHOLE or module in _ADDED}
        self._seen: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Calls inside are seen, and backwards through them, also later ones."""
        handles = [module.register_forward_hook(partial(self._at_call, name)) for name, module in self._modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _at_call(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if type(output) is Tensor and output.requires_grad:
            output.register_hook(partial(_add_to, self._seen, name))
            if self._modules[name] in _ADDED:
                _add_to(self._outputs, name, output)

    def take(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What was seen, which is forgotten.

        Returns:
            By name, zeros where nothing was seen: of modules that hand on what is whole, their gradients', ``[2]``; and
            of those whose gradients are added up, what they handed on, and its gradients', ``[2, 2]``.
        """
        device = next((seen.device for seen in self._seen.values()), torch.device("cpu"))
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        outputs, gradients = (
            {name: seen.get(name, nothing) for name in self._modules} for seen in (self._outputs, self._seen)
        )
        self._outputs.clear()
        self._seen.clear()
        whole = {name: seen for name, seen in gradients.items() if self._modules[name] in _WHOLE}
        added = [name for name, module in self._modules.items() if module in _ADDED]
        return whole, {name: torch.stack([outputs[name], gradients[name]]) for name in added}


@torch.no_grad()
def _add_to(seen: dict[str, Tensor], name: str, values: Tensor) -> None:
    own, before = norm_and_sum(values), seen.get(name)
    seen[name] = own if before is None else before + own


def norm_and_sum(values: Tensor) -> Tensor:
    """``[2]``, given in 64 bits. Taken in 32 where values have fewer, and never of a copy: they may be all logits'."""
    values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    wide = torch.float32 if values.dtype.itemsize < 4 else None
    return torch.stack([torch.linalg.vector_norm(values, dtype=wide), values.sum(dtype=wide)]).double()
