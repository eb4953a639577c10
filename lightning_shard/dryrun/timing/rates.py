"""What work costs on a device: a part's operations by a profile, or as they were measured on the device at hand.

Of each part, forward and backward, a rank spends

* *products*: matrix products, convolutions and attention, at the device's peak or its memory's bandwidth, whichever is
  slower (a roofline);
* *memory*: other operations, each reading what it is given and writing what it makes;
* *tensor*, *expert*: what its axis sends, which the computation waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_shard.dryrun.counting.counts import EXPERT, TENSOR, Cost, PartCount, Work
from lightning_shard.dryrun.timing.devices import Device
from lightning_shard.dryrun.timing.links import Groups, Links

PRODUCTS, MEMORY = "products", "memory"

Seconds = Mapping[str, float]
"""By what they are spent on."""


@dataclass(frozen=True)
class Measured:
    """What parts took on the device at hand, instead of what a profile says.

    Attributes:
        seconds: Of a forward and of a backward of each part, by its name, for microbatches of ``samples``.
        device: Where.
    """

    seconds: Mapping[str, tuple[float, float]]
    samples: int
    device: str


class Rates:
    """What work costs on a device.

    Args:
        dtype: Of matrix products.
        measured: In place of the profile's peaks, where a part was measured.
        overlaps: Whether gathering and reducing go on beside computation; gloo's do not.
    """

    def __init__(self, device: Device, dtype: str, *, measured: Measured | None = None, overlaps: bool = True) -> None:
        self.device = device
        self.links = Links(device)
        self.overlaps = overlaps
        self.measured = measured
        self.peak = device.peak(dtype)
        self._products = self.peak * device.achieved.compute
        self._memory = device.memory_bandwidth * device.achieved.memory

    def read(self, nbytes: float) -> float:
        return nbytes / self._memory

    def to_host(self, nbytes: float) -> float:
        """To the host's memory or from there; 0 where the profile doesn't say how fast that is."""
        bandwidth = self.device.host_bandwidth
        return 0.0 if bandwidth is None else nbytes / (bandwidth * self.device.achieved.links)

    def spent(self, work: Work, groups: Groups) -> dict[str, float]:
        products = max(work.flops / self._products, self.read(work.moved - work.beside))
        return {PRODUCTS: products, MEMORY: self.read(work.beside), **self._sent(work, groups)}

    def of_part(self, part: PartCount, cost: Cost, groups: Groups, samples: int) -> tuple[Seconds, Seconds]:
        """A forward and a backward; measured ones with what was counted to be sent."""
        forward, backward = cost.forward, cost.backward
        known = self.measured.seconds.get(part.name) if self.measured is not None else None
        if known is None:
            return self.spent(forward, groups), self.spent(backward, groups)
        assert self.measured is not None
        scale = samples / self.measured.samples
        forward_s, backward_s = (scale * seconds for seconds in known)
        if cost is not part.plain and part.plain.backward.flops:
            again = max(0, backward.flops - part.plain.backward.flops) / max(1, part.plain.forward.flops)
            backward_s += again * forward_s
        return (
            {PRODUCTS: forward_s, **self._sent(forward, groups)},
            {PRODUCTS: backward_s, **self._sent(backward, groups)},
        )

    def of_weights(self, part: PartCount, cost: Cost, groups: Groups, samples: int) -> float:
        """What of a part's backward comes in its second part, the gradients of matrix products' weights."""
        if cost.parts is None:
            return 0.0
        _, backward = self.of_part(part, cost, groups, samples)
        own = backward.get(PRODUCTS, 0.0) + backward.get(MEMORY, 0.0)
        if self.measured is not None and part.name in self.measured.seconds:
            return own * cost.parts.weights.flops / max(1, cost.backward.flops)
        weights = self.spent(cost.parts.weights, groups)
        return min(own, weights[PRODUCTS] + weights[MEMORY])

    def _sent(self, work: Work, groups: Groups) -> dict[str, float]:
        found = {}
        if work.traffic.get(TENSOR):
            found[TENSOR] = self.links.ring(groups.tensor, work.traffic[TENSOR], work.collectives.get(TENSOR, 1))
        if work.traffic.get(EXPERT):
            found[EXPERT] = self.links.exchange(groups.expert, work.traffic[EXPERT], work.collectives.get(EXPERT, 1))
        return found


def dtype_of(precision: str) -> str:
    """In which matrix products are computed, under a Trainer's precision."""
    kinds = {"bf16": "bfloat16", "16": "float16", "64": "float64"}
    return kinds.get(precision.partition("-")[0], "float32")
