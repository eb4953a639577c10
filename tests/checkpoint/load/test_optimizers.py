"""Torch optimizers in and out of checkpoints, by themselves and in the forms that torch itself gives their state."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_shard import checkpoint
from lightning_shard.errors import StateMismatchError, UnsupportedStateError
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import trainer_of

STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3, bias=False))


def adamw(module: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """Two groups that differ in what matters, the second of parameters in another order than the module's."""
    named = dict(module.named_parameters())
    decayed = [named.pop("0.weight"), named.pop("2.weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": list(reversed(named.values())), "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr, amsgrad=True)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same whole batch on every rank, so that averaging over ranks changes nothing."""
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(parameter).clone() for name, parameter in module.named_parameters()}


FORMS = {
    "optimizer": lambda module, optimizer: optimizer,
    "numbered": lambda module, optimizer: optimizer.state_dict(),
    "named": get_optimizer_state_dict,
}


def sharded() -> nn.Sequential:
    module, mesh = network(), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in module:
        fully_shard(part, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def save_in_all_forms(folder: str) -> None:
    module = sharded()
    optimizer = adamw(module)
    train(module, optimizer, steps=range(STEPS))
    saver = checkpoint.AsyncSaver()
    for form, of in FORMS.items():
        checkpoint.save(module, f"{folder}/{form}", optimizer=of(module, optimizer), trainer_state={"step": STEPS})
    saver.save(module, f"{folder}/asynchronous", optimizer=optimizer)
    saver.close()


def go_on(module: nn.Module, path: str) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    optimizer = adamw(module, lr=7.0)  # it hasn't stepped, and has other settings
    assert checkpoint.load(path, into=module, optimizer=optimizer) == ([], [])
    train(module, optimizer, steps=range(STEPS, STEPS + 1))
    return whole(module)


def go_on_sharded(folder: str) -> dict[str, dict[str, Tensor]]:
    return {form: go_on(sharded(), f"{folder}/{form}") for form in (*FORMS, "asynchronous")}


def test_a_plain_run_goes_on_as_if_undisturbed_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    undisturbed = network()
    train(undisturbed, adamw(undisturbed), steps=range(STEPS + 1))
    run_ranks(save_in_all_forms, 2, str(tmp_path))
    assert checkpoint.read(tmp_path / "optimizer").trainer_state()["step"] == STEPS
    named = {form: set(checkpoint.read(tmp_path / form).optimizer) for form in FORMS}
    assert "0/0.weight/max_exp_avg_sq" in named["optimizer"]
    assert named["optimizer"] == named["named"]
    ends = run_ranks(go_on_sharded, 4, str(tmp_path))
    ends.append({form: go_on(network(), f"{tmp_path}/{form}") for form in (*FORMS, "asynchronous")})
    for end in ends:
        for form, parameters in end.items():
            for name, parameter in undisturbed.named_parameters():
                torch.testing.assert_close(parameters[name], parameter.detach(), rtol=0, atol=1e-7, msg=form)


def two_stages(folder: str) -> dict[str, Tensor]:
    """Each of two ranks has half of the network, and an optimizer of its own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))
    rank = dist.get_rank()
    module = network()
    own = nn.ModuleDict({str(i): part for i, part in enumerate(module) if (i < 1) == (rank == 0)})
    group = {"params": list(own.parameters()), "weight_decay": 0.1 * rank}
    optimizer = torch.optim.AdamW([group])
    for parameter in own.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    checkpoint.save(own, f"{folder}/named", optimizer=optimizer, mesh=mesh["data"])
    with pytest.raises(UnsupportedStateError, match="numbers"):
        checkpoint.save(own, f"{folder}/numbered", optimizer=optimizer.state_dict(), mesh=mesh["data"])
    fresh = torch.optim.AdamW([{"params": list(own.parameters())}])
    assert checkpoint.load(f"{folder}/named", own, optimizer=fresh) == ([], [])
    for number, entries in fresh.state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.equal(value, before[number][key])
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in own.named_parameters()}


def test_stages_that_hold_different_parameters_save_one_optimizer(tmp_path: Path) -> None:
    parts = run_ranks(two_stages, 2, str(tmp_path))
    module = network()
    optimizer = torch.optim.AdamW(module.parameters())
    checkpoint.load(tmp_path / "named", module, optimizer=optimizer)
    for name, parameter in module.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], (parts[0] | parts[1])[name]), name


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = network()
    optimizer = adamw(module)
    train(module, optimizer, steps=range(2))
    return module, optimizer


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_several_optimizers_of_any_kind_come_back_as_they_were(tmp_path: Path) -> None:
    def two_of(module: nn.Sequential, lr: float) -> list[torch.optim.Optimizer]:
        rest = [*module[1].parameters(), *module[2].parameters()]
        return [torch.optim.SGD(module[0].parameters(), lr=lr, momentum=0.9), torch.optim.LBFGS(rest)]

    module, into = network(), network()
    optimizers, fresh = two_of(module, 0.1), two_of(into, 0.7)
    train(module, optimizers[0], steps=range(2))
    optimizers[1].step(lambda: module(torch.ones(2, 6)).square().mean())
    checkpoint.save(module.state_dict(), tmp_path / "c", optimizer=optimizers)  # parameters found by their memory
    checkpoint.load(tmp_path / "c", into.state_dict(), optimizer=fresh)
    for ours, theirs in zip(fresh, optimizers, strict=True):
        assert same(ours.state_dict(), theirs.state_dict())
    with pytest.raises(StateMismatchError, match="2 optimizers, and 1"):
        checkpoint.load(tmp_path / "c", into, optimizer=fresh[0])


class Counting(torch.optim.Optimizer):
    """Keeps its state under keys of several kinds, as optimizers that number what they keep do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                0: torch.full_like(parameter, 1.0),
                "0": torch.full_like(parameter, 2.0),
                "a/b": torch.full_like(parameter, 4.0),
                (0, 1): {"past": [torch.full((2,), 3.0)]},
            }


def test_the_keys_of_a_state_stay_what_they_are(tmp_path: Path) -> None:
    module, other = nn.Linear(2, 3), nn.Linear(2, 3)
    saved, loaded = Counting(module.parameters()), Counting(other.parameters())
    saved.step()
    checkpoint.save(module, tmp_path / "c", optimizer=saved)
    checkpoint.load(tmp_path / "c", other, optimizer=loaded)
    for before, after in zip(saved.state.values(), loaded.state.values(), strict=True):
        assert set(after) == {0, "0", "a/b", (0, 1)}
        assert torch.equal(after[0], before[0])
        assert torch.equal(after["0"], before["0"])
        assert torch.equal(after["a/b"], before["a/b"])
        assert torch.equal(after[0, 1]["past"][0], before[0, 1]["past"][0])


def slashed() -> nn.ModuleDict:
    parts = {
        "conv/1": nn.Linear(2, 3),
        "conv": nn.Linear(3, 2),
        "p": nn.ParameterDict({"a/exp_avg": torch.ones(2), "a": torch.ones(2)}),
    }
    return nn.ModuleDict(parts)


def test_names_may_contain_slashes(tmp_path: Path) -> None:
    module = slashed()
    optimizer = torch.optim.AdamW(module.parameters())
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    for folder, saved, prefix in (("a", module, None), ("b", nn.ModuleDict({"model": module}), "model.")):
        checkpoint.save(saved, tmp_path / folder, optimizer=optimizer)
        into = slashed()
        fresh = torch.optim.AdamW(into.parameters())
        checkpoint.load(tmp_path / folder, into, optimizer=fresh, strip_prefix=prefix)
        assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_ckpt_whose_optimizer_state_is_by_names_is_taken_by_position_as_torch_does(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    names = [f"any/name.{number}" for number in range(4)]
    named = {
        "state": {names[number]: entries for number, entries in state["state"].items()} | {"note": 5},
        "param_groups": [{**state["param_groups"][0], "params": names}],
    }
    torch.save({"state_dict": module.state_dict(), "optimizer_states": [named]}, tmp_path / "a.ckpt")
    again = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    other = torch.optim.AdamW(again.parameters(), lr=0.2)
    checkpoint.load(tmp_path / "a.ckpt", again, optimizer=other)
    assert other.state.pop("note") == 5  # type: ignore[call-overload]
    found = other.state_dict()
    assert found["param_groups"] == state["param_groups"]
    assert found["state"].keys() == state["state"].keys()
    for number, entries in state["state"].items():
        assert all(torch.equal(found["state"][number][key], value) for key, value in entries.items())


def test_what_does_not_fit_is_refused_and_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    module, optimizer = trained()
    checkpoint.save(module, tmp_path / "c", optimizer=optimizer)
    checkpoint.save(module, tmp_path / "weights")
    checkpoint.save(module, tmp_path / "by name", optimizer={"m": torch.ones(2)})
    plain = torch.optim.AdamW(module.parameters())
    swapped = adamw(module)
    swapped.param_groups[0]["params"], swapped.param_groups[1]["params"] = (
        swapped.param_groups[1]["params"],
        swapped.param_groups[0]["params"],
    )
    half = torch.optim.AdamW(
        [{"params": [*module[0].parameters(), module[2].weight]}, {"params": list(module[1].parameters())[:1]}]
    )
    of_sgd = torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups], lr=0.1, momentum=0.9)
    for path, given, match in (
        (
            "c",
            of_sgd,
            "settings .*betas.*, and lacks dampening, momentum, nesterov, so .* another optimizer class than SGD",
        ),
        ("c", plain, "2 parameter groups, and the one here has 1"),
        ("c", swapped, "in the same order"),
        ("c", half, "was in group 1"),
        ("weights", plain, r"Missing in the checkpoint \(5\): optimizer:0/0\.weight"),
        ("by name", plain, "optimizer= a mapping"),
        ("c", FORMS["numbered"](module, optimizer), "pass the torch.optim.Optimizer itself"),
    ):
        before = copy.deepcopy(given if isinstance(given, dict) else given.state_dict())
        with pytest.raises((StateMismatchError, UnsupportedStateError), match=match):
            checkpoint.load(tmp_path / path, module, optimizer=given)
        assert same(given if isinstance(given, dict) else given.state_dict(), before)
    fewer = torch.optim.AdamW(
        [{"params": [module[0].weight]}, {"params": [module[1].bias, module[1].weight, module[0].bias]}]
    )
    with pytest.raises(StateMismatchError, match=r"Not in the state \(1\): optimizer:0/2\.weight"):
        checkpoint.load(tmp_path / "c", module, optimizer=fewer)
    assert checkpoint.load(tmp_path / "c", module, optimizer=fewer, strict=False) == ([], ["optimizer:0/2.weight"])
    assert torch.equal(fewer.state[module[0].weight]["exp_avg"], optimizer.state[module[0].weight]["exp_avg"])


