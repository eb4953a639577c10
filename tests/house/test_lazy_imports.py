"""What importing costs is told by what is imported, and Lightning knows the strategy in whatever order it is."""

import subprocess
import sys

import pytest

HEAVY = ["lightning", "pytorch_lightning", "torch._dynamo", "torch._inductor", "sympy", "onnx", "transformers"]
MAKE_A_TRAINER = """
trainer = Trainer(strategy="hybrid_shard", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
assert type(trainer.strategy) is lightning_shard.HybridShardStrategy
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_checkpoints_and_the_command_line_import_neither_lightning_nor_the_compiler_and_lightning_may_follow():
    """LightningCLI refuses a name that two known classes have: its ModelCheckpoint stays the only one."""
    # what torch imports on its own is torch's affair
    imports = "import sys, torch; own = set(sys.modules); import lightning_shard.checkpoint, lightning_shard.cli"
    lightning = "import lightning as L; Trainer = L.Trainer"
    subclasses = "print([kind.__module__ for kind in L.pytorch.callbacks.ModelCheckpoint.__subclasses__()])"
    code = f"{imports}; print(*set(sys.modules) - own)\n{lightning}\n{MAKE_A_TRAINER}\n{subclasses}"
    imported, *_, known = run(code).strip().splitlines()
    assert {"lightning_shard.checkpoint", "lightning_shard.cli"} <= set(imported.split())
    assert not set(HEAVY) & set(imported.split())
    assert known == "[]"


@pytest.mark.long  # imports all of it once more
def test_lightning_knows_the_strategy_where_it_was_imported_first():
    run("from lightning.pytorch import Trainer; import lightning_shard" + MAKE_A_TRAINER)


def test_an_import_of_lightning_that_failed_may_be_tried_again(tmp_path):
    strategies = tmp_path / "lightning" / "pytorch" / "strategies.py"  # ours, which takes no time
    strategies.parent.mkdir(parents=True)
    for package in strategies.parents[:2]:
        (package / "__init__.py").touch()
    strategies.write_text("import not_there_at_first\nStrategyRegistry = not_there_at_first.Registry()\n")
    code = f"""
import sys, types; sys.path.insert(0, {str(tmp_path)!r})
import lightning_shard
try:
    import lightning.pytorch.strategies
except ImportError:
    pass
class Registry(dict):
    def register(self, name, strategy, description): self[name] = strategy
sys.modules["not_there_at_first"] = types.SimpleNamespace(Registry=Registry)
from lightning.pytorch.strategies import StrategyRegistry
print(*StrategyRegistry)
"""
    assert run(code).split() == ["hybrid_shard"]


def test_a_name_that_is_not_there_is_an_attribute_error():
    import lightning_shard

    with pytest.raises(AttributeError, match="no attribute 'Strategy'"):
        lightning_shard.Strategy  # noqa: B018
