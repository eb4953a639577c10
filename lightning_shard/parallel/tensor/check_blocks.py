"""Check that blocks split by a tensor-parallel plan compute the same as with whole parameters.

A plan that doesn't fit the code may not fail. Take a fused layer whose output is queries, keys and values, one after
the other: with ``colwise``, each rank gets consecutive features, which the code takes for other queries, keys and
values. So in the first training step, one block of each kind is run once more on whole parameters, and the results are
compared; blocks of a kind have the same modules with the same settings. So is each module outside of the blocks that
holds split layers, such as a head of several layers. What runs without training before, in an evaluation or as a frozen
network, is compared then. Of a model's own plan, blocks alone are compared: it may not fit all configurations (Gemma 3n
takes statistics over the features that its plan splits, in layers that are sparse).

Split layers in modules that also hold blocks are compared by
:mod:`lightning_shard.parallel.tensor.check_around_blocks`.

During the comparison, trained parameters that are small everywhere have other values (``small_weights.py``).

Not checked: blocks with a user's hooks inside; compiled blocks; blocks that are called with objects; parts whose input
or output is split; blocks that are given a part on each rank; code that draws random numbers for split features (a
warning says so); sequence-parallel plans.
"""

from __future__ import annotations

import copy
import random
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call

from lightning_shard import tree
from lightning_shard.errors import PlanError
from lightning_shard.parallel.containers import has_forward
from lightning_shard.parallel.context.check_positions import RunChanges, TrialRuns, random_state
from lightning_shard.parallel.probe_arguments import PLAIN, has_other_hooks, is_cache
from lightning_shard.parallel.tensor.check_handed_on import norm_and_sum
from lightning_shard.parallel.tensor.small_weights import enlarged
from lightning_shard.parallel.tensor.styles import ScatterSequence
from lightning_shard.sharding import full_tensor, parameter_like, put_attributes

_APART = {torch.float64: 0.02, torch.float32: 0.02}
_APART_IN_16_BITS = 0.2
"""Tolerance, relative to the largest element that a block adds to its input; a wrong plan differs by about 1."""

JointAttempt = Callable[[str], AbstractContextManager[None]]
"""A context, by a name, for a run that may fail: it suppresses an error if all ranks of the group have one."""

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class SplitBlocksCheck:
    """Compares one block of each kind.

    Args:
        blocks: Whole blocks by name, before anything wraps them.
        parts: Other modules by name, whose input or output may be split.
        styles: Styles of split modules, by name.
        trial_runs: A context for runs of a module; its :class:`RunChanges` restore what a run has changed.
        joint_attempt: Its ranks are the tensor ranks, and those that hold experts of the blocks.
        numbered: Whether blocks of different numbers (transformers' ``layer_idx``) are of different kinds.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        parts: Mapping[str, nn.Module],
        styles: Mapping[str, ParallelStyle],
        trial_runs: TrialRuns,
        joint_attempt: JointAttempt,
        *,
        numbered: bool = True,
    ) -> None:
        kinds: dict[Any, str] = {}
        deals_sequences = any(isinstance(style, ScatterSequence) for style in styles.values())
        modules_by_name = {**blocks, **parts}
        for name, block in modules_by_name.items() if not deals_sequences else ():
            inside = tuple((n.removeprefix(name), s) for n, s in styles.items() if n.startswith(f"{name}."))
            if inside and not _is_hooked(block):
                modules = tuple((n, type(module), _settings(module, numbered)) for n, module in block.named_modules())
                kinds.setdefault((modules, tuple((n, repr(s)) for n, s in inside)), name)
        self._copies = {name: _without_hooks(modules_by_name[name]) for name in kinds.values()}
        self._parts = parts.keys()
        self._trial_runs = trial_runs
        self._joint_attempt = joint_attempt

    def compare(self, root: nn.Module) -> None:
        """Wrap the blocks' forwards, so that their first calls are compared; on all tensor ranks.

        Call it before ``root`` is sharded or cut: what replaces a block's forward later must call this wrapper.
        """
        for name, whole in self._copies.items():
            block, is_part = root.get_submodule(name), name in self._parts
            _compare_first_calls(block, name, whole, self._trial_runs, self._joint_attempt, is_part)


def _settings(module: nn.Module, numbered: bool) -> tuple[tuple[str, str], ...]:
    """What code may decide by: a module's plain values, such as a layer's number, its functions, and its sizes."""
    plain = {
        name: each for name, each in vars(module).items() if _is_setting(each) and (numbered or name != "layer_idx")
    }
    sizes = {
        name: None if tensor is None else tuple(tensor.shape)
        for name, tensor in chain(module._parameters.items(), module._buffers.items())
    }
    return tuple((name, repr(value)) for name, value in sorted({**plain, **sizes}.items()))


def _is_setting(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(entry, PLAIN) for entry in value)
    return isinstance(value, (*PLAIN, types.FunctionType, types.BuiltinFunctionType))


def beside_blocks(root: nn.Module, blocks: Collection[str], styles: Collection[str]) -> Iterator[str]:
    """The outermost modules below ``root`` that hold split layers and no blocks."""
    for name, _ in root.named_children():
        yield from _beside(root, name, blocks, styles)


def _beside(root: nn.Module, name: str, blocks: Collection[str], styles: Collection[str]) -> Iterator[str]:
    module = root.get_submodule(name)
    if name in blocks or not any(style.startswith(f"{name}.") for style in styles):
        return
    if has_forward(module) and not any(block.startswith(f"{name}.") for block in blocks):
        yield name
        return
    for key, _ in module.named_children():
        yield from _beside(root, f"{name}.{key}", blocks, styles)


def _is_hooked(block: nn.Module) -> bool:
    """Whether a copy without hooks may compute something else: torch's older weight_norm, for instance, is a hook."""
    return any(has_other_hooks(module, ()) for module in block.modules() if module is not block)