def test_what_can_not_be_saved_is_refused(tmp_path: Path) -> None:
    module, optimizer = trained()
    with pytest.raises(UnsupportedStateError, match="isn't in the state"):
        checkpoint.save(network(), tmp_path / "c", optimizer=optimizer)
    for state in ("text", {"optimizer_states": 1}):
        with pytest.raises(UnsupportedStateError, match="'optimizer_states' where an optimizer is saved"):
            checkpoint.save(module, tmp_path / "c", optimizer=optimizer, trainer_state=state)
    with pytest.raises(UnsupportedStateError, match="holds a Linear"):
        checkpoint.save(module, tmp_path / "c", optimizer=[nn.Linear(1, 1)])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with pytest.raises(UnsupportedStateError, match=r"'param_groups\..* not a tensor"):
        checkpoint.save(module, tmp_path / "c", optimizer=get_optimizer_state_dict(module, optimizer, options=options))
    assert not checkpoint.exists(tmp_path / "c")


class Module(L.LightningModule):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.model)


def batches(steps: range) -> DataLoader[Tensor]:
    drawn = (torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) for step in steps)
    return DataLoader(list(itertools.chain.from_iterable(drawn)), batch_size=8)


def fit(steps: range, save: str | None = None, resume: str | None = None) -> dict[str, Tensor]:
    trainer = trainer_of({}, 1, max_steps=len(steps))
    module = Module()
    trainer.fit(module, batches(steps), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return whole(module.model)


def trainers_and_plain_loops(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    fit(range(STEPS), save=f"{folder}/of a trainer")
    module = network()
    optimizer = adamw(module, lr=7.0)
    checkpoint.load(f"{folder}/of a trainer", module, optimizer=optimizer, strip_prefix="model.")
    plain = network()
    plain_optimizer = adamw(plain)
    train(plain, plain_optimizer, steps=range(STEPS))
    assert same(optimizer.state_dict(), plain_optimizer.state_dict())
    checkpoint.save(plain, f"{folder}/plain", optimizer=plain_optimizer)
    train(module, optimizer, steps=range(STEPS, STEPS + 1))
    train(plain, plain_optimizer, steps=range(STEPS, STEPS + 1))
    return whole(plain), whole(module), fit(range(STEPS, STEPS + 1), resume=f"{folder}/plain")


def test_trainers_and_plain_loops_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    ((plain, from_trainer, in_trainer),) = run_ranks(trainers_and_plain_loops, 1, str(tmp_path), elastic=True)
    for name in plain:
        assert torch.equal(from_trainer[name], plain[name]), name
        assert torch.equal(in_trainer[name], plain[name]), name


def _stages_with_a_new_parameter(folder: str) -> list[float]:
    """As of a pipeline: the first stage has none of the second group, the second has new ones only of the first."""
    names = [["a", "b"], [], []] if dist.get_rank() == 0 else [["new"], ["c"], []]
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for group in names for name in group})
    optimizer = torch.optim.SGD([{"params": [module[name] for name in group]} for group in names], lr=0.1)
    checkpoint.load(folder, module, optimizer=optimizer, strict=False)
    return [group["lr"] for group in optimizer.param_groups]


def test_a_group_has_the_same_settings_on_all_stages(tmp_path: Path) -> None:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in ("a", "b", "c")})
    lrs = {0.2: [module["a"], module["b"]], 0.3: [module["c"]], 0.4: []}
    optimizer = torch.optim.SGD([{"params": parameters, "lr": lr} for lr, parameters in lrs.items()])
    checkpoint.save(module, tmp_path, optimizer=optimizer)
    assert run_ranks(_stages_with_a_new_parameter, 2, str(tmp_path)) == [list(lrs)] * 2
