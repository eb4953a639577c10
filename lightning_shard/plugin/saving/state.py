"""Loads a module's state from a checkpoint, by the module's own state-dict names."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import checkpoint as ckpt
from lightning_shard.arguments import few
from lightning_shard.errors import StateMismatchError
from lightning_shard.plugin.saving.own_loading import as_stored, load_by_own_code
from lightning_shard.sharding import full_tensor, local_part, local_tensor


def load_module(
    module: nn.Module,
    stored: Mapping[str, Any],
    elsewhere: Iterable[str],
    *,
    strict: bool,
    also: Iterable[str] = (),
    left_out: Collection[str] = (),
    by_own_code: bool = False,
) -> tuple[list[str], list[str]]:
    """Fill a module's parameters and buffers, in place.

    Args:
        module: Cut and sharded.
        stored: Names to stored tensors (a checkpoint's, or plain ones with which a hook replaced them).
        elsewhere: Names that other stages fill.
        strict: Refuse missing and unexpected names.
        also: Buffers that are filled as well, although they are another stage's state.
        left_out: Names that may be missing, since the module already has their values.
        by_own_code: Call the module's ``load_state_dict``, since some stage has its own loading code; the same value on
            all ranks.

    Returns:
        Missing and unexpected names.

    Raises:
        StateMismatchError: Shapes differ; with ``strict``, names do.
    """
    state = module.state_dict(keep_vars=True)
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    live = {name for name, _ in (*parameters, *buffers)}
    own = {name: state[name] for name in state if name in live}
    foreign = {name: module.get_buffer(name) for name in also if name in stored}
    if by_own_code:
        ckpt.load_together(lambda: _pairs(foreign, stored))
        _tell_of_types((stored[n], own[n]) for n in own if isinstance(stored.get(n), ckpt.StoredTensor))
        plain = state.keys() - live
        return load_by_own_code(module, stored, set(elsewhere), strict=strict, plain=plain, left_out=left_out)
    own |= foreign
    # state that a module keeps in other ways (extra state, a metric's state) is loaded as from a plain checkpoint
    others = {name: stored[name] for name in state if name in stored and name not in live}
    found = {id(tensor) for name, tensor in state.items() if name in stored}
    missing = sorted(
        name
        for name, tensor in state.items()
        if name not in stored and id(tensor) not in found and name not in left_out
    )
    unexpected = sorted(stored.keys() - state.keys() - set(elsewhere))

    def pairs() -> list[ckpt.Pair]:
        if strict and (missing or unexpected):  # checked here, since names may be missing on one stage only
            raise StateMismatchError(
                f"The checkpoint's tensors aren't the module's: {_some('missing', missing)};"
                f" {_some('unexpected', unexpected)}. Set strict_loading = False on the module to load those they"
                " share."
            )
        found = _pairs(own, stored)
        _tell_of_types(found)
        return found

    ckpt.load_together(pairs, cast=True)  # as plain Lightning does
    with ckpt.all_or_none():
        if others:
            whole = {n: v.full() if isinstance(v, ckpt.StoredTensor) else v for n, v in others.items()}
            module.load_state_dict(whole, strict=False)
    return missing, unexpected


def fill(targets: Mapping[str, Tensor], stored: Mapping[str, Any], *, strict: bool) -> None:
    """Fill tensors, in place, by name, from stored or plain ones; a collective call.

    Raises:
        StateMismatchError: Shapes differ; with ``strict``, names are missing.
    """

    def pairs() -> list[ckpt.Pair]:
        missing = sorted(targets.keys() - stored.keys())
        if strict and missing:
            raise StateMismatchError(f"The checkpoint's tensors aren't the average's: {_some('missing', missing)}.")
        return _pairs(targets, as_stored(stored))

    ckpt.load_together(pairs)


def _tell_of_types(pairs: Iterable[ckpt.Pair]) -> None:
    differ = [(stored, tensor) for stored, tensor in pairs if stored.dtype != tensor.dtype]
    if differ:
        stored, tensor = differ[0]
        warnings.warn(  # on each rank that converts: rank 0's stage may have none of them
            f"{stored.name} is {stored.dtype} in the checkpoint and {tensor.dtype} in the module, and is converted"
            f"{f', and so are {len(differ) - 1} more' if len(differ) > 1 else ''}.",
            stacklevel=2,
        )


def _pairs(targets: Mapping[str, Tensor], stored: Mapping[str, Any]) -> list[ckpt.Pair]:
    """Pairs of a stored tensor and the tensor to read it into; plain values are copied at once."""
    pairs = []
    for name, target in targets.items():
        value = stored.get(name)
        if isinstance(value, ckpt.StoredTensor):
            pairs.append((value, target.detach()))
        elif isinstance(value, Tensor):
            _copy_part(name, target, value)
    return pairs


def _copy_part(name: str, target: Tensor, value: Tensor) -> None:
    """Copy this rank's part of a tensor from a hook: of a full tensor, or of one that is sharded itself."""
    if value.shape != target.shape:
        raise StateMismatchError(
            f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(target.shape)} in the module."
        )
    full = full_tensor(value)
    local_tensor(target).copy_(local_part(full, target) if isinstance(target, DTensor) else full)


def _some(what: str, names: list[str]) -> str:
    return f"{len(names)} {what}{f' ({few(names)})' if names else ''}"
