"""Converts counted work to time on a device, by its profile.

For each part, forward and backward, a rank's time consists of

* *products*: matrix products, convolutions and attention, at the device's peak or its memory's bandwidth, whichever is
  slower (roofline model);
* *memory*: other operations, each of which reads its inputs and writes its outputs (no fusion);
* *tensor*, *expert*: communication along these axes, which computation waits for.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_shard.dryrun.counting.counts import EXPERT, TENSOR, Cost, Work
from lightning_shard.dryrun.timing.devices import Device
from lightning_shard.dryrun.timing.links import Groups, Links

PRODUCTS, MEMORY = "products", "memory"

Seconds = Mapping[str, float]
"""Seconds by purpose."""


class Rates:
    """Times of work on a device, with matrix products of a dtype; with gloo, communication ``overlaps`` nothing."""

    def __init__(self, device: Device, dtype: str, *, overlaps: bool = True) -> None:
        self.device, self.links, self.overlaps = device, Links(device), overlaps
        self.peak = device.peak(dtype)
        self._products = self.peak * device.achieved.compute
        self._memory = device.memory_bandwidth * device.achieved.memory

    def read(self, nbytes: float) -> float:
        return nbytes / self._memory

    def to_host(self, nbytes: float) -> float:
        """Time to copy bytes to or from host memory; 0 if the profile has no host bandwidth."""
        bandwidth = self.device.host_bandwidth
        return 0.0 if bandwidth is None else nbytes / (bandwidth * self.device.achieved.links)

    def spent(self, work: Work, groups: Groups) -> dict[str, float]:
        products = max(work.flops / self._products, self.read(work.moved - work.beside))
        return {PRODUCTS: products, MEMORY: self.read(work.beside), **self._sent(work, groups)}

    def of_weights(self, cost: Cost, groups: Groups) -> float:
        """Time of a split backward's second part: the gradients of matrix products' weights."""
        if cost.parts is None:
            return 0.0
        whole, weights = self.spent(cost.backward, groups), self.spent(cost.parts.weights, groups)
        return min(whole[PRODUCTS] + whole[MEMORY], weights[PRODUCTS] + weights[MEMORY])

    def _sent(self, work: Work, groups: Groups) -> dict[str, float]:
        ways = (TENSOR, self.links.ring, groups.tensor), (EXPERT, self.links.exchange, groups.expert)
        return {
            axis: send(group, work.traffic[axis], work.collectives.get(axis, 1))
            for axis, send, group in ways
            if work.traffic.get(axis)
        }


def dtype_of(precision: str) -> str:
    """The dtype of matrix products under a Trainer's precision."""
    kinds = {"bf16": "bfloat16", "16": "float16", "64": "float64"}
    return kinds.get(precision.partition("-")[0], "float32")
