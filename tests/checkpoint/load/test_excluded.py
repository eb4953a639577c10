"""Frozen tensors that a checkpoint leaves out: found in a base, or told of where they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import checkpoint
from lightning_shard.checkpoint.content import content_of_all
from lightning_shard.checkpoint.excluded import complete
from lightning_shard.errors import CheckpointError, StateMismatchError

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
