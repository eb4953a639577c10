"""What does each setting that saves memory save, and what does arithmetic say it should?

A GPT on two data-parallel ranks, in 32 bits where nothing else is said. Counted are the bytes of tensors, on rank 0: of
what is kept for the backward when a forward has ended, of blocks' gathered weights then, and of gradients between two
accumulated batches.

In units of the hidden state, ``tokens × width``, a block of this GPT keeps 18: its input, that normalized (without and
with the norm's weight), query, key, value, what attention mixed, the sum with the input, that normalized (twice), and 4
each before and after the GELU. Recomputed, it keeps its input; selectively, that and the results of matrix products and
attention, 11. CUDA's norms are one kernel each, which keeps no normalized state without its weight: two fewer. Autocast
keeps each weight's cast.

    python benchmarks/memory.py                  # half a minute; results/memory-<date>.json
    python benchmarks/memory.py --device cuda    # and what offloading saves there; results/memory-cuda-<date>.json
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.report import MIB, RESULTS, Row, Target, show, write_result
from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from recipes.gpt import GPT
from tests import on_gpu

RANKS = 2
AGREES = Target("of_reference", 0.9, text="within 10 %")


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    context: int
    batch: int
    vocabulary: int = 64

    @property
    def state(self) -> int:
        """Elements of a hidden state of one rank."""
        return self.batch * self.context * self.width

    @property
    def of_blocks(self) -> int:
        """Weights of all blocks without their norms'."""
        return 12 * self.width**2 * self.layers

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.width
        return self.of_blocks + norms + (2 * self.vocabulary + self.context) * self.width


@dataclass
class Seen:
    """Bytes; ``held`` by the device between steps."""

    kept: int = 0
    gathered: int = 0
    gradients: int = 0
    held: int = 0


def storages(tensors: Iterator[Tensor]) -> dict[int, int]:
    plain = (t for t in tensors if type(t) in (Tensor, nn.Parameter))  # others, as fake ones, may have no memory
    strided = (t for t in plain if t.layout == torch.strided)
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in strided}


def alive() -> Iterator[Tensor]:
    """All tensors that Python knows, and their gradients."""
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            yield thing
            if thing.is_leaf and thing.requires_grad and thing.grad is not None:
                yield thing.grad


class Kept:
    """Counts what a forward that runs inside keeps until the backward."""

    def __enter__(self) -> Kept:
        self._before = storages(alive())
        self._saved: list[Tensor] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor)
        return tensor

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def nbytes(self, besides: nn.Module) -> int:
        """Without parameters; to be asked once."""
        now = storages(alive()) | storages(iter(self._saved))
        held = self._before.keys() | storages(besides.parameters()).keys()
        self._saved.clear()
        return sum(nbytes for storage, nbytes in now.items() if storage not in held)


