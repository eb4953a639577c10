"""Refuses Lightning features that can't be right on a parallel layout: at setup, before the module is changed."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.parameter import is_lazy
from torchmetrics.wrappers import Running

from lightning_shard.errors import WHOLE_BATCHES, ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.parallel.batch_norm import batch_norms


def refuse(trainer: pl.Trainer, module: pl.LightningModule, layout: Layout, microbatches: int) -> None:
    """Check a module and a Trainer's settings against the layout."""
    fits, normalizing = trainer.state.fn == TrainerFn.FITTING, list(batch_norms(module))
    refuse_network(module, layout, microbatches, fits=fits)
    layer_sync = getattr(trainer.strategy, "_layer_sync", None)
    if layer_sync is not None and type(layer_sync) is not TorchSyncBatchNorm:
        raise ConfigurationError(
            f"{type(layer_sync).__name__} as layer_sync plugin isn't supported by HybridShardStrategy: use"
            " sync_batchnorm=True, or replace the layers in configure_model."
        )
    if layer_sync is not None and normalizing and layout.context_parallel_size > 1:
        raise ConfigurationError(
            f"sync_batchnorm=True with context_parallel_size={layout.context_parallel_size} isn't supported (untested):"
            f" leave one out, or use another norm than {normalizing[0]}."
        )
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ConfigurationError(
            "ModelPruning can't be used: it masks elements of whole tensors and replaces parameters, and here they are"
            " sharded. Train without it and prune afterwards, by torch.nn.utils.prune on what load_from_checkpoint"
            ' returns; or train with strategy="auto" on one device.',
            breaks=9,
        )
    if layout.context_parallel_size > 1 and fits and not module.automatic_optimization:
        raise ConfigurationError(
            f"context_parallel_size={layout.context_parallel_size} with manual optimization isn't supported (untested):"
            " let the Trainer optimize (automatic_optimization=True), or use context_parallel_size=1."
        )
    if layout.pipeline_parallel_size == 1:
        return
    steps = ("training_step", "validation_step", "test_step", "predict_step")
    takes_iterator = [
        name for name in steps if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True)
    ]
    for applies, breaks, reason in (
        (
            fits and not module.automatic_optimization,
            4,
            "manual optimization: let the Trainer optimize (automatic_optimization=True)",
        ),
        (is_overridden("backward", module), 4, "a LightningModule.backward of its own: remove it"),
        (
            fits and any(isinstance(c, StochasticWeightAveraging) for c in callbacks) and normalizing,
            None,
            "StochasticWeightAveraging of a module with BatchNorm (a last epoch of forwards only): use WeightAveraging",
        ),
        (takes_iterator, 1, f"a {''.join(takes_iterator[:1])} that takes dataloader_iter: take batch"),
    ):
        if applies:
            raise ConfigurationError(
                f"pipeline_parallel_size={layout.pipeline_parallel_size} doesn't go with {reason}, or use"
                " pipeline_parallel_size=1.",
                breaks=breaks,
            )


def refuse_network(module: nn.Module, layout: Layout, microbatches: int, *, fits: bool) -> None:
    """Check a network against the layout, whatever loop trains it."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise ConfigurationError(
            f"{lazy[0]} has no shape yet, as a first forward gives it (a lazy module), but parameters are divided among"
            " ranks before. Run the network once in __init__ or configure_model, or give its layers their sizes."
        )
    tables = [
        name
        for name, part in module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad
    ]
    if fits and tables:
        raise ConfigurationError(
            f"{tables[0]}, a table with sparse=True, is trained and gives sparse gradients, which can't be reduced over"
            " ranks in parts: use sparse=False, and an optimizer for dense gradients in place of SparseAdam, or freeze"
            " it before training starts."
        )
    if layout.pipeline_parallel_size == 1:
        return
    normalizing = list(batch_norms(module))
    if normalizing and fits and microbatches > 1:
        rank_zero_warn(
            f"{normalizing[0]} normalizes by the samples of a microbatch, as it does when gradients are accumulated:"
            " with several pipeline stages training differs from that on whole batches. GroupNorm and LayerNorm don't,"
            f" and nothing does with {WHOLE_BATCHES}."
        )
    counting = [name for name, part in module.named_modules() if getattr(part, "scale_grad_by_freq", False)]
    if fits and counting and microbatches > 1:
        rank_zero_warn(
            f"{counting[0]} divides gradients by how often an entry is in a microbatch (scale_grad_by_freq): with"
            " several pipeline stages training differs from that on whole batches, as where gradients are accumulated."
            f" With {WHOLE_BATCHES} it doesn't."
        )
    windows = [name for name, part in module.named_modules() if isinstance(part, Running)]
    if windows and microbatches > 1:
        rank_zero_warn(
            f"{windows[0]} is a metric over its last updates, and with several pipeline stages a step updates it once"
            f" for each of {microbatches} microbatches: multiply its window by {microbatches}, or use {WHOLE_BATCHES}."
        )
