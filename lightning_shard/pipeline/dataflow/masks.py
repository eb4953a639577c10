"""Masks and nested tensors that torch and transformers decide on by values: on stages they are made, or not, alike.

Keeps transformers from deciding by values whether there is a mask, where values may not decide, or aren't there.

- Given an ``attention_mask``, its models make no mask where nothing is padded. Then a microbatch runs fewer operations
  than a padded one (values that cross are named by operation number), and blocks that return a mask's sum with position
  biases (T5) return other shapes. So on stages, a mask is made whenever one is given. Causal masks are skipped as usual
  where operations aren't counted: there attention is faster without.
- Without one, they look by position ids whether a row holds several sequences, one after the other (*packed*), between
  which attention needs a mask. On fake tensors, they take rows to be packed, and create a mask that no real step
  creates; on meta tensors, the check fails. Positions that a model creates itself count upwards, so they aren't packed.

Private in transformers 5.0 to 5.23, and used here: ``masking_utils._ignore_bidirectional_mask_sdpa`` and
``_ignore_causal_mask_sdpa``, whose first argument is the mask of padding, and ``find_packed_sequence_indices``.

Keeps ``nn.TransformerEncoder`` from nested tensors, which can't be sent between stages, and returns what they give.

In evaluation, given padding that ends the sequences, a ``TransformerEncoder`` with torch's defaults runs its layers on
nested tensors, which hold no padded positions; after the last layer it pads with zeros. Whether it does so depends on
the parameters of its first layer, so stages would differ. On stages, the layers run on dense tensors instead, and the
padded positions of the last layer's output are set to zero.

Written from torch 2.11 to 2.14: ``TransformerEncoder.forward``, its attribute ``use_nested_tensor``, and
``torch._nested_tensor_from_mask_left_aligned``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.torch_private import replaced

_BIDIRECTIONAL, _CAUSAL = "_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"
_MODULE = "transformers.masking_utils"
_PACKED = "find_packed_sequence_indices"


def masks_made_as_given(*, causal_too: bool) -> AbstractContextManager[None]:
    """Context in which whether there is a mask doesn't depend on its values."""
    if _MODULE not in sys.modules:
        return nullcontext()
    return _replaced(_made_if_given, _BIDIRECTIONAL, *[_CAUSAL] * causal_too)


def _made_if_given(_: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def is_skipped(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        return False if padding_mask is not None else plain(padding_mask, *args, **kwargs)

    return is_skipped


@dataclass
class Asked:
    """Records whether a model looked for packed sequences by positions of its own."""

    is_asked: bool = False


@contextmanager
def nothing_packed(batch: Any = None) -> Iterator[Asked]:
    """Context in which each row of positions counts as one sequence; positions in ``batch`` are checked as usual."""
    asked = Asked()

    def unless_given(_: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def packed(position_ids: Tensor) -> Any:
            given = {tensor.untyped_storage()._cdata for tensor in tree.tensors(batch)}
            if position_ids.untyped_storage()._cdata in given:
                return plain(position_ids)
            asked.is_asked = True
            return None

        return packed

    with _replaced(unless_given, _PACKED):
        yield asked


def _replaced(by: Callable[[str, Callable[..., Any]], Callable[..., Any]], *names: str) -> AbstractContextManager[None]:
    """Context in which ``by(name, function)`` replaces those functions of these names that transformers has."""
    masks: Any = sys.modules.get(_MODULE)
    return replaced(*[(masks, name, by(name, getattr(masks, name))) for name in names if hasattr(masks, name)])


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
