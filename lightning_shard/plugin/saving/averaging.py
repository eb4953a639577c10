"""Makes Lightning's weight averaging callbacks average this rank's shards of a module that is cut and sharded.

The callbacks copy the module in their setup, which is before it is sharded. Here that copy is suppressed. Once the
module is assembled, the callbacks get an average of its sharded parameters, with the same sharding on the same device.

Private in Lightning 2.6, used here: ``_average_model`` of both callbacks, ``WeightAveraging._kwargs`` and
``_use_buffers``.

Averages that callbacks and hooks keep in plain tensors by parameters' names are saved by the stages that have these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from lightning_shard.checkpoint.sharded_values import rebuilt
from lightning_shard.dense import is_dense
from lightning_shard.lightning_private import averages_postponed
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.saving.own_loading import fill
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
        for name, value in live.state_dict(keep_vars=True).items():
            held = copies.get(id(value), value)
            state[prefix + name] = held.detach() if isinstance(held, Tensor) else held
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


_OTHER_STATE = {"state_dict", "current_model_state", "optimizer_states", "hyper_parameters"}
Shape = tuple[int, ...]
Path = tuple[Any, ...]


def by_stages(
    checkpoint: Mapping[str, Any], shapes: Mapping[str, Shape], groups: Groups, mesh: DeviceMesh
) -> dict[str, Any]:
    """The checkpoint with the plain tensors of which a stage has its own as DTensors, and only on that stage.

    Such are, in dicts, tensors under parameters' names and of their shapes, as an average of weights in whole tensors
    that all stages have made: each keeps that of its own parameters up to date. And those that the last stage lacks,
    whose state is saved, as a hook computes them of its part of the model's. A collective call over the pipeline.

    Args:
        shapes: Of this stage's parameters, by name. A key may be a name's end, as of ``module.net.named_parameters()``.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in _OTHER_STATE}
    paths = {*_paths(rest, ())}
    everyones: list[tuple[Mapping[str, Shape], set[Path]]] = groups.gather_over_stages((dict(shapes), paths))
    stages, lacking = [held for held, _ in everyones], paths - everyones[-1][1]
    held = {name: (stage, shape) for stage, of_stage in enumerate(stages) for name, shape in of_stage.items()}
    by_end: dict[Any, set[tuple[int, Shape]]] = {}
    for name, of_name in held.items():
        parts = name.split(".")
        for start in range(len(parts)):
            by_end.setdefault(".".join(parts[start:]), set()).add(of_name)
    own = len(stages) - 1 - groups.pipeline.rank()

    def holder(key: Any, value: Any) -> int | None:
        """The stage that has the parameter, if a key and a tensor tell it."""
        if not _is_plain(value):
            return None
        found = by_end.get(key, set()) if isinstance(key, str) else set()
        of_key = {stage for stage, _ in found}
        return of_key.pop() if len(of_key) == 1 and value.shape in {shape for _, shape in found} else None

    def split(value: Any, path: Path) -> Any:
        if _is_plain(value) and (holder(path[-1], value) is not None or path in lacking):
            return DTensor.from_local(value.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        if type(value) in (dict, OrderedDict):
            value = type(value)((key, each) for key, each in value.items() if holder(key, each) in (None, own))
        return rebuilt(value, lambda key, each: split(each, (*path, key)))

    return {key: checkpoint[key] for key in checkpoint.keys() & _OTHER_STATE} | split(rest, ())


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and is_dense(value) and not value.is_meta


def _paths(value: Any, path: Path) -> Iterator[Path]:
    """Of the plain tensors in dicts within dicts."""
    if _is_plain(value):
        yield path
    elif type(value) in (dict, OrderedDict):
        for key, each in value.items():
            yield from _paths(each, (*path, key))
