"""Keeps what users set on parameters, such as ``weight._no_weight_decay = True`` for ``configure_optimizers``.

Laying a module out replaces its parameters by others: parts, fake ones, sharded ones, gathered ones in calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_shard.parallel.fsdp.units import gathered_of, groups_of, sharded_units
from lightning_shard.sharding import put_attributes, share_attributes

Attributes = Mapping[str, Mapping[str, Any]]
"""By the parameter's name, and the attribute's."""


def attributes_of(root: nn.Module) -> Attributes:
    """Those of all parameters that have any."""
    named = root.named_parameters(remove_duplicate=False)
    return {name: dict(parameter.__dict__) for name, parameter in named if parameter.__dict__}


def put_on_units(root: nn.Module, attributes: Attributes) -> None:
    """Set them on the parameters that FSDP2 has put in place of others; gathered ones will have what these have."""
    for name, parameter in root.named_parameters(remove_duplicate=False):
        put_attributes(parameter, attributes.get(name, {}))
    for unit in sharded_units(root):
        _share_with_gathered(unit)


def _share_with_gathered(unit: nn.Module) -> None:
    """FSDP2 makes a unit's gathered parameters when it is first gathered, and keeps them.

    That isn't always the unit's first call: where a rank has several stages, each one's step calls the others' blocks.
    """

    def share(*_: Any) -> None:
        parameters = [parameter for group in groups_of(unit) for parameter in group.fsdp_params]
        gathered = [*map(gathered_of, parameters)]
        if all(tensor is not None for tensor in gathered):
            for tensor, parameter in zip(gathered, parameters):
                share_attributes(tensor, parameter.sharded_param)
            handle.remove()

    handle = unit.register_forward_pre_hook(share)  # runs after FSDP2's own, which was put first
