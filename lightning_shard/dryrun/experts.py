"""A mixture's experts on ranks of their own, where no other rank is there to say how many tokens it sends."""

from __future__ import annotations

from torch import Tensor

from lightning_shard.parallel.expert import Dispatched


class DealtEvenly(Dispatched):
    """Tokens are taken to be spread evenly: each rank sends as many rows to each other as it gets from it."""

    def _agree(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        ranks, rows = self._mesh.size(), len(chosen)
        sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return sizes, sizes, chosen.new_empty(rows)
