"""What parameters are when a module is laid out: initial weights, equal on every layout, and what users set on them.

A module built with real weights keeps them. If processes built different ones (no seed was set), rank 0's are
broadcast, as in Lightning's DDP. A module built on ``meta`` is initialised part by part (a part is a block, or one
module outside the blocks). Every rank initialises the full part under a seed derived from its name, and keeps its own
shards. So the weights depend on the seed alone, and no rank ever holds more than one full part.

Keeps what users set on parameters, such as ``weight._no_weight_decay = True`` for ``configure_optimizers``.

Laying a module out replaces its parameters by others: parts, fake ones, sharded ones, gathered ones in calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.dense import is_dense
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.rank_compare import digest_of, everyones
from lightning_shard.sharding import cut, parameter_like, put_attributes
from lightning_shard.tree import as_bytes

_FILLED = 1
"""Version counter of a new tensor after its one ``fill_``."""


def agree_on_weights(root: nn.Module) -> None:
    """Broadcast rank 0's real parameters and buffers to all ranks if digests differ; collective over all ranks.

    Raises:
        ConfigurationError: Sparse buffers differ: ranks may hold other numbers of entries.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    state = [t for t in (*root.parameters(), *root.buffers()) if not t.is_meta and not isinstance(t, DTensor)]
    dense = [*filter(is_dense, state)]
    sparse = [t for t in state if not is_dense(t)]
    of_dense, of_sparse = map(set, zip(*everyones((digest_of(dense), digest_of(sparse)))))
    if len(of_sparse) > 1:
        raise ConfigurationError(
            f"Processes have built a {type(root).__name__} with different sparse buffers, of which rank 0's can't be"
            " written to the others': build them from the same data on all ranks, or call L.seed_everything before."
        )
    for tensor in dense if len(of_dense) > 1 else ():
        _broadcast_from_first(tensor.detach())


def _broadcast_from_first(tensor: Tensor) -> None:
    """Broadcast rank 0's values, through a device that the process group's backend supports."""
    device = torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
    values = tensor.to(device).contiguous()
    raw = as_bytes(values)
    dist.broadcast(raw, src=0)
    tensor.copy_(values)


def materialize(root: nn.Module, blocks: Collection[str], device: torch.device, seed: int) -> None:
    """Initialise all parameters and buffers of ``root`` that are on meta, in place.

    Args:
        root: The model, already cut to its stage and sharded.
        blocks: Names. All modules of a block are initialised under one seed; other modules one by one.
        device: Device of the weights.
        seed: The run's seed.

    Raises:
        ConfigurationError: Nothing initialises a tensor on meta; the message names it.
    """
    real: dict[int, tuple[Tensor, Tensor]] = {}
    for name, part in list(root.named_modules()):
        if any(name.startswith(f"{block}.") for block in blocks):
            continue
        named = dict(part.named_modules(prefix=name)) if name in blocks else {name: part}
        modules = [*named.values()]
        if not any(t.is_meta for module in modules for t in _own(module).values()):
            continue
        with _whole(modules, device, real) as originals, _seeded(seed, name, device), torch.no_grad():
            for module_name, module in reversed(named.items()):  # a parent's own rule is applied after its children's
                _initialize(root, module_name, module)
            _check_initialized(name, modules, originals)


def _own(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


@contextmanager
def _whole(
    modules: list[nn.Module], device: torch.device, real: dict[int, tuple[Tensor, Tensor]]
) -> Iterator[dict[int, dict[str, Tensor]]]:
    """Replace tensors on meta by full-sized real ones; on exit, replace these by this rank's part of each.

    Args:
        real: By the id of a tensor on meta: that tensor, and the part that replaces it; extended on exit. With it, tied
            tensors stay tied, and have the values of the first part that holds them.
    """
    originals: dict[int, dict[str, Tensor]] = {}
    whole: dict[int, Tensor] = {}
    for module in modules:
        for key, tensor in _own(module).items():
            if not tensor.is_meta:
                continue
            originals.setdefault(id(module), {})[key] = tensor
            if id(tensor) not in whole:
                full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                full.fill_(torch.nan if full.is_floating_point() or full.is_complex() else 0)
                whole[id(tensor)] = parameter_like(full, tensor) if isinstance(tensor, nn.Parameter) else full
            slot = module._parameters if key in module._parameters else module._buffers
            slot[key] = whole[id(tensor)]  # type: ignore[assignment]
    yield originals
    for module in modules:
        for key, tensor in originals.get(id(module), {}).items():
            if id(tensor) not in real:
                real[id(tensor)] = tensor, _keep(whole[id(tensor)], tensor)
            slot = module._parameters if key in module._parameters else module._buffers
            slot[key] = real[id(tensor)][1]  # type: ignore[assignment]


def _keep(full: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of ``full`` as a DTensor, if ``like`` is one; else ``full``."""
    if not isinstance(like, DTensor):
        return full
    kept = cut(full, like.device_mesh, like.placements)
    return parameter_like(kept, like) if isinstance(like, nn.Parameter) else kept


@contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(
            int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 1
        )
        yield


def _initialize(root: nn.Module, name: str, module: nn.Module) -> None:
    """Call the module's own ``reset_parameters``, then ``_init_weights(module)`` of the nearest ancestor that has it.

    ``_init_weights`` is a convention of transformers that many GPT implementations follow. It refines the layers' own
    initialisation.
    """
    for method in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, method, None)
        if callable(reset) and _own(module):
            reset()
            break
    rule = _rule_around(root, name)
    if rule is not None:
        rule(module)


def _rule_around(root: nn.Module, name: str) -> Callable[[nn.Module], None] | None:
    while True:
        rule = getattr(root.get_submodule(name), "_init_weights", None)
        if callable(rule):
            return rule
        if not name:
            return None
        name = name.rpartition(".")[0]


def _check_initialized(part: str, modules: list[nn.Module], originals: dict[int, dict[str, Tensor]]) -> None:
    for module in modules:
        for key in originals.get(id(module), {}):
            tensor = _own(module)[key]
            # Floating-point tensors were filled with NaN, others with zeros. The others count as initialised if they
            # were written to or replaced.
            if tensor.is_floating_point() or tensor.is_complex():
                untouched = bool(tensor.isnan().any())
            else:
                untouched = tensor._version == _FILLED and not tensor.any()
            if untouched:
                where = f" in {part!r}" if part else ""
                raise ConfigurationError(
                    f"{key!r} of the {type(module).__name__}{where} was built on meta and nothing initialises it:"
                    " give the module a reset_parameters(), or the network an _init_weights(module), that sets it."
                )


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
