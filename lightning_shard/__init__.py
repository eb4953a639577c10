"""Hybrid-sharded training of unmodified LightningModules, and checkpoints that load on any layout.

Importing makes ``Trainer(strategy="hybrid_shard")`` and ``Fabric(strategy="hybrid_shard")`` known, before or after
Lightning is imported, and has ``load_from_checkpoint`` and other strategies open these checkpoints. It imports nothing
else:
``lightning_shard.checkpoint`` and the command line need neither Lightning nor torch's compiler, and where it isn't
installed they work all the same.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_shard.dryrun.planning import plan
    from lightning_shard.dryrun.record import RecordTimeline
    from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO
    from lightning_shard.plugin.saving.model_checkpoint import ModelCheckpoint
    from lightning_shard.plugin.strategy import HybridShardStrategy

__all__ = ["HybridShardStrategy", "ModelCheckpoint", "RecordTimeline", "ShardedCheckpointIO", "plan"]

_FOUND_IN = {
    "HybridShardStrategy": "lightning_shard.plugin.strategy",
    "ModelCheckpoint": "lightning_shard.plugin.saving.model_checkpoint",
    "RecordTimeline": "lightning_shard.dryrun.record",
    "ShardedCheckpointIO": "lightning_shard.plugin.saving.checkpoint_io",
    "plan": "lightning_shard.dryrun.planning",
}
_REGISTRY, _FABRICS = "lightning.pytorch.strategies", "lightning.fabric.strategies"


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_FOUND_IN[name]), name)
    globals()[name] = value
    return value


def _hybrid_shard(**arguments: Any) -> HybridShardStrategy:
    """What Lightning calls for ``strategy="hybrid_shard"``: only then is the strategy imported."""
    from lightning_shard.plugin.strategy import HybridShardStrategy

    return HybridShardStrategy(**arguments)


def _of_fabric(**arguments: Any) -> Any:
    from lightning_shard.fabric import HybridShardStrategy

    return HybridShardStrategy(**arguments)


def _register(module: str, registry_name: str, make: Callable[..., Any]) -> None:
    registry = getattr(sys.modules[module], registry_name)
    if "hybrid_shard" not in registry:
        registry.register("hybrid_shard", make, description="Fully sharded data, tensor and pipeline parallelism.")


def _open_by(installer: str) -> None:
    """Have Lightning open our folders; what does so is imported where one is opened."""
    private = importlib.import_module("lightning_shard.lightning_private")
    getattr(private, installer)(partial(importlib.import_module, "lightning_shard.plugin.saving.plain_lightning"))


_ONCE_IMPORTED: dict[str, tuple[str, Callable[[], None]]] = {
    _FABRICS: ("STRATEGY_REGISTRY", partial(_register, _FABRICS, "STRATEGY_REGISTRY", _of_fabric)),
    _REGISTRY: ("StrategyRegistry", partial(_register, _REGISTRY, "StrategyRegistry", _hybrid_shard)),
    "lightning.pytorch.core.module": ("LightningModule", partial(_open_by, "open_folders")),
    "lightning.pytorch.cli": ("LightningCLI", partial(_open_by, "take_hyperparameters")),
}
"""What to do once a module of Lightning's has been imported, and the name that it has then."""


class _RegisterWithLightning(MetaPathFinder):
    """Registers the strategy as soon as Lightning has made its registry, and so on. Finds nothing itself.

    It stays where it is: an import that failed may be tried again.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _ONCE_IMPORTED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                _ONCE_IMPORTED[fullname][1]()

            loader.exec_module = execute_and_register
        return spec


for _module, (_name, _do) in _ONCE_IMPORTED.items():
    if hasattr(sys.modules.get(_module), _name):
        _do()
sys.meta_path.insert(0, _RegisterWithLightning())
