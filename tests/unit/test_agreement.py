"""What ranks exchange after each step: bits that are combined over all ranks by "or"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.layout import Layout
from lightning_shard.plugin.steps.checks.agreement import SameGradients, SameSettings, same_on_data_ranks


def optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=lr)


def combined(*flags: list[bool]) -> list[bool]:
    return [any(bits) for bits in zip(*flags, strict=True)]


def test_optimizers_with_other_settings_on_a_rank_are_refused() -> None:
    """A scheduler that monitors a data rank's own value lowered the rate of that rank's shards only."""
    ranks = [SameSettings([optimizer(lr)], Layout.resolve(3, 0)) for lr in (1e-3, 1e-3, 1e-4)]
    ranks[0].check(combined(ranks[0].flags, ranks[1].flags))
    for rank in ranks:
        with pytest.raises(StepError, match=r"different settings \(this rank's learning rates: .*sync_dist=True"):
            rank.check(combined(*(each.flags for each in ranks)))


def test_gradients_of_other_parameters_on_a_data_rank_are_refused_and_on_a_stage_not() -> None:
    module = nn.Linear(2, 2)
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
    none = SameGradients(module, Layout.resolve(4, 0, **sizes))
    module.bias.grad = torch.ones(2)
    neighbour = SameGradients(module, Layout.resolve(4, 1, **sizes))
    other_stage = SameGradients(module, Layout.resolve(4, 2, **sizes))
    none.check(combined(none.flags, other_stage.flags))
    with pytest.raises(StepError, match=r"gradients of different .*on this rank \['weight', 'bias'\] have none"):
        none.check(combined(none.flags, neighbour.flags))
    module.weight.grad = torch.ones(2, 2)
    both = SameGradients(module, Layout.resolve(4, 1, **sizes))
    with pytest.raises(StepError, match=r"gradients of different .*on another rank some have none"):
        both.check(combined(both.flags, none.flags))


def test_a_tensor_on_the_host_that_differs_is_sent_over_the_groups_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL serves no CPU tensors; a state dict may hold some on devices too."""
    sent = []

    def gather(into: list[Any], own: Any, group: Any) -> None:
        into[:] = [own, dict.fromkeys(own, "another digest") if isinstance(own, dict) else "another digest"]

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, group, group_src: sent.append(tensor.device.type))
    with pytest.raises(NotImplementedError, match="meta"):  # which has no data to copy back
        same_on_data_ranks({"seen": torch.ones(2)}, (), None, torch.device("meta"))
    assert sent == ["meta"]
    state = {"seen": torch.ones(2)}
    agreed = same_on_data_ranks(state, (), None, torch.device("cpu"))
    assert torch.equal(agreed["seen"], state["seen"])
    assert agreed["seen"] is not state["seen"]
