"""Fingerprints of replicated tensors, to check that they are equal on all ranks of a mesh, each of which writes a part.

A fingerprint covers all elements of a small tensor, and a sample of a larger one, so that it costs a save no time;
replicas that have diverged differ nearly everywhere. It depends only on the elements, not on strides or devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from lightning_shard.checkpoint.memory import byte_view, is_plain

WHOLE_BYTES = 2**14
"""Tensors up to this size are compared whole."""
WINDOWS, WINDOW_BYTES = 16, 2**10
"""The sample of a larger tensor: so many windows, evenly spaced from its first element to its last."""
FINGERPRINT_BYTES = 8


def fingerprints(tensors: Sequence[Tensor]) -> bytes:
    """The fingerprints of tensors, concatenated, :data:`FINGERPRINT_BYTES` each."""
    sampled = iter(_sampled([tensor for tensor in tensors if not is_plain(tensor)]))
    samples = (b"".join(_parts(tensor)) if is_plain(tensor) else next(sampled) for tensor in tensors)
    return b"".join(map(xxhash.xxh3_64_digest, samples))


def _windows(tensor: Tensor) -> list[tuple[int, int]]:
    """[begin, end) of each window, as flat row-major element indices."""
    elements, each = tensor.numel(), WINDOW_BYTES // tensor.element_size()
    if tensor.nbytes <= WHOLE_BYTES:
        return [(0, elements)]
    return [(start, start + each) for start in ((elements - each) * n // (WINDOWS - 1) for n in range(WINDOWS))]


def _parts(tensor: Tensor) -> list[memoryview]:
    memory, size = byte_view(tensor), tensor.element_size()
    return [memory[begin * size : end * size] for begin, end in _windows(tensor)]


def _sampled(tensors: Sequence[Tensor]) -> list[memoryview]:
    """The samples of tensors that aren't contiguous CPU tensors; one copy from each device."""
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
