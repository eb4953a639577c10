"""Keeps what users set on parameters, such as ``weight._no_weight_decay = True`` for ``configure_optimizers``.

Laying a module out replaces its parameters by others: parts, fake ones, sharded ones, gathered ones in calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_shard.sharding import put_attributes

Attributes = Mapping[str, Mapping[str, Any]]
"""By the parameter's name, and the attribute's."""


def attributes_of(root: nn.Module) -> Attributes:
    """Those of all parameters that have any."""
    named = root.named_parameters(remove_duplicate=False)
    return {name: dict(parameter.__dict__) for name, parameter in named if parameter.__dict__}


def put_on_units(root: nn.Module, attributes: Attributes) -> None:
    """Set them on the parameters that FSDP2 has put in place of others; gathered ones take what these have."""
    for name, parameter in root.named_parameters(remove_duplicate=False):
        put_attributes(parameter, attributes.get(name, {}))