def _without_hooks(block: nn.Module) -> nn.Module:
    """A copy of a block without hooks, its tensors on meta. It shares the block's generators: both draw from them."""
    memo: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in block.buffers()}
    for module in block.modules():
        memo.update({id(value): value for value in vars(module).values() if isinstance(value, _GENERATORS)})
    for parameter in block.parameters():
        memo[id(parameter)] = parameter_like(torch.empty_like(parameter, device="meta"), parameter)
    whole = copy.deepcopy(block, memo)
    for module in whole.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return whole.eval()


def _compare_first_calls(
    block: nn.Module,
    name: str,
    whole: nn.Module,
    trial_runs: TrialRuns,
    joint_attempt: JointAttempt,
    is_part: bool,
) -> None:
    own, had, first = block.forward, "forward" in block.__dict__, FirstCalls(block)

    @wraps(own)
    def compared(*args: Any, **kwargs: Any) -> Any:
        if not first.is_due():
            return own(*args, **kwargs)
        with first.comparing() as trains:
            # otherwise a later replacement calls this wrapper, and stays
            if trains and block.__dict__.get("forward") is compared:
                if had:
                    block.__dict__["forward"] = own
                else:
                    del block.__dict__["forward"]
            given = args, kwargs
            with suppress(OpaqueError), torch.no_grad(), enlarged(block.parameters()):
                _check(block, name, own, whole, trial_runs, joint_attempt, given, trains=trains, is_part=is_part)
        return own(*args, **kwargs)

    block.__dict__["forward"] = compared


class FirstCalls:
    """Tells which calls of a module to compare: its first in training, and one before that without training."""

    _is_comparing = False  # any module: what runs for a comparison isn't compared itself

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._compared: bool | None = None  # whether in training

    def is_due(self) -> bool:
        if FirstCalls._is_comparing or self._compared or (self._compared is not None and not self._trains):
            return False
        return not is_watched(self._module)

    @contextmanager
    def comparing(self) -> Iterator[bool]:
        """Context in which a call that is due is compared; its value is whether it is in training."""
        self._compared = self._trains
        FirstCalls._is_comparing = True
        try:
            yield self._compared
        finally:
            FirstCalls._is_comparing = False

    @property
    def _trains(self) -> bool:
        return self._module.training and torch.is_grad_enabled()


def is_watched(block: nn.Module) -> bool:
    """Whether a user's hooks inside of a block would see the additional run."""
    return any(
        has_other_hooks(module, ("torch.", "lightning_shard.", "lightning."))
        for module in block.modules()
        if module is not block
    )


class OpaqueError(Exception):
    """A run could change its arguments, and they can't be copied."""


