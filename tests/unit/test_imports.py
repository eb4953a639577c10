"""The directions of imports, read from the source of every module."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_shard"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A room is a folder or a single module of the package; it may import itself and these.
TRADES = {"parallel", "pipeline", "checkpoint"}
GROUND = {
    *(
        "arguments",
        "dense",
        "errors",
        "gloo",
        "installed",
        "layout",
        "namespaces",
        "processors",
        "scripted",
        "sharding",
    ),
    *("subclasses", "torch_private", "tree", "user_hooks", "versions"),
}
ROOMS: dict[str, set[str]] = {
    "arguments": {"errors"},
    "dense": {"tree"},
    "errors": set(),
    "gloo": {"torch_private"},
    "installed": {"errors"},
    "layout": {"errors"},
    "lightning_private": {"torch_private"},
    "namespaces": set(),
    "processors": set(),
    "scripted": {"errors"},
    "sharding": {"errors"},
    "subclasses": set(),
    "torch_private": set(),
    "tree": {"errors"},
    "user_hooks": set(),
    "versions": {"tree"},
    "parallel": GROUND,
    "pipeline": GROUND,
    "checkpoint": GROUND,
    "plugin": GROUND | TRADES | {"lightning_private"},
    "fabric": GROUND | TRADES | {"plugin"},
    "report": GROUND | TRADES | {"plugin"},
    "dryrun": GROUND | TRADES | {"plugin", "report"},
    "testing": GROUND | TRADES | {"plugin"},
    "cli": GROUND | TRADES | {"plugin", "report", "dryrun", "cli_plan"},
    "cli_plan": GROUND | TRADES | {"plugin", "report", "dryrun"},
    "__init__": GROUND | TRADES | {"plugin", "fabric", "dryrun"},
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


def imported(module: Path) -> Iterator[str]:
    """Full names of what a module imports, anywhere in it; of ``from a import b`` both ``a`` and ``a.b``."""
    package = ("lightning_shard", *module.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(module.read_text(), module)):
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


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
class TestEveryModule:
    def test_stands_in_a_room_whose_neighbours_are_decided(self, module: Path) -> None:
        assert room_of(module) in ROOMS

    def test_imports_only_the_rooms_before_its_own(self, module: Path) -> None:
        room = room_of(module)
        assert rooms_imported(module) <= ROOMS[room] | {room}

    def test_imports_lightning_only_where_lightning_is_known(self, module: Path) -> None:
        if room_of(module) not in KNOWS_LIGHTNING:
            assert not {"lightning", "pytorch_lightning", "lightning_fabric"} & libraries_imported(module)

    def test_imports_hydra_only_for_the_command_line(self, module: Path) -> None:
        if room_of(module) not in KNOWS_HYDRA:
            assert "hydra" not in libraries_imported(module)

    def test_imports_dcp_only_where_it_is_served(self, module: Path) -> None:
        # importing it costs time, and "checkpoint" does so only when asked for DcpWriter or DcpReader
        if module.name != "dcp.py":
            assert not [name for name in imported(module) if name.startswith("torch.distributed.checkpoint")]

    def test_has_nothing_to_do_with_pickle(self, module: Path) -> None:
        tree = ast.parse(module.read_text())
        if module == KNOWS_TORCH_FILES:
            loads = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE]
            assert [ast.unparse(call.func) for call in loads] == ["torch.load"]
            assert "weights_only=True" in ast.unparse(loads[0])
            return
        if room_of(module) not in KNOWS_PICKLE:
            assert not PICKLERS & libraries_imported(module)
        attributes = {
            (node.value.id, node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert not {("torch", "load"), ("torch", "save")} & attributes
        assert not {"torch.load", "torch.save", "torch.serialization"} & set(imported(module))


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
