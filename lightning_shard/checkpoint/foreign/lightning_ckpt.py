"""Converts Lightning's checkpoint dict (the content of a ``.ckpt``) to named tensors and a trainer state, and back.

Lightning's optimizer state is keyed by parameter numbers, in the order of the parameter groups. Ours is keyed by
parameter names (``"{optimizer}/{parameter}/{key}"``); where these aren't known, the numbers serve as names.

``on_save_checkpoint`` may add values under keys that this package has another use for. They are kept in
``checkpoint["lightning_shard"]["of_hooks"]``, and are back under their keys in ``on_load_checkpoint`` and a ``.ckpt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_shard.checkpoint.optimizers.named import OPTIMIZER_STATES, apart, flatten_optimizer_states
from lightning_shard.checkpoint.optimizers.taken import named_state_dict
from lightning_shard.errors import CheckpointError, UnsupportedStateError

TRANSFORMERS_KEY = "transformers"
"""Key of the trainer state for what a transformers folder needs beside the weights."""
EXTRA_STATE = "extra_state"
"""Key for those values of a state dict that are no tensors."""
RANK_STATE = "rank_state"
OWN = "lightning_shard"
OPTIMIZER_TENSORS = "optimizer_tensors"
_OF_HOOKS = "of_hooks"
_SHARED = (TRANSFORMERS_KEY, EXTRA_STATE, RANK_STATE)
_RESERVED = (OWN, OPTIMIZER_TENSORS)
"""Keys that are in use while hooks run."""


def set_aside(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint dict as hooks have left it, with what is under such keys set aside."""
    if taken := [key for key in _RESERVED if key in checkpoint]:
        raise UnsupportedStateError(
            f"A hook has put {taken[0]!r} into the checkpoint, a key that lightning_shard needs itself: choose another."
        )
    kept = {key: checkpoint[key] for key in _SHARED if key in checkpoint}
    rest = {key: value for key, value in checkpoint.items() if key not in kept}
    return {**rest, OWN: {_OF_HOOKS: kept}} if kept else rest


def put_back(checkpoint: dict[str, Any]) -> None:
    """Put what :func:`set_aside` has set aside back under its keys."""
    own = checkpoint.get(OWN)
    if isinstance(own, Mapping) and _OF_HOOKS in own:
        checkpoint.update(own[_OF_HOOKS])
        checkpoint[OWN] = {key: value for key, value in own.items() if key != _OF_HOOKS}
        if not checkpoint[OWN]:
            del checkpoint[OWN]


_DATA_PLACE = {"epoch", "position", "unit", "seed"}
"""Keys of the data position that the strategy's loaders save, which other loaders can't load."""


def take_apart(content: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Split a checkpoint dict.

    Returns:
        The model's tensors; the optimizers' tensors by ``"{optimizer}/{number}/{key}"``; and the rest, whose optimizer
        states are as :func:`~lightning_shard.checkpoint.optimizers.named.name_numbered` expects them.
    """
    own = content.get(OWN)  # of a gathered checkpoint
    rest = set_aside(
        {key: value for key, value in content.items() if key not in ("state_dict", OWN, OPTIMIZER_TENSORS)}
    )
    if isinstance(own, Mapping):
        rest[OWN] = {**own, **rest.get(OWN, {})}
    model = {name: value for name, value in content["state_dict"].items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in content["state_dict"].items() if not isinstance(value, Tensor)}
    if extra:
        rest[EXTRA_STATE] = extra
    optimizer: dict[str, Tensor] = {}
    if OPTIMIZER_STATES in rest:
        states = (named_state_dict(state, None) for state in rest[OPTIMIZER_STATES])
        optimizer, rest[OPTIMIZER_STATES] = flatten_optimizer_states(states)
    return model, optimizer, rest


def put_together(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None, rest: Any) -> dict[str, Any]:
    """Make the dict that plain Trainers and ``load_from_checkpoint`` read.

    Args:
        model: The module's tensors.
        optimizer: The optimizers' tensors by ``"{optimizer}/{parameter}/{key}"``; None to leave out all training state.
        rest: The trainer state; ignored if it isn't Lightning's.
    """
    if not isinstance(rest, Mapping) or "pytorch-lightning_version" not in rest:
        if optimizer:
            raise CheckpointError(
                "The checkpoint wasn't saved by Lightning's Trainer, so its optimizer's tensors have no place in a"
                " .ckpt file: gather with optimizer=False."
            )
        return {"state_dict": dict(model)}
    content = {key: value for key, value in rest.items() if key not in (EXTRA_STATE, TRANSFORMERS_KEY)}
    content["state_dict"] = {**model, **rest.get(EXTRA_STATE, {})}
    put_back(content)
    loops = content.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if "combined_loader" in loops:
        loops["combined_loader"] = [state for state in loops["combined_loader"] if not _DATA_PLACE.issubset(state)]
    if optimizer is None:
        for key in ("optimizer_states", "lr_schedulers", "callbacks"):
            content.pop(key, None)
    elif any("values" in state for state in content.get("optimizer_states", [])):
        content["optimizer_states"] = [
            _numbered(index, state, optimizer) for index, state in enumerate(content["optimizer_states"])
        ]
    return content


def _numbered(index: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """One optimizer's state dict with parameter numbers, as torch's ``state_dict()`` has it."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    assert len(numbers) == len(names), "an optimizer has a parameter twice"
    entries: dict[Any, dict[str, Any]] = {numbers[name]: dict(values) for name, values in state["values"].items()}
    for path, tensor in tensors.items():
        owner, name, key = apart(path)
        if int(owner) == index:
            entries.setdefault(numbers[name], {})[key] = tensor
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {**dict(sorted(entries.items())), **state.get("shared", {})}, "param_groups": groups}
