"""What a step gives to loggers itself, or prints: warned of if it is once for each microbatch, and silent in trials."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import Logger

from lightning_shard.plugin.steps.around_steps import DirectOutput


class Memory(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    name, version = "memory", 0  # type: ignore[assignment]

    @property
    def experiment(self) -> Memory:
        return self

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class Module(L.LightningModule):
    def step(self, value: float) -> None:
        assert isinstance(self.logger, Memory)
        assert self.logger.name == "memory"
        self.logger.log_metrics({"a": value})
        self.logger.experiment.log_metrics({"b": value})
        for logger in self.loggers:
            logger.log_metrics({"c": value})  # type: ignore[union-attr]
        self.print(f"printed {value}")


def rows(value: float) -> list[dict[str, float]]:
    return [{name: value} for name in "abc"]


@pytest.fixture
def module() -> Module:
    made = Module()
    made.trainer = L.Trainer(logger=Memory(), accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False)
    return made


def given(module: Module) -> Any:
    return module.trainer.logger.rows  # type: ignore[union-attr]


def test_of_several_microbatches_it_is_told_once_what_to_do(module: Module, capsys: Any) -> None:
    output = DirectOutput(module, lambda: False)
    with output.watched(2), pytest.warns(UserWarning, match=r"calls self\.logger\.log_metrics\..*on_train_batch_end"):
        module.step(1.0)
    with warnings.catch_warnings(), output.watched(2):
        warnings.simplefilter("error")
        module.step(2.0)
    module.step(3.0)
    assert given(module) == rows(1.0) + rows(2.0) + rows(3.0)
    assert capsys.readouterr().out.split("\n")[:3] == ["printed 1.0", "printed 2.0", "printed 3.0"]


def test_what_is_run_again_is_given_once(module: Module, capsys: Any) -> None:
    output = DirectOutput(module, lambda: False)
    with output.watched(1):
        put_back = output.remember()
        module.step(1.0)
        put_back()
        module.step(2.0)
        put_back = output.remember()
        module.step(3.0)
        put_back()
        assert given(module) == []
    assert given(module) == rows(2.0)
    assert capsys.readouterr().out == "printed 2.0\n"


def test_trials_and_failed_steps_give_nothing(module: Module, capsys: Any) -> None:
    with DirectOutput(module).watched():
        module.step(1.0)
    output = DirectOutput(module, lambda: False)

    def fail() -> None:
        with output.watched(1):
            output.remember()
            module.step(2.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert given(module) == []
    assert capsys.readouterr().out == ""
    assert "print" not in vars(module)
