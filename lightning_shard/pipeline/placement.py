"""Places blocks on pipeline stages.

Each stage holds a contiguous range of at least one block. A part around the blocks is placed with the block that it
runs before.

A pipeline runs at the pace of its slowest stage, so ``"auto"`` minimises the cost of the costliest stage, exactly, by
dynamic programming. C(i, j) is the cost of blocks i … j−1 and of the parts before them (on the last stage also of those
after them); B(s, j) is the least possible cost of the costliest of s stages that hold the first j blocks::

    B(s, j) = min over i of max(B(s − 1, i), C(i, j))

Among the placements that reach this bottleneck, it takes the one with the least sum of squared stage costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import Any, Literal

from lightning_shard.arguments import count_text, short, size_text, table
from lightning_shard.errors import PlacementError
from lightning_shard.pipeline.cost import ModelCost, PartCost

Policy = Literal["auto", "even"] | Sequence[int]

_ALSO = 25
"""Columns of the table for names of parts."""


@dataclass(frozen=True)
class StagePlacement:
    """One stage.

    Attributes:
        blocks: The places of its blocks.
        cost: In the unit that the placement used: operations, parameters, or numbers of blocks.
        parts: The names of the parts that it holds beside blocks.
        names: The names of its blocks.
        ranks: The ranks that hold the stage.
        memory: Bytes that each of these ranks' devices needs according to a plan; ``None`` if there is no plan, or the
            plan doesn't know.
        later: The portion of ``cost`` in matrix products whose weight gradients can be deferred (split backward).
        again: The portion of ``cost`` that the backward recomputes.
    """

    blocks: range
    parameters: int
    bytes: int
    cost: int
    parts: tuple[str, ...] = ()
    device: str | None = None
    names: tuple[str, ...] = ()
    ranks: range = range(0)
    memory: int | None = None
    later: float = 0.0
    again: int = 0


@dataclass(frozen=True)
class Placement:
    """The stage of every block; ``str()`` gives a table for a terminal, in which long lists of parts are cut off."""

    stages: tuple[StagePlacement, ...]

    def stage_of(self, block: int) -> int:
        """The stage that holds this block.

        Raises:
            IndexError: There is no such block.
        """
        for index, stage in enumerate(self.stages):
            if block in stage.blocks:
                return index
        raise IndexError(f"there is no block {block}: blocks are numbered from 0 to {self.stages[-1].blocks.stop - 1}.")

    def layers_of(self, rank: int) -> tuple[str, ...]:
        """The names of the blocks and parts of which a rank holds at least a shard.

        Raises:
            IndexError: There is no such rank.
        """
        stage = next((stage for stage in self.stages if rank in stage.ranks), None)
        if stage is None:
            raise IndexError(
                f"there is no rank {rank} among the {sum(len(stage.ranks) for stage in self.stages)} of this layout."
            )
        return (*stage.names, *stage.parts)

    def ranks_of(self, layer: str) -> tuple[int, ...]:
        """The ranks that hold at least a shard of a layer, by the name of a block, of a part, or of a submodule.

        Raises:
            KeyError: There is none of this name.
        """

        def has(stage: StagePlacement) -> bool:
            return any(layer == name or layer.startswith(f"{name}.") for name in (*stage.names, *stage.parts))

        ranks = [rank for stage in self.stages if has(stage) for rank in stage.ranks]
        if not ranks:
            raise KeyError(f"{layer!r} is no block, and no part around them: see placement.stages[…].names and parts.")
        return tuple(sorted(ranks))

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks per stage, as ``placement=[…]`` takes them."""
        return tuple(len(stage.blocks) for stage in self.stages)

    def __str__(self) -> str:
        total = sum(stage.cost for stage in self.stages)
        parts = [name.split(".") for stage in self.stages for name in stage.parts]
        common = len([*takewhile(lambda same: len(set(same)) == 1, zip(*(names[:-1] for names in parts)))])

        def row(name: object, blocks: str, also: str, stages: Sequence[StagePlacement], device: str = "") -> list[str]:
            share = f"{100 * sum(stage.cost for stage in stages) / total:.1f} %" if total else ""
            parameters, nbytes = sum(stage.parameters for stage in stages), sum(stage.bytes for stage in stages)
            return [str(name), blocks, also, count_text(parameters), size_text(nbytes), share, device]

        rows = []
        for index, stage in enumerate(self.stages):
            also = ", ".join(".".join(name.split(".")[common:]) for name in stage.parts)
            rows.append(row(index, range_text(stage.blocks), short(also, _ALSO), [stage], stage.device or ""))
        rows.append(row("all", str(sum(self.counts)), "", self.stages))
        return table(["stage", "blocks", "also", "parameters", "bytes", "cost", "device"], rows)


