"""Runs a LightningModule on one rank, and records what it computes.

The only module of ``testing`` that imports Lightning; it is imported in the ranks' processes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_shard import HybridShardStrategy, tree
from lightning_shard.errors import BatchError, ConfigurationError
from lightning_shard.parallel.batch_norm import batch_norms
from lightning_shard.parallel.clip import gradient_norm
from lightning_shard.parallel.plans import declared_plan
from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.plugin.steps.randomness import seed_all
from lightning_shard.sharding import full_tensor
from lightning_shard.testing.compare import Facts, Moment, Record, keeps
from lightning_shard.testing.layouts import NamedLayout

_QUIET = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}


@dataclass(frozen=True)
class Run:
    """The settings that all runs of a comparison share."""

    make_module: Callable[[], Any]
    make_batches: Callable[[], Iterable[Any]]
    steps: int
    seed: int
    trainer: Mapping[str, Any] = field(default_factory=dict)


def on_one_process(run: Run) -> tuple[Record, Record, Facts]:
    """Run a plain Trainer twice, the second time with other random numbers; returns both records, and facts."""
    facts = Facts()
    return _record(run, None, facts=facts), _record(run, None, facts=facts, other_numbers=True), facts


def on_a_layout(run: Run, layout: NamedLayout) -> Record:
    """Run on a layout; returns this rank's record."""
    return _record(run, layout)


def _record(run: Run, layout: NamedLayout | None, **options: Any) -> Record:
    _be_quiet()
    L.seed_everything(run.seed, verbose=False)
    module = run.make_module()
    if not isinstance(module, L.LightningModule):
        raise ConfigurationError(f"make_module returned a {type(module).__name__}: return a LightningModule.")
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigurationError(
            f"make_module returned a {type(module).__name__} on meta, and one plain process can't train that: have it"
            " build the (small) module with real weights in this test."
        )
    recorder = Recorder(run.seed, layout, **options)
    trainer = L.Trainer(
        strategy="auto" if layout is None else HybridShardStrategy(**layout.arguments),
        devices=1 if layout is None else layout.world_size,
        callbacks=[*run.trainer.get("callbacks", ()), recorder],
        **{**_QUIET, **{key: value for key, value in run.trainer.items() if key != "callbacks"}},
        logger=_Logger(),
        use_distributed_sampler=False,
        max_epochs=1,
    )
    batches = _Batches(run, trainer)
    trainer.fit(module, batches, batches if is_overridden("validation_step", module) else None)
    if is_overridden("predict_step", module):
        trainer.predict(module, batches, return_predictions=False)
    return recorder.record


def _be_quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for package in ("lightning", "torch"):
        warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")


class _Logger(DummyLogger):
    """A logger that ignores everything; Lightning keeps ``logged_metrics`` only if there is a logger."""


class _Batches:
    """The batches, cut to this data rank's part. Not a DataLoader, so that nothing else shards them."""

    def __init__(self, run: Run, trainer: L.Trainer) -> None:
        self._run = run
        self._trainer = trainer

    def __len__(self) -> int:
        return sum(1 for _ in self._whole())

    def __iter__(self) -> Iterator[Any]:
        strategy = self._trainer.strategy
        rank, size = 0, 1
        if isinstance(strategy, HybridShardStrategy):
            rank, size = strategy.layout.data_rank, strategy.layout.data_parallel_size
        for batch in self._whole():
            if size > 1 and (samples := tree.batch_size(batch)) % size:
                raise BatchError(
                    f"make_batches gave a batch of {samples} samples, which {size} data ranks can't share equally:"
                    f" use a multiple of {size}."
                )
            yield tree.split(batch, size)[rank] if size > 1 else batch

    def _whole(self) -> Iterator[Any]:
        return islice(iter(self._run.make_batches()), self._run.steps)


