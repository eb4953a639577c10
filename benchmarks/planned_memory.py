"""Does a run need the memory that its plan says? Bytes of live tensors at a step's peak, on CPU ranks, by kind.

The plan is made on fake tensors, by one process. Measured is a real step, the second of a run, on each rank: every
storage that an operation makes is followed until it is freed, and whenever more live than ever before, they are told
apart: shards of parameters, the optimizer's state, gradients (whole ones, shards, and the buffers by which they are
reduced), gathered parameters (with the buffers of all-gathers), and the rest: activations, what was received, the loss
and what operations work with. What kernels take inside and what an allocator adds isn't in either number.

A plan takes tokens to be spread evenly over expert-parallel ranks. So kinds are compared where they are; where the
router's weights decide, only the sum.

    python benchmarks/planned_memory.py          # minutes; results/planned_memory-<date>.json
    python benchmarks/planned_memory.py --measured benchmarks/results/planned_memory-<date>.json  # plans of now
    python benchmarks/planned_memory.py --cuda   # one CUDA device: its allocator's peak beside the plan

With ``--cuda`` larger networks train on one device, and measured is ``torch.cuda.max_memory_allocated`` of the second
step, which has in it what kernels and their libraries take. Written are results/planned_memory_cuda-<date>.json, whose
plans can be made again on any machine, with ``--measured`` too.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.report import MIB, RESULTS, Row, Target, show, write_result
from lightning_shard import HybridShardStrategy
from lightning_shard.dryrun.counting.counts import Ledger
from lightning_shard.dryrun.planned import Plan
from lightning_shard.dryrun.planning import plan
from lightning_shard.layout import Layout
from lightning_shard.testing import run_ranks
from recipes import plans
from recipes.gpt import GPT

KINDS = ("parameters", "optimizer", "gradients", "gathered", "rest")
ALLOCATED = "the allocator's peak"
AGREES = Target("of_reference", 0.95, text="within 5 %")
BATCH, CONTEXT, VOCABULARY, WIDTH, LAYERS = 8, 64, 256, 128, 4
CUDA_WIDTH = 1024
"""So wide that a library's workspace of some MiB is little beside the rest."""


class Measured(L.LightningModule):
    """A network of tokens to logits, in an ordinary module."""

    def __init__(self, kind: str, *, width: int = WIDTH, is_even: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = network(kind, width)
        for name, part in self.net.named_modules():
            if is_even and name.endswith(".gate"):
                part.register_forward_hook(evenly)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        output = self.net(tokens)
        logits = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def network(kind: str, width: int) -> torch.nn.Module:
    if kind == "GPT":
        return GPT(VOCABULARY, width, LAYERS, 4, CONTEXT)
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "use_cache": False,
    }
    config: Any
    if kind == "Llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=4 * width)
    else:
        config = transformers.Qwen3MoeConfig(
            **sizes, head_dim=width // 4, moe_intermediate_size=width, num_experts=8, num_experts_per_tok=2
        )
    return transformers.AutoModelForCausalLM.from_config(config)


def evenly(router: Any, given: Any, routed: Any) -> Any:
    """As many tokens for each expert, whatever the router's weights say."""
    logits, scores, indices = routed
    experts = torch.arange(indices.numel(), device=indices.device) % router.num_experts
    return logits, scores, experts.view_as(indices).to(indices.dtype)


@dataclass(frozen=True)
class Case:
    network: str
    name: str
    ranks: int
    sizes: dict[str, int]
    settings: dict[str, Any] = field(default_factory=dict)
    is_even: bool = False
    width: int = WIDTH
    device_type: str = "cpu"

    def module(self) -> Measured:
        return Measured(self.network, width=self.width, is_even=self.is_even)

    @property
    def compares_kinds(self) -> bool:
        return self.is_even or "expert_parallel_size" not in self.sizes

    @property
    def strategy(self) -> dict[str, Any]:
        is_cut = self.network == "GPT" and self.ranks > 1
        plan = {"tensor_parallel_plan": plans.GPT} if is_cut else {}
        cut = {"microbatches": 4} if self.sizes.get("pipeline_parallel_size", 1) > 1 else {}
        return {**plan, **cut, **{key: value for key, value in self.settings.items() if key != "precision"}}

    @property
    def precision(self) -> Any:
        return self.settings.get("precision", "32-true")


