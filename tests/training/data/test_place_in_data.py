"""Lightning's own fit loop, stopped anywhere and taken up on another number of data ranks, sees each sample once.

The data ranks are simulated one after the other in this process: nothing here talks to another rank.
"""

import math
from itertools import chain, islice

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_shard.plugin.data.loader import shard_dataloader
from lightning_shard.plugin.data.resume import batches_trained, resume_data

SAMPLES = 48  # with 4 ranks and batches of 2: 6 steps; with 2 ranks 12; with 1 rank 24


class Dealt(SingleDeviceStrategy):
    """Data rank ``rank`` of ``size``."""

    def __init__(self, rank, size):
        super().__init__(device="cpu")
        self.rank, self.size = rank, size

    def process_dataloader(self, dataloader):
        trainer = self.lightning_module.trainer
        return shard_dataloader(
            dataloader, data_rank=self.rank, data_size=self.size, seed=0, train=trainer.training,
            batches_trained=lambda: batches_trained(trainer),
        )  # fmt: skip

    def on_train_start(self):
        resume_data(self.lightning_module.trainer)


class Recorder(pl.LightningModule):
    def __init__(self, asks_for_steps=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.asks_for_steps = asks_for_steps
        self.seen = []  # (epoch, batch_idx, samples)
        self.validated = []  # (epoch, batch_idx of training, batches of validation)
        self.lengths = []
        self.in_validation = 0

    def training_step(self, batch, batch_idx):
        samples = [int(i) for part in (batch.values() if isinstance(batch, dict) else [batch]) for i in part]
        self.seen.append((self.current_epoch, batch_idx, samples))
        self.lengths.append(self.trainer.num_training_batches)
        return self.weight.sum()

    def on_validation_start(self):
        self.in_validation = 0

    def validation_step(self, batch, batch_idx):
        self.in_validation += 1

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.validated.append((self.current_epoch, self.trainer.fit_loop.batch_idx, self.in_validation))

    def configure_optimizers(self):
        if self.asks_for_steps:
            self.asked = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(Exception):
    pass


class SaveAndStop(Callback):
    """Save a checkpoint in a hook when so many batches of the run were trained on, and end the run as a crash would."""

    def __init__(self, path, hook, steps):
        self.path, self.steps = path, steps
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.global_step >= self.steps and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            # the exception leaves a cycle behind, in which torch takes 5 s to end each worker
            trainer.fit_loop._combined_loader._iterator.iterators.clear()
            raise Stop


def loader(workers=0, samples=SAMPLES, batch_size=2, shuffle=True, **options):
    return DataLoader(range(samples), batch_size=batch_size, shuffle=shuffle, num_workers=workers, **options)


def fit_rank(rank, size, folder, *, resume=None, stop=None, make=loader, asks=False, validate=True, **options):
    path = folder / f"of-{size}-{rank}.ckpt"
    module = Recorder(asks)
    if not validate:
        module.validation_step = None
        options["limit_val_batches"] = 0
    trainer = pl.Trainer(
        strategy=Dealt(rank, size),
        accelerator="cpu",
        callbacks=[SaveAndStop(path, *stop)] if stop else [],
        **{
            "max_epochs": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "num_sanity_val_steps": 0, **options,
        },
    )  # fmt: skip
    val = DataLoader(range(8), batch_size=2)
    try:
        trainer.fit(module, make(), val, ckpt_path=resume, weights_only=False)
        assert stop is None, "the run ended before it was to be stopped"
    except Stop:
        pass
    return module, path


def fit(size, folder, **options):
    """Run every rank: the world's steps as ``(epoch, batch_idx, samples of all)``, rank 0's module and checkpoint."""
    runs = [fit_rank(rank, size, folder, **options) for rank in range(size)]
    steps = []
    for parts in zip(*(module.seen for module, _ in runs), strict=True):
        assert len({(epoch, batch_idx) for epoch, batch_idx, _ in parts}) == 1
        epoch, batch_idx, _ = parts[0]
        steps.append(
            (epoch, batch_idx, list(chain.from_iterable(zip(*(samples for *_, samples in parts), strict=True))))
        )
    return steps, runs[0][0], runs[0][1]


def samples_of(steps, epoch):
    return [index for of, _, samples in steps if of == epoch for index in samples]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    steps, _, _ = fit(1, tmp_path_factory.mktemp("whole"))
    return [samples_of(steps, epoch) for epoch in range(2)]


def test_the_ranks_together_train_on_one_order(tmp_path, uninterrupted):
    for size in (2, 4):
        steps, module, _ = fit(size, tmp_path)
        assert [samples_of(steps, epoch) for epoch in range(2)] == uninterrupted
        assert set(module.lengths) == {SAMPLES // (2 * size)}
    assert sorted(uninterrupted[0]) == sorted(uninterrupted[1]) == list(range(SAMPLES))
    assert uninterrupted[0] != uninterrupted[1]


HOOKS = ["on_train_batch_start", "on_train_batch_end", "on_validation_end"]


@pytest.mark.parametrize(
    ("hook", "asks", "workers"),
    [
        *((hook, hook == "on_train_batch_end", 0) for hook in HOOKS),
        pytest.param("on_train_batch_start", True, 2, marks=pytest.mark.ranks),
        pytest.param("on_validation_end", False, 2, marks=[pytest.mark.ranks, pytest.mark.long]),
    ],
)
def test_from_4_to_2_to_1_ranks_in_mid_epoch(tmp_path, uninterrupted, hook, asks, workers):
    def make():
        return loader(workers)

    options = {"make": make, "asks": asks, "val_check_interval": 0.25}
    first, _, path = fit(4, tmp_path, stop=(hook, 3), **options)
    second, module, path = fit(2, tmp_path, stop=(hook, 3 + 3), resume=path, **options)
    third, last_module, _ = fit(1, tmp_path, resume=path, **options)
    assert samples_of(chain(first, second, third), 0) == uninterrupted[0]
    assert samples_of(third, 1) == uninterrupted[1]
    # the batches are counted as they would have been on the layout at hand, up to the epoch's constant length
    assert [batch_idx for _, batch_idx, _ in second] == list(range(6, 9))
    assert set(module.lengths) == {12}
    assert set(last_module.lengths) == {24}
    assert [batch_idx for epoch, batch_idx, _ in third] == [*range(18, 24), *range(24)]


@pytest.mark.parametrize(
    "limits", [pytest.param({"max_epochs": 3}, marks=pytest.mark.long), {"max_epochs": -1, "max_steps": 30}]
)
@pytest.mark.parametrize(
    ("hook", "validate"),
    [
        ("on_train_batch_end", False),
        ("on_validation_end", True),
        ("on_train_epoch_end", True),
        ("on_train_epoch_start", False),
    ],
)
def test_a_checkpoint_of_the_end_of_an_epoch_begins_the_next_one(tmp_path, uninterrupted, hook, limits, validate):
    first, _, path = fit(4, tmp_path, stop=(hook, 6), validate=validate, **limits)
    assert samples_of(first, 0) == uninterrupted[0]
    for size in (4, 2):
        second, *_ = fit(size, tmp_path, resume=path, validate=validate, **limits)
        assert samples_of(second, 0) == []
        assert samples_of(second, 1) == uninterrupted[1]
        assert [batch_idx for epoch, batch_idx, _ in second if epoch == 1] == list(range(SAMPLES // 2 // size))


@pytest.mark.parametrize(("hook", "size"), [("on_train_batch_start", 4), ("on_before_zero_grad", 2)])
def test_a_checkpoint_of_an_epoch_s_last_batch_before_it_was_trained_on(tmp_path, uninterrupted, hook, size):
    """As callbacks save on an exception. The batch was counted as done, and the epoch's validation was left out."""
    *_, path = fit(4, tmp_path, stop=(hook, 5))
    second, module, _ = fit(size, tmp_path, resume=path)
    assert samples_of(second, 0) == uninterrupted[0][-8:]
    assert samples_of(second, 1) == uninterrupted[1]
    in_epoch = SAMPLES // 2 // size
    assert [batch_idx for epoch, batch_idx, _ in second if epoch == 0] == list(range(in_epoch * 5 // 6, in_epoch))
    assert [epoch for epoch, *_ in module.validated] == [0, 1]


@pytest.mark.parametrize("validate", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_resumed_at_an_epoch_s_end_can_be_resumed_again_in_the_next_one(tmp_path, uninterrupted, validate):
    """Its epochs were counted wrong, so the third run counted from the epoch's begin, and left out its last step."""

    def run(size, **options):
        return fit(size, tmp_path, validate=validate, accumulate_grad_batches=8 // size, **options)

    *_, path = run(4, stop=("on_train_batch_end", 3))
    second, _, path = run(2, resume=path, stop=("on_train_batch_end", 3 + 1))
    assert samples_of(second, 1) == uninterrupted[1][:16]
    for size, batches in ((2, range(4, 12)), (1, range(8, 24))):
        third, module, _ = run(size, resume=path)
        assert samples_of(third, 1) == uninterrupted[1][16:]
        assert [(epoch, batch_idx) for epoch, batch_idx, _ in third] == [(1, batch_idx) for batch_idx in batches]
        assert module.trainer.global_step == 3 + 3
        assert len(module.validated) == validate


@pytest.mark.parametrize("size", [3, 8])
def test_where_it_does_not_divide_the_epoch_ends_with_the_data(tmp_path, uninterrupted, size):
    first, _, path = fit(4, tmp_path, stop=("on_train_batch_end", 2))
    second, module, _ = fit(size, tmp_path, resume=path)
    seen = samples_of(first, 0) + samples_of(second, 0)
    assert set(seen) == set(range(SAMPLES))
    assert len(seen) - SAMPLES < size
    assert seen[:SAMPLES] == uninterrupted[0]
    assert samples_of(second, 1)[:SAMPLES] == uninterrupted[1]
    (length,) = set(module.lengths)
    assert length == math.ceil(math.ceil(SAMPLES / size) / 2)
    assert [batch_idx for epoch, batch_idx, _ in second if epoch == 0][-1] == length - 1
    assert [epoch for epoch, *_ in module.validated] == [0, 1]


def test_gradients_are_accumulated_in_step_with_the_data(tmp_path, uninterrupted):
    first, _, path = fit(4, tmp_path, stop=("on_train_batch_end", 1), accumulate_grad_batches=2)
    assert len(first) == 2
    second, module, _ = fit(2, tmp_path, resume=path, accumulate_grad_batches=4)
    assert samples_of(first, 0) + samples_of(second, 0) == uninterrupted[0]
    # 1 step of 2 batches before, then 2 and 3 of 4 batches
    assert module.trainer.global_step == 1 + 2 + 3


def forget_place(path):
    checkpoint = torch.load(path, weights_only=False)
    del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(checkpoint, path)


@pytest.mark.parametrize("stored", [True, False])
def test_several_loaders_keep_their_own_places(tmp_path, stored):
    """The short loader (8 samples) is read again and again beside the long one."""

    def make():
        return CombinedLoader(
            {"long": loader(shuffle=False), "short": loader(samples=8, shuffle=False)}, "max_size_cycle"
        )

    def parts(steps):
        longs, shorts = [], []
        for _, _, samples in steps:
            longs += samples[: len(samples) // 2]
            shorts += samples[len(samples) // 2 :]
        return longs, shorts

    first, _, path = fit(4, tmp_path, stop=("on_train_batch_end", 3), make=make, max_epochs=1)
    if not stored:
        forget_place(path)
    second, _, _ = fit(2 if stored else 4, tmp_path, resume=path, make=make, max_epochs=1)
    longs, shorts = (a + b for a, b in zip(parts(first), parts(second), strict=True))
    assert longs == list(range(SAMPLES))
    assert shorts == list(range(8)) * 6


def test_a_batch_sampler_resumes_by_whole_batches(tmp_path):
    batches = [[i, i + 1, i + 2][: 1 + i % 3] for i in range(24)]

    def make():
        return DataLoader(range(SAMPLES), batch_sampler=batches)

    runs = [fit_rank(rank, 4, tmp_path, stop=("on_train_batch_end", 3), make=make, max_epochs=1) for rank in range(4)]
    first = [samples for parts in zip(*(module.seen for module, _ in runs), strict=True) for *_, samples in parts]
    rest = [fit_rank(rank, 2, tmp_path, resume=runs[0][1], make=make, max_epochs=1)[0].seen for rank in range(2)]
    second = [samples for parts in zip(*rest, strict=True) for *_, samples in parts]
    assert first + second == batches
    assert [batch_idx for _, batch_idx, _ in rest[0]] == list(range(6, 12))


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_place_that_was_not_saved_is_guessed_aloud(tmp_path, uninterrupted, epoch):
    first, _, path = fit(4, tmp_path, stop=("on_train_batch_end", 3 + epoch * SAMPLES // 8))
    forget_place(path)
    with pytest.warns(UserWarning, match=r"doesn't store the position in the data.*, 3 batches are skipped"):
        second, _, _ = fit(4, tmp_path, resume=path)
    assert samples_of(first, epoch) + samples_of(second, epoch) == uninterrupted[epoch]


class Stateful(DataLoader):
    """As torchdata's StatefulDataLoader: the state that is loaded is that of the next iterator."""

    taken, _next = 0, 0

    def __iter__(self):
        self.taken, self._next = self._next, 0
        return self._rest(super().__iter__(), self.taken)

    def _rest(self, batches, start):
        for batch in islice(batches, start, None):
            self.taken += 1
            yield batch

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self._next = state["taken"]


@pytest.mark.parametrize("asks", [False, True])
def test_a_loader_with_a_state_of_its_own_resumes_at_it_though_the_loaders_were_asked_for_before(tmp_path, asks):
    options = {"make": lambda: Stateful(range(SAMPLES), batch_size=2), "asks": asks}
    first, _, path = fit(1, tmp_path, stop=("on_train_batch_end", 5), **options)
    second, _, _ = fit(1, tmp_path, resume=path, **options)
    for epoch in range(2):
        assert samples_of(chain(first, second), epoch) == list(range(SAMPLES))
