"""Which checkpoints a run keeps, finds and removes: on an S3 server as on the local disk, with the same callback."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint as LightningsOwn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.errors import CheckpointError, ConfigurationError
from lightning_shard.plugin.saving.model_checkpoint import save_as_last
from tests.parity import QUIET
from tests.servers import KEY, SECRET, Server, let_servers_forget, serve

LOSSES = [5.0, 3.0, 4.0, 1.0, 2.0, 6.0]
AT_EACH: dict[str, Any] = {"monitor": "val_loss", "save_on_train_epoch_end": False}
BEST_TWO: dict[str, Any] = {**AT_EACH, "save_top_k": 2, "save_last": True}


class Scripted(L.LightningModule):
    """Validates to the given losses, one after each step."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fails_at = fails_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self.fails_at:
            raise ZeroDivisionError("as the test asks for")
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", LOSSES[self.global_step - 1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass
class Place:
    """A directory for checkpoints: as a path of its store, and as what is really there."""

    dirpath: str
    folder: Path
    options: dict[str, Any] | None = None

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []

    def tear(self, name: str) -> None:
        """Leave what a save leaves that was cut off before its commit, long ago."""
        data = self.folder / name / "model" / "rank-00000-0123456789ab.safetensors"
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_bytes(b"half")
        then = time.time() - 7200
        os.utime(data, (then, then))
        (self.folder / name / "manifest.json").unlink(missing_ok=True)
        let_servers_forget()

    def fit(
        self,
        keep: LightningsOwn,
        steps: int,
        resume: str | None = None,
        module: Scripted | None = None,
        **trainer: Any,
    ) -> L.Trainer:
        made = self.trainer(keep, max_steps=steps, **trainer)
        made.fit(module or Scripted(), data(2), data(1), ckpt_path=resume)
        return made

    def trainer(self, keep: LightningsOwn, **settings: Any) -> L.Trainer:
        io = ShardedCheckpointIO(self.options, fsync=False)
        settings = {"val_check_interval": 1, **QUIET, **settings, "enable_checkpointing": True}
        return L.Trainer(callbacks=[keep], plugins=[io], devices=1, **settings)

    def keep(self, **settings: Any) -> ModelCheckpoint:
        return ModelCheckpoint(self.dirpath, filename="{step}", **settings)


def data(batches: int) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(batches, 2), batch_size=1)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve("s3", tmp_path_factory.mktemp("s3") / "served") as running:
        yield running


@pytest.fixture
def on_s3(s3: Server, tmp_path: Path) -> Place:
    return Place(f"{s3.url}/{tmp_path.name}", s3.folder / "bucket" / tmp_path.name, s3.options)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        return request.getfixturevalue("on_s3")
    return Place(str(tmp_path / "run"), tmp_path / "run")


SETTINGS: dict[str, dict[str, Any]] = {
    "best two and last": BEST_TWO,
    "highest": {**AT_EACH, "mode": "max"},
    "at the end of epochs": {"monitor": "val_loss", "save_top_k": 3},
    "all, every second step": {"monitor": "val_loss", "save_top_k": -1, "every_n_train_steps": 2},
    "newest, every second epoch": {"every_n_epochs": 2, "save_last": True},
    "newest, all the time": {"train_time_interval": timedelta(0)},
    "only the last": {"save_top_k": 0, "save_last": True, "every_n_train_steps": 1},
    "one name, versions": {**AT_EACH, "filename": "best", "save_top_k": 2},
    "one name, no versions": {**AT_EACH, "filename": "best", "enable_version_counter": False},
    "weights": {"save_weights_only": True, "save_top_k": -1, "every_n_train_steps": 3},
}
SHORT = ("best two and last", "at the end of epochs", "one name, versions")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in SETTINGS]
)
def test_s3_holds_what_lightnings_own_callback_would_keep_on_the_local_disk(
    name: str, on_s3: Place, tmp_path: Path
) -> None:
    settings = {"filename": "{step}", **SETTINGS[name]}
    own, ours = LightningsOwn(tmp_path, **settings), ModelCheckpoint(on_s3.dirpath, **settings)
    L.Trainer(callbacks=[own], max_steps=6, **{**QUIET, "enable_checkpointing": True, "val_check_interval": 1}).fit(
        Scripted(), data(2), data(1)
    )
    on_s3.fit(ours, 6)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept
    assert on_s3.names() == kept
    assert all(checkpoint.verify(f"{on_s3.dirpath}/{name}", storage_options=on_s3.options).ok for name in kept)
    assert relative(ours.state_dict(), on_s3.dirpath) == relative(own.state_dict(), str(tmp_path))


