"""Gradient clipping of Lightning's precision plugins, over every axis."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard.parallel.clip import clip_by_norm, clip_by_value


def clip_over_all_axes(plugin: Precision, stage_mesh: DeviceMesh, device: torch.device) -> None:
    """Have a precision plugin clip by the norm of the whole model's gradients, not of this rank's.

    Lightning picks the plugin, and each clips its own parameters by ``torch.nn.utils``; only these two methods differ
    here.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        clip_by_norm(plugin.main_params(optimizer), clip_val, stage_mesh, device)

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        clip_by_value(plugin.main_params(optimizer), clip_val)

    methods: dict[str, Any] = {"clip_grad_by_norm": clip_grad_by_norm, "clip_grad_by_value": clip_grad_by_value}
    plugin.__dict__.update(methods)
