"""Data classes of the counts: what one microbatch costs on one rank, part by part.

The counts of one pair of tensor and expert sizes are made once; all layouts with that pair are computed from them.
Counting computes no values and uses no memory for the model: its own ``training_step`` runs forward and backward on
fake tensors, with the tensor- and expert-parallel styles of a run, on a fake process group. What the step does outside
of blocks and parts has its own accounts: *around*, which every pipeline stage runs (masks, positions), and *loss*, what
follows the last block, which only the last stage runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

AROUND, LOSS = "(around)", "(loss)"
TENSOR, EXPERT = "tensor", "expert"


@dataclass(frozen=True)
class Work:
    """The cost of one part's forward or backward on one rank.

    Attributes:
        flops: Floating-point operations of matrix products, convolutions and attention.
        moved: Bytes that operations read and write, without fusion: the bound of memory-bound operations.
        beside: Bytes of ``moved`` by operations that ``flops`` doesn't count.
        traffic: Bytes that this rank sends, by axis (``"tensor"``, ``"expert"``), for ring collectives. Traffic of
            pipelines and data ranks isn't included: it follows from ``output`` and ``parameters``.
        collectives: The number of these collectives, by axis.
    """

    flops: int = 0
    moved: int = 0
    beside: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict)
    collectives: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TwoParts:
    """A split backward: first the gradients of inputs, later those of matrix products' weights. In bytes.

    Attributes:
        owed: What products keep from the first part to the second; each storage counts once.
        given: Bytes of ``owed`` that are the gradient with which the backward began.
        freed: As :attr:`Cost.freed`, in the first part.
        inputs_peak, inputs_adding_peak, of_gradients: As :class:`Cost`'s ``backward_peak``, ``adding_peak`` and
            ``of_gradients``, in the first part.
        weights_peak, weights_adding_peak: The same in the second part.
        late: Indices in :attr:`PartCount.parameters` of the parameters whose gradients come in the second part.
        weights: The second part's operations.
    """

    owed: int = 0
    given: int = 0
    freed: int = 0
    inputs_peak: int = 0
    inputs_adding_peak: int = 0
    of_gradients: int = 0
    weights_peak: int = 0
    weights_adding_peak: int = 0
    late: tuple[int, ...] = ()
    weights: Work = Work()


@dataclass(frozen=True)
class Cost:
    """The cost of one microbatch in a part, for one way of running it. Memory in bytes.

    Attributes:
        forward: The forward's operations.
        backward: The backward's operations, including the second forward if the part is recomputed.
        kept: Created in the forward and alive until the backward; each storage counts once. Without parameters and
            inputs. A block's output counts for the block if the next one keeps it.
        forward_peak: The largest growth of memory during the forward.
        backward_peak: The largest growth during the backward if weights have no gradients yet; includes the gradients
            that it creates.
        adding_peak: The same if weights have gradients, to which new ones are added one at a time.
        freed: Bytes of ``kept`` that are already free when the part's backward begins, since their last user was the
            backward of what runs after it.
        carried: Alive when the forward begins, from what ran before, beyond what that keeps: values that local
            variables hold, such as logits, and that no backward needs.
        of_gradients: Bytes of ``backward_peak`` that are gradients of whole parameters.
        experts_done: The growth (negative: shrinkage) since the part's backward began, without gradients of parameters,
            at the moment when the backward of its sharded experts is done.
        parts: The split backward; ``None`` if nothing of it can be delayed, or it wasn't counted.
    """

    forward: Work = Work()
    backward: Work = Work()
    kept: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    adding_peak: int = 0
    freed: int = 0
    carried: int = 0
    of_gradients: int = 0
    experts_done: int = 0
    parts: TwoParts | None = None


@dataclass(frozen=True)
class ParameterCount:
    """One parameter. A tied one is in each part that uses it, under its first name.

    Attributes:
        shape: The whole parameter's shape.
        local_shape: One rank's shape under tensor and expert parallelism, before FSDP shards it.
        is_expert: Whether it is sharded over expert-parallel ranks; FSDP then shards it over the data ranks that hold
            the same experts, not over all.
        gathered_dtype: The dtype in which FSDP gathers it; None for its own.
        is_listed: Whether it belongs to a module list of experts that are sharded over ranks. Then all data ranks share
            it, and the ranks that compute with it gather it, so that it is included in what its part keeps.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    is_expert: bool = False
    gathered_dtype: torch.dtype | None = None
    is_listed: bool = False

    @property
    def numel(self) -> int:
        return _product(self.local_shape)

    @property
    def bytes(self) -> int:
        """Bytes of the rank's part, before FSDP shards it."""
        return self.numel * self.dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        return self.numel * (self.gathered_dtype or self.dtype).itemsize


