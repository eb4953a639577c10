"""What ranks must agree on: the batch of a pipeline and a tensor group, and what is saved as the same on all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import xxhash
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import tree
from lightning_shard.checkpoint.storable import check_storable
from lightning_shard.errors import BatchError, StepError, UnsupportedStateError
from lightning_shard.layout import Layout
from lightning_shard.plugin import trainer_private
from lightning_shard.sharding import local_tensor
from lightning_shard.tree import as_bytes


def check_same_batch(batch: Any, layout: Layout) -> None:
    """Compare a batch's bytes over the ranks of one data rank; a collective call over all ranks.

    The strategy's own sampler sees to it. A dataset or sampler that deals by global rank doesn't, and every number
    after it would be wrong without anything failing. Nor does one that doesn't deal at all: then data ranks read equal
    batches, which is warned of, since data may also be alike.

    Raises:
        BatchError: On every rank, where two ranks of a data rank have read other values.
    """
    if layout.world_size == 1:
        return
    digests: list[str] = [""] * layout.world_size
    dist.all_gather_object(digests, _digest(batch))
    first: dict[int, int] = {}
    for rank, digest in enumerate(digests):
        data_rank = layout.at(rank).data_rank
        other = first.setdefault(data_rank, rank)
        if digest != digests[other]:
            raise BatchError(
                f"Ranks {other} and {rank} hold parts of one model and read data rank {data_rank}'s batches, but their"
                " batches differ: a dataset or sampler that deals by global rank must deal by data rank instead"
                " (trainer.strategy.layout.data_rank of data_parallel_size)."
            )
    batches = {digests[rank] for rank in first.values()}
    if len(batches) < len(first) and tree.tensors(batch):
        rank_zero_warn(
            f"The first batch is the same on {len(first) - len(batches) + 1} of {len(first)} data ranks, so they do the"
            " same work. DataLoaders over a dataset with indices are dealt for you; an IterableDataset, or what is no"
            " DataLoader, must deal by trainer.strategy.layout.data_rank of data_parallel_size."
        )


def what_follows(trainer: pl.Trainer) -> str:
    """What this rank reads after the present batch, as far as that is known: the same on all ranks of a data rank."""
    if trainer_private.is_last_batch(trainer):
        return "no more batch"
    following = trainer_private.next_batch(trainer)
    if following is None:
        return "another batch"
    batch, loader = following
    sizes = sorted({str(tensor.size(0)) for tensor in tree.tensors(batch) if tensor.ndim})
    return f"a batch of {' and '.join(sizes) or 'no'} samples from loader {loader}"


def check_what_follows(own: str, told: str) -> None:
    """Compare this with what the last stage says, in messages that are sent anyway.

    An IterableDataset may give another number of batches on each rank, and a rank that has another one than the others
    would wait for them for ever.

    Raises:
        BatchError: On this rank; what it tells the others ends them.
    """
    if own != told:
        raise BatchError(
            f"This rank reads {own} next, and the last pipeline stage {told}: ranks that hold parts of one"
            " model read the same batches. Have an IterableDataset give the same samples on all of them: deal by"
            " trainer.strategy.layout.data_rank of data_parallel_size, not by rank, and look for files that some"
            " machines lack."
        )


class SameGradients:
    """Whether a stage's data ranks have gradients for the same parameters, asked in a message that is sent anyway.

    FSDP2 (torch 2.13) adds up those gradients that each rank has, one after the other. Of ranks that ran other experts
    of a list, or other branches, it adds one parameter's to another's, and nothing fails.

    Args:
        module: After a backward that has reduced gradients.
        layout: This rank's.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._without = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
        self.said = _of_stage(self._without, layout)

    def check(self, heard: Sequence[bool]) -> None:
        """Look at what any rank has said.

        Raises:
            StepError: On every rank.
        """
        if _differ(heard):
            raise StepError(
                "Data ranks have computed gradients of different parameters in this step (this rank none of"
                f" {self._without[:3] or 'those that others have none of'}), so they were added up wrongly, and this"
                " step's weights are wrong: resume from an earlier checkpoint. Have each rank's loss use the same"
                " parameters, such as by 0 * output of those that it leaves out; lists of experts may be dealt to ranks"
                " by expert_parallel_size."
            )


class SameSettings:
    """Whether the optimizers of a stage's ranks step alike, asked in the same message.

    Each rank steps its part of the parameters. A ReduceLROnPlateau whose monitored value is a data rank's own lowers
    the learning rate on that one only.

    Args:
        optimizers: After a step.
        layout: This rank's.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], layout: Layout) -> None:
        self._rates = [[group.get("lr") for group in optimizer.param_groups] for optimizer in optimizers]
        settings = [[_numbers(group) for group in optimizer.param_groups] for optimizer in optimizers]
        self.said = _of_stage(settings, layout)

    def check(self, heard: Sequence[bool]) -> None:
        """Look at what any rank has said.

        Raises:
            StepError: On every rank.
        """
        if _differ(heard):
            raise StepError(
                f"The ranks' optimizers have different settings (this rank's learning rates: {self._rates}), and each"
                " steps its own part of the parameters, so this step's weights are wrong: resume from an earlier"
                " checkpoint. Log what a scheduler monitors with sync_dist=True, and set what a hook sets alike on all"
                " ranks."
            )


_BITS = 16


def _of_stage(value: object, layout: Layout) -> list[bool]:
    """For each stage bits, the own one's of a digest and their opposites: where both are said, ranks differ."""
    digest = xxhash.xxh3_64_intdigest(repr(value).encode())
    own = [bool(digest >> bit & 1) for bit in range(_BITS)]
    both, silent = [*own, *(not bit for bit in own)], [False] * 2 * _BITS
    stages = range(layout.pipeline_parallel_size)
    return [bit for stage in stages for bit in (both if stage == layout.pipeline_rank else silent)]