def copied(value: Any) -> Any:
    """Copies of arguments for an additional run, which may change them in place.

    transformers' caches are replaced by ``None``, since the run would append to them.

    Raises:
        OpaqueError: It isn't known how to copy an argument.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if is_cache(value):
        return None
    if tree.is_node(value):
        return tree.rebuild(value, [copied(each) for _, each in tree.children(value)])
    if isinstance(value, PLAIN):
        return value
    raise OpaqueError


def _check(
    block: nn.Module,
    name: str,
    own: Callable[..., Any],
    whole: nn.Module,
    trial_runs: TrialRuns,
    joint_attempt: JointAttempt,
    arguments: tuple[Any, Any],
    *,
    trains: bool,
    is_part: bool,
) -> None:
    tensors = {key: full_tensor(value) for key, value in chain(block.named_parameters(), block.named_buffers())}
    for key, parameter in block.named_parameters():
        put_attributes(tensors[key], parameter.__dict__)
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    if _are_split(arguments, block):
        return

    # both runs get copies, since a run may write to its arguments and to buffers

    def split_run() -> Any:
        args, kwargs = copied(arguments)
        return own(*args, **kwargs)

    def whole_run() -> Any:
        buffers = {key: tensors[key].clone() for key, _ in block.named_buffers()}
        return functional_call(whole, tensors | buffers, *copied(arguments))

    with trial_runs(block) as changes:
        for own_part, part in zip(block.modules(), whole.modules()):
            part.training = own_part.training
        if trains:
            with joint_attempt(name):  # fails if the part's input is split
                _, drawn = _outcome(split_run, changes, device)
                _, drawn_whole = _outcome(whole_run, changes, device)
                if drawn != drawn_whole:
                    warn_of_draws(block, name)
        whole.eval()
        block.eval()
        split = expected = None
        with nullcontext() if trains else joint_attempt(name):  # in evaluations it may need the caches that it is given
            split, drawn = _outcome(split_run, changes, device)
        if split is None:
            return
        with joint_attempt(name) if is_part or not trains else nullcontext():
            expected, drawn_whole = _outcome(whole_run, changes, device)
        if expected is None:
            return  # the part's input is split
    given = next(iter(tree.tensors(arguments)), None)
    pairs = list(zip(split, expected))
    if is_part and any(ours.shape != theirs.shape for ours, theirs in pairs):
        return  # the part's output is split
    drew_alike = drawn == drawn_whole  # if not, it draws for split features, so other numbers
    for ours, theirs in pairs:
        if ours.shape != theirs.shape or (drew_alike and not are_alike(ours, theirs, given)):
            raise PlanError(
                f"tensor_parallel_plan: {name} computes something else when it is split than whole. A layer whose"
                " output holds several things one after the other, such as queries, keys and values, can't be"
                " 'colwise', which gives each rank a part of all its features: choose 'colwise_gather_output', and"
                " 'rowwise_split_input' for the layer behind it, or a layer for each. What follows a 'colwise' layer,"
                " up to a 'rowwise' one, must work on a part of its features or heads."
            )


def _are_split(arguments: Any, block: nn.Module) -> bool:
    """Whether ranks are given different values, such as another block's keys of their heads; a collective call."""
    mesh = next((each.device_mesh for each in block.parameters() if isinstance(each, DTensor)), None)
    sums = [norm_and_sum(each) for each in tree.tensors(arguments) if each.is_floating_point() and each.numel()]
    if mesh is None or mesh.ndim > 1 or not sums:
        return False
    largest = torch.stack(sums).nan_to_num()
    smallest = -largest
    for each in (largest, smallest):
        dist.all_reduce(each, dist.ReduceOp.MAX, mesh.get_group())
    apart = (largest + smallest).amax(-1)
    return bool((apart > _APART[torch.float32] * largest[:, 0]).any())


def is_on_first_rank(module: nn.Module) -> bool:
    """Whether this is the first of the ranks that hold parts of a module: it speaks for all."""
    meshes = (parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor))
    coordinate = next((mesh.get_coordinate() for mesh in meshes), None)
    return coordinate is not None and not any(coordinate)


def warn_of_draws(module: nn.Module, name: str) -> None:
    """Warn, on the first tensor rank, that a module draws random numbers for split features."""
    if is_on_first_rank(module):
        warnings.warn(
            f"tensor_parallel_plan: {name} draws random numbers, as for dropout, for features or heads that the plan"
            " splits. All tensor ranks draw the same ones, each for its part: every feature is dropped as often as on"
            " one process, but features of different ranks are dropped together. Where that matters, drop features"
            " where they are whole (behind the 'rowwise' layer), or give the layers around it the styles"
            " 'colwise_gather_output' and 'rowwise_split_input'.",
            stacklevel=2,
        )


def _outcome(run: Callable[[], Any], changes: RunChanges, device: torch.device) -> tuple[list[Tensor], bytes]:
    """The tensors that a run returns, and the state of the generators after it; then restore everything."""
    try:
        # clones, since the run may return a buffer, which is restored
        return [tensor.clone() for tensor in tree.tensors(run())], random_state(device)
    finally:
        changes.restore()


def are_alike(ours: Tensor, theirs: Tensor, given: Tensor | None) -> bool:
    if not theirs.is_floating_point() or not theirs.numel():
        return True
    finite = theirs.isfinite()  # a comparison with NaN is always false
    ours, theirs = (values.where(finite, torch.zeros_like(values)) for values in (ours, theirs))
    largest = theirs.abs().max()
    rounding = 4 * torch.finfo(theirs.dtype).eps * largest
    if given is not None and given.shape == theirs.shape:  # a residual block, which adds to its input
        largest = torch.minimum(largest, (theirs - given).where(finite, torch.zeros_like(given)).abs().max())
    apart = _APART.get(ours.dtype, _APART_IN_16_BITS) * largest + rounding
    return bool((ours - theirs).abs().max() <= apart)
