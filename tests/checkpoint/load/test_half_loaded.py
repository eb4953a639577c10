"""What a refused load leaves behind, modules that it can't fill in place, and frozen tensors that a base has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import checkpoint
from lightning_shard.checkpoint import half_loaded
from lightning_shard.checkpoint.content import content_of_all
from lightning_shard.checkpoint.excluded import complete
from lightning_shard.checkpoint.loading import load as loading
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, StateMismatchError
from tests.checkpoint.manifests import flip

SAVED = {"a": torch.arange(6.0), "b": torch.arange(4.0) + 10}


@pytest.fixture
def damaged(tmp_path):
    """A checkpoint whose last tensor differs from its digest."""
    checkpoint.save(SAVED, tmp_path)
    (file,) = (tmp_path / "model").iterdir()
    flip(file)
    return tmp_path


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in SAVED.items()}


def test_a_refused_load_of_little_changes_nothing(damaged, tmp_path_factory):
    into = zeros()
    with pytest.raises(CorruptCheckpointError, match="differ from their digest") as refused:
        checkpoint.load(damaged, into)
    assert "have changed" not in str(refused.value)
    assert all(not tensor.any() for tensor in into.values())
    checkpoint.save(into, tmp_path_factory.mktemp("saved"))


@pytest.fixture
def module():
    module = nn.Module()
    module.a, module.b = (nn.Parameter(tensor) for tensor in zeros().values())
    return module


@pytest.mark.parametrize("as_module", [False, True])
def test_what_a_refused_load_has_changed_is_not_saved_until_a_load_succeeds(
    damaged, module, tmp_path_factory, monkeypatch, as_module
):
    monkeypatch.setattr(loading, "CHECKED_FIRST_BYTES", 8)
    into = module if as_module else zeros()
    with pytest.raises(CorruptCheckpointError, match="have changed in part"):
        checkpoint.load(damaged, into)
    folder = tmp_path_factory.mktemp("saved")
    with pytest.raises(CheckpointError, match="A load into 'a' failed midway"):
        checkpoint.save(into, folder / "bad")
    assert not checkpoint.exists(folder / "bad")
    checkpoint.save({"c": torch.ones(3)}, folder / "others")
    checkpoint.save(SAVED, folder / "good")
    checkpoint.load(folder / "good", into)
    checkpoint.save(into, folder / "again")


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return torch.tensor(7)

    def set_extra_state(self, state):
        assert int(state) == 7


def test_a_module_whose_state_dict_is_copies_is_refused(tmp_path):
    saved, loaded = WithExtraState(3, 2), WithExtraState(3, 2)
    checkpoint.save(saved, tmp_path)
    with pytest.raises(StateMismatchError, match=r"has '_extra_state', .* load into state = module.state_dict"):
        checkpoint.load(tmp_path, loaded)
    state = loaded.state_dict()
    checkpoint.load(tmp_path, state)
    loaded.load_state_dict(state)
    assert torch.equal(loaded.weight, saved.weight)


def test_what_was_filled_by_other_means_is_saved_once_it_is_said(damaged, module, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(loading, "CHECKED_FIRST_BYTES", 8)
    with pytest.raises(CorruptCheckpointError, match="have changed in part"):
        checkpoint.load(damaged, module)
    module.load_state_dict(SAVED)
    folder = tmp_path_factory.mktemp("saved")
    with pytest.raises(CheckpointError, match=r"call checkpoint\.declare_filled"):
        checkpoint.save(module, folder)
    checkpoint.declare_filled(module)
    checkpoint.save(module, folder)
    assert all(torch.equal(found, SAVED[name]) for name, found in checkpoint.read(folder).full().items())


def test_of_views_with_gaps_none_is_saved_that_was_not_filled(tmp_path):
    table = torch.zeros(4, 6)
    columns = {name: table[:, at : at + 2] for name, at in (("a", 0), ("b", 2), ("c", 4))}
    half_loaded.mark(columns.values())
    half_loaded.clear([columns["a"], columns["c"]])
    with pytest.raises(CheckpointError, match="A load into 'b' failed"):
        checkpoint.save({"b": columns["b"]}, tmp_path)
    half_loaded.clear([columns["b"][:2], columns["b"][2:]])  # not the view that was marked: it isn't believed
    with pytest.raises(CheckpointError, match="A load into 'b' failed"):
        checkpoint.save({"b": columns["b"]}, tmp_path)
    half_loaded.clear([table])
    checkpoint.save(columns, tmp_path)


BASE = {
    "embed.weight": torch.arange(12.0).view(4, 3),
    "layers.0.q.weight": torch.arange(9.0).view(3, 3),
    "layers.0.q.bias": torch.arange(3.0),
}
PEFT = "model.base_model.model."
WRAPPED = {
    f"{PEFT}embed.original_module.weight": "embed.weight",
    f"{PEFT}layers.0.q.base_layer.weight": "layers.0.q.weight",
    f"{PEFT}layers.0.q.base_layer.bias": "layers.0.q.bias",
}
"""As peft names the base's tensors in a module that holds the model as ``self.model``."""
ADAPTER = f"{PEFT}layers.0.q.lora_A.default.weight"


