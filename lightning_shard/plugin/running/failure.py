"""Ends all ranks if one fails, and reports the first cause.

The first rank that fails writes its error to the process group's store. A thread on every rank polls the store, and
ends the process if its main thread doesn't end by itself; once a second it also writes a heartbeat, with the place
where its main thread is. How ranks save after an exception, and why all this: ``docs/decisions/failures.md``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lightning_shard.errors import RankFailure, ShardError
from lightning_shard.plugin.running.interrupts import Interrupts
from lightning_shard.plugin.running.rendezvous import Rendezvous, collect
from lightning_shard.torch_private import replaced

_KEY = "lightning_shard/watch"
_POLL_S = 1.0
_SETTLE_S = 3.0
"""How long a rank that has lost the others waits for heartbeats and reports, and a rank that learns of a failure for
one of its own."""
_GRACE_S = 10.0
"""How long a main thread may take to leave the run: until the ranks that it waits for have ended."""
_ANSWER_S = 10.0
_CONNECT_S = 10.0
_YES, _NO = "yes", "no: "
_CTRL_C = "Ctrl+C: all ranks end after this step. Press it again to end at once, without a checkpoint."


class FailureWatch:
    """Reports and watches for the first failure among the ranks of one fit or evaluation; all ranks create one.

    It has many attributes, since a thread of its own, signals and the failing code meet in it.
    """

    _made = 0

    def __init__(self, rendezvous: Rendezvous) -> None:
        # a failure in an earlier fit may have been caught, and ranks run the same fits in the same order
        FailureWatch._made += 1
        self._prefix = f"{_KEY}/{FailureWatch._made}"
        self._rendezvous = rendezvous
        self._rank = rendezvous.rank
        self._store = self._connect()
        self._main = threading.get_ident()
        self.is_in_run = True
        """Whether the main thread is where others wait for it. Elsewhere the process with the store may have ended."""
        self.interrupts = Interrupts()
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._failing = False
        self._ends = self._at_once = False
        """Whether the thread ends what the main thread does; and that without a save."""
        self._reported = False
        self._fault = ""
        """Why this rank can't save what it has, since it failed."""
        self._asked = 0
        self._refused = ""
        self._seen: str | None = None
        """The first failure, as the thread has read it: the store may vanish afterwards."""
        self._seen_at = 0.0
        self._first: str | None = None
        """The first failure, if it was another rank's; set by :meth:`report`."""
        self._thread = threading.Thread(target=self._watch, name="lightning_shard failure watch", daemon=True)
        self._thread.start()

    def fails(self) -> None:
        """Tell that an exception has left the run, so that the main thread ends by itself."""
        with self._lock:
            self._failing = self.interrupts.has_left = True

    def report(self, exception: BaseException) -> None:
        """Report that this rank failed. If another rank was first, add its cause to the exception as a note."""
        if self._reported:
            return
        self._reported = True
        self.fails()
        take_over_from_observer()
        cause = "".join(traceback.format_exception_only(exception)).strip()
        mine = f"rank {self._rank}: {cause}"
        lost = self._ends or lost_the_others(exception)
        try:
            if lost:
                mine = self._who_was_first() or mine
            first = self._store.compare_set(self._key("first_failure"), "", mine).decode()
        except RuntimeError:
            first = self._seen or self._store_lost
        if lost:
            self._fault = "has lost the others"
        elif _in_update(exception):
            self._fault = "failed in an optimizer's update, which may have changed some of its weights"
        if self._ends or not first.endswith(f": {cause}"):
            exception.add_note(f"The first failure was on {first}")
            self._first = first

    def failure_elsewhere(self, exception: BaseException) -> BaseException | None:
        """After :meth:`report`: what to raise in place of an ``exception`` that is only another failure's consequence.

        Returns:
            A RankFailure with the first failure; a KeyboardInterrupt after Ctrl+C.
        """
        is_interrupt = isinstance(exception, KeyboardInterrupt)
        if self._at_once:
            return None if is_interrupt else KeyboardInterrupt(self._first or "")
        is_consequence = lost_the_others(exception) or (self._ends and is_interrupt)
        if self._first is None or isinstance(exception, ShardError) or not is_consequence:
            return None
        return RankFailure(
            f"rank {self._rank} lost the others. The first failure was on {self._first}\nAll ranks stop; started again"
            ' with ckpt_path="last", the run goes on from its last checkpoint.'
        )

    def agree_to_save(self, position: str) -> str:
        """Agree, after :meth:`report`, that all ranks save now, and are at the same position.

        Returns:
            Empty; or, the same on every rank that asks, why none of them saves.
        """
        if not self._refused:
            self._asked += 1
            keys = [self._key("saves", self._asked, rank) for rank in range(self._rendezvous.world_size)]
            try:
                self._store.set(keys[self._rank], f"{_NO}{self._fault}" if self._fault else position)
                answers = collect(self._store, keys, _ANSWER_S, lambda answer: answer.startswith(_NO))
                mine = _refusal({rank: answers[key] for rank, key in enumerate(keys) if key in answers}, len(keys))
                verdict_key = self._key("saves", self._asked, "verdict")
                verdict = self._store.compare_set(verdict_key, "", mine or _YES).decode()
            except RuntimeError:
                verdict = f"{self._seen or self._store_lost}"
            self._refused = verdict if verdict != _YES else ""
        return self._refused

    def say_once(self, text: str) -> None:
        """Print what no rank of the run has printed; not if the store is lost, and rank 0 with it, which has then."""
        with suppress(RuntimeError):
            if self._store.add(self._key("said", text), 1) == 1:
                say(text)

    def leave(self, launcher: int) -> None:
        """Tell, after :meth:`report`, that this rank saves nothing more, and may end its process.

        Args:
            launcher: The rank whose process may have started this one, and learns of the failure first.
        """
        if self.stopped.is_set():
            return
        with suppress(RuntimeError):
            self._decline("doesn't save")
            self._asked += 1  # a program that catches the exception may save then
            self._heard()
            if self._rendezvous.is_kept_by_an_agent:
                ranks = []
            elif self._rank == 0:  # the store lives in this process: let the others read it
                ranks = [*range(1, self._rendezvous.world_size)]
            else:
                ranks = [launcher] if launcher != self._rank else []
            collect(self._store, [self._key("heard", rank) for rank in ranks], 2 * _POLL_S)
        self._end_thread()

    def stop(self) -> None:
        """Stop watching: the run ended well."""
        if not self.stopped.is_set():
            with suppress(RuntimeError):
                self._store.set(self._key("ended", self._rank), "1")  # a missing heartbeat is no failure then
            self._end_thread()

    def _end_thread(self) -> None:
        self.stopped.set()
        self.interrupts.wake()
        # at interpreter exit, a thread inside a call of the store would end the process with SIGABRT
        self._thread.join(2 * _CONNECT_S)
        self.interrupts.close()

    def _connect(self) -> dist.Store:
        # a separate connection, since a waiting call may hold the process group's
        return self._rendezvous.connect(timedelta(seconds=_CONNECT_S))

    def _key(self, *parts: object) -> str:
        """Of what is in the store."""
        return "/".join(map(str, (self._prefix, *parts)))

    def _decline(self, reason: str) -> None:
        """Answer ranks that ask, now or later, whether this one saves as well."""
        self._store.set(self._key("saves", self._asked + 1, self._rank), f"{_NO}{reason}")

    def _heard(self) -> None:
        """Tell that this rank knows the first failure."""
        self._store.set(self._key("heard", self._rank), "1")

    # The thread

    def _watch(self) -> None:
        beats = 0
        while True:
            self.interrupts.wait(_POLL_S if beats else 0)
            if self.stopped.is_set():
                return
            beats += 1
            first = self._look(f"{beats} {self._where()}")
            if first is not None and self._seen is None:
                self._seen, self._seen_at = first, time.monotonic()
                take_over_from_observer()
                with suppress(RuntimeError):
                    self._heard()
            if self._seen is not None and not self._failing:
                settled = time.monotonic() - self._seen_at > _SETTLE_S
                if self._at_once or settled:
                    self._end(self._seen)

    def _end(self, first: str) -> None:
        """End what the main thread does, and if that fails, the process."""
        with self._lock:
            if self._failing:
                return
            self._ends = True
        where = self._where()
        with suppress(RuntimeError):
            self._decline(f"is {where}")
        if self.interrupts.catches:
            self.interrupts.ends_now = True
            signal.pthread_kill(self._main, signal.SIGINT)
        stop = time.monotonic() + (_GRACE_S / 4 if self._at_once else _GRACE_S)
        while time.monotonic() < stop:
            if self.stopped.wait(_POLL_S / 4) or (self._failing and not self._at_once):
                return  # the main thread ends the process, once its hooks have run
        brief = first.partition("\n")[0]
        say(f"rank {self._rank} stops {self._where()}, because of the first failure, on {brief}")
        os._exit(1)

    def _look(self, beat: str = "") -> str | None:
        """Write a heartbeat; returns the first failure, if any. A lost connection counts if a new one can't be made."""
        at_once_key = self._key("at_once")
        try:
            self._store.set(self._key("alive", self._rank), beat)
            reason = self.interrupts.look()
            if self.interrupts.asked_at is not None:
                self.say_once(_CTRL_C)
            if reason is not None:
                self._store.set(at_once_key, "1")
                self._store.compare_set(self._key("first_failure"), "", f"rank {self._rank}: {reason}")
            if not self._store.check([self._key("first_failure")]):
                return None
            self._at_once = self._at_once or self._store.check([at_once_key])
            return self._store.get(self._key("first_failure")).decode()
        except RuntimeError:
            if self.stopped.is_set() or not self.is_in_run:
                return None
        try:
            self._store = self._connect()
            return None
        except RuntimeError:
            return self._store_lost

    @property
    def _store_lost(self) -> str:
        holder = "torchrun's agent" if self._rendezvous.is_kept_by_an_agent else "rank 0"
        return f"{holder}: the process that held the process group's store is gone."

    def _where(self) -> str:
        """The innermost line at which the main thread is."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "nowhere"
        code = frame.f_code
        return f"at {code.co_filename}:{frame.f_lineno} in {code.co_name}"

    # Who is silent

    def _who_was_first(self) -> str | None:
        """The first failure that another rank reports, or what can be found out about ranks that don't report."""
        self._store.set(self._key("lost", self._rank), "1")
        # only one rank examines heartbeats, and the others wait for its report
        looks = self._store.compare_set(self._key("looks"), "", str(self._rank)).decode() == str(self._rank)
        before = self._beats() if looks else {}
        stop = time.monotonic() + (_SETTLE_S if looks else 2 * _SETTLE_S)
        while time.monotonic() < stop:
            if self._store.check([self._key("first_failure")]):
                return self._store.get(self._key("first_failure")).decode()
            time.sleep(_POLL_S / 4)
        if not looks:
            return None
        beats = self._beats()
        ended = [rank for rank in beats if self._store.check([self._key("ended", rank)])]
        others = [rank for rank in beats if rank not in ended and not self._store.check([self._key("lost", rank)])]
        if silent := [rank for rank in others if beats[rank] == before[rank]]:
            return f"{_ranks(silent)}: no sign of life; ended by force or stopped, or its machine is gone."
        if others:
            places = "; ".join(f"rank {rank} is {beats[rank].partition(' ')[2]}" for rank in others)
            return f"{_ranks(others)}: alive, but not in the collective that the others waited in: {places}."
        if ended:
            return f"{_ranks(ended)}: ended before the others, with fewer steps or collectives than they."
        return None

    def _beats(self) -> dict[int, str]:
        """Each rank's last heartbeat."""
        beats = {}
        for rank in range(self._rendezvous.world_size):
            key = self._key("alive", rank)
            beats[rank] = self._store.get(key).decode() if self._store.check([key]) else ""
        return beats