def cases() -> Iterator[Case]:
    layouts: list[tuple[str, int, dict[str, int]]] = [
        ("dp 2", 2, {"data_parallel_size": 2}),
        ("tp 2", 2, {"tensor_parallel_size": 2}),
        ("pp 2", 2, {"pipeline_parallel_size": 2}),
        ("pp 2 × dp 2", 4, {"pipeline_parallel_size": 2, "data_parallel_size": 2}),
    ]
    for network_ in ("GPT", "Llama", "mixture"):
        for name, ranks, sizes in layouts:
            if network_ == "mixture" and "tensor_parallel_size" in sizes:
                continue
            for settings in ({}, {"activation_checkpointing": True}):
                yield Case(network_, name + _said(settings), ranks, sizes, settings)
        offloads = {"cpu_offload": True}
        yield Case(network_, "dp 2" + _said(offloads), 2, {"data_parallel_size": 2}, offloads)
    for settings in ({}, {"activation_checkpointing": True}):
        sizes = {"data_parallel_size": 2, "expert_parallel_size": 2}
        yield Case("mixture", "ep 2" + _said(settings), 2, sizes, settings)
        yield Case("mixture", "ep 2, tokens spread evenly" + _said(settings), 2, sizes, settings, is_even=True)
    others: list[tuple[int, dict[str, Any]]] = [
        (0, {"activation_checkpointing": "selective"}),
        (0, {"precision": "bf16-mixed"}),
        (0, {"precision": "bf16-true"}),
        (2, {"schedule": "Interleaved1F1B"}),
        (3, {"precision": "bf16-mixed"}),
        (3, {"schedule": "GPipe"}),
        (3, {"reshard_after_forward": True}),
        (3, {"reduce_each_microbatch": True}),
    ]
    for number, settings in others:
        name, ranks, sizes = layouts[number]
        yield Case("GPT", name + _with_values(settings), ranks, sizes, settings)
    in_two_parts: list[tuple[str, int, dict[str, Any]]] = [
        ("GPT", 2, {"schedule": "InterleavedZeroBubble"}),
        ("GPT", 2, {"schedule": "InterleavedZeroBubble", "placement": [2, 2]}),
        ("GPT", 2, {"schedule": "ZBVZeroBubble"}),
        ("GPT", 2, {"schedule": "DualPipeV"}),
        ("GPT", 2, {"schedule": "ZBVZeroBubble", "activation_checkpointing": 2}),
        ("GPT", 3, {"schedule": "InterleavedZeroBubble", "precision": "bf16-mixed"}),
        ("GPT", 3, {"schedule": "ZBVZeroBubble"}),
        ("GPT", 3, {"schedule": "DualPipeV", "reduce_each_microbatch": True}),
        ("Llama", 2, {"schedule": "InterleavedZeroBubble"}),
        ("Llama", 3, {"schedule": "DualPipeV", "precision": "bf16-mixed"}),
        ("mixture", 2, {"schedule": "ZBVZeroBubble"}),
    ]
    for network_, number, settings in in_two_parts:
        name, ranks, sizes = layouts[number]
        yield Case(network_, name + _with_values(settings), ranks, sizes, settings)


def cuda_cases() -> Iterator[Case]:
    """On one device."""
    settings: list[dict[str, Any]] = [
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": "selective"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"cpu_offload": True},
    ]
    for network_ in ("GPT", "Llama", "mixture"):
        for each in settings:
            yield Case(network_, "one device" + _with_values(each), 1, {}, each, False, CUDA_WIDTH, "cuda")


def _with_values(settings: dict[str, Any]) -> str:
    return "".join(f", {key}={value}" for key, value in settings.items())


def _said(settings: dict[str, Any]) -> str:
    return "".join(f", {name}" for name in settings)


# -- a run ------------------------------------------------------------------------------------------------------------


class RunsLedger(Ledger):
    """Also counts tensors that were made before, and storages that are resized in place, as FSDP2 does to free them.

    Args:
        on_peak: Called whenever ``live`` reaches a new maximum.
    """

    def __init__(self, on_peak: Callable[[Ledger], None]) -> None:
        super().__init__()
        self._peak, self._on_peak = 0, on_peak

    def _grow(self, nbytes: int) -> None:
        super()._grow(nbytes)
        if self.live > self._peak:
            self._peak = self.live
            self._on_peak(self)

    def adopt(self, tensor: Tensor, label: Hashable) -> None:
        self._enter(tensor, label)

    def seeing_resizes(self) -> Any:
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = plain(storage, size)
            known = self._made.get(storage._cdata)
            if known is not None:
                self._made[storage._cdata] = known[0], size, known[2]
                self._grow(size - known[1])
            return result

        return mock.patch.object(torch.UntypedStorage, "resize_", resize)


