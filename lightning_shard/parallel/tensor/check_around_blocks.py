"""Check that split layers in a module that also holds blocks compute the same as with whole parameters.

Examples are a backbone with a projection before its blocks, and a LightningModule that holds everything itself. To run
such an *owner* on whole parameters would take memory for all of them. Instead, before its first call in training, and
an earlier one without training, it is run twice more. The first run is split, and records what each block returns. In
the second run the layers outside of the blocks are whole, and each block is replaced by a replay of what it returned.
Compared are the outputs of layers that return whole features, the arguments of the first block, and the outputs of the
owner.

A layer with whole input and whole output is correct by itself. If there are no other layers, nothing is run.

Code may call layers of a block, or of a part, by another method than the module's forward. Where a step does so first,
it is compared as an owner, after it has run; these layers are then whole in its second run.

Not checked: what :mod:`lightning_shard.parallel.tensor.check_blocks` doesn't check, inputs and outputs that are split,
and code that can't run a second time without gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard import tree
from lightning_shard.errors import PlanError
from lightning_shard.parallel.containers import has_forward
from lightning_shard.parallel.context.check_positions import TrialRuns, random_state
from lightning_shard.parallel.fsdp.watched_parameters import others_in_place
from lightning_shard.parallel.tensor.calls_outside import noting_calls_outside
from lightning_shard.parallel.tensor.check_blocks import (
    FirstCalls,
    JointAttempt,
    OpaqueError,
    are_alike,
    copied,
    is_on_first_rank,
    warn_of_draws,
)
from lightning_shard.parallel.tensor.small_weights import enlarged
from lightning_shard.parallel.tensor.styles import REPLICATED, ScatterSequence, Split
from lightning_shard.sharding import full_tensor

Outcomes = list[tuple[str, list[Tensor]]]
"""Copies of tensors in the order of a run, with a text that says where: the first block's arguments, and outputs."""


