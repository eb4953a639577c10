"""``open`` is replaced while any thread's steps are watched, and put back whichever ends first."""

from __future__ import annotations

import builtins
import io
import threading
import warnings
from pathlib import Path

import pytest

from lightning_shard.plugin.steps.checks.written_files import WrittenFiles


def append(path: Path) -> None:
    for _ in range(3):
        with path.open("a") as file:
            file.write("x")


def test_it_is_told_of_once_in_each_run(tmp_path: Path) -> None:
    for run in range(2):
        files = WrittenFiles()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for batch in range(3):
                with files.watched():
                    append(tmp_path / f"{run} {batch}")
        assert [str(each.message).partition(str(tmp_path))[0] for each in said] == ["A step appends to "]


def test_steps_of_several_threads_end_in_any_order(tmp_path: Path) -> None:
    before, inside, other_ended = (builtins.open, io.open), threading.Event(), threading.Event()

    def outlasts() -> None:
        with WrittenFiles().watched():
            inside.set()
            assert other_ended.wait(10)

    thread = threading.Thread(target=outlasts)
    with WrittenFiles().watched():
        thread.start()
        assert inside.wait(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        append(tmp_path / "not in a step")
    other_ended.set()
    thread.join(10)
    assert (builtins.open, io.open) == before


def test_what_a_step_writes_anew_is_not_told_of(tmp_path: Path) -> None:
    with warnings.catch_warnings(), WrittenFiles().watched():
        warnings.simplefilter("error")
        (tmp_path / "anew").write_text("x")
    with pytest.raises(ValueError, match="x"), WrittenFiles().watched():
        raise ValueError("x")
