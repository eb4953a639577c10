"""Runs modules' own loading code on sharded modules: ``load_state_dict``, ``_load_from_state_dict``, hooks.

Such code renames old keys, converts old values, or fills in what old checkpoints lack. It gets all of the checkpoint,
by name, as a :class:`LazyTensor` each, which is read when its values are used, and copied into a sharded parameter by
this rank's part. ``on_load_checkpoint`` gets the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_shard import checkpoint as ckpt
from lightning_shard import tree
from lightning_shard.arguments import few
from lightning_shard.checkpoint import half_loaded
from lightning_shard.errors import StateMismatchError
from lightning_shard.sharding import full_tensor, local_tensor
from lightning_shard.state.walk import below, entries, is_object, put_entry, reachable

_LOADERS = ("load_state_dict", "_load_from_state_dict")
_ANYONES = ("torch.", "torchmetrics.", "lightning.", "lightning_shard.")
"""Packages whose loading code only copies values by name; that is faster without calling it."""
_METADATA = {"size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"}


def loads_itself(module: nn.Module) -> bool:
    """Whether a module, or a submodule, has its own loading code."""
    for part in module.modules():
        code = [getattr(part, name) for name in _LOADERS]
        code += [getattr(hook, "hook", hook) for hook in part._load_state_dict_pre_hooks.values()]
        code += part._load_state_dict_post_hooks.values()
        if not all(map(_is_anyones, code)):
            return True
    return False


def _is_anyones(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_ANYONES)


def edits_checkpoints(module: pl.LightningModule) -> bool:
    """Whether a module or a callback loads by a hook of its own, which may compute with the checkpoint's values."""
    holders: list[Any] = [module, *module.trainer.callbacks]  # type: ignore[attr-defined]
    return not all(_is_anyones(each.on_load_checkpoint) for each in holders)


