"""Blocks to stages: contiguous, at least one on each, a part around them on the stage of the block that it runs before.

A pipeline goes at the pace of its slowest stage, so ``"auto"`` makes the costliest stage as cheap as it can be. With
C(i, j) the cost of blocks i … j−1 and of the parts before them (on the last stage also after them), and B(s, j) the
least possible cost of the costliest of s stages that hold the first j blocks::

    B(s, j) = min over i of max(B(s − 1, i), C(i, j))

and of all placements that reach this, the one with the least sum of squared stage costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from lightning_shard.errors import PlacementError
from lightning_shard.pipeline.cost import ModelCost, PartCost

__all__ = ["Placement", "StagePlacement", "place"]

Policy = Literal["auto", "even"] | Sequence[int]


@dataclass(frozen=True)
class StagePlacement:
    """One stage; ``cost`` is in the units that it was placed by, ``parts`` is what it holds beside blocks."""

    blocks: range
    parameters: int
    bytes: int
    cost: int
    parts: tuple[str, ...] = ()
    device: str | None = None


@dataclass(frozen=True)
class Placement:
    """Every block's stage; ``str()`` is a table."""

    stages: tuple[StagePlacement, ...]

    def stage_of(self, block: int) -> int:
        """The stage that holds this block.

        Raises:
            IndexError: There is no such block.
        """
        for index, stage in enumerate(self.stages):
            if block in stage.blocks:
                return index
        raise IndexError(f"block {block} is none of the {self.stages[-1].blocks.stop} that were placed.")

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks per stage, as ``placement=[…]`` takes them."""
        return tuple(len(stage.blocks) for stage in self.stages)

    def __str__(self) -> str:
        total = sum(stage.cost for stage in self.stages)
        rows = [
            [
                str(index),
                _block_range(stage.blocks),
                ", ".join(stage.parts),
                _count(stage.parameters),
                _size(stage.bytes),
                f"{100 * stage.cost / total:.1f} %" if total else "",
                stage.device or "",
            ]
            for index, stage in enumerate(self.stages)
        ]
        rows.append(
            [
                "all",
                str(sum(self.counts)),
                "",
                _count(sum(stage.parameters for stage in self.stages)),
                _size(sum(stage.bytes for stage in self.stages)),
                "100.0 %" if total else "",
                "",
            ]
        )
        return _table(["stage", "blocks", "also", "parameters", "bytes", "cost", "device"], rows)


def place(cost: ModelCost, stages: int, policy: Policy = "auto", *, devices: Sequence[str] = ()) -> Placement:
    """Place the blocks on ``stages`` stages.

    Args:
        policy: ``"auto"``: the least cost of the costliest stage; ``"even"``: as many blocks on each, the earlier ones
            taking one more where they don't divide; or each stage's number of blocks.
        devices: A name for each stage, for the table.

    Raises:
        PlacementError: More stages than blocks, or numbers that don't fit them.
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
        placed.append(
            StagePlacement(
                range(start, stop),
                sum(part.parameters for part in held),
                sum(part.bytes for part in held),
                weights(cost.blocks[start:stop]) + weights(beside),
                tuple(part.name for part in beside),
                devices[index] if devices else None,
            )
        )
    return Placement(tuple(placed))


def _checked_counts(policy: Policy, blocks: int, stages: int) -> list[int]:
    if isinstance(policy, str) or not isinstance(policy, Sequence):
        raise PlacementError(f'placement ({policy!r}) must be "auto", "even", or each stage\'s number of blocks.')
    counts = [*policy]
    example = [blocks // stages + (index < blocks % stages) for index in range(stages)]
    remedy = f'for example {example}, or use "auto".'
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise PlacementError(f"placement ({counts}) must give every stage at least 1 block, as an integer: {remedy}")
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
    """Operations where there are any, else parameters, else numbers of blocks."""
    if any(block.flops for block in cost.blocks):
        return lambda parts: sum(part.flops for part in parts)
    if any(block.parameters for block in cost.blocks):
        return lambda parts: sum(part.parameters for part in parts)
    blocks = set(map(id, cost.blocks))
    return lambda parts: sum(id(part) in blocks for part in parts)


def _least_bottleneck(blocks: Sequence[int], stages: int, around: Sequence[int]) -> list[int]:
    """The stages' bounds in the blocks, ``stages + 1`` of them.

    Exact in O(stages × blocks²).

    Args:
        around: The cost of what runs before each block, and of what runs after all.
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
    """The least combined cost of all contiguous placements, and the bounds that reach it."""
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


# -- the table --------------------------------------------------------------------------------------------------------


def _table(header: list[str], rows: list[list[str]]) -> str:
    used = [index for index in range(len(header)) if any(row[index] for row in rows)]
    lines = [[row[index] for index in used] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to_the_right = [header[index] in ("parameters", "bytes", "cost") for index in used]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_the_right, strict=True)
        ).rstrip()
        for line in lines
    )


def _block_range(blocks: range) -> str:
    ends = f"{blocks.start}" if len(blocks) == 1 else f"{blocks.start}-{blocks.stop - 1}"
    return f"{ends} ({len(blocks)})"


def _count(number: float) -> str:
    return _scaled(number, 1000, ["", " k", " M", " G", " T"])


def _size(bytes_: float) -> str:
    return _scaled(bytes_, 1024, [" B", " KiB", " MiB", " GiB", " TiB"])


def _scaled(number: float, step: int, units: list[str]) -> str:
    for unit in units[:-1]:
        # 999.95 would be rounded to four digits
        if number < step - 0.05:
            return f"{number:.1f}{unit}" if unit != units[0] else f"{number:.0f}{unit}"
        number /= step
    return f"{number:.1f}{units[-1]}"
