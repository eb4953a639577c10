"""The directions of imports, read from the source of every module."""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "lightning_shard"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A room is a folder or a single module of the package; it may import itself and these.
TRADES = {"parallel", "pipeline", "checkpoint"}
GROUND = {
    *(
        "arguments",
        "dense",
        "errors",
        "installed",
        "layout",
        "namespaces",
        "processors",
        "sharding",
    ),
    *("state", "subclasses", "torch_private", "tree", "user_hooks", "versions"),
}
ROOMS: dict[str, set[str]] = {
    "arguments": {"errors"},
    "dense": {"tree"},
    "errors": set(),
    "installed": {"errors"},
    "layout": {"errors"},
    "lightning_private": {"errors", "torch_private"},
    "namespaces": set(),
    "processors": set(),
    "sharding": {"errors"},
    "subclasses": set(),
    "torch_private": set(),
    "tree": {"errors"},
    "user_hooks": set(),
    "state": {"dense", "errors", "namespaces", "sharding", "torch_private", "tree", "versions"},
    "versions": {"tree"},
    "parallel": GROUND,
    "pipeline": GROUND,
    "checkpoint": GROUND,
    "plugin": GROUND | TRADES | {"lightning_private"},
    "fabric": GROUND | TRADES | {"lightning_private", "plugin"},
    "dryrun": GROUND | TRADES | {"lightning_private", "plugin"},
    "testing": GROUND | TRADES | {"lightning_private", "plugin"},
    "cli": GROUND | TRADES | {"lightning_private", "plugin", "dryrun", "cli_plan"},
    "cli_plan": GROUND | TRADES | {"lightning_private", "plugin", "dryrun"},
    "__init__": GROUND | TRADES | {"lightning_private", "plugin", "fabric", "dryrun"},
}
KNOWS_LIGHTNING = {"lightning_private", "plugin", "fabric", "dryrun", "testing"}
KNOWS_HYDRA = {"cli_plan"}
# The tests' own worker processes send functions and results to each other.
KNOWS_PICKLE = {"testing"}
# Lightning's .ckpt is written, and what is in one read without running code.
KNOWS_TORCH_FILES = PACKAGE / "checkpoint" / "foreign" / "torchfile.py"
UNSAFE = {"torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"}
PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def parsed(module: Path) -> ast.Module:
    return ast.parse(module.read_text(), module)


@cache
def imported(module: Path) -> frozenset[str]:
    """Full names of what a module imports, anywhere in it; of ``from a import b`` both ``a`` and ``a.b``."""
    return frozenset(_imported(module))


def _imported(module: Path) -> Iterator[str]:
    package = ("lightning_shard", *module.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def rooms_imported(module: Path) -> set[str]:
    parts = (name.split(".") for name in imported(module))
    return {name[1] for name in parts if name[0] == "lightning_shard" and len(name) > 1} & set(ROOMS)


def libraries_imported(module: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(module)}


def test_the_modules_are_found() -> None:
    assert {"errors", "layout", *TRADES, "plugin"} <= {room_of(module) for module in MODULES}


def those(wrong: Callable[[Path], object]) -> list[str]:
    """The modules of which something is true."""
    return [str(module.relative_to(PACKAGE)) for module in MODULES if wrong(module)]


def test_every_module_stands_in_a_room_whose_neighbours_are_decided() -> None:
    assert not those(lambda module: room_of(module) not in ROOMS)


def test_modules_import_only_the_rooms_before_their_own() -> None:
    assert not those(lambda module: rooms_imported(module) - ROOMS[room_of(module)] - {room_of(module)})


def test_lightning_is_imported_only_where_it_is_known() -> None:
    lightning = {"lightning", "pytorch_lightning", "lightning_fabric"}
    assert {room_of(PACKAGE / name) for name in those(lambda module: lightning & libraries_imported(module))} == (
        KNOWS_LIGHTNING
    )


def test_hydra_is_imported_only_for_the_command_line() -> None:
    assert {room_of(PACKAGE / name) for name in those(lambda module: "hydra" in libraries_imported(module))} == (
        KNOWS_HYDRA
    )


def test_dcp_is_imported_only_where_it_is_served() -> None:
    # importing it costs time, and "checkpoint" does so only when asked for DcpWriter or DcpReader
    dcp = "torch.distributed.checkpoint"
    found = those(lambda module: any(name.startswith(dcp) for name in imported(module)))
    assert {Path(name).name for name in found} == {"dcp.py"}


def test_modules_have_nothing_to_do_with_pickle() -> None:
    def wrong(module: Path) -> object:
        attributes = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(parsed(module))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        unpickled = PICKLERS & libraries_imported(module) if room_of(module) not in KNOWS_PICKLE else set()
        return unpickled | {"torch.load", "torch.save", "torch.serialization"} & {*attributes, *imported(module)}

    assert those(wrong) == [str(KNOWS_TORCH_FILES.relative_to(PACKAGE))]
    calls = [node for node in ast.walk(parsed(KNOWS_TORCH_FILES)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) in UNSAFE]
    assert [ast.unparse(call.func) for call in loads] == ["torch.load"]
    assert "weights_only=True" in ast.unparse(loads[0])


def test_errors_import_nothing() -> None:
    assert not list(imported(PACKAGE / "errors.py"))


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    module = tmp_path / "pipeline" / "stage.py"
    module.parent.mkdir()
    module.write_text(
        "import os, lightning_shard.plugin.strategy\n"
        "from lightning_shard import checkpoint\n"
        "from .. import parallel\n"
        "from ..layout import Layout\n"
        "from . import cost\n"
        "def late():\n    import pickle\n"
    )
    assert rooms_imported(module) == {"plugin", "checkpoint", "parallel", "layout", "pipeline"}
    assert {"os", "pickle"} <= libraries_imported(module)
