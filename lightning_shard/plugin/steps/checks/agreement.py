"""Compares between ranks what must be equal: batches, optimizer settings, and state that is saved as replicated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import xxhash
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import lightning_private, tree
from lightning_shard.checkpoint.tensors import check_storable
from lightning_shard.errors import BatchError, StepError, UnsupportedStateError
from lightning_shard.layout import Layout
from lightning_shard.parallel.rank_compare import digest_of, exchanged, unequal
from lightning_shard.sharding import local_tensor


def check_same_batch(batch: Any, layout: Layout, strategy: str = "trainer.strategy") -> None:
    """Compare a batch's bytes over the ranks of each data rank; a collective call over all ranks.

    The strategy's own sampler guarantees that they are equal. A dataset or sampler that distributes by global rank
    doesn't, and training would be wrong without failing. A dataset or sampler that doesn't distribute at all gives data
    ranks equal batches. That is only warned of, since data may happen to be equal.

    Args:
        strategy: As a user's code names it.

    Raises:
        BatchError: On every rank, if two ranks of one data rank have read different values.
    """
    if layout.world_size == 1:
        return
    (found,) = exchanged(None, {layout.data_rank: digest_of(batch)})
    for data_rank, held in unequal(found).items():
        (one, *_), (other, *_), *_ = held.values()
        raise BatchError(
            f"Ranks {one} and {other} hold parts of one model and read data rank {data_rank}'s batches, but their"
            " batches differ: a dataset or sampler that deals by global rank must deal"
            f" by data rank instead ({strategy}.layout.data_rank of data_parallel_size). Data that each"
            " process makes at random must be made from one seed: call L.seed_everything before. Nor may it depend"
            " on the process or the time, as the order of a set of texts does (sort it).",
            breaks=1,
        )
    batches = len({digest for ranks in found.values() for digest in ranks.values()})
    if batches < len(found) and tree.tensors(batch):
        rank_zero_warn(
            f"The first batch is the same on {len(found) - batches + 1} of {len(found)} data ranks, so they do the"
            " same work. DataLoaders over a dataset with indices are dealt for you; an IterableDataset, or what is no"
            f" DataLoader, must deal by {strategy}.layout.data_rank of data_parallel_size."
        )


def what_follows(trainer: pl.Trainer) -> str:
    """Describe what this rank reads after the current batch, as far as known: equal on all ranks of a data rank."""
    if lightning_private.is_last_batch(trainer):
        return "no more batch"
    following = lightning_private.next_batch(trainer)
    if following is None:
        return "another batch"
    batch, loader = following
    sizes = sorted({str(tensor.size(0)) for tensor in tree.tensors(batch) if tensor.ndim})
    return f"a batch of {' and '.join(sizes) or 'no'} samples from loader {loader}"


def check_what_follows(own: str, told: str) -> None:
    """Compare :func:`what_follows` with the last stage's, which its regular broadcast carries.

    An IterableDataset may give each rank another number of batches. The ranks would then wait for each other forever.

    Raises:
        BatchError: On this rank. The failure is reported to the other ranks, which end too.
    """
    if own != told:
        raise BatchError(
            f"This rank reads {own} next, and the last pipeline stage {told}: ranks that hold parts of one model read"
            " the same batches. Have an IterableDataset give the same samples on all of"
            " them: deal by trainer.strategy.layout.data_rank of data_parallel_size, not by rank, and look for files"
            " that some machines lack.",
            breaks=1,
        )


class SameUpdate:
    """Checks what a stage's ranks must have alike at an optimizer's step, within a message that is sent anyway.

    * Gradients of the same parameters. FSDP2 (torch 2.13) reduces the gradients that each rank has in sequence. If
      ranks ran different experts of a list, or different branches, it adds one parameter's gradient to another's, and
      nothing fails.
    * Optimizers with equal settings. Each rank updates its part of the parameters. A ReduceLROnPlateau that monitors a
      data rank's own value lowers the learning rate on that rank only. Learning rates are compared over all stages,
      where these have as many groups.

    Args:
        module: After a backward that has reduced gradients.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], layout: Layout) -> None:
        self._without: list[str] = []
        if layout.stage_size > 1:  # otherwise no other rank has parts of this stage
            with torch._C.DisableTorchFunctionSubclass():
                self._without = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
        self._rates = [[group.get("lr") for group in optimizer.param_groups] for optimizer in optimizers]
        settings = [[_numbers(group) for group in optimizer.param_groups] for optimizer in optimizers]
        groups = [len(each) for each in self._rates]
        rates = [rate if isinstance(rate, (int, float)) else None for each in self._rates for rate in each]
        of_stages = (*_of_stage(self._without, layout), *_of_stage(settings, layout))
        self.numbers = [*of_stages, *_of_all(groups), *_of_all(rates)]

    def check(self, largest: Sequence[int]) -> None:
        """Check the largest of all ranks' ``numbers``: where they differ, every rank raises."""
        size = len(largest) // 2 - 2
        of_gradients, of_settings = largest[:size], largest[size:-4]
        if _differ(of_gradients):
            here = f"on this rank {self._without[:3]} have none" if self._without else "on another rank some have none"
            raise StepError(
                f"Data ranks have gradients of different parameters in this step ({here}), so they were reduced"
                " wrongly, and this step's weights are wrong: resume from an earlier checkpoint. Have each rank's loss"
                " use the same parameters, such as by 0 * output of those that it leaves out; lists of experts may be"
                " distributed to ranks by expert_parallel_size."
            )
        if _differ(of_settings) or (_differ(largest[-2:]) and not _differ(largest[-4:-2])):
            raise StepError(
                f"The ranks' optimizers have different settings (this rank's learning rates: {self._rates}), and each"
                " steps its own part of the parameters, so this step's weights are wrong:"
                " resume from an earlier checkpoint. Log what a scheduler monitors with sync_dist=True, and set what a"
                " hook sets alike on all ranks. With several pipeline stages, a step sets rates before it calls the"
                " network: only the last stage runs the code behind it.",
                breaks=11,
            )


