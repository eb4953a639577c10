"""Runs an evaluation step that calls the network several times, as ``generate()`` does: one call after the other.

The step runs whole on each rank; a call of the network goes through all stages (``network_calls.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import StageEnd
from lightning_shard.pipeline.dataflow.search import OfAny, Post, Search, find_crossing
from lightning_shard.pipeline.dataflow.taint import refuse
from lightning_shard.pipeline.runtime.channel import Channel
from lightning_shard.pipeline.runtime.network_calls import Calls
from lightning_shard.pipeline.stages.stage import Stage


class CallByCall:
    """Runs one rank's part of such steps.

    Args:
        ends: This rank's stages, in order, each with its channel.
    """

    def __init__(self, ends: Sequence[tuple[Stage, Channel]]) -> None:
        self._ends = ends

    def __call__(
        self,
        run: Callable[[], Any],
        in_call: Callable[[], AbstractContextManager[Callable[[], None]]],
        note_generators: Callable[[], Callable[[], None]],
        after_call: Callable[[int], None],
        of_any: OfAny = bool,
    ) -> Any:
        """Run a step that calls the network several times, on its whole batch.

        Args:
            run: Calls the step, for the last stage of this rank.
            in_call: Context of each call of the network, in which all stages of this rank run in turn; gives what ends
                the stages' own versions of the module's state.
            note_generators: Notes the states of the random generators; returns a function that restores them.
            after_call: Called after each call of the network with the number of calls so far.
            of_any: As for :class:`~lightning_shard.pipeline.runtime.step.PipelinedStep`, for calls of the network.

        Returns:
            The step's return value; meaningful on the rank of the last stage.

        Raises:
            StepError: Data ranks that have to run alike call the network a different number of times.
        """
        *siblings, (last, channel) = self._ends
        through = partial(self._through_stages, in_call, of_any)
        stages = [stage for stage, _ in self._ends]
        calls = Calls(stages, channel, through, note_generators, after_call)
        with ExitStack() as inside:
            for sibling, _ in siblings:
                inside.enter_context(sibling.calling(calls))
            inside.enter_context(last.calling(calls))
            inside.enter_context(calls.running())
            result = run()
            calls.end()
            if of_any(False):
                raise StepError(
                    "Data ranks call the network a different number of times within one step, as generating texts of"
                    " different lengths does. Where experts are dealt over data ranks, each call needs all of them:"
                    " call it equally often (generate to a fixed length), or use expert_parallel_size=1."
                )
        return result

    def _through_stages(
        self, in_call: Callable[[], AbstractContextManager[Callable[[], None]]], of_any: OfAny, call: Callable[[], Any]
    ) -> Any:
        """Run one call of the network; returns its output on the rank of the last stage."""
        calls = self._ends[-1][0].calls
        assert calls is not None
        objects, kept = calls.objects, calls.kept

        def run(stage: Stage, _: int) -> Any:
            ledger, output = stage.passage.ledger, None
            assert ledger is not None
            calls.stage_begins()
            with suppress(StageEnd), stage.running(stage.entrances[0]):
                output = call()
                if stage.is_last:
                    refuse(output, "What the network returns")
                    objects.fetch(ledger)
            objects.stage_ends(ledger, is_last=stage.is_last)
            return output

        of_any(True)  # a rank whose step has ended raises
        with in_call() as settle:
            kept.stages_begin()
            post = Post(self._ends[-1][1])
            searches = [Search(stage, channel, post) for stage, channel in self._ends]
            find_crossing(searches, run, 0)
            settle()
            kept.stages_end()
        for _, channel in self._ends:
            channel.flush()
        return searches[-1].result
