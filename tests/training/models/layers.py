"""Few layers in place of many, such that each kind of layer that a configuration has is among them.

What tells layers apart: lists with an entry for each layer (``layer_types``), lists of layers' numbers
(``cross_attention_layers``), and counts of layers at the beginning or at the end (``first_k_dense_replace``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

COUNTS = (
    *("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "depth"),
    *("encoder_layers", "decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
"""Names for a number of layers."""
AT_BEGIN = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
"""Numbers of the first layer of another kind."""
LAST = ("moe_layer_end_index",)
"""Numbers of the last layer of a kind."""
AT_END = ("num_kv_shared_layers",)
"""How many layers at the end are of another kind: they use what layers before them have computed."""
_NUMBERS = re.compile(r"(layers|layer_ids|indices|indexes|idxs)$")


def few_layers(config: Any) -> dict[str, Any]:
    """Settings with which a configuration has few layers, of all its kinds.

    Each kind is in the first half, and in the second, if the configuration has it there. Layers that use what others
    have computed are the second half. Empty if all layers are of one kind.
    """
    renamed = getattr(type(config), "attribute_map", {})
    held = {name: value for name, value in config.to_dict().items() if name not in renamed}
    settings: dict[str, Any] = {}
    for count in {held[name] for name in COUNTS if isinstance(held.get(name), int)}:
        settings |= _few(count, held)
    return settings


def _few(count: int, held: dict[str, Any]) -> dict[str, Any]:
    lists = {name: value for name, value in held.items() if _is_of_layers(value, count)}
    numbers = {name: value for name, value in held.items() if _are_numbers(name, value, count)}
    ends = {name: count - held[name] for name in AT_END if held.get(name)}
    begins = {name: held[name] for name in AT_BEGIN if held.get(name)} | ends
    begins |= {name: held[name] + 1 for name in LAST if held.get(name)}

    def kind(layer: int) -> Hashable:
        own = (*(str(value[layer]) for value in lists.values()), *(layer in value for value in numbers.values()))
        return own, *(layer < begin for begin in begins.values())

    kinds = [kind(layer) for layer in range(count)]
    if count <= 4 or len(set(kinds)) in (1, count):
        return {}
    half = min(ends.values(), default=count // 2)
    layers = [*_firsts(kinds, range(half)), *_firsts(kinds, range(half, count))]
    before: Callable[[int], int] = lambda begin: sum(layer < begin for layer in layers)  # noqa: E731
    settings: dict[str, Any] = {name: len(layers) for name in COUNTS if held.get(name) == count}
    settings |= {name: [value[layer] for layer in layers] for name, value in lists.items()}
    settings |= {name: [new for new, old in enumerate(layers) if old in value] for name, value in numbers.items()}
    settings |= {name: before(begin) for name, begin in begins.items()}
    settings |= {name: len(layers) - before(begin) for name, begin in ends.items()}
    return settings | {name: before(held[name] + 1) - 1 for name in LAST if held.get(name)}


def _firsts(kinds: Sequence[Hashable], layers: range) -> list[int]:
    """The first layer of each kind, but two at least."""
    firsts = {kinds[layer]: layer for layer in reversed(layers)}
    return sorted({*firsts.values(), *layers[:2]} if len(firsts) == 1 else firsts.values())


def _is_of_layers(value: Any, count: int) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != count or [*value] == [*range(count)]:
        return False
    return len(set(map(str, value))) > 1


def _are_numbers(name: str, value: Any, count: int) -> bool:
    if not isinstance(value, (list, tuple)) or not _NUMBERS.search(name) or name == "out_indices":
        return False
    if not 0 < len(value) < count:
        return False
    return all(type(each) is int and each < count for each in value) and [*value] == sorted({*value}) and value[0] >= 0
