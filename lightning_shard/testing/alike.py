"""``assert_trains_alike``: trains a LightningModule on one process and on layouts, and reports the first difference."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from lightning_shard.arguments import few
from lightning_shard.errors import ConfigurationError, RankFailure, ShardError
from lightning_shard.testing.compare import Apart, Facts, Parting, Record, any_matches, first_parting, hint
from lightning_shard.testing.layouts import DEFAULT, NamedLayout, parse, parse_all
from lightning_shard.testing.processes import RanksFailed, run_ranks

TOLERANCE = 1e-4
"""Relative, for fp32: rounding changes gradients of networks of a few layers by 1e-6 to 1e-5 of their largest value."""

_SHOWN = 6
"""How many other quantities that differ at the same moment are listed."""


class TrainsDifferently(AssertionError):
    """A module computes different values on a layout than on one process.

    Attributes:
        layout: The layout's name.
        moment: The first moment at which anything differs, such as ``"training batch 0"``.
        first: The first quantity that differs then.
        others: The other quantities that differ then.
        hint: The likeliest cause.
    """

    def __init__(self, layout: NamedLayout, parting: Parting, facts: Facts, tolerance: float) -> None:
        self.layout = layout.name
        self.moment = parting.moment
        self.first, *self.others = parting.apart
        self.hint = hint(parting, facts, layout)
        super().__init__("\n".join(self._lines(tolerance)))

    def _lines(self, tolerance: float) -> Iterable[str]:
        first = self.first
        yield f"{self.layout} first differs from one process at {self.moment}, in {first}:"
        yield f"  one process: {first.expected}"
        where = f" (on rank {', '.join(map(str, first.ranks))})" if first.ranks else ""
        yield f"  {self.layout}: {first.found}{where}"
        if math.isfinite(first.relative):
            yield f"  difference: {first.relative:.2g} of the largest value; tolerance={tolerance:.2g}"
        if self.others:
            yield f"Also different then: {few(map(_brief, self.others), _SHOWN)}."
        yield self.hint


def _brief(apart: Apart) -> str:
    return f"{apart} ({apart.relative:.1g})" if math.isfinite(apart.relative) else str(apart)


def assert_trains_alike(
    make_module: Callable[[], Any],
    make_batches: Callable[[], Iterable[Any]],
    layouts: str | Mapping[str, Any] | Iterable[str | Mapping[str, Any]] | None = None,
    *,
    steps: int = 3,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    allow_random: bool = False,
    ignore_logs: str | Sequence[str] = (),
    trainer: Mapping[str, Any] | None = None,
    timeout_s: float = 120,
    **options: Any,
) -> list[str]:
    """Train a small LightningModule on one plain process and on layouts, and compare everything that they compute.

        def test_my_module_trains_alike():
            assert_trains_alike(make_module, make_batches, ["pp2", "pp2 x dp2"], pipeline_blocks="model.layers")

    It compares the weights before training; for each training batch what the step returned (as ``on_train_batch_end``
    gets it), what was logged, every gradient, the gradient norm, and parameters and buffers afterwards; what validation
    returned and logged; and predictions. Validation and prediction are skipped if the module doesn't define the step.
    Each data rank gets its part of every batch; the ranks' joined outputs and averaged logs are compared (in training,
    averages weighted by ``loss_weight`` are tried, too).

    It starts processes on this machine's CPU, so a script must call it below ``if __name__ == "__main__":``.

    Args:
        make_module: Makes the module, with weights from the global random generators, which are seeded before. Like
            ``make_batches``, a function that processes can import by its name, or a ``functools.partial`` of one.
        make_batches: Makes the batches of one epoch, as steps get them; the same ones each time. With pipeline stages a
            batch needs samples for two microbatches per stage, on each data rank: 8 are enough for all layouts of up to
            4 ranks.
        layouts: ``"pp2"``, ``"pp2 x dp2"``, ``"tp2"``, …, or dicts of arguments of ``HybridShardStrategy``; one or
            several. Default: ``"pp2"`` and ``"dp2"``, and ``"tp2"`` if there is a tensor-parallel plan.
        steps: The maximum number of batches.
        seed: The seed of the weights.
        tolerance: Relative to each tensor's largest value.
        allow_random: Accept modules that draw random numbers in training; then only names, shapes and types are
            compared.
        ignore_logs: Names of logs that aren't compared, or patterns such as ``"time/*"``: of counts and seconds, say.
        trainer: More arguments of the Trainer, such as ``{"gradient_clip_val": 1.0}``.
        timeout_s: The time limit of one layout, in seconds.
        options: More arguments of ``HybridShardStrategy``, for all layouts.

    Returns:
        The names of the layouts that were compared.

    Raises:
        TrainsDifferently: A layout differs. It describes the first difference, and its usual cause.
        ShardError: The layout or the module was refused; the original error.
        ConfigurationError: Invalid arguments; or random numbers affect training, and each layout draws different ones.
        RanksFailed: A process, also the plain one, raised any other error.
    """
    from lightning_shard import HybridShardStrategy

    chosen = parse_all(DEFAULT if layouts is None else layouts, options)
    for layout in chosen:
        HybridShardStrategy(**layout.arguments)  # raises for invalid arguments before anything runs
    alone = OneProcess(
        make_module,
        make_batches,
        steps=steps,
        seed=seed,
        allow_random=allow_random,
        ignore_logs=ignore_logs,
        trainer=trainer,
        timeout_s=timeout_s,
    )
    if layouts is None and not (alone.facts.has_plan or options.get("tensor_parallel_plan")):
        chosen = [layout for layout in chosen if layout.name != "tp2"]
    for layout in chosen:
        alone.compare(layout, tolerance)
    return [layout.name for layout in chosen]


class OneProcess:
    """A module's run on one process, as the reference for runs on layouts."""

    def __init__(
        self,
        make_module: Callable[[], Any],
        make_batches: Callable[[], Iterable[Any]],
        *,
        steps: int = 3,
        seed: int = 0,
        allow_random: bool = False,
        ignore_logs: str | Sequence[str] = (),
        trainer: Mapping[str, Any] | None = None,
        timeout_s: float = 120,
    ) -> None:
        from lightning_shard.testing import recorder

        for name, function in (("make_module", make_module), ("make_batches", make_batches)):
            _check_importable(name, function)
        self._run = recorder.Run(make_module, make_batches, steps, seed, trainer or {})
        self._timeout_s = timeout_s
        self._random = False
        self._ignore_logs = [ignore_logs] if isinstance(ignore_logs, str) else [*ignore_logs]
        self.record: Record
        self.facts: Facts
        try:
            [(self.record, again, self.facts)] = run_ranks(
                recorder.on_one_process, 1, self._run, timeout_s=timeout_s, init=False
            )
        except RanksFailed as failed:
            failed.add_note("This was a plain Trainer on one process: it has to run there first.")
            _raise_refusal(failed)
        if not any(name.startswith("training batch") for name in self.record):
            raise ConfigurationError("make_batches gave no batch: there is nothing to compare.")
        logs = {name for moment in self.record.values() for name in moment.logs}
        for pattern in self._ignore_logs:
            if not any(any_matches(name, [pattern]) for name in logs):
                raise ConfigurationError(f"ignore_logs has {pattern!r}, which fits none of the logs {sorted(logs)}.")
        parting = first_parting(self.record, [again], parse("dp1", {}), 0.0, self._ignore_logs)
        if parting is not None:
            if not allow_random:
                raise ConfigurationError(_random_numbers(parting, self.facts))
            self._random = True

    def compare(self, layout: NamedLayout, tolerance: float = TOLERANCE) -> None:
        """Run on a layout and compare.

        Raises:
            TrainsDifferently: The runs differ.
            ShardError: The layout or the module was refused.
            RanksFailed: A rank raised any other error.
        """
        from lightning_shard.testing import recorder

        try:
            ranks = run_ranks(
                recorder.on_a_layout, layout.world_size, self._run, layout, elastic=True, timeout_s=self._timeout_s
            )
        except RanksFailed as failed:
            _raise_refusal(failed)
        allowed = math.inf if self._random else tolerance
        parting = first_parting(self.record, ranks, layout, allowed, self._ignore_logs)
        if parting is not None:
            raise TrainsDifferently(layout, parting, self.facts, allowed)


