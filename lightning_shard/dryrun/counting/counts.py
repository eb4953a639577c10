"""What one microbatch costs on one rank, part by part: counted once, and all layouts of a kind are arithmetic on it.

Nothing is computed and no memory is used for the model: its own ``training_step`` runs forward and backward on fake
tensors, tensor- and expert-parallel by the styles that a run applies, on a process group that sends nothing. What the
step does outside of blocks and parts is an account of its own: *around*, which every stage of a pipeline runs (masks,
positions), and *loss*, what follows the last block, which the last stage runs.
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
    """What a forward, or a backward, of one part costs a rank.

    Attributes:
        flops: Floating-point operations of matrix products, convolutions and attention.
        moved: Bytes that operations read and write, each for itself: what bounds those that compute little.
        beside: What of that is by operations that ``flops`` doesn't count.
        traffic: Bytes that this rank sends, by the axis that they are sent along (``"tensor"``, ``"expert"``), with
            collectives going round a ring. What pipelines and data ranks send isn't a part's: see ``output`` and
            ``parameters``.
        collectives: How many collectives that is, by axis.
    """

    flops: int = 0
    moved: int = 0
    beside: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict)
    collectives: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TwoParts:
    """A backward in two parts: the gradients of inputs, and later those of matrix products' weights; bytes.

    Attributes:
        owed: What products keep from the first part to the second, each storage once.
        given: What of ``owed`` is the gradient with which the part's backward began.
        freed: As :attr:`Cost.freed`, in the first part.
        inputs_peak, inputs_adding_peak, of_gradients: As those of :class:`Cost`'s backward, in the first part.
        weights_peak, weights_adding_peak: The same in the second part.
        late: Places of the parameters whose gradients come in the second part, in :attr:`PartCount.parameters`.
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
    """Of one microbatch, in one way to run a part.

    Attributes:
        forward: Its operations.
        backward: Its operations, with those of the second forward where it is run again.
        kept: Bytes of what the part made in the forward that live until the backward, each storage once; without
            parameters, and without what it was given. A block's output is the block's, where the next one keeps it.
        forward_peak: The most bytes by which memory grows in its forward over what it was when that began.
        backward_peak: The same in its backward, where weights have no gradients yet: those it makes are among it.
        adding_peak: The same where they have, and new ones are added to them one at a time.
        freed: What of ``kept`` is free when its backward begins, since what runs after it had been its last user.
        carried: What lives when its forward begins of what ran before it, apart from what that keeps: values that code
            has at hand, such as logits, and that no backward needs.
        of_gradients: What of ``backward_peak`` is gradients of whole parameters.
        experts_done: By how much more lives, or less, than when its backward began, gradients of parameters apart, when
            the backward of experts in it is done that were dealt to ranks.
        parts: Of a backward in two parts; ``None`` where nothing of it can come later, or that wasn't counted.
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
    """One parameter; a tied one is in each part that uses it, under its first name.

    Attributes:
        shape: Of the whole parameter.
        local_shape: What a rank has of it under tensor and expert parallelism, before it is fully sharded.
        is_expert: Whether it is dealt to expert-parallel ranks: then it is sharded over the data ranks that hold the
            same experts, not over all.
        gathered_dtype: In which it is gathered to compute with it.
        is_listed: Whether it is of a list of experts that are dealt to ranks: then all data ranks share it, and those
            who compute with it gather it, so that it is among what its part keeps.
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
        """Of the rank's part before it is fully sharded."""
        return self.numel * self.dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        return self.numel * (self.gathered_dtype or self.dtype).itemsize


@dataclass(frozen=True)
class PartCount:
    """A block, a part before, between or after blocks, or what the step does around them.

    Attributes:
        name: As the module has it.
        output: Bytes of the tensors that it returns: what a pipeline sends, if a cut follows.
        plain: Run as it is.
        recomputed: Under ``activation_checkpointing=True``; as ``plain`` of what isn't a block.
        selective: Under ``activation_checkpointing="selective"``.
    """

    name: str
    parameters: tuple[ParameterCount, ...] = ()
    output: int = 0
    plain: Cost = Cost()
    recomputed: Cost = Cost()
    selective: Cost = Cost()


@dataclass(frozen=True)
class Counts:
    """A module's step on one microbatch, in one way to cut its tensors.

    Attributes:
        blocks: In running order; one that runs several times is there as often.
        parts: The others, each with the place of the block that it runs before; ``len(blocks)`` after all.
        everywhere: What every stage holds and runs: *around*, and frozen modules beside the network.
        loss: What the step does after the last block outside of parts.
        samples: Of the microbatch.
        tokens: Of the microbatch: elements of its largest tensor of integers; samples, where there is none.
        batch_bytes: Of the microbatch's tensors.
        buffer_bytes: Of all of the module's buffers, which every rank holds whole.
        saved_buffer_bytes: What of that is in checkpoints.
        tensor_parallel_size: That it was counted for.
        expert_parallel_size: That it was counted for.
        counted: Whether the step ran on fake tensors. If not, only parameters, and operations estimated from them, are
            known: memory of activations is unknown, and not 0.
        reason: Why it was not counted.
        in_two_parts: Whether backwards in two parts were counted too.
        assumed: What had to be assumed, for people.
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
        """Everything that is cut, in running order, with its place: parts before the block of their place."""
        for place in range(len(self.blocks) + 1):
            yield from ((place, part) for own, part in self.parts if own == place)
            if place < len(self.blocks):
                yield place, self.blocks[place]

    @cached_property
    def uses(self) -> Counter[str]:
        """In how many of the parts that are cut each parameter is, by its name; a block that runs again is one."""
        parts = {part.name: part for _, part in self.in_order()}
        return Counter(parameter.name for part in parts.values() for parameter in part.parameters)

    def of_stage(self, blocks: range) -> tuple[PartCount, ...]:
        """What a stage with these blocks runs, in order; what every stage runs is first, the loss last."""
        is_last = blocks.stop == len(self.blocks)
        own = [part for place, part in self.in_order() if place in blocks or (is_last and place == blocks.stop)]
        return (*self.everywhere, *own, *((self.loss,) if is_last else ()))


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