def save_without(
    path: Path,
    frozen: Mapping[str, Tensor],
    origins: Mapping[str, str] | None = None,
    trained: Mapping[str, Tensor] | None = None,
) -> None:
    contents = content_of_all(frozen)
    told: dict[str, Any] = {
        name: {"dtype": "F32", "shape": list(tensor.shape), "content": contents[name]}
        for name, tensor in frozen.items()
    }
    record = {"tensors": told, "base": None, "origins": dict(origins or {})}
    state = {"pytorch-lightning_version": L.__version__, "lightning_shard": {"excluded": record}}
    checkpoint.save(trained or {ADAPTER: torch.ones(2, 3)}, path, trainer_state=state)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_base_is_found_without_what_peft_adds_to_names(tmp_path: Path, prefix: str) -> None:
    checkpoint.save({prefix + name: tensor for name, tensor in BASE.items()}, tmp_path / "base")
    save_without(tmp_path / "c", {name: BASE[inner] for name, inner in WRAPPED.items()})
    whole = complete(checkpoint.read(tmp_path / "c"), tmp_path / "base").full()
    assert whole.keys() == {*WRAPPED, ADAPTER}
    assert all(torch.equal(whole[name], BASE[inner]) for name, inner in WRAPPED.items())


def test_a_base_that_leaves_doubt_is_refused(tmp_path: Path) -> None:
    checkpoint.save(BASE, tmp_path / "base")
    two = {f"{PEFT}layers.0.q.{wrapper}weight": torch.zeros(3, 3) for wrapper in ("", "base_layer.")}
    save_without(tmp_path / "two of one name", two)
    with pytest.raises(StateMismatchError, match=r"if they stay unique without it\. Save the whole module once"):
        complete(checkpoint.read(tmp_path / "two of one name"), tmp_path / "base")
    for title, other, error in (
        ("shape", torch.zeros(3, 2), "pass a base of the same dtypes"),
        ("content", torch.zeros(3, 3), "holds another"),
    ):
        save_without(tmp_path / title, {f"{PEFT}layers.0.q.base_layer.weight": other})
        with pytest.raises(StateMismatchError, match=error):
            complete(checkpoint.read(tmp_path / title), tmp_path / "base")


def test_who_asks_for_what_was_left_out_is_told_where_it_is(tmp_path: Path) -> None:
    frozen = {name: BASE[inner] for name, inner in WRAPPED.items()}
    into = {ADAPTER: torch.zeros(2, 3), **{name: torch.zeros_like(tensor) for name, tensor in frozen.items()}}
    for title, origins, source in (("known", {PEFT: "some/model"}, "from some/model"), ("built", {}, "when it was")):
        save_without(tmp_path / title, frozen, origins)
        with pytest.raises(
            StateMismatchError, match=rf"checkpoint \(3\): .* leaves out 3 frozen tensors .* had {source}"
        ):
            checkpoint.load(tmp_path / title, into)
        assert checkpoint.load(tmp_path / title, into, strict=False).missing == list(frozen)
    with pytest.raises(StateMismatchError) as refused:
        checkpoint.load(tmp_path / "known", {})
    assert "leaves out" not in str(refused.value)


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "adapter"):
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("is_there", [True, False])
def test_load_from_checkpoint_takes_what_was_left_out_from_where_a_model_was_loaded(
    tmp_path: Path, is_there: bool
) -> None:
    """A transformers model and the one in it record the same folder, each under its own prefix."""
    frozen = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}
    base = str(tmp_path / "base")
    trained = {"adapter": torch.full((2,), 3.0)}
    save_without(tmp_path / "c", frozen, {"": base, "model.": base}, trained)
    if is_there:
        checkpoint.save(frozen, base)
        loaded = Lit.load_from_checkpoint(tmp_path / "c").state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in (frozen | trained).items())
    else:
        with pytest.raises(CheckpointError, match=r"opens what gather\(path, out, base=\) writes"):
            Lit.load_from_checkpoint(tmp_path / "c")
