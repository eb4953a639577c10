"""What is installed: the version, the recipes that come with the package, and the packages of an extra."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from lightning_shard.errors import ConfigurationError

_NAME = "lightning-shard"
_MODULES = {"hydra-core": "hydra"}
"""Of packages whose module has another name."""


def version() -> str:
    try:
        return metadata.version(_NAME)
    except metadata.PackageNotFoundError:  # imported from a source tree
        return "unknown"


def recipes() -> Path:
    """The folder of ``train.py``, with ``conf`` beside it: the wheel's, or in a clone that at its top level."""
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def own_conf() -> Path | None:
    """The working folder's ``conf``, whose files are found in addition to those of the recipes; not in a clone."""
    own = Path("conf").resolve()
    return own if own.is_dir() and own != (recipes().parent / "conf").resolve() else None


def how_to_install(extra: str) -> str:
    """What to run if a package of this extra isn't installed, which needs no index that has this package."""
    marked = re.compile(rf"(.+?) *; *extra == ['\"]{extra}['\"]")
    packages = [found[1] for found in map(marked.fullmatch, metadata.requires(_NAME) or ()) if found]
    return f"pip install {' '.join(repr(each) for each in packages)}"


def need_recipes() -> None:
    """
    Raises:
        ConfigurationError: A package that recipes need isn't installed.
    """
    if lacks("recipes"):
        raise ConfigurationError(f"Recipes are configured by Hydra, which isn't installed: {how_to_install('recipes')}")


def lacks(extra: str) -> bool:
    """Whether a package of an extra isn't installed."""
    names = re.findall(r"'([\w-]+)", how_to_install(extra))
    return any(find_spec(_MODULES.get(name, name.replace("-", "_"))) is None for name in names)
