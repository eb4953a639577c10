"""Notes calls of a module's layers from outside of it: by one of its other methods, or by code that holds the module.

A comparison of the module's own call (``check_blocks.py``) doesn't see what such code computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def noting_calls_outside(root: nn.Module, layers: Mapping[str, str]) -> Iterator[set[str]]:
    """Context whose value is the set of modules of which a layer was called, inside, while the module itself wasn't.

    Args:
        root: The whole model.
        layers: Names of layers, each with the name of the module around it.
    """
    running: Counter[str] = Counter()
    outside: set[str] = set()
    with ExitStack() as hooks:
        for name in {*layers.values()}:
            module = root.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(partial(_begin, running, name), prepend=True).remove)
            hooks.callback(module.register_forward_hook(partial(_end, running, name), always_call=True).remove)
        for layer, name in layers.items():
            note = partial(_note, running, outside, name)
            hooks.callback(root.get_submodule(layer).register_forward_pre_hook(note, prepend=True).remove)
        yield outside


def _begin(running: Counter[str], name: str, *_: Any) -> None:
    running[name] += 1


def _end(running: Counter[str], name: str, *_: Any) -> None:
    running[name] -= 1


def _note(running: Counter[str], outside: set[str], name: str, *_: Any) -> None:
    if not running[name]:
        outside.add(name)
