"""Steps of a loop of Fabric's on pipeline stages: a function of a network and a batch, in place of a Trainer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, finalize

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import BatchError, ConfigurationError, StepError
from lightning_shard.lightning_private import within_fabrics_backward
from lightning_shard.parallel.batch_norm import broadcast_statistics
from lightning_shard.parallel.fsdp import as_tensors
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.plugin.assembly.assemble import Assembly
from lightning_shard.plugin.assembly.parameters import refuse_frozen, what_trains
from lightning_shard.plugin.assembly.prepared import Steps
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.loop import Loop
from lightning_shard.plugin.steps.pipelined import PipelinedSteps
from lightning_shard.torch_private import parametrizations_leaving_what_is_given, total_norms_checked

_CLIPPED = (
    "torch.nn.utils computes the norm of this stage's gradients alone: with several pipeline stages clip by"
    " fabric.clip_gradients(model, optimizer, max_norm=…), which takes the whole model's, and returns it."
)
LossFunction = Callable[[Any, Any], Any]

_ONE_CALL = (
    " With several pipeline stages forwards and backwards of microbatches alternate, on all of them: use"
    " fabric.strategy.training_step(loss_fn, model, batch), or evaluation_step, with a loss_fn(model, batch) that calls"
    " the model; or pipeline_parallel_size=1."
)
_CALLED = f"A network was called outside of a step.{_ONE_CALL}"
BACKWARD = f"fabric.backward was called.{_ONE_CALL}"


class FabricLoop(Loop):
    """A loop that a user writes; its loss function divides a loss over accumulated batches itself.

    Args:
        precision: Fabric's plugin. The module that Fabric wraps has its autocast around its own calls.
    """

    def __init__(self, precision: Any) -> None:
        self.precision = precision
        self.code: Callable[..., Any] | None = None

    def step(self, method: str) -> Callable[..., Any]:
        assert self.code is not None
        return self.code


class Pipelined:
    """Runs the steps of one network, which was cut into stages.

    Args:
        known: How it was laid out.
        loop: The one that was given to the steps.
        seed: Of random numbers, the same on all ranks.

    Attributes:
        draws: What the next steps' random numbers depend on: that seed, and the number of training steps so far.
    """

    def __init__(
        self, module: nn.Module, known: Assembly, loop: FabricLoop, steps: Steps, groups: Groups, seed: int
    ) -> None:
        assert isinstance(steps.run, PipelinedSteps)
        self.module = module
        self.known = known
        self._loop = loop
        self._run = steps.run
        self._gradients = steps.gradients
        self.first_checks = steps.first_checks
        self._groups = groups
        self.draws = {"seed": seed, "steps": 0}
        self._evaluated: int | None = None  # batches since the last training step; None: it was one
        self._trains: list[dict[str, bool]] = []
        self._given: WeakKeyDictionary[torch.optim.Optimizer, Mapping[str, int]] = WeakKeyDictionary()
        self._until_update = ExitStack()  # from a training step to the optimizer's
        finalize(self, self._until_update.close)
        module.register_forward_pre_hook(self._refuse_call, prepend=True)

    def train(self, loss_function: LossFunction, model: Any, batch: Any, *, accumulates: bool) -> Any:
        """Run all forwards and backwards of a batch; returns what the function would for it, without graphs."""
        name = self._begin("training_step", loss_function, batch, accumulates)
        if self._evaluated is not None:
            self._evaluated = None
            self._run.look_again("training_step")
        self.draws["steps"] += 1
        self._until_update.close()
        loop, checks = self._loop, self.first_checks
        loop.begins_accumulation, loop.is_accumulating = not loop.is_accumulating, accumulates
        self._gradients.begin_step()
        held = self._gradients.held() if accumulates else nullcontext()
        with self._running(loss_function, model), held, checks.at("training_step", batch) as shown:
            shown.output = self._run.train(self._seed("train"), batch, self.draws["steps"], name)
            self._gradients.end_backward()
        refuse = WeakMethod(self._refuse_norm)
        checked = total_norms_checked(lambda tensors: (method := refuse()) is None or method(tensors))
        self._until_update.enter_context(checked)
        return shown.output

    def evaluate(self, loss_function: LossFunction, model: Any, batch: Any) -> Any:
        """Run the forwards of a batch."""
        name = self._begin("validation_step", loss_function, batch, False)
        if self._evaluated is None:
            self._evaluated = 0
            broadcast_statistics(self.module, self._groups.gradient)
            self.first_checks.join_copies()
            self._run.begin("validation_step")
        self._evaluated += 1
        seed = self._seed("evaluate")

        def draw(arguments: tuple[Any, ...]) -> int:
            return randomness.derive(seed, *arguments[1:])

        with torch.inference_mode(False), torch.no_grad(), self._running(loss_function, model):
            with self.first_checks.at("validation_step", batch) as shown:
                shown.output = self._run.evaluate("validation_step", draw, (), batch, self._evaluated, name)
            reshard(self.module)  # what comes next may change the shards
        return shown.output

    def _seed(self, kind: str) -> int:
        return randomness.derive(self.draws["seed"], kind, self.draws["steps"])

    def _begin(self, method: str, loss_function: LossFunction, batch: Any, accumulates: bool) -> str:
        """Compare what the stages are about to run, and look at what trains; a collective call over the pipeline.

        Returns:
            A name of the function's code, the same on all ranks.

        Raises:
            BatchError: On all ranks of the pipeline: they have batches of other shapes, or are at another step.
        """
        name = _named(loss_function)
        own = f"{method} of {name}{' without gradient sync' * accumulates}, a batch of {_shapes(batch)}"
        trains = {key: parameter.requires_grad for key, parameter in self.module.named_parameters()}
        known = self._trains[self.known.layout.pipeline_rank] if self._trains else None
        steps, has_changed = zip(*self._groups.gather_over_stages((own, trains != known)))
        if len(set(steps)) > 1:
            raise BatchError(
                "The ranks of a pipeline hold parts of one model and run the same steps on the same batches, but the"
                f" first stage runs {steps[0]}, and the last {steps[-1]}: have a dataset or sampler deal by"
                " fabric.strategy.layout.data_rank of data_parallel_size, not by rank, and let no rank's code differ.",
                breaks=1,
            )
        if any(has_changed):
            before, self._trains = self._trains, what_trains(self.module, self._groups.gather_over_stages)
            if method == "training_step":
                refuse_frozen(self._trains)
            if before:
                self._run.reset_crossings()
        return name

    @contextmanager
    def _running(self, loss_function: LossFunction, model: Any) -> Iterator[None]:
        """Context of a step."""

        def code(part: Any, *_: Any) -> Any:
            return loss_function(model, part)

        self._loop.code = code
        try:
            with within_fabrics_backward(), as_tensors.step(), parametrizations_leaving_what_is_given():
                yield
        finally:
            self._loop.code = None

    def _refuse_call(self, *_: Any) -> None:
        if self._loop.code is None:
            raise StepError(_CALLED, breaks=2)

    def _refuse_norm(self, tensors: Iterable[Tensor]) -> None:
        own = {id(parameter.grad) for parameter in self.module.parameters()}
        if any(id(tensor) in own for tensor in tensors):
            raise StepError(_CLIPPED, breaks=10)

    def add(self, optimizer: torch.optim.Optimizer, positions: Mapping[str, int]) -> None:
        """Note an optimizer of the network; a collective call over the pipeline.

        Args:
            positions: Of the parameters of all stages among those that it was made with.

        Raises:
            ConfigurationError: Stages have made other groups.
        """
        kinds = [
            {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str))}
            for group in optimizer.param_groups
        ]
        if any(kinds != of_stage for of_stage in self._groups.gather_over_stages(kinds)):
            raise ConfigurationError(
                f"The parameter groups of {type(optimizer).__name__} aren't the same on all pipeline stages, each of"
                " which has its own parameters after the setup: make the optimizer before, and pass it to"
                " fabric.setup(model, optimizer), or make groups that don't depend on how many parameters there are."
            )
        if len({*positions.values()}) == len(positions):  # made before the network was cut
            self._given[optimizer] = positions

    def places_in(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """All stages' parameters in the order in which one process would give them to an optimizer."""
        given = self._given.get(optimizer, {})
        return {name: len(given) + place for name, place in self.known.places.items()} | dict(given)

    def begin_update(self) -> None:
        """Before an optimizer's step.

        Raises:
            StepError: Gradients of the last steps weren't reduced.
        """
        self._until_update.close()
        if self._loop.is_accumulating:
            raise StepError(
                "The optimizer steps after a training_step within fabric.no_backward_sync, whose gradients ranks have"
                " not added up: leave no_backward_sync before the last training_step of an accumulation.",
                breaks=4,
            )


def _named(function: Any) -> str:
    """A name of a function's code: of functions made anew for each batch the same, and of others another."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name}:{code.co_firstlineno}"


def _shapes(batch: Any) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tree.tensors(batch)) or "no tensors"
