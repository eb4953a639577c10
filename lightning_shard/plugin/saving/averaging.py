"""Makes Lightning's weight averaging callbacks average this rank's shards of a module that is cut and sharded.

The callbacks copy the module in their setup, which is before it is sharded. Here that copy is suppressed. Once the
module is assembled, the callbacks get an average of its sharded parameters, with the same sharding on the same device.

Private in Lightning 2.6, used here: ``_average_model`` of both callbacks, ``WeightAveraging._kwargs`` and
``_use_buffers``, ``StochasticWeightAveraging._scheduler_state``, ``fit_loop.restarted_mid_epoch``.

Completes what callbacks and hooks keep of each parameter, by its name, in plain tensors that each stage has made.

An average of weights goes over ``named_parameters()``, which has a stage's own parameters. In whole tensors, it is up
to date on each stage for these only, and the first rank's is saved. What is kept as DTensors is saved in parts instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from lightning_shard.dense import is_dense
from lightning_shard.lightning_private import averages_postponed
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.plugin.broadcast import values_of
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.saving.own_loading import fill
from lightning_shard.plugin.steps.checks.buffers import sums_of
from lightning_shard.plugin.steps.checks.stage_parameters import seen_as_parts


def postpone_copies(callbacks: Iterable[pl.Callback]) -> None:
    """Before callbacks are set up: keep averaging callbacks from copying the module then."""
    for callback in callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            vars(callback)["setup"] = partial(_set_up, callback)


def average_shards(callbacks: Iterable[pl.Callback], module: pl.LightningModule) -> None:
    """Give the callbacks their averages of an assembled module."""
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            callback._average_model = ShardedCopy(module)  # type: ignore[assignment]
        elif isinstance(callback, WeightAveraging) and callback._average_model is None:
            callback._average_model = ShardedAverage(module, callback._use_buffers, **callback._kwargs)


def resume_averaging(trainer: pl.Trainer) -> None:
    """In mid-epoch, after the loops were restored: make SWA's schedule take over again.

    It does so in the epoch-start hook, which Lightning skips there. Otherwise the rest of the epoch would be trained by
    the module's own scheduler, and SWA's would be a step behind from then on.
    """
    if not trainer.fit_loop.restarted_mid_epoch:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, StochasticWeightAveraging) or callback._scheduler_state is None:
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            (optimizer,) = trainer.optimizers
            rates = [group["lr"] for group in optimizer.param_groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            # creating the scheduler takes a step
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def _set_up(callback: Any, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
    del vars(callback)["setup"]
    if stage == "fit":
        callback._average_model = None  # an earlier fit's
    with averages_postponed():
        callback.setup(trainer, pl_module, stage)


class ShardedCopy(nn.Module):
    """Copies of a module's parameters and buffers with the same sharding, but without code that computes."""

    def __init__(self, live: pl.LightningModule) -> None:
        super().__init__()
        reshard(live)
        self._live = (live,)  # in a tuple, so that it isn't registered as a submodule
        self._copies = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in live.named_parameters()}
        self._buffer_copies = {name: buffer.detach().clone() for name, buffer in live.named_buffers()}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedCopy:
        return self  # AveragedModel deep-copies its argument

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        reshard(self._live[0])  # callers zip these with the module's own parameters
        return iter(self._copies.values())

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return iter(self._buffer_copies.values())

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The module's own with the copies in it; values that aren't parameters or buffers are the module's current."""
        (live,) = self._live
        copies = self._by_live_tensor()
        state = {} if destination is None else destination
        own = {name: copies.get(id(value), value) for name, value in live.state_dict(keep_vars=True).items()}
        strategy: Any = live.trainer.strategy
        state.update((prefix + name, value) for name, value in strategy.shown_whole(own).items())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        (live,) = self._live
        copies = self._by_live_tensor()
        own = live.state_dict(keep_vars=True)
        fill({name: copies[id(value)] for name, value in own.items() if id(value) in copies}, state_dict, strict=strict)

    def _by_live_tensor(self) -> dict[int, Tensor]:
        (live,) = self._live
        reshard(live)
        copies = {id(tensor): self._copies[name] for name, tensor in live.named_parameters()}
        return copies | {id(tensor): self._buffer_copies[name] for name, tensor in live.named_buffers()}