class Measured(L.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT(size.vocabulary, size.width, size.layers, 4, size.context)
        self.seen = Seen()
        self.kept = Kept()
        self.began = torch.cuda.memory_allocated()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        if batch_idx > 0:
            return loss_of(self.net, tokens)
        with self.kept:
            loss = loss_of(self.net, tokens)
        # within the step: hooks get parameters as they are sharded
        gathered = (p for p in self.net.blocks.parameters() if p.ndim > 1)
        self.seen.gathered = sum(storages(gathered).values())
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if not self.seen.kept:
            self.seen.kept = self.kept.nbytes(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.seen.gradients = sum(t.nbytes for t in gradients())
        elif torch.cuda.is_available():
            gc.collect()
            self.seen.held = torch.cuda.memory_allocated() - self.began

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def gradients() -> Iterator[Tensor]:
    """Of whole parameters, and of shards."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    for gradient in (tensor.grad for tensor in tensors if isinstance(tensor, nn.Parameter)):
        if gradient is not None:
            yield gradient.to_local() if isinstance(gradient, DTensor) else gradient


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())


def measure(size: Size, settings: dict[str, dict[str, Any]], device: str) -> dict[str, Seen]:
    """On one of the ranks."""
    on_gpu.place_ranks()
    tokens = torch.arange(2 * size.batch * size.context).view(-1, size.context) % size.vocabulary
    seen = {}
    for name, chosen in settings.items():
        options = dict(chosen)
        precision = options.pop("precision", "32-true")
        module = Measured(size)
        trainer = L.Trainer(
            strategy=HybridShardStrategy(data_parallel_size=RANKS, **options),
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=RANKS,
            precision=precision,
            max_steps=1,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader: Any = DataLoader(tokens.repeat(RANKS, 1), batch_size=size.batch)  # type: ignore[arg-type]
        trainer.fit(module, loader)
        seen[name] = module.seen
        del trainer, module  # before the next one's bytes are counted
        gc.collect()
    return seen


def kept_by_autocast(size: Size, device: str) -> int:
    """As Lightning's own bf16-mixed runs, on one process: each weight's cast is kept until the backward."""
    torch.manual_seed(0)
    net = GPT(size.vocabulary, size.width, size.layers, 4, size.context).to(device)
    tokens = torch.arange(size.batch * size.context, device=device).view(-1, size.context) % size.vocabulary
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        with Kept() as kept:
            loss = loss_of(net, tokens)
        return kept.nbytes(net) if loss.requires_grad else 0


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "activation_checkpointing=True": {"activation_checkpointing": True},
    "activation_checkpointing=2": {"activation_checkpointing": 2},
    'activation_checkpointing="selective"': {"activation_checkpointing": "selective"},
    "precision=bf16-mixed": {"precision": "bf16-mixed", "reshard_after_forward": False},
    "reshard_after_forward=False": {"reshard_after_forward": False},
    "reduce_each_microbatch=True": {"reduce_each_microbatch": True},
}
OFFLOADED: dict[str, dict[str, Any]] = {"cpu_offload=True": {"cpu_offload": True}}
"""From the CPU nothing is offloaded."""
KEPT, GATHERED, GRADIENTS = "kept for the backward", "gathered after the forward", "gradients between batches"
HELD = "held by the device between steps"


def rows_of(size: Size, device: str) -> list[Row]:
    settings = SETTINGS | (OFFLOADED if device == "cuda" else {})
    seen = run_ranks(measure, RANKS, size, settings, device, elastic=True, timeout_s=300)[0]
    none, whole, mixed = seen["none"], seen["reshard_after_forward=False"], seen["precision=bf16-mixed"]
    state, weights = 4 * size.state * size.layers, size.of_blocks
    rows = [Row(KEPT, "none", mib=none.kept / MIB, is_reference=True)]
    norms = 2 if device == "cuda" else 0
    for name, share in zip([*SETTINGS][1:4], (17 - norms, (17 - norms) / 2, 7 - norms)):
        rows.append(_row(KEPT, name, seen[name].kept, none.kept, share * state))
    plain = run_ranks(kept_by_autocast, 1, size, device, init=False)[0]
    rows.append(Row(KEPT, "bf16-mixed by autocast alone", mib=plain / MIB, is_reference=True))
    rows.append(_row(KEPT, "precision=bf16-mixed", mixed.kept, plain, 2 * weights))
    rows.append(Row(GATHERED, "reshard_after_forward=False", mib=whole.gathered / MIB, is_reference=True))
    rows.append(_row(GATHERED, "the same in bf16-mixed", mixed.gathered, whole.gathered, 2 * weights))
    rows.append(_row(GATHERED, "reshard_after_forward=True", none.gathered, whole.gathered, 4 * weights))
    each = seen["reduce_each_microbatch=True"].gradients
    rows.append(Row(GRADIENTS, "none", mib=none.gradients / MIB, is_reference=True))
    saved = 4 * size.parameters * (RANKS - 1) / RANKS
    rows.append(_row(GRADIENTS, "reduce_each_microbatch=True", each, none.gradients, saved))
    if device == "cuda":
        of_each = 4 * 4  # a parameter, its gradient and AdamW's two moments
        rows.append(Row(HELD, "none", mib=none.held / MIB, is_reference=True))
        offloaded = seen["cpu_offload=True"].held
        rows.append(_row(HELD, "cpu_offload=True", offloaded, none.held, of_each * size.parameters / RANKS))
    return rows


def _row(what: str, name: str, measured: int, reference: int, predicted: float) -> Row:
    saved = reference - measured
    agreement = min(saved / predicted, predicted / saved) if saved > 0 else 0.0
    note = f"saves {saved / MIB:.2f} MiB, by arithmetic {predicted / MIB:.2f}"
    return Row(what, name, mib=measured / MIB, of_reference=agreement, reference="arithmetic", target=AGREES, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small; no result is written unless --results is given")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="CUDA devices: one a rank, or one for all"
    )
    parser.add_argument("--results", type=Path, help="where the result goes (benchmarks/results)")
    options = parser.parse_args()
    size = Size(128, 4, 64, 8) if options.quick else Size(256, 6, 128, 8)
    rows = rows_of(size, options.device)
    show("bytes of tensors, rank 0 of 2", rows)
    results = options.results or (None if options.quick else RESULTS)
    if results is not None:
        print(write_result("memory" if options.device == "cpu" else f"memory-{options.device}", rows, results))


if __name__ == "__main__":
    main()
