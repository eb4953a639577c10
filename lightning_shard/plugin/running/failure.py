"""Stops all ranks if one fails, and reports the first cause.

The first rank that fails writes its error to the process group's store. The other ranks either meet a broken
connection, or wait in a collective that will never end. So a thread on every rank polls the store, and ends the process
if its main thread doesn't end by itself.

A process that is killed or stopped can't report. So each thread also writes a heartbeat once a second, with the place
where its main thread is. A rank that has lost the others checks whose heartbeat has stopped before it reports what the
first failure was.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_shard.errors import RankFailure, ShardError
from lightning_shard.plugin.running.rendezvous import Rendezvous

_KEY = "lightning_shard/watch"
_POLL_S = 1.0
_SETTLE_S = 4.0
"""How long a rank that has lost the others waits for heartbeats and reports."""
_GRACE_S = 10.0
_CONNECT_S = 10.0


class FailureWatch:
    """Reports and watches for the first failure among the ranks of one fit or evaluation; all ranks create one."""

    _made = 0

    def __init__(self, rendezvous: Rendezvous) -> None:
        # Ranks run the same fits in the same order, and a failure in an earlier fit may have been caught: so the
        # number of the fit is part of the keys.
        FailureWatch._made += 1
        self._prefix = f"{_KEY}/{FailureWatch._made}"
        self._rendezvous = rendezvous
        self._rank = rendezvous.rank
        self._store = self._connect()
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._failing = False
        self._seen: str | None = None
        """The first failure, as the thread has read it: the store may vanish afterwards."""
        self._first: str | None = None
        """The first failure, if it was another rank's; set by :meth:`report`."""
        self._thread = threading.Thread(target=self._watch, name="lightning_shard failure watch", daemon=True)
        self._thread.start()

    def report(self, exception: BaseException) -> None:
        """Report that this rank failed. If another rank was first, add its cause to the exception as a note."""
        if self._failing:
            return  # reported already
        self._failing = True
        cause = "".join(traceback.format_exception_only(exception)).strip()
        mine = f"rank {self._rank}: {cause}"
        try:
            if lost_the_others(exception):
                mine = self._who_was_first() or mine
            first = self._store.compare_set(self._first_key, "", mine).decode()
        except (RuntimeError, dist.DistError):
            first = self._seen or self._store_lost
        self._stopped.set()
        if not first.endswith(f": {cause}"):
            exception.add_note(f"The first failure was on {first}")
            self._first = first
        if self._rank == 0 and not self._rendezvous.is_kept_by_an_agent:
            time.sleep(2 * _POLL_S)  # the store lives in this process: let the others read it

    def failure_elsewhere(self, exception: BaseException) -> RankFailure | None:
        """After :meth:`report`: a RankFailure with the first failure, if ``exception`` is only its consequence."""
        if self._first is None or isinstance(exception, ShardError) or not lost_the_others(exception):
            return None
        return RankFailure(
            f"rank {self._rank} lost the others. The first failure was on {self._first}\nAll ranks stop; started again"
            ' with ckpt_path="last", the run goes on from its last checkpoint.'
        )

    def stop(self) -> None:
        """Stop watching: the run ended well."""
        if not self._stopped.is_set():
            with suppress(RuntimeError, dist.DistError):
                self._store.set(self._ended_key(self._rank), "1")  # a missing heartbeat is no failure then
        self._stopped.set()
        # at interpreter exit, a thread inside a call of the store would end the process with SIGABRT
        self._thread.join(2 * _CONNECT_S)

    @property
    def _first_key(self) -> str:
        return f"{self._prefix}/first_failure"

    def _connect(self) -> dist.Store:
        # a separate connection, since a waiting call may hold the process group's
        return self._rendezvous.connect(timedelta(seconds=_CONNECT_S))

    # The thread

    def _watch(self) -> None:
        beats = 0
        while not self._stopped.wait(_POLL_S if beats else 0):
            beats += 1
            first = self._seen = self._look(f"{beats} {self._where()}") or self._seen
            if first is None or self._failing:
                continue
            if self._stopped.wait(_GRACE_S):
                return
            if self._failing:
                continue  # the main thread is about to end the process
            print(
                f"[lightning_shard] rank {self._rank} stops {self._where()}, because of the first failure, on {first}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def _look(self, beat: str = "") -> str | None:
        """Write a heartbeat; returns the first failure, if any. A lost connection counts if a new one can't be made."""
        try:
            self._store.set(self._beat_key(self._rank), beat)
            return self._store.get(self._first_key).decode() if self._store.check([self._first_key]) else None
        except (RuntimeError, dist.DistError):
            if self._stopped.is_set():
                return None
        try:
            self._store = self._connect()
            return None
        except (RuntimeError, dist.DistError):
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
        self._store.set(self._lost_key(self._rank), "1")
        # only one rank examines heartbeats, and the others wait for its report
        looks = self._store.compare_set(f"{self._prefix}/looks", "", str(self._rank)).decode() == str(self._rank)
        before = self._beats() if looks else {}
        stop = time.monotonic() + (_SETTLE_S if looks else 2 * _SETTLE_S)
        while time.monotonic() < stop:
            if self._store.check([self._first_key]):
                return self._store.get(self._first_key).decode()
            time.sleep(_POLL_S / 4)
        if not looks:
            return None
        beats = self._beats()
        ended = [rank for rank in beats if self._store.check([self._ended_key(rank)])]
        others = [rank for rank in beats if rank not in ended and not self._store.check([self._lost_key(rank)])]
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
            key = self._beat_key(rank)
            beats[rank] = self._store.get(key).decode() if self._store.check([key]) else ""
        return beats

    def _beat_key(self, rank: int) -> str:
        return f"{self._prefix}/alive/{rank}"

    def _ended_key(self, rank: int) -> str:
        return f"{self._prefix}/ended/{rank}"

    def _lost_key(self, rank: int) -> str:
        return f"{self._prefix}/lost/{rank}"


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


def note_missing_state(exception: BaseException) -> None:
    """If a user's ``on_…_end`` hook fails on a stage before the last: note why state that steps keep may be missing."""
    note = (
        "With several pipeline stages, what a step does after calling the network runs on the last stage only. What it"
        " logs, and keeps in attributes of modules, reaches the other stages at the end of the batch: numbers, texts,"
        " tensors, and lists, dicts and plain objects of these; anything else doesn't."
    )
    frames = (frame for frame, _ in traceback.walk_tb(exception.__traceback__))
    hooks = (f for f in frames if f.f_code.co_name.startswith("on_") and f.f_code.co_name.endswith("_end"))
    of_user = any(not str(hook.f_globals.get("__name__")).startswith("lightning") for hook in hooks)
    says_why = isinstance(exception, ShardError)
    if of_user and not says_why and not lost_the_others(exception) and note not in getattr(exception, "__notes__", ()):
        exception.add_note(note)


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
