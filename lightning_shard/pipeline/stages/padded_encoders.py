"""Keeps ``nn.TransformerEncoder`` from nested tensors, which can't be sent between stages, and returns what they give.

In evaluation, given padding that ends the sequences, a ``TransformerEncoder`` with torch's defaults runs its layers on
nested tensors, which hold no padded positions; after the last layer it pads with zeros. Whether it does so depends on
the parameters of its first layer, so stages would differ. On stages, the layers run on dense tensors instead, and the
padded positions of the last layer's output are set to zero.

Written from torch 2.11 to 2.14: ``TransformerEncoder.forward``, its attribute ``use_nested_tensor``, and
``torch._nested_tensor_from_mask_left_aligned``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def use_dense_tensors(root: nn.Module) -> None:
    """Let all encoders in ``root`` run on dense tensors; those of classes with another forward stay as they are."""
    for module in root.modules():
        is_encoder = isinstance(module, nn.TransformerEncoder) and type(module).forward is nn.TransformerEncoder.forward
        if is_encoder and getattr(module, "use_nested_tensor", False):
            vars(module).update(use_nested_tensor=False, forward=partial(_forward, module, module.forward))


def _forward(encoder: nn.Module, plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_compiling() or not torch.backends.mha.get_fastpath_enabled():
        return plain(*args, **kwargs)
    assert isinstance(encoder, nn.TransformerEncoder)
    last: nn.Module = encoder.layers[-1]
    # prepended: before the stage's hook, which sends the output
    handle = last.register_forward_hook(partial(_as_nested, encoder), with_kwargs=True, prepend=True)
    try:
        return plain(*args, **kwargs)
    finally:
        handle.remove()


def _as_nested(
    encoder: nn.TransformerEncoder, last: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any], output: Tensor
) -> Tensor | None:
    """The last layer's output with zeros at padded positions, where torch would have used nested tensors."""
    (hidden,), padding = args, kwargs["src_key_padding_mask"]  # padding: 0 and -inf
    if last.training or padding is None or kwargs["src_mask"] is not None or hidden.dim() != 3:
        return None
    if torch.is_autocast_enabled() or (torch.is_grad_enabled() and (hidden.requires_grad or _trains(last))):
        return None
    if encoder.mask_check and not torch._nested_tensor_from_mask_left_aligned(hidden, padding.logical_not()):
        return None
    return output.masked_fill(padding.bool()[..., None], 0.0)


def _trains(layer: nn.Module) -> bool:
    """Whether a parameter that this stage holds trains; where a stand-in replaces the layer, the output isn't used."""
    return any(p is not None and p.requires_grad for module in layer.modules() for p in module._parameters.values())
