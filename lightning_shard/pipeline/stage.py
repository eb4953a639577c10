"""Cut a model to one stage, in place, and join it to its neighbours at the blocks.

The stage keeps its range of blocks, the first stage what runs before them and the last what runs after them. Names of
parameters never change. What the stage doesn't hold is stood in for, so that the user's own code runs unmodified:

* Code **before the blocks** runs on every stage (masks, rotary tables and other arguments are recomputed from the same
  batch). Parameters that another stage holds are :class:`Hollow` there: right shape and dtype, no memory, and what is
  computed from them is unknown (``taint.py``).
* The last **block of the earlier stages** hands out what the previous stage's last block returned, in the same nesting,
  so whatever the model does between blocks is done to the received state as it would be to the block's own output. The
  blocks before it hand out unknown values of the same shapes.
* The first **block of a later stage** ends the stage's part: it leaves the user's step by :class:`StageEnd`.

An unknown value that a block here takes besides the hidden state, and parameters used on the wrong side of the blocks,
raise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.taint import Hollow, mark, refuse

RECORDS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""What transformers collect from all of their blocks, by hooks that a foreign block hasn't."""


def not_recorded(flags: Iterable[str]) -> str:
    return (
        f"{' and '.join(flags)} can't be collected where blocks are on several pipeline stages, since each has only its"
        " own: leave out, or use pipeline_parallel_size=1."
    )


class StageEnd(BaseException):
    """Leaves the user's step where this stage's part of it ends; not an ``Exception``, so that no step catches it."""


@dataclass
class Passage:
    """One microbatch's way through this stage: what came in, how far the step got, what goes out."""

    received: Any = None
    calls: int = 0
    entered: bool = False
    output: Any = None
    active: bool = False
    differentiates: bool = False
    on_enter: Callable[[], None] | None = None


class _StandIn(nn.Module):
    """In a foreign block's place, with its plain attributes (models ask blocks for their kind of attention, say).

    Its other attributes are refused in a step, and a hook on the block as a whole runs on what the stand-in gives.
    """

    passage: Passage
    block_name: str

    def __init__(self, passage: Passage, name: str, block: nn.Module) -> None:
        super().__init__()
        # a number that isn't a whole one may be a loss that the block keeps, and is another after each step
        plain = {k: v for k, v in vars(block).items() if not k.startswith("_") and isinstance(v, (str, int))}
        elsewhere = frozenset(key for key in dir(block) if not key.startswith("_") and key not in plain)
        self.__dict__.update(plain, passage=passage, block_name=name, elsewhere=elsewhere, training=block.training)
        for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
            self.__dict__[hooks] = block.__dict__[hooks]

    def __getattr__(self, key: str) -> Any:
        if key in self.__dict__.get("elsewhere", ()) and self.passage.active:
            raise StepError(
                f"The step asks {self.block_name} for its {key!r}, and that block is on another pipeline stage: return"
                " what is needed of it from its forward, as a part of the hidden state, or use"
                " pipeline_parallel_size=1."
            )
        return super().__getattr__(key)

    def check(self) -> Passage:
        if not self.passage.active:
            raise StepError(
                "The network was called outside a step; with several pipeline stages no process holds all of it. Call"
                " it in training_step, validation_step, test_step or predict_step, or use pipeline_parallel_size=1."
            )
        return _check_differentiates(self.passage)


class EarlierBlock(_StandIn):
    hands_on = False

    def forward(self, *_: Any, **__: Any) -> Any:
        passage = self.check()
        passage.entered = True
        if self.hands_on:
            return tree.map_leaves(_apart, passage.received)
        return tree.map_leaves(self._unknown, passage.received)

    def _unknown(self, leaf: Any) -> Any:
        """In place of a value that isn't known on this stage; of its own memory, since models may write into it."""
        if not isinstance(leaf, Tensor):
            return leaf
        has_nan = leaf.is_floating_point() or leaf.is_complex()
        data = torch.full_like(leaf, torch.nan, requires_grad=False) if has_nan else leaf.clone()
        return mark(data, f"the output of {self.block_name}, a block of an earlier stage,")