def place(
    cost: ModelCost,
    stages: int,
    policy: Policy = "auto",
    *,
    devices: Sequence[str] = (),
    ranks: Sequence[range] = (),
) -> Placement:
    """Place the blocks on ``stages`` stages.

    Args:
        policy: ``"auto"`` minimises the cost of the costliest stage. ``"even"`` gives each stage equally many blocks,
            and earlier stages one more if they don't divide evenly. Or the number of blocks of each stage.
        devices: A device name for each stage, shown in the table.
        ranks: The ranks of each stage.

    Raises:
        PlacementError: There are more stages than blocks, or the counts don't match stages and blocks.
    """
    blocks = len(cost.blocks)
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise PlacementError(f"the number of stages ({stages!r}) must be an integer of at least 1.")
    if stages > blocks:
        raise PlacementError(
            f"{stages} stages need at least {stages} blocks, and the network has {blocks}:"
            f" use pipeline_parallel_size={blocks} or less, or name by pipeline_blocks what else to cut between, and a"
            " block as often as it runs."
        )
    weights = _weights(cost)
    if policy == "auto":
        around = [weights(cost.parts_at(place)) for place in range(blocks + 1)]
        bounds = _least_bottleneck([weights((block,)) for block in cost.blocks], stages, around)
    elif policy == "even":
        share, extra = divmod(blocks, stages)
        bounds = [0, *accumulate(share + (index < extra) for index in range(stages))]
    else:
        bounds = [0, *accumulate(_checked_counts(policy, blocks, stages))]
    placed = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        places = range(start, stop + (index == stages - 1))
        beside = (*(part for place in places for part in cost.parts_at(place)), *cost.everywhere)
        held = {part.name: part for part in cost.blocks[start:stop] + beside}.values()  # a block may run several times
        runs = cost.blocks[start:stop] + beside
        placed.append(
            StagePlacement(
                range(start, stop),
                sum(part.parameters for part in held),
                sum(part.bytes for part in held),
                weights(cost.blocks[start:stop]) + weights(beside),
                tuple(part.name for part in beside),
                devices[index] if devices else None,
                tuple(dict.fromkeys(block.name for block in cost.blocks[start:stop])),
                ranks[index] if ranks else range(0),
                later=sum(part.later * weights((part,)) for part in runs),
                again=weights([part for part in runs if part.runs_again]),
            )
        )
    return Placement(tuple(placed))


def check_policy(policy: Any) -> None:
    """Validate a policy as far as possible before the blocks are known.

    Raises:
        PlacementError: It is neither a known name nor a sequence of block counts.
    """
    if isinstance(policy, str) and policy in ("auto", "even"):
        return
    if isinstance(policy, (str, bytes)) or not isinstance(policy, Sequence):
        raise PlacementError(f'placement ({policy!r}) must be "auto", "even", or each stage\'s number of blocks.')
    if not policy or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in policy):
        raise PlacementError(
            f"placement ({[*policy]}) must give every stage at least 1 block, as an integer: for example [3, 5, 5, 3]"
            ' for four stages of 16 blocks, or use "auto".'
        )


def _checked_counts(policy: Policy, blocks: int, stages: int) -> list[int]:
    check_policy(policy)
    counts: list[int] = [*policy]  # type: ignore[list-item]
    example = [blocks // stages + (index < blocks % stages) for index in range(stages)]
    remedy = f'for example {example}, or use "auto".'
    if len(counts) != stages:
        raise PlacementError(
            f"placement ({counts}) must hold one number for each of the {stages} stages, and holds"
            f" {len(counts)}: {remedy}"
        )
    if sum(counts) != blocks:
        raise PlacementError(
            f"placement ({counts}) places {sum(counts)} blocks, and the network has {blocks}: {remedy}"
        )
    return counts


def _weights(cost: ModelCost) -> Callable[[Sequence[PartCost]], int]:
    """The cost function: operations if any are known, else parameters, else numbers of blocks."""
    if any(block.flops for block in cost.blocks):
        return lambda parts: sum(part.flops for part in parts)
    if any(block.parameters for block in cost.blocks):
        return lambda parts: sum(part.parameters for part in parts)
    blocks = set(map(id, cost.blocks))
    return lambda parts: sum(id(part) in blocks for part in parts)


def _least_bottleneck(blocks: Sequence[int], stages: int, around: Sequence[int]) -> list[int]:
    """The boundaries of the stages in the blocks, ``stages + 1`` of them. Exact, in O(stages × blocks²).

    Args:
        around: The cost of the parts before each block, and of those after all blocks.
    """
    sums = [0, *accumulate(block + before for block, before in zip(blocks, around))]

    def cost(stage: int, start: int, stop: int) -> int:
        return sums[stop] - sums[start] + around[-1] * (stage == stages - 1)

    bottleneck = _best(len(blocks), stages, cost, max)[0]

    def within(stage: int, start: int, stop: int) -> float:
        own = cost(stage, start, stop)
        return own**2 if own <= bottleneck else float("inf")

    return _best(len(blocks), stages, within, lambda done, own: done + own)[1]


def _best(
    blocks: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least combined cost over all contiguous placements, and the boundaries that reach it."""
    best: list[dict[int, tuple[float, int]]] = [{0: (0, 0)}]
    for stage in range(stages):
        row = {}
        for stop in range(stage + 1, blocks - (stages - stage - 1) + 1):
            row[stop] = min(
                (combine(done, cost(stage, start, stop)), start)
                for start, (done, _) in best[stage].items()
                if start < stop
            )
        best.append(row)
    bounds = [blocks]
    for stage in range(stages, 0, -1):
        bounds.append(best[stage][bounds[-1]][1])
    return best[stages][blocks][0], bounds[::-1]


def range_text(blocks: range) -> str:
    """Such as ``0-11 (12)``."""
    ends = f"{blocks.start}" if len(blocks) == 1 else f"{blocks.start}-{blocks.stop - 1}"
    return f"{ends} ({len(blocks)})"
