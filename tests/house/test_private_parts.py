"""Private names of torch and Lightning are reached in two files, and in those that are listed here; in no others.

Seen are names that are imported, or reached from an imported one by dots (``torch._C._autograd``), and not attributes
of objects (``module._parameters``).
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

PACKAGE = ROOT / "lightning_shard"
LIBRARIES = {"torch", "lightning", "torchmetrics"}
ROOMS = {"torch_private.py", "lightning_private.py"}
#: In torch's documentation under these names.
DOCUMENTED = (
    *("torch._C.DisableTorchFunction", "torch._foreach_", "torch.ops.", "torch.Tensor._make_subclass"),
    *("torch.utils._pytree.", "torch.utils._python_dispatch.TorchDispatchMode", "torch._subclasses.fake_tensor."),
)
FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
CLIP = "torch.nn.utils.clip_grad"
HOOKS = "torch.nn.modules.module._global_backward"
#: What else is reached, by the file that alone needs it; classes of layers where code asks for them.
ELSEWHERE = {
    "checkpoint/ranks.py": {"torch.distributed.distributed_c10d._get_process_group_store"},
    "checkpoint/dcp.py": {"torch.distributed.checkpoint._traverse"},
    "checkpoint/tensors.py": {"torch.distributed.tensor.placement_types._StridedShard"},
    "dryrun/counting/fake.py": {"torch.testing._internal"},
    "fabric/ranks.py": {
        "lightning.fabric.strategies.launchers._MultiProcessingLauncher",
        "lightning.fabric.strategies.launchers._SubprocessScriptLauncher",
    },
    "fabric/strategy.py": {"torch._dynamo"},
    "parallel/batch_norm.py": {"torch.nn.modules._functions"},
    "parallel/compiled_blocks.py": {"torch._dynamo"},
    "parallel/fsdp/units.py": {
        f"{FULLY_SHARD}._fsdp_state._get_module_fsdp_state",
        f"{FULLY_SHARD}._fully_shard",
        "torch.distributed.fsdp.FSDPModule._apply",
    },
    "parallel/collectives.py": {"torch.distributed._functional_collectives"},
    "parallel/tensor/plan.py": {"torch.nn.modules.conv._ConvNd"},
    "pipeline/dataflow/backward_hooks.py": {f"{HOOKS}_hooks", f"{HOOKS}_pre_hooks"},
    "pipeline/runtime/step.py": {"torch.autograd._profiler_enabled"},
    "pipeline/stages/cut.py": {"torch.nn.Module._save_to_state_dict"},
    "pipeline/dataflow/masks.py": {"torch._nested_tensor_from_mask_left_aligned"},
    "plugin/assembly/prepared.py": {"lightning.fabric.utilities.optimizer._optimizers_to_device"},
    "plugin/data/loader.py": {
        "lightning.fabric.utilities.data._reinstantiate_wrapped_cls",
        "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper",
        "lightning.pytorch.utilities.data._get_dataloader_init_args_and_kwargs",
    },
    "plugin/data/resume.py": {
        "lightning.fabric.utilities.types._Stateful",
        "lightning.pytorch.utilities.combined_loader._SUPPORTED_MODES",
    },
    "plugin/groups.py": {"torch.distributed.distributed_c10d._set_pg_timeout"},
    "plugin/running/connected.py": {"lightning.pytorch.strategies.launchers._SubprocessScriptLauncher"},
    "plugin/running/laid_out.py": {
        "lightning.fabric.utilities.distributed._init_dist_connection",
        "lightning.fabric.utilities.distributed._sync_ddp_if_available",
    },
    "plugin/running/failure.py": {
        "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver",
    },
    "plugin/running/launchers.py": {
        "lightning.fabric.utilities.imports._IS_INTERACTIVE",
        "lightning.pytorch.strategies.launchers._MultiProcessingLauncher",
        "lightning.pytorch.strategies.launchers.multiprocessing._WorkerOutput",
    },
    "plugin/steps/gradient_norms.py": {
        f"{CLIP}._clip_grads_with_norm_",
        f"{CLIP}._get_total_norm",
        f"{CLIP}._group_tensors_by_device_and_dtype",
    },
    "plugin/steps/look_ahead.py": {"lightning.pytorch.loops.fetchers._PrefetchDataFetcher"},
    "plugin/steps/loss_weight.py": {"torch._amp_foreach_non_finite_check_and_unscale_"},
}


def names_reached(source: str) -> Iterator[str]:
    """Full names of what code imports from the libraries, and of what it reaches by dots from an imported name."""
    tree = ast.parse(source)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            held = [(alias.asname, alias.name) for alias in node.names]
            names |= {
                asname or name.partition(".")[0]: name if asname else name.partition(".")[0] for asname, name in held
            }
            yield from (name for _, name in held)
    yield from names.values()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            first, *rest = ast.unparse(node).split(".")
            if first in names and all(part.isidentifier() for part in rest):
                yield ".".join([names[first], *rest])


def private(source: str) -> set[str]:
    """The private names among them, each to its last private part."""
    found = set()
    for name in names_reached(source):
        library, *parts = name.split(".")
        places = [place for place, part in enumerate(parts, 1) if part.startswith("_") and not part.startswith("__")]
        if library in LIBRARIES and places and not name.startswith(DOCUMENTED):
            found.add(".".join([library, *parts[: places[-1]]]))
    return found


def test_private_names_are_reached_where_they_are_listed() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    found = {name: private(path.read_text()) for name, path in files.items() if name not in ROOMS}
    assert {name: names for name, names in found.items() if names} == ELSEWHERE
    assert all(private(Path(PACKAGE / room).read_text()) for room in ROOMS)


def test_no_callers_frames_are_looked_at() -> None:
    looks = re.compile(r"\b(_getframe\w*|currentframe|f_back|f_globals|getouterframes|inspect\.(stack|trace))\b")
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(sources) > 100
    assert {name: found[0] for name, source in sources.items() if (found := looks.findall(source))} == {}


def test_the_reader_sees_every_form() -> None:
    source = (
        "import torch, os\nimport torch._dynamo as dynamo\nfrom torch.overrides import _get_mode as mode, Public\n"
        "def late(x):\n    from lightning.pytorch import _private\n    return torch._C._one(x)._version, os._exit\n"
    )
    assert private(source) == {
        "torch._dynamo",
        "torch.overrides._get_mode",
        "lightning.pytorch._private",
        "torch._C._one",
    }
