"""What one rank knows of the values that cross its stages' cuts, by signature; and the searches by which it finds out.

A search runs one microbatch through all stages, one after the other (``search.py``). All stages search together, so
they know of the same signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import RankFailure, StepError
from lightning_shard.pipeline.dataflow.crossing import Crossing
from lightning_shard.pipeline.dataflow.search import CallsAgain, Memory, Post, Ran, RunStep, Search, find_crossing
from lightning_shard.pipeline.runtime.channel import Channel, Signature
from lightning_shard.pipeline.stages.stage import Stage

_KNOWN = 1024
"""Of so many signatures it is remembered what crosses."""


@dataclass
class Ends:
    """A stage of this rank, its channel to the neighbours, and the values that cross its cuts.

    Attributes:
        crossings: By signature.
        latest: What was last searched for, by the kind of step.
    """

    stage: Stage
    channel: Channel
    crossings: dict[Signature, Crossing] = field(default_factory=dict)
    latest: dict[str, Crossing] = field(default_factory=dict)


class KnownCrossings:
    """What crosses the cuts of one rank's stages; made of what :class:`~.step.PipelinedStep` is.

    Attributes:
        ends: By the stage's index.
        returns: Called for a stage with the values that it has sent in a search, where some were sent after its run.
    """

    def __init__(self, stages: Iterable[Stage], channels: Iterable[Channel], remember: Callable[..., Memory]) -> None:
        self.ends = {stage.index: Ends(stage, channel) for stage, channel in zip(stages, channels, strict=True)}
        self.returns: Callable[[Stage, list[Tensor]], None] = lambda stage, sent: None
        self._remember = remember
        self._again: set[str] = set()
        self._looks_again = False  # in the batch that has begun, until its first search

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, the last stage's last; a collective call over the pipeline."""
        return [*self.ends.values()][-1].channel.gather(value)

    def look_again(self, step: str) -> None:
        """Search once more for what crosses, in the next batch of each kind that begins with ``step``: at a new epoch.

        What a step computes may depend on the epoch. If something else crosses now, all stages forget what they know
        of other signatures.
        """
        kinds = {kind for end in self.ends.values() for kind in end.latest}
        self._again |= {kind for kind in kinds if kind.split()[0] == step}

    def has_to_look_again(self, kind: str) -> bool:
        """Whether the batch of this kind that begins now is such a one."""
        self._looks_again = kind in self._again
        self._again.discard(kind)
        return self._looks_again

    def knows(self, keys: Iterable[Signature]) -> bool:
        """Whether a stage needs no answer from the next one to run its part of microbatches with these signatures.

        The same on all stages.
        """
        return not any(key[0] in self._again for key in keys) and self.are_settled(keys)

    def are_settled(self, keys: Iterable[Signature]) -> bool:
        """Whether the values that cross are final for these signatures; the same answer on all stages."""
        for key in {*keys}:
            for end in self.ends.values():
                crossing = end.crossings.get(key)
                if crossing is None or not crossing.is_settled:
                    return False
        return True

    def find(self, run: RunStep, i: int, keys: Sequence[Signature]) -> dict[int, Ran]:
        """Search for what crosses, in microbatch ``i`` of a batch with these signatures; returns each stage's forward.

        Raises:
            CallsAgain: The step calls the network several times; on all ranks. Then the run had no effect.
        """
        kind = keys[i][0]
        searches = self._searches()
        if all(kind in end.latest for end in self.ends.values()):
            for search in searches:
                search.begin_as(self.ends[search.stage.index].latest[kind])
        memory = self._remember(puts_back=not torch.is_grad_enabled() or len(self.ends) > 1)
        try:
            found_other = find_crossing(searches, run, i, self.returns)
            memory.check()
        except CallsAgain:
            memory.put_back()
            raise
        finally:
            memory.forget()
        forgets, self._looks_again = found_other and self._looks_again, False
        ran = {}
        for search, end in zip(searches, self.ends.values()):
            crossing = search.crossing
            # A first microbatch may run more operations than others, to fill caches. So if operations are counted, the
            # second microbatch is searched too. Whether any stage counts them is known to all stages.
            crossing.is_settled = crossing.is_settled or keys[i] in end.crossings
            if forgets:
                end.crossings = {key: each for key, each in end.crossings.items() if key[0] != kind}
            end.crossings[keys[i]] = end.latest[kind] = crossing
            _forget_oldest(end.crossings, keys)
            ran[end.stage.index] = search.ran
        return ran

    def rehearse(self, run: Callable[[Stage], Any], kind: str) -> Exception | None:
        """Run one more microbatch forward through all stages, one after the other, in a single round of a search.

        Each stage sends what it last sent for this kind of step. Of a microbatch of other shapes more may be needed, or
        the code may not take it.

        Returns:
            ``None`` on all ranks if the microbatch has passed all stages; else an error on all ranks.
        """
        errors: list[Exception] = []

        def attempt(stage: Stage, _: int) -> Any:
            try:
                return run(stage)
            except RankFailure:
                raise
            except Exception as error:
                errors.append(error)
                stage.passage.failed = True

        searches = self._searches()
        for search in searches:
            search.begin_as(self.ends[search.stage.index].latest[kind])
            try:
                search.run(attempt, 0)
            except StepError as error:
                errors.append(error)
                search.fail()
        verdict = searches[0].post.close()
        for search in searches:
            search.settle(verdict)
            search.channel.flush()
        return next(iter(errors), StepError("Another stage's run failed.")) if errors or verdict.failed else None

    def _searches(self) -> list[Search]:
        post = Post([*self.ends.values()][-1].channel)
        return [Search(end.stage, end.channel, post) for end in self.ends.values()]


def _forget_oldest(crossings: dict[Signature, Crossing], in_use: Sequence[Signature]) -> None:
    """Limit what is known where batches are of ever new shapes; on all stages alike, since all search together."""
    if len(crossings) > _KNOWN:
        crossings.pop(next((key for key in crossings if key not in in_use), None), None)  # type: ignore[arg-type]