_SILENT = -(2**62)
"""Less than what any rank encodes."""


def _of_stage(value: object, layout: Layout) -> list[int]:
    """Encode a value so that the largest numbers of all ranks show, of each stage, whether its ranks' values differ."""
    own, size = layout.pipeline_rank, layout.pipeline_parallel_size
    silent = [_SILENT] * 2
    return [*silent * own, *_of_all(value), *silent * (size - 1 - own)]


def _of_all(value: object) -> list[int]:
    """Encode a value so that the largest numbers of all ranks show whether their values differ.

    These are a digest and its negative: where values differ, the largest digest isn't the least one.
    """
    digest = xxhash.xxh3_64_intdigest(repr(value).encode()) >> 3
    return [digest, -digest]


def _differ(largest: Sequence[int]) -> bool:
    return any(most != -least for most, least in zip(largest[::2], largest[1::2]))


def _numbers(group: Mapping[str, Any]) -> list[Any]:
    return [
        (name, value)
        for name, value in group.items()
        if isinstance(value, (bool, int, float)) or (isinstance(value, tuple) and not tree.tensors(value))
    ]


def check_copies(
    tied: Mapping[str, Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
    names: Mapping[int, str],
    layout: Layout,
    group: dist.ProcessGroup,
) -> None:
    """Compare what saves take to be equal and optimizers may change in several ways; a collective call over all ranks.

    Tied parameters' copies on several stages, and their optimizer state, start equal and take the same updates. With
    an optimizer that uses statistics over all its parameters, or draws random numbers for them, they diverge. A plain
    tensor in the state of a sharded parameter is saved as replicated on every rank that holds the parameter.

    Args:
        names: ``id(parameter)`` to name, of the parameters whose plain state is compared.

    Raises:
        UnsupportedStateError: On every rank, if copies have diverged, or a plain tensor is a rank's own part.
    """
    pipeline = f"{layout.rank % layout.stage_size}/"
    copies = {f"{pipeline}{name}": digest_of(local_tensor(parameter)) for name, parameter in tied.items()}
    plain: dict[str, str] = {}
    of_stages = {id(parameter): name for name, parameter in tied.items()}
    for index, optimizer in enumerate(optimizers):
        for parameter, entries in optimizer.state.items():
            name = of_stages.get(id(parameter)) or names.get(id(parameter), "")
            for path, value in tree.walk(entries) if name else ():
                key = "/".join((name, *path))
                if name in tied:
                    copies[pipeline + key] = digest_of(local_tensor(value) if isinstance(value, Tensor) else value)
                elif isinstance(parameter, DTensor) and _is_plain(value) and value.ndim:
                    plain[f"{index}/{key}"] = digest_of(value)
    of_copies, of_plain = exchanged(group, copies, plain)
    for key in unequal(of_plain):
        raise UnsupportedStateError(
            f"Optimizer state {key!r} is a plain tensor that differs between ranks, while its parameter is sharded: how"
            " the parts make up a whole isn't known, so they can't be saved. Have the optimizer keep it as a DTensor,"
            " made from the parameter by torch.zeros_like."
        )
    for key in unequal(of_copies):
        raise UnsupportedStateError(
            f"{key.partition('/')[2]} is tied over two pipeline stages, and their copies have parted: an optimizer that"
            " takes norms or other statistics over its parameters, or draws random numbers, or a callback, has changed"
            " them in two ways. Use an optimizer that steps each element by itself (AdamW, SGD), untie the weights, or"
            " use pipeline_parallel_size=1."
        )


def _is_plain(value: Any) -> bool:
    """Whether it is a dense tensor in memory; other tensors are saved in parts, or refused when they are saved."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return False
    try:
        check_storable("", value)
    except UnsupportedStateError:
        return False
    return True