class AroundBlocksCheck:
    """Compares modules that hold blocks, and split layers beside them.

    Args:
        root: The whole model, before anything wraps it.
        blocks: Names of all blocks.
        parts: Names of modules without blocks, which are compared by themselves.
        styles: Styles of split modules, by name.
        steps: Names of the methods of ``root`` that are its calls, if they can be run again.
        trial_runs: A context for runs of a module; its :class:`RunChanges` restore what a run has changed.
        trial_runs_of_step: The same for runs of ``root``'s ``step``.
        joint_attempt: Its ranks are those of a stage, since blocks that run inside are all-gathered from data ranks.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Collection[str],
        parts: Collection[str],
        styles: Mapping[str, ParallelStyle],
        steps: Collection[str],
        trial_runs: TrialRuns,
        trial_runs_of_step: TrialRuns,
        joint_attempt: JointAttempt,
    ) -> None:
        blocks = [name for name in blocks if not (name in styles and _is_layer(root.get_submodule(name)))]
        inside = tuple(f"{name}." for name in (*blocks, *parts))
        around = [name for name in styles if not f"{name}.".startswith(inside)]
        crossing = [name for name in around if not _is_whole_outside(styles[name])]
        owners = {_owner(root, name) for name in crossing}
        owners.update("" for part in parts if _has_split_edge(part, styles))
        if not steps:
            owners.discard("")
        if any(isinstance(style, ScatterSequence) for style in styles.values()):
            owners.clear()
        self._owners = [name for name in owners if not any(_is_in(name, other) for other in owners)]
        self._blocks = [name for name in blocks if not any(_is_in(name, other) for other in blocks)]
        within = tuple(f"{name}." for name in blocks)
        self._layers = {name: style for name, style in styles.items() if not f"{name}.".startswith(within)}
        self._styles = styles
        self._forwards = {name: vars(root.get_submodule(name)).get("forward") for name in styles}
        self._inside: dict[str, str] = {}
        if steps and "" not in self._owners and not any(isinstance(s, ScatterSequence) for s in styles.values()):
            for name in styles:
                around_it = next((each for each in (*self._blocks, *parts) if _is_in(name, each)), None)
                if around_it is not None and not _is_whole_outside(styles[name]):
                    self._inside[name] = around_it
        self._steps = steps
        self._trial_runs = trial_runs
        self._trial_runs_of_step = trial_runs_of_step
        self._joint_attempt = joint_attempt

    def compare(self, root: nn.Module) -> None:
        """Wrap the owners, so that their first calls are compared. Call after ``root`` is sharded.

        All tensor ranks must call it.
        """
        for name in self._owners:
            owner = root.get_submodule(name)
            blocks = {each: root.get_submodule(each) for each in self._blocks if _is_in(each, name)}
            layers = {each: root.get_submodule(each) for each in self._layers if _is_in(each, name)}
            first = FirstCalls(owner)
            for method in self._steps if not name else ("forward",):
                runs = self._trial_runs if name else self._trial_runs_of_step
                self._compare_first_calls(owner, name or method, method, first, blocks, layers, runs)
        if self._inside:
            first = FirstCalls(root)
            for method in self._steps:
                self._watch_first_calls(root, method, first)

    def _watch_first_calls(self, root: nn.Module, method: str, first: FirstCalls) -> None:
        """Compare a step after its first call, if that has called layers from outside of their block or part."""
        own, had = getattr(root, method), method in vars(root)

        @wraps(own)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not first.is_due():
                return own(*args, **kwargs)
            arguments = None
            with suppress(OpaqueError):
                arguments = copied((args, kwargs))  # the step may change them
            with noting_calls_outside(root, self._inside) as outside:
                returned = own(*args, **kwargs)
            with first.comparing() as trains:
                if trains:
                    _put_back(root, method, own if had else None)
                if outside and arguments is not None:
                    within = tuple(f"{each}." for each in self._blocks if each not in outside)
                    blocks = {each: root.get_submodule(each) for each in self._blocks if each not in outside}
                    layers = {name: root.get_submodule(name) for name in self._styles if not name.startswith(within)}
                    self._refuse_apart(root, method, own, arguments, blocks, layers, self._trial_runs_of_step)
            return returned

        vars(root)[method] = watched

    def _compare_first_calls(
        self,
        owner: nn.Module,
        name: str,
        method: str,
        first: FirstCalls,
        blocks: Mapping[str, nn.Module],
        layers: Mapping[str, nn.Module],
        trial_runs: TrialRuns,
    ) -> None:
        own, had = getattr(owner, method), method in vars(owner)

        @wraps(own)
        def compared(*args: Any, **kwargs: Any) -> Any:
            if not first.is_due():
                return own(*args, **kwargs)
            with first.comparing() as trains:
                if trains:
                    _put_back(owner, method, own if had else None)
                self._refuse_apart(owner, name, own, (args, kwargs), blocks, layers, trial_runs)
            return own(*args, **kwargs)

        vars(owner)[method] = compared

    def _refuse_apart(
        self,
        owner: nn.Module,
        name: str,
        own: Callable[..., Any],
        arguments: tuple[Any, Any],
        blocks: Mapping[str, nn.Module],
        layers: Mapping[str, nn.Module],
        trial_runs: TrialRuns,
    ) -> None:
        inside = {parameter for block in blocks.values() for parameter in block.parameters()}
        with torch.no_grad(), enlarged(each for each in owner.parameters() if each not in inside):
            apart = self._first_apart(owner, name, own, arguments, blocks, layers, trial_runs)
        if apart is not None:
            raise PlanError(
                f"tensor_parallel_plan: {name} computes something else when the layers that it holds beside its"
                f" blocks are split than whole, first in {apart}. What follows a 'colwise' layer, up to a 'rowwise'"
                " one, must work on a part of its features: a norm or softmax over them, or things that lie one"
                " after the other in them, need all. Choose 'colwise_gather_output', and 'rowwise_split_input' for"
                " the layer behind it, or leave both out of the plan."
            )

    def _first_apart(
        self,
        owner: nn.Module,
        name: str,
        own: Callable[..., Any],
        arguments: tuple[Any, Any],
        blocks: Mapping[str, nn.Module],
        layers: Mapping[str, nn.Module],
        trial_runs: TrialRuns,
    ) -> str | None:
        """Where results differ first, in running order; ``None`` if nowhere, or if that can't be known."""
        device = next((parameter.device for parameter in owner.parameters()), torch.device("cpu"))
        calls: list[_Call] = []
        whole_outside = {name: layer for name, layer in layers.items() if _gives_whole(self._styles[name])}

        def outcomes(replayed: Iterator[_Call] | None) -> tuple[Outcomes, bytes]:
            args, kwargs = copied(arguments)
            seen: Outcomes = []
            with ExitStack() as inside:
                for each, layer in whole_outside.items():
                    inside.callback(layer.register_forward_hook(partial(_note_returned, each, seen)).remove)
                if replayed is not None:
                    inside.enter_context(others_in_place())
                    for each, layer in layers.items():
                        inside.enter_context(_whole(layer, self._forwards[each], keeps=each in whole_outside))
                for each, block in blocks.items():
                    if replayed is None:
                        given = block.register_forward_pre_hook(partial(_note_given, each, seen), with_kwargs=True)
                        left = block.register_forward_hook(partial(_record, each, calls, device))
                        inside.callback(given.remove)
                        inside.callback(left.remove)
                    else:
                        inside.enter_context(_replaying(each, block, seen, replayed))
                returned = own(*args, **kwargs)
            seen.append(("what it returns", _copies(returned)))
            return seen, random_state(device)

        with trial_runs(owner) as changes:
            whole = None
            try:
                with self._joint_attempt(name or "the step"), _telling_of_errors(owner, name):
                    owner.eval()
                    split, drawn = outcomes(None)
                    changes.restore()
                    owner.eval()
                    whole, drawn_whole = outcomes(iter(calls))
            finally:
                changes.restore()
        if whole is None:
            return None  # the runs failed on all ranks; if the cause is a real error, the user's run raises it too
        if drawn != drawn_whole:
            warn_of_draws(owner, name)
        if drawn != drawn_whole or [where for where, _ in split] != [where for where, _ in whole]:
            return None
        for (where, ours), (_, theirs) in zip(split, whole):
            pairs = [(a, b) for a, b in zip(ours, theirs) if a.shape == b.shape]  # tensors of other shapes are split
            if not all(are_alike(a, b, None) for a, b in pairs):
                return where
        return None


