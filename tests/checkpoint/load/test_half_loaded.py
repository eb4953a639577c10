"""What a refused load leaves behind, and modules that it can't fill in place."""

import pytest
import torch
from torch import nn

from lightning_shard import checkpoint
from lightning_shard.checkpoint import half_loaded
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
