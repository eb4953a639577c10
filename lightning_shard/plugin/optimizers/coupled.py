"""Detects optimizers whose update of one parameter depends on others, such as on a norm over all of them."""

from __future__ import annotations

import torch

from lightning_shard.plugin.optimizers.trials import is_of_torch, stepped, tried

_SCALES = (1.0, 1000.0)


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's updates depend on other parameters, tested on two small ones.

    torch's own optimizers don't. Where nothing is known (``trials.tried``) the answer is ``False``.
    """
    if is_of_torch(optimizer):
        return False
    ends = tried(optimizer, lambda make: [stepped(optimizer, make, scales) for scales in (_SCALES, _SCALES[:1])])
    return ends is not None and not torch.allclose(ends[0], ends[1], rtol=1e-4, atol=1e-7, equal_nan=True)