def _refusal(answers: dict[int, str], world_size: int) -> str:
    """Why ranks with these answers don't save; empty if they do."""
    for rank, answer in answers.items():
        if answer.startswith(_NO):
            return f"rank {rank} {answer.removeprefix(_NO)}"
    if silent := [rank for rank in range(world_size) if rank not in answers]:
        return f"{_ranks(silent)} didn't answer within {_ANSWER_S:.0f} s"
    if len(set(answers.values())) > 1:
        other = next(rank for rank, answer in answers.items() if answer != answers[0])
        return f"rank 0 is {answers[0]}, and rank {other} {answers[other]}"
    return ""


def _in_update(exception: BaseException) -> bool:
    """Whether an exception was raised in an optimizer's step, after the closure that the step calls first."""
    inside = False
    for frame, _ in traceback.walk_tb(exception.__traceback__):
        if frame.f_code.co_name == "_wrap_closure":  # of Lightning's precision plugins
            inside = False
        elif isinstance(frame.f_locals.get("self"), torch.optim.Optimizer) and frame.f_code.co_name == "step":
            inside = True
    return inside


def lost_the_others(exception: BaseException) -> bool:
    """Whether an exception follows from a collective's error about an unreachable rank: then its cause lies elsewhere.

    Gloo raises plain RuntimeErrors, which are recognized by their text (torch 2.13). Those of NCCL and stores have
    classes of their own.
    """
    error: BaseException | None = exception
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, dist.DistError):
            return True
        if type(error) is RuntimeError and any(sign in str(error) for sign in ("gloo/", "Gloo ")):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def say(text: str) -> None:
    print(f"[lightning_shard] {text}", file=sys.stderr, flush=True)


def printing_failed_saves(trainer: pl.Trainer, say_once: Callable[[str], None]) -> AbstractContextManager[None]:
    """Inside, our own errors in ``on_exception`` hooks are printed, by one rank: the run's own is to be raised."""

    def guarded(hook: Callable[..., None]) -> Callable[..., None]:
        def on_exception(*args: Any, **kwargs: Any) -> None:
            try:
                hook(*args, **kwargs)
            except ShardError as error:
                say_once(str(error))

        return on_exception

    holders = [each for each in (*trainer.callbacks, trainer.datamodule) if each is not None]  # type: ignore[attr-defined]
    hooks = [(each, "on_exception", guarded(each.on_exception)) for each in holders if "on_exception" not in vars(each)]
    return replaced(*hooks)


def take_over_from_observer() -> None:
    """Keep Lightning's launcher from killing this process since a child has failed: it ends by itself, and says why.

    Private in Lightning 2.6: ``_ChildProcessObserver._run``, whose result sets ``_finished`` after each pause.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._run = lambda: True  # type: ignore[method-assign]