def _raise_refusal(failed: RanksFailed) -> NoReturn:
    """Raise our own error if it was the first one; errors about a lost rank are consequences, and don't count."""
    causes = [error for error in failed.errors.values() if not isinstance(error, RankFailure)]
    if causes and isinstance(causes[0], ShardError):
        raise causes[0] from failed
    raise failed


def _random_numbers(parting: Parting, facts: Facts) -> str:
    where = f" They are drawn by {', '.join(facts.draws[:8])}." if facts.draws else ""
    return (
        "Two runs on one process, with equal weights and batches but other random numbers, first differ at"
        f" {parting.moment}, in {parting.apart[0]}: the module uses random numbers, and each layout draws"
        f" others, so nothing could be compared.{where} Set dropout and the like to 0 in make_module, and draw noise"
        " when the batches are made; or pass allow_random=True, which compares names, shapes and types only."
    )


def _check_importable(name: str, function: Callable[..., Any]) -> None:
    if not callable(function):
        raise ConfigurationError(f"{name} is a {type(function).__name__}: pass a function that makes one.")
    inner: Any = getattr(function, "func", function)
    qualified = getattr(inner, "__qualname__", "")
    shown = f"{name} ({qualified or function!r})"
    remedy = (
        "Other processes import it by its name: define it at the top level of a module or script, and pass arguments by"
        " functools.partial."
    )
    main = __import__("__main__")
    if getattr(inner, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise ConfigurationError(f"{shown} is defined in a session that is no file. {remedy}")
    try:
        pickle.dumps(function)
    except Exception as error:
        raise ConfigurationError(f"{shown} can't be sent to other processes: {error}. {remedy}") from error
