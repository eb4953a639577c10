"""What running a network changes is put back, beside its parameters."""

import torch
from torch import nn

from lightning_shard.plugin.steps.state.snapshot import Memory


def test_a_list_of_parameters_stays_as_sharding_changes_it() -> None:
    recurrent = nn.LSTM(2, 2)
    memory = Memory(recurrent)
    gathered = nn.Parameter(torch.zeros_like(recurrent.weight_ih_l0))
    recurrent.weight_ih_l0 = gathered
    memory.put_back()
    assert recurrent._flat_weights[0] is gathered


def test_a_tensor_that_a_graph_holds_may_be_changed_and_put_back() -> None:
    module = nn.Module()
    module.register_buffer("scale", torch.full((), 2.0))
    weight = torch.ones((), requires_grad=True)
    result = weight * module.scale
    memory = Memory(module)
    module.scale.fill_(3.0)
    memory.put_back()
    result.backward()
    assert weight.grad == 2.0