class LaterBlock(_StandIn):
    def forward(self, *_: Any, **__: Any) -> Any:
        self.check()
        raise StageEnd


def _apart(leaf: Any) -> Any:
    """A copy, for code that may change it in place: what was received gathers a gradient, what is handed on is sent."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@dataclass
class Stage:
    """This rank's stage of a model that was cut in place.

    Attributes:
        index: Its place in the pipeline, of ``count``.
        owned: Names of the blocks it holds.
        foreign_buffers: Names of buffers that stay here for the code before the blocks but are another stage's state.
        incomplete: By name, every module of which another stage holds parameters.
    """

    index: int
    count: int
    owned: list[str]
    passage: Passage = field(default_factory=Passage)
    foreign_buffers: set[str] = field(default_factory=set)
    incomplete: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @contextmanager
    def microbatch(self, received: Any) -> Iterator[Passage]:
        """Run one microbatch's forward inside; yields its :class:`Passage`."""
        passage = self.passage
        passage.received, passage.output = received, None
        passage.calls, passage.entered, passage.active = 0, False, True
        passage.differentiates = torch.is_grad_enabled()
        try:
            yield passage
        finally:
            passage.received, passage.output, passage.active, passage.on_enter = None, None, False, None


def cut(
    root: nn.Module,
    blocks: Iterable[str],
    owned: range,
    *,
    network: str,
    index: int,
    count: int,
    before: Iterable[str],
    after: Iterable[str],
    kept: Collection[str],
    device: torch.device,
) -> Stage:
    """Keep stage ``index`` of ``count`` of ``root``, in place.

    Args:
        root: The LightningModule.
        blocks: Names of all blocks.
        owned: Which of them this stage holds.
        network: The name of the module that a step calls; ``""`` where it is ``root`` itself.
        before: Names of modules and parameters that run before the blocks: the first stage's.
        after: Names of those that run after them: the last stage's.
        kept: Names of tied parameters that this stage holds, on both sides of the blocks.
        device: Where stand-ins live.
    """
    names = list(blocks)
    stage = Stage(index, count, [names[i] for i in owned])
    originals = [root.get_submodule(name) for name in names]
    for i, (name, block) in enumerate(zip(names, originals)):
        if i not in owned:
            parent, _, key = name.rpartition(".")
            stand_in = EarlierBlock if i < owned.start else LaterBlock
            root.get_submodule(parent)._modules[key] = stand_in(stage.passage, name, block)
            if i == owned.start - 1:
                root.get_submodule(name).__dict__["hands_on"] = True
    for foreign, side, holder in ((before, "before", 0), (after, "after", count - 1)):
        if index != holder:
            for name in foreign:
                _hollow(root, name, side, holder, stage, kept, device)
    stage.incomplete = _incomplete(root)
    for name in stage.owned:
        _refuse_unknown_inputs(root.get_submodule(name), name, stage.passage)
    _join(root.get_submodule(stage.owned[0]), root.get_submodule(stage.owned[-1]), stage)
    # The step itself runs inside a call of root, so that one is a second call only if it is the third of root.
    _count_calls(root.get_submodule(network), stage.passage, allowed=1 if network else 2)
    return stage


def _incomplete(root: nn.Module) -> dict[str, nn.Module]:
    names: set[str] = set()
    for name, module in root.named_modules():
        if isinstance(module, _StandIn) or any(isinstance(value, Hollow) for value in vars(module).values()):
            parts = name.split(".") if name else []
            names.update(".".join(parts[:length]) for length in range(len(parts) + 1))
    return {name: root.get_submodule(name) for name in sorted(names)}