def _differ(heard: Sequence[bool]) -> bool:
    parts = [heard[start : start + _BITS] for start in range(0, len(heard), _BITS)]
    return any(bit and opposite for one, other in zip(parts[::2], parts[1::2]) for bit, opposite in zip(one, other))


def _numbers(group: Mapping[str, Any]) -> list[Any]:
    simple = ((name, value) for name, value in group.items() if isinstance(value, (bool, int, float, tuple)))
    return [(name, value) for name, value in simple if not tree.tensors(value)]


def check_replicas(states: Iterable[dict[str, Any]]) -> None:
    """Compare what optimizers keep as plain tensors for sharded parameters; a collective call over all ranks.

    Such a tensor is saved as the same on every rank that holds its parameter.

    Args:
        states: Of :func:`named_optimizer_state`.

    Raises:
        UnsupportedStateError: On every rank, where one differs: a rank's own part, that doesn't say of what.
    """
    own = {}
    for index, state in enumerate(states):
        for name, entries in state["state"].items():
            if isinstance(state["parameters"][name], DTensor):
                for path, value in tree.walk(entries):
                    if _is_plain(value) and value.ndim:
                        own["/".join((str(index), name, *path))] = _digest(value)
    everyone: list[dict[str, str]] = [own]
    if dist.is_initialized():
        everyone = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    first: dict[str, tuple[int, str]] = {}
    for rank, found in enumerate(everyone):
        for key, value in found.items():
            other, expected = first.setdefault(key, (rank, value))
            if value != expected:
                raise UnsupportedStateError(
                    f"Optimizer state {key!r} is a plain tensor that differs between ranks {other} and {rank}, while"
                    " its parameter is sharded: how the parts make up a whole isn't known, so they can't be saved. Have"
                    " the optimizer keep it as a DTensor, made from the parameter by torch.zeros_like."
                )


def check_copies(
    tied: Mapping[str, Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
    gather_over_stages: Callable[[Any], list[Any]],
) -> None:
    """Compare what two stages hold of a tied parameter, and its optimizer state; a collective call over the pipeline.

    Both start alike and take the same steps. An optimizer that looks at all its parameters, or draws random numbers for
    them, doesn't: of which copy the model is made wouldn't be known.

    Args:
        tied: This stage's, by name.

    Raises:
        UnsupportedStateError: On every stage, where the copies have parted.
    """
    own = {name: _digest(local_tensor(parameter)) for name, parameter in tied.items()}
    for optimizer in optimizers:
        for name, parameter in tied.items():
            for path, value in tree.walk(optimizer.state.get(parameter, {})):
                known = local_tensor(value) if isinstance(value, Tensor) else value
                own["/".join((name, *path))] = _digest(known)
    parted = first_parted(gather_over_stages(own))
    if parted is not None:
        raise UnsupportedStateError(
            f"{parted} is tied over two pipeline stages, and their copies have parted: an optimizer that takes norms or"
            " other statistics over its parameters, or draws random numbers, or a callback, has changed them in two"
            " ways. Use an optimizer that steps each element by itself (AdamW, SGD), untie the weights, or use"
            " pipeline_parallel_size=1."
        )


def first_parted(of_stages: Iterable[Mapping[str, Any]]) -> str | None:
    """The first name for which two stages have other values; ``None``: there is none."""
    first: dict[str, Any] = {}
    named = (entry for stage in of_stages for entry in stage.items())
    return next((name for name, value in named if first.setdefault(name, value) != value), None)


def same_on_data_ranks(state: dict[str, Any], parameters: Collection[str], group: Any) -> dict[str, Any]:
    """A state dict with the first data rank's values of what is no parameter, such as BatchNorm's statistics.

    A collective call over the group. The module's own are left as they are.
    """
    plain = {name: value for name, value in state.items() if name not in parameters and _is_plain(value)}
    if _equal_everywhere(_digest(plain), group):
        return state
    digests: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(digests, {name: _digest(value) for name, value in plain.items()}, group=group)
    agreed = dict(state)
    for name in sorted(set.intersection(*map(set, digests))):
        if any(other[name] != digests[0][name] for other in digests):
            value = plain[name]
            agreed[name] = torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
            # as bytes: not every backend knows every dtype
            dist.broadcast(as_bytes(agreed[name]), group=group, group_src=0)
    return agreed


def _equal_everywhere(value: str, group: Any) -> bool:
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return len(set(values)) == 1


def _is_plain(value: Any) -> bool:
    """Whether it's a tensor of elements in memory; any other is saved in parts, or refused when it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return False
    try:
        check_storable("", value)
    except UnsupportedStateError:
        return False
    return True


def _strided(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.layout == torch.jagged:
        nested: Any = tensor
        return nested.values(), nested.offsets()
    if tensor.is_nested:
        return tensor.unbind()
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def _digest(batch: Any) -> str:
    digest = xxhash.xxh3_128()
    for path, leaf in tree.walk(batch):
        digest.update("/".join(path).encode())
        if isinstance(leaf, Tensor):
            for part in _strided(leaf.detach()):
                plain = part.resolve_conj().resolve_neg().cpu().contiguous()
                digest.update(as_bytes(plain).numpy().data)
        elif isinstance(leaf, (str, int, float)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
