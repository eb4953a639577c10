"""Tensors that all ranks of a mesh hold alike, each of which writes a part: do they hold the same?

A fingerprint of the contents is compared: of small tensors all elements, of others a sample, so that a save takes no
longer. Replicas that have come apart differ nearly everywhere. It depends on the elements alone, and not on how or on
what device a rank holds them.
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
"""Of a larger one, evenly from its first element to its last."""
FINGERPRINT_BYTES = 8


def fingerprints(tensors: Sequence[Tensor]) -> bytes:
    """One after another, of :data:`FINGERPRINT_BYTES` each."""
    sampled = iter(_sampled([tensor for tensor in tensors if not is_plain(tensor)]))
    return b"".join(_digest(_parts(tensor) if is_plain(tensor) else [next(sampled)]) for tensor in tensors)


def _digest(parts: Iterable[memoryview]) -> bytes:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _windows(tensor: Tensor) -> list[tuple[int, int]]:
    """Begin and end of what is compared, in elements of the row-major order."""
    elements, each = tensor.numel(), WINDOW_BYTES // tensor.element_size()
    if tensor.nbytes <= WHOLE_BYTES:
        return [(0, elements)]
    return [(start, start + each) for start in ((elements - each) * n // (WINDOWS - 1) for n in range(WINDOWS))]


def _parts(tensor: Tensor) -> list[memoryview]:
    memory, size = byte_view(tensor), tensor.element_size()
    return [memory[begin * size : end * size] for begin, end in _windows(tensor)]


def _sampled(tensors: Sequence[Tensor]) -> list[memoryview]:
    """The same of tensors that aren't plain in the CPU's memory; from a device they come in one copy."""
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
    tensor = tensor.resolve_conj().resolve_neg()
    windows = _windows(tensor)
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        chosen = torch.cat([flat[begin:end] for begin, end in windows])
    else:
        places = torch.cat([torch.arange(begin, end, device=tensor.device) for begin, end in windows])
        chosen = tensor[torch.unravel_index(places, tensor.shape)]
    return chosen.view(torch.uint8)
