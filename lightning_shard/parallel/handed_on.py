"""What split modules hand on whole, and whether its gradients are whole too.

A layer that is gathered or summed gives every tensor rank the same output, and takes each rank's gradient of it for the
whole one. Where what follows uses it for features or heads of each rank's own (one head's keys and values, of a layer
that is ``colwise_gather_output``, beside queries that are split), a rank's gradient is a summand. The forward is right
then, and so may be all parameters that aren't split: only gradients of split ones are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard.parallel.styles import OwnShare, Split

_WHOLE: WeakSet[nn.Module] = WeakSet()


def remember_whole_outputs(root: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Note which modules, of those that are split, hand on what is whole."""
    _WHOLE.update(root.get_submodule(name) for name, style in styles.items() if _hands_on_whole(style))


def _hands_on_whole(style: ParallelStyle) -> bool:
    if isinstance(style, Split):
        return isinstance(style.produced, Replicate)
    # torch's own have layouts of their outputs, and some of what they make of these
    layouts = getattr(style, "desired_output_layouts", getattr(style, "output_layouts", ()))
    of_torch = isinstance(layouts, tuple) and layouts and all(isinstance(each, Replicate) for each in layouts)
    return isinstance(style, OwnShare) or bool(of_torch)


class OutputGradients:
    """Of what a model's split modules hand on whole: norms and sums of gradients, added up over calls.

    Args:
        root: The model, or a stage of it, after :func:`remember_whole_outputs`.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = {name: module for name, module in root.named_modules() if module in _WHOLE}
        self._seen: dict[str, Tensor] = {}

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
            output.register_hook(partial(self._at_gradient, name))

    @torch.no_grad()
    def _at_gradient(self, name: str, gradient: Tensor) -> None:
        seen = norm_and_sum(gradient)
        before = self._seen.get(name)
        self._seen[name] = seen if before is None else before + seen

    def take(self) -> dict[str, Tensor]:
        """Of each module, ``[2]``, zeros where nothing was seen; what was seen is forgotten."""
        device = next((seen.device for seen in self._seen.values()), torch.device("cpu"))
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        taken = {name: self._seen.get(name, nothing) for name in self._modules}
        self._seen.clear()
        return taken


def norm_and_sum(values: Tensor) -> Tensor:
    """``[2]``, given in 64 bits. Taken in 32 where values have fewer, and never of a copy: they may be all logits'."""
    values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    wide = torch.float32 if values.dtype.itemsize < 4 else None
    return torch.stack([torch.linalg.vector_norm(values, dtype=wide), values.sum(dtype=wide)]).double()
