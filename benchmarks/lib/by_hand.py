"""The same parallelism by hand, in plain torch: FSDP2, tensor parallel, torch's pipelines, an all-to-all of tokens.

As torchtitan does it: blocks are recomputed, then compiled, then sharded; stages keep their blocks gathered for a step;
tokens go to their experts by two all-to-alls, and experts are each on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from benchmarks.lib.steps import EXPERTS, Experts, Size, Tokens, Watch, loss_of, network, optimizer_of
from recipes import plans
from recipes.gpt import GPT

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
ONE_STAGE_EACH = ("1F1B", "GPipe")


def shard(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def split(model: GPT, mesh: DeviceMesh) -> None:
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    parallelize_module(model, mesh, {name: styles[style]() for name, style in plans.GPT.items()})


def _train(
    watch: Watch,
    size: Size,
    module: nn.Module,
    step: Callable[[Tensor], Tensor | None],
    data_rank: int = 0,
    data_ranks: int = 1,
) -> None:
    tokens = Tokens(size, watch.steps, data_ranks)
    loader = DataLoader(tokens, batch_size=size.batch, sampler=range(data_rank, len(tokens), data_ranks))
    optimizer = optimizer_of(module)
    for window in loader:
        optimizer.zero_grad()
        loss = step(window.to(size.device))
        optimizer.step()
        watch.ended(loss)


def _network(size: Size) -> GPT:
    """On this rank's device, which the thread is set to."""
    if size.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return network(size).to(size.device)


def _both_ranks(size: Size) -> DeviceMesh:
    """Over a group as torch makes it by default: the world's, which a mesh of one axis takes, is of the strategy."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, size.device)


def _whole_step(model: nn.Module, window: Tensor) -> Tensor:
    loss = loss_of(model(window[:, :-1]), window)
    loss.backward()
    return loss


def data(watch: Watch, size: Size, *, recomputes: bool = False, offloads: bool = False, compiles: bool = False) -> None:
    """Fully sharded over two ranks, with torch's own ways to save memory or time."""
    model = _network(size)
    mesh = _both_ranks(size)
    if recomputes:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
    if compiles:
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile()
    shard(model, mesh, **({"offload_policy": CPUOffloadPolicy(pin_memory=size.device == "cuda")} if offloads else {}))
    _train(watch, size, model, partial(_whole_step, model), mesh.get_rank(), 2)


def tensor(watch: Watch, size: Size, data_ranks: int = 1) -> None:
    """Split over two tensor ranks, and fully sharded where there are several data ranks."""
    model = _network(size)
    mesh = init_device_mesh(size.device, (data_ranks, 2), mesh_dim_names=("data", "tensor"))
    split(model, mesh["tensor"])
    if data_ranks > 1:
        shard(model, mesh["data"])
    _train(watch, size, model, partial(_whole_step, model), mesh.get_local_rank("data"), data_ranks)


# -- pipelines


class Part(nn.Module):
    """What a pipeline of torch's own asks of its user: the network, rewritten as parts."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        begin, end = (len(model.blocks) * number // stages for number in (stage, stage + 1))
        first, last = stage == 0, stage == stages - 1
        self.blocks = model.blocks[begin:end]
        self.embeddings = nn.ModuleList([model.token_embedding, model.position_embedding] if first else [])
        self.ends = nn.ModuleList([model.norm, model.head] if last else [])

    def forward(self, x: Tensor) -> Tensor:
        if self.embeddings:
            tokens, positions = self.embeddings
            x = tokens(x) + positions(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            x = block(x)
        for end in self.ends:
            x = end(x)
        return x


def pipeline(watch: Watch, size: Size, ranks: int = 2, data_ranks: int = 1, schedule: str = "1F1B") -> None:
    """torch's own schedules, over as many stages on each rank as they want."""
    mesh = init_device_mesh(size.device, (ranks, data_ranks), mesh_dim_names=("pipeline", "data"))
    rank = mesh.get_local_rank("pipeline")
    if schedule in ONE_STAGE_EACH:
        stages, own = ranks, [rank]
    else:
        stages = 2 * ranks
        own = [rank, stages - 1 - rank if schedule in V_SHAPED else rank + ranks]
    model = _network(size)
    parts = nn.ModuleList(Part(model, number, stages) for number in own)
    del model
    if data_ranks > 1:
        for part in parts:
            shard(part, mesh["data"], reshard_after_forward=False)
    group = mesh.get_group("pipeline")
    device = next(parts.parameters()).device
    ends = [PipelineStage(part, n, stages, device, group=group) for part, n in zip(parts, own)]
    kind: Any = get_schedule_class(schedule)
    runs = kind(ends[0] if schedule in ONE_STAGE_EACH else ends, size.microbatches, loss_fn=loss_of)

    def step(window: Tensor) -> Tensor | None:
        given = (window[:, :-1],) if 0 in own else ()
        is_last = stages - 1 in own
        losses: list[Tensor] = []
        runs.step(*given, target=window if is_last else None, losses=losses if is_last else None, return_outputs=False)
        return torch.stack(losses).mean() if is_last else None

    _train(watch, size, parts, step, mesh.get_local_rank("data"), data_ranks)


# -- experts


class DispatchedExperts(nn.Module):
    """This rank's experts: all ranks' tokens come to them and go back, each by an all-to-all."""

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.here = EXPERTS // group.size()
        own = slice(group.rank() * self.here, (group.rank() + 1) * self.here)
        self.local = Experts(self.here, experts.up.size(1), experts.up.size(2))
        self.local.up = nn.Parameter(experts.up[own].detach().clone())
        self.local.down = nn.Parameter(experts.down[own].detach().clone())

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        chosen, choices = chosen_NK.flatten(), chosen_NK.size(1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        counts, coming = counts.view(-1, self.here), coming.view(-1, self.here)  # by rank and its experts
        given, taken = counts.sum(1).tolist(), coming.sum(1).tolist()
        rows = all_to_all_single_autograd(x_ND[order // choices], taken, given, self.group)
        # from an order by the rank they came from to one by experts, and back
        numbers = torch.arange(self.here, device=coming.device).repeat(self.group.size())
        number = numbers.repeat_interleave(coming.flatten())
        by_expert = number.argsort(stable=True)
        results = self.local.on_rows(rows[by_expert], coming.sum(0).tolist())
        results = torch.empty_like(results).index_copy(0, by_expert, results)
        returned = all_to_all_single_autograd(results, given, taken, self.group)
        weighted = returned * weights_NK.flatten()[order, None]
        return torch.zeros_like(x_ND).index_add(0, order // choices, weighted)


def experts(watch: Watch, size: Size) -> None:
    """Fully sharded over two ranks but for experts, of which each rank has a half."""
    model = _network(size)
    mesh = _both_ranks(size)
    own: list[nn.Parameter] = []
    for block in model.blocks:
        block.mlp.experts = DispatchedExperts(block.mlp.experts, mesh.get_group())
        own += block.mlp.experts.parameters()
    shard(model, mesh, ignored_params=set(own))

    def step(window: Tensor) -> Tensor:
        loss = _whole_step(model, window)
        for parameter in own:  # their gradients are sums over all ranks' tokens
            assert parameter.grad is not None
            parameter.grad.div_(2)
        return loss

    _train(watch, size, model, step, mesh.get_rank(), 2)
