"""Tensors that all ranks of a mesh hold alike, each of which writes a part: do they hold the same?

A fingerprint of the contents is compared: of small tensors all bytes, of others a sample, so that a save takes no
longer. Replicas that have come apart differ nearly everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from lightning_shard.checkpoint.memory import byte_view, is_plain

WHOLE_BYTES = 2**14
"""Tensors up to this are compared whole."""
WINDOWS, WINDOW_BYTES = 16, 2**10
"""Of a larger one, evenly from its first byte to its last."""
PER_DIM = 8
"""Of one that isn't plain in the CPU's memory, such as on a device: so many places along each dim."""
FINGERPRINT_BYTES = 8


def fingerprints(tensors: Sequence[Tensor]) -> bytes:
    """One after another, of :data:`FINGERPRINT_BYTES` each."""
    sampled = iter(_sampled([tensor for tensor in tensors if not is_plain(tensor)]))
    return b"".join(_digest(_windows(byte_view(tensor)) if is_plain(tensor) else [next(sampled)]) for tensor in tensors)


def _digest(parts: Iterable[memoryview]) -> bytes:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _windows(memory: memoryview) -> list[memoryview]:
    if memory.nbytes <= WHOLE_BYTES:
        return [memory]
    last = memory.nbytes - WINDOW_BYTES
    starts = (last * number // (WINDOWS - 1) for number in range(WINDOWS))
    return [memory[start : start + WINDOW_BYTES] for start in starts]


def _sampled(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Some elements of each; from a device they come in one copy."""
    samples = [_sample(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for number, sample in enumerate(samples):
        by_device.setdefault(sample.device, []).append(number)
    found = [memoryview(b"")] * len(samples)
    for numbers in by_device.values():
        memory, start = byte_view(torch.cat([samples[number] for number in numbers]).cpu()), 0
        for number in numbers:
            found[number] = memory[start : start + samples[number].numel()]
            start += samples[number].numel()
    return found


def _sample(tensor: Tensor) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if size > PER_DIM:
            places = [(size - 1) * number // (PER_DIM - 1) for number in range(PER_DIM)]
            tensor = tensor.index_select(dim, torch.tensor(places, dtype=torch.int64, device=tensor.device))
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
