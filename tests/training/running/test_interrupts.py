"""Ctrl+C is noted in a run; pressed again, or if no batch ends, it ends the run at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lightning_shard.plugin.running import interrupts
from lightning_shard.plugin.running.interrupts import Interrupts

Pair = tuple[Interrupts, Interrupts]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Interrupts(), Interrupts()
    for one in made:
        one.catches = True
    yield made
    for one in made:
        one.close()


def press(one: Interrupts) -> None:
    os.write(one._writes, bytes([signal.SIGINT]))
    one.wait(1)


def test_the_same_press_that_comes_twice_at_once_counts_once_and_a_later_one_ends_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = pair
    for _ in range(2):
        press(first)
        assert first.look() is None
    monkeypatch.setattr(interrupts, "_SAME_S", 0.0)
    press(other)
    assert other.look() is None  # its first, and it had not heard of the other's
    press(other)
    assert "pressed again" in str(other.look())


def test_a_batch_that_never_ends_is_waited_for_only_so_long_unless_it_is_a_save(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 0.0)
    press(first)
    assert first.look() is None
    with first.saving():
        assert first.look() is None
    assert "no batch ended within 0 s" in str(first.look())


def test_a_signal_raises_nothing_in_a_run_and_python_handles_it_again_after_it(pair: Pair) -> None:
    first, _ = pair
    with first.caught():
        signal.raise_signal(signal.SIGINT)
        first.wait(1)
        assert first._presses == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def test_a_users_own_handler_stays_in_place(pair: Pair) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with pair[0].caught():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
