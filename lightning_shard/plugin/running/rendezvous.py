"""Provides the ranks of a run with a store whose keys belong to this run alone.

torchrun restarts its processes in rounds: after a failure, or when a machine joins or leaves. Its agent keeps one store
over all rounds (torch 2.5 to 2.13; pytorch issue 135712), and process groups write the same keys each time. So a rank
may read the address of a rank of an earlier round, and is refused, or waits forever. Nothing in the environment
identifies the round: ``TORCHELASTIC_RESTART_COUNT`` is each agent's own count of failures.

Here the ranks of a round agree on a random name, which becomes the prefix of all keys. Leftovers of earlier rounds do
no harm: rank 0 answers under a key that only the asking process knows, and counts a rank as present once that process
has confirmed the answer, under a key that contains the round's name.

Private in torch, used here: the environment variable ``TORCHELASTIC_USE_AGENT_STORE``.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_shard.errors import RankFailure

_PREFIX = "lightning_shard/round"
_POLL_S = 0.02
_POLL_MAX_S = 0.5

_agreed: str | None = None
"""The name of this process's round. A process belongs to one round only."""


@dataclass(frozen=True)
class Rendezvous:
    """The store's address, and the ranks that use it."""

    address: str
    port: int
    rank: int
    world_size: int
    timeout: timedelta

    @property
    def is_kept_by_an_agent(self) -> bool:
        """Whether torchrun's agent keeps the store, so that it outlives the processes.

        Otherwise rank 0 creates a store, in torch's own rendezvous.
        """
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def connect(self, timeout: timedelta | None = None) -> dist.Store:
        """Open a separate connection to the store, for keys of this round. The first call is collective over all ranks.

        Raises:
            RankFailure: Some ranks didn't come in time.
        """
        store: dist.Store = dist.TCPStore(
            self.address, self.port, is_master=False, wait_for_workers=False, timeout=timeout or self.timeout
        )
        if not self.is_kept_by_an_agent:
            return store
        global _agreed  # noqa: PLW0603
        if _agreed is None:
            _agreed = agree(dist.PrefixStore(_PREFIX, store), self.rank, self.world_size, self.timeout)
        return dist.PrefixStore(f"{_PREFIX}/{_agreed}", store)


def agree(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Agree on a new name among the present ranks, over a store that may hold any leftovers. A collective call."""
    return _lead(store, world_size, timeout) if rank == 0 else _follow(store, rank, timeout)


def _lead(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    name = uuid.uuid4().hex
    answered: dict[int, str] = {}
    missing = set(range(1, world_size))
    stop = time.monotonic() + timeout.total_seconds()
    pause_s = _POLL_S
    while missing:
        for rank in sorted(missing):
            if not store.check([f"asks/{rank}"]):
                continue
            process = store.get(f"asks/{rank}").decode()
            if answered.get(rank) != process:  # the key may stem from a process of an earlier round, which is gone
                answered[rank] = process
                store.set(f"answer/{process}", name)
                pause_s = _POLL_S
            elif store.check([f"{name}/present/{process}"]):
                missing.discard(rank)
        if time.monotonic() > stop:
            raise RankFailure(_absent(f"ranks {sorted(missing)} of {world_size}", timeout))
        time.sleep(pause_s if missing else 0)
        pause_s = min(1.5 * pause_s, _POLL_MAX_S)
    return name


def _follow(store: dist.Store, rank: int, timeout: timedelta) -> str:
    process = uuid.uuid4().hex
    store.set(f"asks/{rank}", process)
    try:
        store.wait([f"answer/{process}"], timeout)
    except RuntimeError as error:
        raise RankFailure(_absent("rank 0", timeout)) from error
    name = store.get(f"answer/{process}").decode()
    store.set(f"{name}/present/{process}", "1")
    return name


def _absent(who: str, timeout: timedelta) -> str:
    return (
        f"This round of torchrun began without {who}, which didn't join within {timeout.total_seconds():.0f} s"
        f" (timeout) at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}. Look at the first error of"
        " their processes; where machines may join a job, start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
    )


def collect(
    store: dist.Store, keys: Sequence[str], within_s: float, settles: Callable[[str], bool] = lambda _: False
) -> dict[str, str]:
    """Read these keys' values, as far as they are set in time; returns early once a value settles the matter.

    So ranks agree where some of them may not join a collective.
    """
    found: dict[str, str] = {}
    stop = time.monotonic() + within_s
    while True:
        for key in keys:
            if key not in found and store.check([key]):
                found[key] = store.get(key).decode()
                if settles(found[key]):
                    return found
        if len(found) == len(keys) or time.monotonic() > stop:
            return found
        time.sleep(2 * _POLL_S)