def _hollow(
    root: nn.Module, name: str, side: str, holder: int, stage: Stage, kept: Collection[str], device: torch.device
) -> None:
    """Take a foreign part's parameters out of the model, leaving hollow tensors in their places."""
    parent, _, key = name.rpartition(".")
    owner = root.get_submodule(parent)
    if key in owner._parameters:
        if name not in kept:
            _hollow_parameter(owner, key, name, side, holder, stage, device)
        return
    for inner, module in owner.get_submodule(key).named_modules():
        path = f"{name}.{inner}" if inner else name
        for parameter in [k for k, p in module._parameters.items() if p is not None and f"{path}.{k}" not in kept]:
            _hollow_parameter(module, parameter, f"{path}.{parameter}", side, holder, stage, device)
        for buffer in [k for k, b in module._buffers.items() if b is not None]:
            if buffer not in module._non_persistent_buffers_set:
                module._non_persistent_buffers_set.add(buffer)
                stage.foreign_buffers.add(f"{path}.{buffer}")


def _hollow_parameter(
    module: nn.Module, key: str, name: str, side: str, holder: int, stage: Stage, device: torch.device
) -> None:
    passage = stage.passage

    def problem() -> str | None:
        if not passage.active or (side == "before" and not passage.entered):
            return None
        wrong = "after" if side == "before" else "between" if passage.entered else "before"
        return (
            f"{name} is held by stage {holder}, because it seems to run {side} the blocks, but stage {stage.index}"
            f" uses it {wrong} them. A part that runs on both sides, or between blocks, can't be split over stages: use"
            " two that share their weights (tied weights can be), make what runs between blocks a part of them, or use"
            f" pipeline_parallel_size=1. If it only runs {'after' if wrong == 'after' else 'before'} the blocks,"
            " register it there in __init__."
        )

    parameter = module._parameters.pop(key)
    assert parameter is not None
    # Into __dict__: nn.Module.__setattr__ would take a tensor for an attempt to replace the parameter.
    module.__dict__[key] = Hollow.of(parameter, device, name, holder, problem)


def _check_differentiates(passage: Passage) -> Passage:
    if torch.is_grad_enabled() != passage.differentiates:
        raise StepError(
            "The blocks run with gradients switched off within a step that needs them, so no gradient would cross the"
            " stages: with activation checkpointing, use use_reentrant=False."
        )
    return passage


def _count_calls(network: nn.Module, passage: Passage, allowed: int) -> None:
    def count(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if passage.active:
            if asked := [flag for flag in RECORDS if kwargs.get(flag)]:
                raise StepError(not_recorded(asked))
            passage.calls += 1
            if passage.calls > allowed:
                raise StepError(
                    "The network was called a second time within one step, and a pipeline runs it once: call it once"
                    " on the concatenated inputs, or use pipeline_parallel_size=1."
                )

    network.register_forward_pre_hook(count, prepend=True, with_kwargs=True)


def _refuse_unknown_inputs(block: nn.Module, name: str, passage: Passage) -> None:
    def check(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if passage.active:
            refuse((args, kwargs), name)

    block.register_forward_pre_hook(check, with_kwargs=True)


def _join(first: nn.Module, last: nn.Module, stage: Stage) -> None:
    """Hooks on the first and last owned block: note that the blocks were reached, and what comes out of them.

    Outside a microbatch's forward the hooks do nothing: recomputation under activation checkpointing calls blocks
    again.
    """
    passage = stage.passage

    def enter(*_: Any) -> None:
        if passage.active:
            if passage.output is not None:
                raise StepError(
                    "The network's blocks ran a second time within one step, and a pipeline runs them once: use"
                    " pipeline_parallel_size=1."
                )
            passage.entered = True
            if passage.on_enter is not None:
                passage.on_enter()

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        if passage.active:
            _check_differentiates(passage)
            refuse(output, f"What {stage.owned[-1]} returns")
            # the block's own output goes on to the hooks that shard it
            passage.output = output if stage.is_last else tree.map_leaves(_apart, output)

    first.register_forward_pre_hook(enter, prepend=True)
    last.register_forward_hook(leave)
