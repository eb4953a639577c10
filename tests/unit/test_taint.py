"""What a stage doesn't know is followed through the user's code, and refused where it would count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.stage import Stage, StageEnd, cut
from lightning_shard.pipeline.taint import Hollow, Unknown

CPU = torch.device("cpu")


def hollow() -> Hollow:
    return Hollow.of(nn.Parameter(torch.ones(4, 3)), CPU, "embed.weight", 0, lambda: None)


def unknown() -> Tensor:
    return nn.functional.embedding(torch.tensor([1, 2]), hollow())


def written(change: Callable[[Tensor], Any]) -> Tensor:
    tensor = torch.zeros(4, 3)
    change(tensor)
    return tensor


COMPUTED: dict[str, Callable[[], Any]] = {
    "floats": lambda: unknown() * 2,
    "integers": lambda: unknown().argmax(-1),
    "bools": lambda: unknown() > 0,
    "without NaN": lambda: unknown().nan_to_num(),
    "indices": lambda: torch.ones(9)[unknown().nan_to_num().long()],
    "joined with known ones": lambda: torch.cat([torch.ones(2, 3), unknown()]),
    "one of several": lambda: unknown().unbind()[1],
    "a transposed view": lambda: unknown().T,
    "detached": lambda: unknown().detach(),
    "as a mask": lambda: torch.ones(2).masked_fill(unknown()[:, 0] > 0, 2),
    "through a layer": lambda: nn.Linear(3, 3)(unknown()),
    "through attention": lambda: nn.functional.scaled_dot_product_attention(*[unknown()[None]] * 3),
    "written into another": lambda: written(lambda t: t.__setitem__(slice(2), unknown())),
    "written into a part of another": lambda: written(lambda t: t[1:].copy_(unknown()[0])),
    "written as an output": lambda: written(lambda t: torch.add(unknown()[:1], 1, out=t)),
    "added in place": lambda: written(lambda t: t.__iadd__(unknown()[0])),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_what_is_computed_from_it_is_unknown(what: str) -> None:
    assert isinstance(COMPUTED[what](), Unknown)


@pytest.mark.parametrize(
    "known",
    [
        lambda: torch.zeros_like(unknown()),
        lambda: unknown().new_ones(3),
        lambda: torch.ones(1, 3).expand_as(unknown()),
        lambda: torch.ones(2).type_as(unknown()),
        lambda: torch.ones(2, dtype=unknown().dtype, device=unknown().device),
    ],
)
def test_its_shape_and_dtype_are_known(known: Callable[[], Tensor]) -> None:
    assert type(known()) is Tensor


def test_known_tensors_beside_it_stay_known() -> None:
    tensor = torch.ones(2, 3)
    torch.broadcast_tensors(tensor[:1], unknown())
    assert type(tensor) is Tensor
    assert type(torch.add(tensor, 1)) is Tensor


@pytest.mark.parametrize(
    "ask", [bool, float, int, Tensor.item, Tensor.tolist, Tensor.numpy, lambda t: torch.equal(t, t), lambda t: 1 in t]
)
def test_python_doesnt_get_its_value(ask: Callable[[Tensor], Any]) -> None:
    with pytest.raises(StepError, match=r"asks for what is computed from embed\.weight, .*, as a number"):
        ask(unknown().sum())


# -- on a stage


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(3) for _ in range(3))
        self.head = nn.Linear(3, 8)

    def before(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def argument(self, embedded: Tensor) -> Any:
        return None

    def between(self, i: int, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        self.states = [self.before(x)]
        for i, layer in enumerate(self.layers):
            self.states.append(self.between(i, layer(self.states[-1], self.argument(self.states[0]))))
        return self.head(self.states[-1])


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.penalty, self.kind = 0.0, "linear"

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        return super().forward(x) + (0 if other is None else other)


class Masks(Net):
    def argument(self, embedded: Tensor) -> Any:
        return {"mask": embedded.argmax(-1, keepdim=True) > 0}["mask"]


class Branches(Net):
    def before(self, x: Tensor) -> Tensor:
        embedded = super().before(x)
        return -embedded if embedded.mean() > 0 else embedded


class Norms(Net):
    def between(self, i: int, hidden: Tensor) -> Tensor:
        return self.norms[i](hidden)


class Skips(Net):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.head(self.states[-1] + self.states[1])


class Asks(Net):
    def between(self, i: int, hidden: Tensor) -> Tensor:
        return hidden + self.layers[i].penalty


def run(net: Net, index: int, step: Callable[[Net], Any] | None = None) -> tuple[Stage, Any]:
    before, after = ["net.embed"], ["net.norms", "net.head"]
    root = nn.ModuleDict({"net": net})
    names = [f"net.layers.{i}" for i in range(3)]
    owned = range(0, 2) if index == 0 else range(2, 3)
    options: dict[str, Any] = {"before": before, "after": after, "kept": (), "device": CPU}
    stage = cut(root, names, owned, network="net", index=index, count=2, **options)
    received = torch.ones(2, 3, requires_grad=True) if index else None
    with stage.microbatch(received) as passage:
        try:
            return stage, (step or (lambda net: net(torch.tensor([1, 2]))))(net)
        except StageEnd:
            return stage, passage.output


@pytest.mark.parametrize(
    ("kind", "index", "says"),
    [
        (Masks, 1, r"net\.layers\.2 takes what is computed from net\.embed\.weight, which stage 0 holds, \(0\.1\)"),
        (Branches, 1, r"asks for what is computed from net\.embed\.weight.* as a number"),
        (Asks, 1, r"asks net\.layers\.0 for its 'penalty', and that block is on another pipeline stage"),
        (Norms, 0, r"net\.norms\.0\.weight is held by stage 1.*but stage 0 uses it between them"),
    ],
)
def test_a_stage_refuses_what_it_doesnt_know(kind: type[Net], index: int, says: str) -> None:
    with pytest.raises(StepError, match=says):
        run(kind(), index)


def test_what_isnt_known_and_not_used_is_no_fault() -> None:
    for index in (0, 1):
        _, output = run(Net(), index)
        assert type(output) is Tensor
        assert output.isfinite().all()


def test_an_earlier_blocks_output_may_not_be_in_the_result() -> None:
    _, output = run(Skips(), 1)
    assert isinstance(output, Unknown)
    assert output.source == "the output of net.layers.0, a block of an earlier stage,"


def test_modules_of_which_a_part_is_elsewhere_are_named() -> None:
    stage, _ = run(Net(), 0)
    others = {"net.layers.2", "net.norms", "net.norms.0", "net.norms.1", "net.norms.2", "net.head"}
    assert set(stage.incomplete) == {"", "net", "net.layers", *others}


def test_a_hook_on_a_block_gets_what_is_known_of_its_output() -> None:
    net, seen = Net(), []
    for layer in net.layers:
        layer.register_forward_hook(lambda *passed: seen.append(passed[-1]))
    stage, _ = run(net, 1)
    assert [type(output) for output in seen] == [Unknown, Tensor, Tensor]  # the second is what was received
    assert not stage.passage.active
    assert net.layers[0].kind == "linear"
    assert not hasattr(net.layers[0], "penalty")  # outside a step
