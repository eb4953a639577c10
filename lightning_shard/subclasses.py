"""Makes subclasses of users' classes without the users' code that is called for each subclass.

A class may require arguments of its subclasses (``class Net(Base, key="net")``), or register them by name: for a class
that we make, the first would fail, and the second would put ours in place of the user's.
"""

from __future__ import annotations

from functools import cache
from typing import Any


class Unannounced:
    """The first base of a class that is made, so that the ``__init_subclass__`` of the others isn't called."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


@cache
def unannounced_base(kind: Any) -> Any:
    """:class:`Unannounced`, of a memory layout with which objects of ``kind`` can become ones of the made class.

    The attributes' dict was added to ``object``, or to ``ABC`` in ``class Net(ABC, Module)``, or to ``Generic``, which
    asks its subclasses for parameters unless they say that they have other bases.
    """
    while kind.__base__.__dictoffset__:
        kind = kind.__base__
    plain = kind.__base__
    if plain is object:
        return Unannounced
    held = {name: vars(Unannounced)[name] for name in ("__init_subclass__", "__module__")}
    return type(plain)("Unannounced", (plain,), {**held, "__orig_bases__": ()})
