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


@pytest.mark.parametrize("module", ["checkpoint", "cli"])
def test_checkpoints_and_the_command_line_import_neither_lightning_nor_the_compiler(module):
    # what torch imports on its own is torch's affair
    code = f"import sys, torch; own = set(sys.modules); import lightning_shard.{module}; print(*set(sys.modules) - own)"
    imported = run(code).split()
    assert f"lightning_shard.{module}" in imported
    assert not set(HEAVY) & set(imported)


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_shard.checkpoint, lightning as L; Trainer = L.Trainer",
        "from lightning.pytorch import Trainer; import lightning_shard",
    ],
    ids=["ours first", "Lightning first"],
)
def test_lightning_knows_the_strategy_in_any_order_of_imports(imports):
    run(imports + MAKE_A_TRAINER)


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


def test_lightnings_own_model_checkpoint_stays_the_only_one_of_its_name_until_ours_is_asked_for():
    """LightningCLI refuses a name that two known classes have."""
    code = """
import lightning.pytorch as pl, lightning_shard
lightning_shard.HybridShardStrategy()
print([kind.__module__ for kind in pl.callbacks.ModelCheckpoint.__subclasses__()])
"""
    assert run(code).strip().endswith("[]")