@dataclass(frozen=True)
class PartCount:
    """A block; a part before, between or after blocks; or what the step does around them.

    Attributes:
        name: The module's name.
        output: Bytes of the tensors that it returns: what a pipeline sends, if a cut follows.
        plain: The cost without activation checkpointing.
        recomputed: The cost with ``activation_checkpointing=True``; same as ``plain`` if it isn't a block.
        selective: The cost with ``activation_checkpointing="selective"``.
    """

    name: str
    parameters: tuple[ParameterCount, ...] = ()
    output: int = 0
    plain: Cost = Cost()
    recomputed: Cost = Cost()
    selective: Cost = Cost()


@dataclass(frozen=True)
class Counts:
    """A module's step on one microbatch, for one tensor and one expert size.

    Attributes:
        blocks: In running order; a block that runs several times is listed as often.
        parts: (place, part) of the others; a part runs before the block of that place, ``len(blocks)``: after all.
        everywhere: What every stage holds and runs: *around*, and frozen modules beside the network.
        loss: What the step does after the last block, outside of parts.
        samples: The number of samples of the microbatch.
        tokens: The number of elements of the microbatch's largest integer tensor; samples, if there is none.
        batch_bytes: Bytes of the microbatch's tensors.
        buffer_bytes: Bytes of all of the module's buffers, which every rank holds whole.
        saved_buffer_bytes: Bytes of those buffers that are saved in checkpoints.
        tensor_parallel_size: The size that it was counted for.
        expert_parallel_size: The size that it was counted for.
        counted: Whether the step ran on fake tensors. If not, only parameters, and operations estimated from them, are
            known; activation memory is then unknown, not 0.
        reason: Why the step wasn't counted.
        in_two_parts: Whether split backwards were counted, too.
        assumed: Texts of the assumptions that were made.
    """

    blocks: tuple[PartCount, ...]
    parts: tuple[tuple[int, PartCount], ...] = ()
    everywhere: tuple[PartCount, ...] = ()
    loss: PartCount = PartCount(LOSS)
    samples: int = 1
    tokens: int = 1
    batch_bytes: int = 0
    buffer_bytes: int = 0
    saved_buffer_bytes: int = 0
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    counted: bool = True
    reason: str = ""
    in_two_parts: bool = False
    assumed: tuple[str, ...] = ()

    def in_order(self) -> Iterator[tuple[int, PartCount]]:
        """Yield (place, part or block) in running order; parts come before the block of their place."""
        for place in range(len(self.blocks) + 1):
            yield from ((place, part) for own, part in self.parts if own == place)
            if place < len(self.blocks):
                yield place, self.blocks[place]

    @cached_property
    def uses(self) -> Counter[str]:
        """For each parameter name, how many blocks and parts use it; a block that runs again counts once."""
        parts = {part.name: part for _, part in self.in_order()}
        return Counter(parameter.name for part in parts.values() for parameter in part.parameters)

    def of_stage(self, blocks: range) -> tuple[PartCount, ...]:
        """What a stage with these blocks runs, in order: first what every stage runs, last the loss."""
        is_last = blocks.stop == len(self.blocks)
        own = [part for place, part in self.in_order() if place in blocks or (is_last and place == blocks.stop)]
        return (*self.everywhere, *own, *((self.loss,) if is_last else ()))


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