class _Call:
    """One call of a block: the block's name, what it returned, and the state of the generators after it."""

    def __init__(self, name: str, returned: Any, device: torch.device) -> None:
        self.name = name
        self.returned = returned
        self._device = device
        self._states = (torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def again(self) -> Any:
        host, own = self._states
        torch.set_rng_state(host)
        if own is not None:
            torch.cuda.set_rng_state(own, self._device)
        return copied(self.returned)


def _note_given(name: str, seen: Outcomes, _: nn.Module, args: Any, kwargs: Any) -> None:
    """Record the first block's arguments only: later blocks get outputs of blocks, and all of them need much memory."""
    if not any(where.endswith(_GIVEN) for where, _ in seen):
        seen.append((f"what {name}{_GIVEN}", _copies((args, kwargs))))


_GIVEN = " is given"


def _record(name: str, calls: list[_Call], device: torch.device, _: nn.Module, __: Any, returned: Any) -> None:
    calls.append(_Call(name, copied(returned), device))


@contextmanager
def _replaying(name: str, block: nn.Module, seen: Outcomes, calls: Iterator[_Call]) -> Iterator[None]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        _note_given(name, seen, block, args, kwargs)
        call = next(calls, None)
        if call is None or call.name != name:
            raise OpaqueError
        return call.again()

    with _exchanged(block, forward):
        yield


@contextmanager
def _whole(layer: nn.Module, forward: Callable[..., Any] | None, *, keeps: bool) -> Iterator[None]:
    """Inside, a split layer has its whole parameters and original forward, and no hooks but, if ``keeps``, the last."""
    last = [*layer._forward_hooks.items()][-1:] if keeps else []
    parameters = [(part, dict(part._parameters)) for part in layer.modules()]
    with _exchanged(layer, forward):
        layer._forward_hooks.update(last)
        for part, own in parameters:
            part._parameters.update({k: None if p is None else full_tensor(p) for k, p in own.items()})  # type: ignore[misc]
        try:
            yield
        finally:
            for part, own in parameters:
                part._parameters.update(own)


@contextmanager
def _exchanged(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Inside, a module has no forward hooks, and another forward; ``None`` stands for that of its class."""
    own: dict[str, Any] = vars(module)
    before: dict[str, Any] = {
        name: own[name] for name in ("_forward_hooks", "_forward_pre_hooks", "forward") if name in own
    }
    own.update(_forward_hooks=type(own["_forward_hooks"])(), _forward_pre_hooks=type(own["_forward_pre_hooks"])())
    own.pop("forward", None)
    if forward is not None:
        own["forward"] = forward
    try:
        yield
    finally:
        own.pop("forward", None)
        own.update(before)


def _note_returned(name: str, seen: Outcomes, _: nn.Module, __: Any, returned: Any) -> None:
    seen.append((f"what {name} returns", _copies(returned)))


def _copies(value: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tree.tensors(value)]


@contextmanager
def _telling_of_errors(owner: nn.Module, name: str) -> Iterator[None]:
    """Warn of an error inside, which keeps the plan from being compared with the code."""
    try:
        yield
    except Exception as error:
        if is_on_first_rank(owner):
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            warnings.warn(
                f"tensor_parallel_plan: {name} isn't compared with what it computes with whole layers, since it can't"
                f" be run again without gradients ({reason:.200}). assert_trains_alike shows whether the plan fits.",
                stacklevel=2,
            )
        raise


def _put_back(owner: nn.Module, method: str, own: Callable[..., Any] | None) -> None:
    """Undo the wrapping of a method; ``None`` stands for that of the class."""
    if own is None:
        del vars(owner)[method]
    else:
        vars(owner)[method] = own


def _is_layer(module: nn.Module) -> bool:
    """Whether a block is a layer, as in a list of linear layers: its own code can't misread how it is split."""
    return not any(True for _ in module.children())


def _owner(root: nn.Module, name: str) -> str:
    """The nearest module around ``name`` that has a forward; else ``""``, the root, which its step calls."""
    while name:
        name = name.rpartition(".")[0]
        if has_forward(root.get_submodule(name)):
            return name
    return ""


def _is_in(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _is_whole_outside(style: ParallelStyle) -> bool:
    return isinstance(style, Split) and style.input_layout == REPLICATED and style.output_layout == REPLICATED


def _gives_whole(style: ParallelStyle) -> bool:
    return isinstance(style, Split) and style.output_layout == REPLICATED


def _has_split_edge(part: str, styles: Mapping[str, ParallelStyle]) -> bool:
    """Whether a part takes split features that none of its layers produces, or produces some that none takes."""
    own = [style for name, style in styles.items() if _is_in(name, part) and isinstance(style, Split)]
    return any(style.input_layout != REPLICATED for style in own) != any(
        style.output_layout != REPLICATED for style in own
    )