def relative(state: Any, dirpath: str) -> Any:
    if isinstance(state, dict):
        return {relative(key, dirpath): relative(value, dirpath) for key, value in state.items()}
    return state.replace(dirpath, "") if isinstance(state, str) else state


def test_last_goes_on_and_best_is_loaded_by_new_trainers(place: Place) -> None:
    with pytest.warns(UserWarning, match="no last checkpoint"):
        first = place.fit(place.keep(**BEST_TWO), 3, resume="last")
    second = place.fit(place.keep(**BEST_TWO), 3, resume="last")
    assert second.ckpt_path == f"{place.dirpath}/last.ckpt"
    assert str(second.ckpt_path) == f"{place.dirpath}/last.ckpt"
    states = [trainer.checkpoint_callback.state_dict() for trainer in (first, second)]
    # Lightning doesn't restore the newest score
    assert states[1] == {**states[0], "current_score": None}
    place.fit(keep := place.keep(**BEST_TWO), 6, resume="last")
    assert place.names() == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
    assert keep.best_model_path == f"{place.dirpath}/step=4.ckpt"
    assert keep.kth_best_model_path == f"{place.dirpath}/step=5.ckpt"
    keep.to_yaml()
    scores = (place.folder / "best_k_models.yaml").read_text()
    assert scores == f"{place.dirpath}/step=4.ckpt: 1.0\n{place.dirpath}/step=5.ckpt: 2.0\n"
    trainer = place.trainer(place.keep(**BEST_TWO))
    trainer.validate(Scripted(), data(1), ckpt_path="last", verbose=False)  # which tells of the best
    trainer.validate(Scripted(), data(1), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == f"{place.dirpath}/step=4.ckpt"


def test_last_is_the_newest_version_that_was_committed(place: Place) -> None:
    settings = {"save_last": True, "save_top_k": 0, "every_n_train_steps": 1}
    for steps in (1, 2, 3):  # new runs, which go on from none
        place.fit(place.keep(**settings), steps)
    assert place.names() == ["last-v1.ckpt", "last-v2.ckpt", "last.ckpt"]
    place.tear("last-v3.ckpt")
    place.tear("lasting.ckpt")
    assert found(place) == "last-v2.ckpt"
    place.tear("last-v2.ckpt")
    assert found(place) == "last-v1.ckpt"
    # the run goes on in the checkpoint that it was resumed from, whose name it knows from there
    resumed = place.fit(place.keep(**settings), 4, resume="last")
    assert resumed.global_step == 4
    assert resumed.ckpt_path == f"{place.dirpath}/last-v1.ckpt"
    # a new one takes the first free name, and torn ones are free
    place.fit(place.keep(**settings), 1)
    assert found(place) == "last-v2.ckpt"
    assert (
        checkpoint.read(f"{place.dirpath}/last-v2.ckpt", storage_options=place.options).trainer_state()["global_step"]
        == 1
    )


def found(place: Place) -> str:
    keep = place.keep(save_last=True)
    (path,) = keep._find_last_checkpoints(place.trainer(keep))
    return path.rpartition("/")[2]


def test_a_torn_save_is_no_checkpoint_and_in_nobodys_way(place: Place) -> None:
    place.tear("step=2.ckpt")
    place.tear("last.ckpt")
    with pytest.warns(UserWarning, match="no last checkpoint"):
        place.fit(place.keep(save_top_k=-1, save_last=True, every_n_train_steps=2), 2, resume="last")
    assert place.names() == ["last.ckpt", "step=2.ckpt"]
    for name in place.names():
        assert checkpoint.verify(f"{place.dirpath}/{name}", storage_options=place.options).ok
        assert not list((place.folder / name).rglob("*-0123456789ab.safetensors"))  # nor do they stay


@pytest.mark.parametrize("spelling", ["{}", pytest.param("{}/manifest.json", marks=pytest.mark.long)])
def test_what_a_run_was_resumed_from_is_never_removed(place: Place, spelling: str) -> None:
    place.fit(place.keep(every_n_train_steps=1), 2)
    assert place.names() == ["step=2.ckpt"]
    keep = place.keep(every_n_train_steps=1)
    place.fit(keep, 5, resume=spelling.format(f"{place.dirpath}/step=2.ckpt"))
    assert place.names() == ["step=2.ckpt", "step=5.ckpt"]  # 3 and 4 have been removed
    assert keep.best_model_path == f"{place.dirpath}/step=5.ckpt"


def test_what_a_run_was_resumed_from_is_not_saved_again_while_gradients_are_accumulated(tmp_path: Path) -> None:
    """Of its first batch's gradients, the next resume would know nothing."""
    place = Place(str(tmp_path), tmp_path)
    batches: list[int] = []

    class Note(ModelCheckpoint):
        def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
            batches.append(trainer.fit_loop.total_batch_idx + 1)
            super()._save_checkpoint(trainer, filepath)

    def run(steps: int, resume: str | None = None) -> None:
        keep = Note(place.dirpath, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
        trainer = place.trainer(keep, max_steps=steps, accumulate_grad_batches=3)
        trainer.fit(Scripted(), data(9), data(1), ckpt_path=resume)

    run(1)
    run(2, place.dirpath + "/step=1.ckpt")
    assert batches == [3, 3, 6, 6]  # of each step, and as last


class Signalled(Scripted):
    """Asks for a checkpoint before the fourth step, as a signal does."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            save_as_last(self.trainer)


@pytest.mark.parametrize("why", ["exception", "signal"])
def test_what_is_saved_out_of_turn_is_not_saved_over_the_best(tmp_path: Path, why: str) -> None:
    local = Place(str(tmp_path / "run"), tmp_path / "run")
    settings = {**AT_EACH, "filename": "best", "mode": "max"}
    if why == "exception":
        with pytest.raises(ZeroDivisionError):
            local.fit(
                ModelCheckpoint(local.dirpath, save_on_exception=True, **settings), 6, module=Scripted(fails_at=3)
            )
        saved = "best-v1.ckpt"
    else:
        local.fit(ModelCheckpoint(local.dirpath, **settings), 4, module=Signalled())
        saved = "last.ckpt"
    assert local.names() == sorted(["best.ckpt", saved])
    steps = {name: checkpoint.read(local.folder / name).trainer_state()["global_step"] for name in local.names()}
    assert steps == {"best.ckpt": 1, saved: 3}


def test_credentials_are_seen_nowhere(on_s3: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keep = on_s3.keep(save_last=True, every_n_train_steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        on_s3.fit(keep, 2)
        on_s3.fit(keep, 3, resume="last")
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in told]
    assert any("last.ckpt" in text for text in said)
    files = [path.read_bytes() for path in on_s3.folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    seen = [str(keep.state_dict()), repr(keep), keep.state_key, *said]
    for secret in (KEY, SECRET):
        assert not [text for text in seen if secret in text]
        assert not [data for data in files if secret.encode() in data]

    on_s3.options = {**(on_s3.options or {}), "secret": f"{SECRET}-but-wrong"}
    with pytest.raises(CheckpointError, match="can't be looked up: PermissionError") as refusal:  # at once
        on_s3.fit(on_s3.keep(), 1, module=Scripted(fails_at=0))
    assert SECRET not in str(refusal.value)


def test_a_link_to_the_newest_is_refused(tmp_path: Path) -> None:
    local = Place(str(tmp_path / "run"), tmp_path / "run")
    with pytest.raises(ConfigurationError, match="save_last=True"):
        local.fit(local.keep(save_last="link"), 1)


def test_a_url_is_a_str() -> None:
    assert ModelCheckpoint("s3://bucket/run/").dirpath == "s3://bucket/run"
    with pytest.raises(ConfigurationError, match="as a str"):
        ModelCheckpoint(Path("s3://bucket/run"))


def test_with_single_files_it_is_lightnings_own_callback(tmp_path: Path) -> None:
    kept = {}
    for name, kind in (("own", LightningsOwn), ("ours", ModelCheckpoint)):
        for steps in (3, 5):
            keep = kind(tmp_path / name, "{step}", **BEST_TWO)
            trainer = L.Trainer(
                callbacks=[keep], max_steps=steps, **{**QUIET, "enable_checkpointing": True, "val_check_interval": 1}
            )
            trainer.fit(Scripted(), data(2), data(1), ckpt_path="last")
        files = sorted(path.name for path in (tmp_path / name).iterdir() if path.is_file())
        kept[name] = (files, relative(keep.state_dict(), str(tmp_path / name)), trainer.global_step)
    assert kept["own"][0]
    assert kept["own"] == kept["ours"]