class Watch(L.Callback):
    """Follows all storages in the second step of a run, and tells them apart at its peak."""

    def __init__(self) -> None:
        self.at_peak: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        self._module = module
        self.ledger = RunsLedger(self._look)
        for _, parameter in module.named_parameters():
            self.ledger.adopt(_local(parameter), "parameters")
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        self.ledger.adopt(_local(value), "optimizer")
        for group in _groups(module):
            for tensor in (t for p in group.fsdp_params for t in p.all_gather_outputs):
                self.ledger.adopt(tensor, "gathered")
        for tensor in (batch, *module.buffers()):
            self.ledger.adopt(tensor, "rest")
        self._resizes = self.ledger.seeing_resizes()
        self._resizes.__enter__()
        self.ledger.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.ledger.__exit__(None, None, None)
            self._resizes.__exit__(None, None, None)

    def _look(self, ledger: Ledger) -> None:
        kinds = {key: label for key, (_, label) in ledger.storages().items() if label in KINDS}
        for group in _groups(self._module):
            for tensor in _of_gathering(group):
                kinds[tensor.untyped_storage()._cdata] = "gathered"
            for tensor in _of_gradients(group):
                kinds[tensor.untyped_storage()._cdata] = "gradients"
        held = (p for part in self._module.modules() for p in part._parameters.values() if p is not None)
        for gradient in (p.grad for p in held):  # where nothing is sharded, there are no groups
            if gradient is not None:
                kinds[_local(gradient).untyped_storage()._cdata] = "gradients"
        self.at_peak = dict.fromkeys(KINDS, 0)
        for key, (nbytes, _) in ledger.storages().items():
            self.at_peak[kinds.get(key, "rest")] += nbytes


class AllocatorPeak(L.Callback):
    """What a CUDA device's allocator has given out at most in the second step of a run."""

    def __init__(self) -> None:
        self.at_peak: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.at_peak = {ALLOCATED: torch.cuda.max_memory_allocated()}


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _groups(module: torch.nn.Module) -> Iterator[Any]:
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            yield from unit._get_fsdp_state()._fsdp_param_groups


def _of_gathering(group: Any) -> Iterator[Tensor]:
    yield from (tensor for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs)
    results = [group._all_gather_result, getattr(group.comm_ctx.all_gather_state, "all_gather_result", None)]
    yield from (result.all_gather_output for result in results if result is not None)


def _of_gradients(group: Any) -> Iterator[Tensor]:
    for parameter in group.fsdp_params:
        whole = (
            parameter.unsharded_accumulated_grad,
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        )
        yield from (_local(gradient) for gradient in (*whole, parameter.sharded_param.grad) if gradient is not None)
    yield from (state.reduce_scatter_input for state in group.comm_ctx.reduce_scatter_states)


def measure(ranks: int, chosen: list[Case]) -> list[dict[str, int]]:
    """On one of the ranks, each case's kinds at its peak, or what a CUDA device's allocator gave out."""
    found = []
    for case in chosen:
        found.append(_measured(ranks, case))
        gc.collect()  # a Trainer is a cycle, and would count in the next case's peak on a device
    return found