class ShardedAverage(AveragedModel):
    """torch's average of a model, for sharded parameters."""

    def __init__(
        self, live: pl.LightningModule, use_buffers: bool, avg_fn: Any = None, multi_avg_fn: Any = None
    ) -> None:
        average = avg_fn or get_swa_avg_fn()
        if multi_avg_fn is not None:
            average = partial(_one_by_one, multi_avg_fn)
        super().__init__(ShardedCopy(live), avg_fn=average, use_buffers=use_buffers)

    def update_parameters(self, model: nn.Module) -> None:
        with seen_as_parts(model):
            super().update_parameters(model)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return self.module.parameters()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        own = {name.removeprefix("module."): value for name, value in state_dict.items() if name.startswith("module.")}
        self.module.load_state_dict(own, strict=strict)
        self.n_averaged.copy_(state_dict["n_averaged"])


def _one_by_one(
    function: Callable[[list[Tensor], list[Tensor], Any], None], average: Tensor, current: Tensor, count: Any
) -> Tensor:
    """Call a function of lists on one pair: lists would mix DTensors on several meshes and plain buffers."""
    function([average], [current], count)
    return average


_MAPPINGS = (dict, OrderedDict)
_OF_THE_STRATEGY = {"state_dict", "current_model_state", "optimizer_states"}
_Path = tuple[Any, ...]
Shape = tuple[int, ...]


class _Holder(NamedTuple):
    stage: int
    shapes: Collection[Shape]
    """Of its parameters of that name, or of that end."""


def of_holders(
    checkpoint: dict[str, Any], shapes: Mapping[str, Shape], groups: Groups, device: torch.device
) -> dict[str, Any]:
    """The checkpoint, on the last stage with tensors under parameters' names as the stages have them that hold these.

    They are tensors of the parameters' shapes: a callback may keep something else under such a name.

    A collective call over the pipeline.

    Args:
        checkpoint: Not modified.
        shapes: Of this stage's parameters, by name. A key may be a name's end, as of ``module.net.named_parameters()``.
        device: Where this rank computes, which the pipeline's group serves.
    """
    holders = _holders(groups.gather_over_stages(dict(shapes)))
    kept = {key: value for key, value in checkpoint.items() if key not in _OF_THE_STRATEGY}
    found = {path: t for path, t in _tensors(kept, ()) if path[-1] in holders and t.shape in holders[path[-1]].shapes}
    told_here = {path: (sums, found[path].shape, found[path].dtype) for path, sums in sums_of(found).items()}
    stages: list[Mapping[_Path, Any]] = groups.gather_over_stages(told_here)
    last = len(stages) - 1
    for path in dict.fromkeys(path for stage in stages for path in stage):
        holder = holders[path[-1]].stage
        told = stages[holder].get(path)
        if told is None or told == stages[last].get(path):
            continue
        _, shape, dtype = told
        like = found.get(path)
        own = like
        if own is None or (own.shape, own.dtype) != (shape, dtype):
            own = torch.empty(shape, dtype=dtype)
        values = values_of(last - holder, own, groups.pipeline, device)
        if groups.pipeline.rank() == 0:  # the last stage's
            checkpoint = _with(checkpoint, path, values if like is None else values.to(like.device))
    return checkpoint


def _holders(stages: Sequence[Mapping[str, Shape]]) -> dict[Any, _Holder]:
    """The stage that holds a parameter, by the ends of its name, where these tell it; without what all stages hold."""
    of_name: dict[str, list[int]] = {}
    for stage, held in enumerate(stages):
        for name in held:
            of_name.setdefault(name, []).append(stage)
    of_end: dict[str, dict[int, set[Shape]]] = {}
    for name, stage in ((name, at[-1]) for name, at in of_name.items() if len(at) < len(stages)):
        parts = name.split(".")
        for start in range(len(parts)):
            held_by = of_end.setdefault(".".join(parts[start:]), {})
            held_by.setdefault(stage, set()).add(stages[stage][name])
    return {end: _Holder(*next(iter(held.items()))) for end, held in of_end.items() if len(held) == 1}


def _tensors(tree: Any, path: _Path) -> Iterator[tuple[_Path, Tensor]]:
    if type(tree) in (Tensor, nn.Parameter) and is_dense(tree) and path and not tree.is_meta:
        yield path, tree.detach()
    elif type(tree) in _MAPPINGS:
        for key, value in tree.items():
            yield from _tensors(value, (*path, key))
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            yield from _tensors(value, (*path, index))


def _with(tree: Any, path: _Path, value: Tensor) -> Any:
    """A copy of the tree with ``value`` at ``path``; itself where it has no such place."""
    if not path:
        return value
    key, *rest = path
    if type(tree) in _MAPPINGS:
        copy = type(tree)(tree)
        copy[key] = _with(tree.get(key, {}), tuple(rest), value)
        return copy
    if type(tree) in (list, tuple) and key < len(tree):
        return type(tree)(_with(each, tuple(rest), value) if index == key else each for index, each in enumerate(tree))
    return tree