class Recorder(L.Callback):
    """Records moments, and on one process also facts about the module."""

    def __init__(
        self, seed: int, layout: NamedLayout | None, *, facts: Facts | None = None, other_numbers: bool = False
    ) -> None:
        self.record: Record = {}
        self._seed = seed
        self._layout = layout
        self._facts = facts
        self._other_numbers = other_numbers
        self._step = Moment()

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if stage == "fit":  # module.setup and configure_model may create weights
            seed_all(self._seed)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._facts is not None:
            _describe(module, self._facts)
        self.record["before training"] = Moment(state=self._state(trainer))

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        weigh = self._layout.arguments.get("loss_weight") if self._layout else None
        self._step = Moment(weight=float(weigh(batch)) if weigh else 1.0)
        if self._facts is not None:
            seed_all(self._seed + 1000 * (1 + self._other_numbers) + batch_idx)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._step.norm = _gradient_norm(trainer, module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.grad is None or isinstance(parameter, Hollow):
                continue
            gradient = full_tensor(parameter.grad).to_dense()
            if self._keeps and gradient.any():
                self._step.gradients[name] = gradient.clone()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step.outputs = _leaves(outputs)
        self._step.logs = _logs(trainer)
        self._step.state = self._state(trainer)
        self.record[f"training batch {batch_idx}"] = self._step

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.record[f"validation batch {batch_idx}"] = Moment(outputs=_leaves(outputs))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.record["the end of training"] = Moment(logs=_logs(trainer), weight=self._step.weight)

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.record[f"prediction of batch {batch_idx}"] = Moment(outputs=_leaves(outputs))

    @property
    def _keeps(self) -> bool:
        return self._layout is None or keeps(self._layout, torch.distributed.get_rank())

    def _state(self, trainer: L.Trainer) -> dict[str, Tensor]:
        """The full tensors that a checkpoint would have of this stage, on the rank that keeps them. Collective."""
        state = trainer.strategy.lightning_module_state_dict()
        whole = {name: full_tensor(value) for name, value in state.items() if isinstance(value, Tensor)}
        return {name: value.clone() for name, value in whole.items()} if self._keeps else {}


def _logs(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in {**trainer.logged_metrics, **trainer.callback_metrics}.items()}


def _gradient_norm(trainer: L.Trainer, module: L.LightningModule) -> float:
    strategy = trainer.strategy
    if isinstance(strategy, HybridShardStrategy):
        mesh = strategy.device_mesh[strategy.layout.stage_axes]
        return float(gradient_norm(module.parameters(), mesh, strategy.root_device))
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not gradients:  # for example after a step that returned None
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([_wide(gradient).norm() for gradient in gradients])))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _leaves(outputs: Any) -> dict[str, Any]:
    """The comparable leaves of what a step returned, by path; a list of plain values is one leaf."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, np.ndarray):
            value = torch.as_tensor(value) if value.dtype.kind in "biuf" else value.tolist()
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Tensor):
            value = full_tensor(value).cpu()
            found[path] = value.item() if not value.ndim and not value.is_complex() else value.clone()
        elif isinstance(value, list) and not tree.tensors(value) and all(_is_plain(entry) for entry in value):
            found[path] = list(value)
        elif tree.is_node(value):
            for key, child in tree.children(value):
                walk(child, f"{path}.{key}" if path else str(key))
        elif _is_plain(value):
            found[path] = value

    walk(outputs, "")
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, bytes, bool, int, float))


# Facts about a module, found on one process


def _describe(module: nn.Module, facts: Facts) -> None:
    facts.has_plan = bool(declared_plan(module, "tp"))
    facts.batch_norms = [*batch_norms(module)]
    facts.draws = [f"{name} ({type(each).__name__})" for name, each in module.named_modules() if _drops(each)]


def _drops(module: nn.Module) -> bool:
    """Whether a module's settings say that it drops values."""
    names = ("p",) if "Drop" in type(module).__name__ else ()
    found = (value for key, value in vars(module).items() if key in names or "drop" in key)
    return any(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in found)