def _measured(ranks: int, case: Case) -> dict[str, int]:
    watch = Watch() if case.device_type == "cpu" else AllocatorPeak()
    tokens = torch.randint(VOCABULARY, (2 * BATCH * ranks, CONTEXT), generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        strategy=HybridShardStrategy(**case.sizes, **case.strategy),
        accelerator=case.device_type,
        devices=ranks,
        precision=case.precision,
        max_steps=2,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(tokens, batch_size=BATCH)  # type: ignore[arg-type]
    trainer.fit(case.module(), loader)
    return watch.at_peak


# -- the comparison ---------------------------------------------------------------------------------------------------


def planned(case: Case) -> Plan:
    batch = torch.zeros(BATCH, CONTEXT, dtype=torch.long)
    return plan(
        case.module,
        batch,
        layout=case.sizes,
        device_type=case.device_type,
        precision=case.precision,
        **case.strategy,
    )


def kinds_of(made: Plan, stage: int) -> dict[str, int]:
    memory = made.stages[stage]
    together = {**memory.peak.bytes}
    for kind, nbytes in memory.host.items() if made.device_type == "cpu" else ():  # the host is the device here
        together[kind] = together.get(kind, 0) + nbytes
    known = {kind: together.pop(kind, 0) for kind in KINDS[:-1]}
    return {**known, "rest": sum(together.values())}


Seen = dict[str, dict[str, int]]
"""Bytes by kind, by the name of a case and its stage."""


def name_of(case: Case, stage: int) -> str:
    is_cut = case.sizes.get("pipeline_parallel_size", 1) > 1
    return f"{case.network}, {case.name}" + (f", stage {stage}" if is_cut else "")


def measured_of(chosen: list[Case]) -> Seen:
    found: Seen = {}
    for ranks in sorted({case.ranks for case in chosen}):
        own = [case for case in chosen if case.ranks == ranks]
        # a CUDA driver's state doesn't survive a fork
        start: Any = {"start_method": "spawn"} if own[0].device_type == "cuda" else {}
        by_rank = run_ranks(measure, ranks, ranks, own, elastic=True, timeout_s=1800, **start)
        for number, case in enumerate(own):
            of_stages = enumerate(Layout.resolve(ranks, **case.sizes).stages())  # the last stage is on rank 0
            found |= {name_of(case, stage): by_rank[own_ranks.start][number] for stage, own_ranks in of_stages}
    return found


def measured_before(result: Path) -> tuple[Seen, str]:
    """What an earlier result has measured, and when."""
    earlier = json.loads(result.read_text())
    found: Seen = {}
    for row in earlier["rows"]:
        if row["contender"] != "all":
            found.setdefault(row["what"], {})[row["contender"]] = round(row.get("mib", 0) * MIB)
    return found, earlier["date"]


def rows_of(chosen: list[Case], measured: Seen, since: dict[str, str]) -> Iterator[Row]:
    """Rows of comparisons.

    Args:
        since: The date of what wasn't measured just now, by name.
    """
    for case in chosen:
        made = planned(case)
        for stage in range(len(made.stages)):
            name, kinds = name_of(case, stage), kinds_of(made, stage)
            seen, date = measured[name], since.get(name, "")
            if case.device_type == "cuda":
                yield _row(name, ALLOCATED, sum(kinds.values()), seen[ALLOCATED], date, None)
                continue
            yield _row(name, "all", sum(kinds.values()), sum(seen.values()), date, AGREES)
            target = AGREES if case.compares_kinds else None
            yield from (_row(name, kind, nbytes, seen[kind], date, target) for kind, nbytes in kinds.items())


def _row(name: str, kind: str, predicted: int, measured: int, date: str, target: Target | None) -> Row:
    agreement = min(predicted, measured) / max(predicted, measured) if max(predicted, measured) else 1.0
    note = f"planned {predicted / MIB:.2f} MiB, {100 * (predicted / measured - 1):+.1f} %" if measured else "none"
    note += f"; measured {date}" if date else ""
    return Row(name, kind, mib=measured / MIB, of_reference=agreement, reference="the plan", target=target, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this; no result unless --results is given")
    parser.add_argument("--results", type=Path, help="where the result goes (benchmarks/results)")
    parser.add_argument("--measured", type=Path, help="an earlier result: what it has measured isn't run again")
    parser.add_argument("--cuda", action="store_true", help="on one CUDA device: its allocator's peak beside the plan")
    options = parser.parse_args()
    if options.cuda and not options.measured and not torch.cuda.is_available():
        print("There is no CUDA device: nothing is measured.")
        return
    chosen = [
        case for case in (cuda_cases() if options.cuda else cases()) if options.only in f"{case.network}, {case.name}"
    ]
    measured, date = measured_before(options.measured) if options.measured else ({}, "")
    since = dict.fromkeys(measured, date)
    measured |= measured_of([case for case in chosen if name_of(case, 0) not in measured])
    rows = list(rows_of(chosen, measured, since))
    show(ALLOCATED if options.cuda else "bytes of live tensors at the peak of a step", rows)
    misses = [row for row in rows if row.target is not None and (row.of_reference or 0) < 0.95]
    print(f"{len(rows)} rows; of {sum(row.target is not None for row in rows)} numbers {len(misses)} beyond 5 %")
    results = options.results or (None if options.only else RESULTS)
    if results is not None:
        about = {}
        if options.cuda:
            earlier = options.measured and json.loads(options.measured.read_text())["device"]
            about = {"device": earlier or torch.cuda.get_device_name()}
        print(write_result("planned_memory_cuda" if options.cuda else "planned_memory", rows, results, **about))


if __name__ == "__main__":
    main()