def as_lazy(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors as lazy tensors for such hooks."""
    return {name: LazyTensor.of(v) if isinstance(v, ckpt.StoredTensor) else v for name, v in stored.items()}


def as_stored(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`as_lazy`, after hooks ran: stored tensors whose values weren't used, else plain ones."""
    return {name: v.content if isinstance(v, LazyTensor) else v for name, v in state.items()}


def replace_lazy(module: nn.Module, *others: object) -> None:
    """Replace lazy tensors by plain ones wherever loading code has put them: in a module, or in what it or others hold.

    Otherwise they would be read when they are used, from files that may be gone by then, or be another checkpoint's.
    """
    holders: list[Any] = [part._parameters for part in module.modules()]
    holders += (value for _, value in reachable(module))
    holders += (value for other in others for _, value in below("", other))
    for holder in holders:
        if isinstance(holder, (list, deque, dict, nn.Module)) or is_object(holder):
            for key, entry in entries(holder).items():
                if (own := _plain(entry)) is not entry:
                    put_entry(holder, key, own)


def _plain(entry: Any) -> Any:
    if isinstance(entry, LazyTensor):
        return entry.plain()
    if isinstance(entry, tuple) and any(isinstance(leaf, LazyTensor) for leaf in tree.leaves(entry)):
        return tree.map_leaves(_plain, entry)
    return entry


class LazyTensor(torch.Tensor):
    """A lazy tensor of a checkpoint, unsharded. Results are plain tensors; operations in place change this one."""

    content: Any
    """A stored tensor; once it was used, a tensor."""

    @classmethod
    def of(cls, content: Any) -> LazyTensor:
        lazy = torch.Tensor._make_subclass(cls, torch.empty((), dtype=content.dtype).expand(content.shape))
        lazy.content = content
        return lazy

    def whole(self) -> Tensor:
        """Its values, read once and kept, since they may be written to."""
        self.content = self.content if isinstance(self.content, Tensor) else self.content.full()
        return self.content  # type: ignore[no-any-return]

    def plain(self) -> Tensor:
        """Its values as a plain tensor; as a parameter, if ``nn.Parameter`` was applied to this."""
        whole = self.whole()
        return nn.Parameter(whole.detach(), whole.requires_grad) if getattr(self, "_is_param", False) else whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], cls) else None
        if name == "copy_" and first is None:
            return copy_part(*args, **(kwargs or {}))
        if (name == "__get__" or name in _METADATA) and first is not None and not isinstance(first.content, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                known = func(*args, **(kwargs or {}))
            if not isinstance(known, Tensor):
                return known
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if first is not None and isinstance(result, Tensor):
            if name.endswith("_") and result is first.content:
                return first
            if name == "detach":  # nn.Parameter requires a result of the same type
                return cls.of(result)
        return result


@torch.no_grad()
def copy_part(target: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
    """Copy this rank's part of a whole tensor; of a stored one, it is all that is read."""
    content = source.content if isinstance(source, LazyTensor) else source
    if isinstance(content, ckpt.StoredTensor) and content.shape == target.shape:
        ckpt.load_tensors([(content, target.detach())], cast=True)
        return target
    return target.copy_(full_tensor(content) if isinstance(content, Tensor) else content.full())


def load_by_own_code(
    module: nn.Module,
    stored: Mapping[str, Any],
    elsewhere: Collection[str],
    *,
    strict: bool,
    plain: Collection[str],
    left_out: Collection[str],
) -> tuple[list[str], list[str]]:
    """Call ``module.load_state_dict`` with a checkpoint, as :func:`load_module`.

    Args:
        plain: Names whose values are passed as plain tensors, such as a metric's state, which is kept as it is.
    """
    state = module.state_dict(keep_vars=True)
    given: Any = OrderedDict((name, _given(value, plain=name in plain)) for name, value in stored.items())
    names_of = {id(tensor): name for name, tensor in state.items() if name in given}
    given.update((n, given[names_of[id(t)]]) for n, t in state.items() if n not in given and id(t) in names_of)  # tied
    given._metadata = getattr(state, "_metadata", None)
    missing: list[str] = []
    unexpected: list[str] = []

    def leave_out_others(_module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in left_out]
        incompatible.unexpected_keys[:] = [name for name in incompatible.unexpected_keys if name not in elsewhere]
        missing[:], unexpected[:] = incompatible.missing_keys, incompatible.unexpected_keys

    own = [local_tensor(tensor.detach()) for tensor in (*nn.Module.parameters(module), *module.buffers())]
    hook = module.register_load_state_dict_post_hook(leave_out_others)
    with ckpt.all_or_none():
        half_loaded.mark(own)
        try:
            module.load_state_dict(given, strict=strict)
            replace_lazy(module)
            half_loaded.clear(own)
        except RuntimeError as error:
            raise StateMismatchError(
                f"The module's own load_state_dict refused the checkpoint: {' '.join(str(error).split())} Set"
                " strict_loading = False on the module to load the names that they share."
            ) from error
        finally:
            hook.remove()
    return missing, unexpected


def _given(value: Any, *, plain: bool) -> Any:
    if isinstance(value, ckpt.StoredTensor):
        return value.full() if plain else LazyTensor.of(value)
    return LazyTensor.of(full_tensor(value)) if isinstance(value, Tensor) and not plain else value


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
    """Fill a module that is cut and sharded, in place; returns missing and unexpected names. Collective over all ranks.

    Args:
        stored: Names to stored tensors (a checkpoint's, or plain ones with which a hook replaced them).
        elsewhere: Names that other stages fill.
        also: Buffers that are filled as well, although they are another stage's state.
        left_out: Names that may be missing, since the module already has their values.
        by_own_code: Whether some stage has its own loading code, so that all call the module's ``load_state_dict``.
    """
    state = module.state_dict(keep_vars=True)
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    live = {name for name, _ in (*parameters, *buffers)}
    own = {name: state[name] for name in state if name in live}
    foreign = {name: module.get_buffer(name) for name in also if name in stored}
    if by_own_code:
        ckpt.load_together(lambda: _pairs(foreign, stored))
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
        return _pairs(own, stored)

    ckpt.load_together(pairs, cast=True)  # as plain Lightning does
    with ckpt.all_or_none():
        if others:
            whole = {n: v.full() if isinstance(v, ckpt.StoredTensor) else v for n, v in others.items()}
            module.load_state_dict(whole, strict=False)
    return missing, unexpected


def fill(targets: Mapping[str, Tensor], stored: Mapping[str, Any], *, strict: bool) -> None:
    """Fill tensors, in place, by name, from stored or plain ones; a collective call."""

    def pairs() -> list[ckpt.Pair]:
        missing = sorted(targets.keys() - stored.keys())
        if strict and missing:
            raise StateMismatchError(f"The checkpoint's tensors aren't the average's: {_some('missing', missing)}.")
        return _pairs(targets, as_stored(stored))

    ckpt.load_together(pairs)


def _pairs(targets: Mapping[str, Tensor], stored: Mapping[str, Any]) -> list[ckpt.Pair]:
    """Pairs of a stored tensor and the tensor to read it into; plain values are copied at once."""
    pairs = []
    for name, target in targets.items():
        value = stored.get(name)
        if isinstance(value, ckpt.StoredTensor):
            pairs.append((value, target.detach()))
        elif isinstance(value, Tensor):
            if value.shape != target.shape:
                raise StateMismatchError(
                    f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(target.shape)} in the module."
                )
            copy_part(target, value)
    return pairs


def _some(what: str, names: list[str]) -> str:
    return f"{len(names)} {what}{f' ({few(names)})' if names else ''}"
