"""Check that what a tensor-parallel plan splits computes the same as with whole layers, forward and backward.

A plan that doesn't fit the code may not fail. Take a fused layer whose output is queries, keys and values, one after
the other: with ``colwise``, each rank gets consecutive features, which the code takes for other queries, keys and
values. Or a gate's whole output that is used on split features: the forward is right, and each rank has one summand of
the gradient. So in the first training step a block of each kind runs twice more, as it is split and with whole layers,
on the same input, gradient and random numbers, and what it returns and the gradients are compared. Blocks of a kind
have the same modules with the same settings; of a model's own plan, but for layers' numbers. What runs without training
before, in an evaluation or as a frozen network, is compared then.

Modules beside the blocks are compared likewise where a user's plan splits layers of theirs, with one stage. Elsewhere
it may have layers that are given and return whole features.

During the comparison, trained parameters that are small everywhere have other values (``whole_layers.py``).

Not checked: blocks with a user's hooks inside; compiled blocks; calls with objects; blocks that are given a part on
each rank; sequence-parallel plans; layers of a block that code outside of the block calls.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard import tree
from lightning_shard.errors import PlanError, ShardError
from lightning_shard.layout import TENSOR_AXIS
from lightning_shard.parallel.block_probe import (
    PLAIN,
    OpaqueError,
    Result,
    TrialRuns,
    copied,
    first_apart,
    in_32_bits,
    is_cache,
    is_filled,
    outcome,
)
from lightning_shard.parallel.containers import has_forward
from lightning_shard.parallel.fsdp.units import is_unit
from lightning_shard.parallel.rank_compare import differing, exchanged, fingerprints
from lightning_shard.parallel.tensor.styles import REPLICATED, ScatterSequence, Split
from lightning_shard.parallel.tensor.whole_layers import (
    Forward,
    Layers,
    enlarged,
    whole_parameters,
    with_whole_layers,
)
from lightning_shard.sharding import full_tensor
from lightning_shard.user_hooks import has_forward_hooks_beside

_APART = {True: 0.02, False: 0.2}
"""Tolerance in 32 bits, and in fewer, relative to the norm of what a block adds to its input; a wrong plan differs by
about 1."""
_SMALL_GRADIENT = {True: 1e-3, False: 5e-2}
"""Relative to the largest norm of a gradient in a block: others may be zero but for rounding."""

_Outcome = tuple[Sequence[Result], bytes]


def holders_around(
    root: nn.Module,
    blocks: Collection[str],
    styles: Mapping[str, ParallelStyle],
    *,
    has_stages: bool,
    calls_root: bool,
) -> set[str]:
    """The names of the modules that hold layers which a user's plan splits outside of blocks: compared as blocks are.

    Args:
        blocks: The names of all blocks. One that is a layer itself, as in a list of linear layers, counts as outside.
        styles: Styles of split modules, by name.
        calls_root: Whether a step's calls are of ``root``, as in Fabric's loops.

    Raises:
        PlanError: Such a layer is in no module of its own, or several stages may run what holds it.
    """
    if any(isinstance(style, ScatterSequence) for style in styles.values()):
        return set()
    within, found = tuple(f"{name}." for name in blocks), set()
    composed = [name for name in blocks if any(True for _ in root.get_submodule(name).children())]
    for name, style in styles.items():
        takes_and_returns_whole = _is_whole(style, "input_layout") and _is_whole(style, "output_layout")
        if takes_and_returns_whole or name.startswith(within):
            continue
        holder = name.rpartition(".")[0]
        is_called = has_forward(root.get_submodule(holder)) and (bool(holder) or calls_root)
        if has_stages or not is_called or any(block.startswith(_inside(holder)) for block in composed):
            raise PlanError(
                f"tensor_parallel_plan: {name} would take or return a part of all features on each rank, and is in no"
                " block: only blocks, and modules beside them, are compared with themselves whole, since code between"
                " split layers may need all features. Choose 'colwise_gather_output', 'rowwise_split_input' or"
                " 'embedding_rowwise', or name a module that holds it and what it works with by pipeline_blocks,"
                " beside the blocks."
            )
        found.add(holder)
    return found


def _inside(name: str) -> str:
    """How the names of a module's submodules begin."""
    return f"{name}." if name else ""


class PlanCheck:
    """Compares one block of each kind, and modules beside the blocks.

    Args:
        root: The whole model, before anything wraps it.
        held: Names of this rank's blocks, and of these modules.
        styles: Styles of split modules, by name.
        trial_runs: A context for runs of a module; its :class:`RunChanges` restore what a run has changed.
        is_own: Whether the plan is the model's own.
    """

    def __init__(
        self,
        root: nn.Module,
        held: Collection[str],
        styles: Mapping[str, ParallelStyle],
        trial_runs: TrialRuns,
        *,
        is_own: bool,
    ) -> None:
        if any(isinstance(style, ScatterSequence) for style in styles.values()):
            styles = {}
        modules = dict(root.named_modules())
        self._layers: Layers = {name: (modules[name], vars(modules[name]).get("forward")) for name in styles}
        self._returning_whole = {name for name, style in styles.items() if _is_whole(style, "output_layout")}
        kinds: dict[str, str] = {}
        for name in sorted(held):
            inside = {
                n.removeprefix(name): (type(style), vars(style))
                for n, style in styles.items()
                if n.startswith(_inside(name))
            }
            if inside:
                kinds.setdefault(repr((_kind(modules[name], numbered=not is_own), inside)), name)
        self._blocks = {name: modules[name].forward for name in kinds.values()}
        self._runs = trial_runs

    def compare(self, root: nn.Module) -> None:
        """Wrap the blocks' forwards, so that their first calls are compared; on all tensor ranks.

        Call it before ``root`` is sharded or cut: what replaces a block's forward later must call this wrapper.
        """
        for name, plain in self._blocks.items():
            block = root.get_submodule(name)
            layers = {each: layer for each, layer in self._layers.items() if each.startswith(_inside(name))}
            _FirstCalls(block, partial(self._compare, block, name, plain, layers)).wrap()

    def _compare(self, block: nn.Module, name: str, plain: Forward, layers: Layers, given: tuple[Any, Any]) -> None:
        """Run a block twice more, and compare.

        Raises:
            PlanError: The results differ, or the code fails with whole layers.
        """
        if _are_parts(given, block):
            return
        device = next((p.device for p in block.parameters()), torch.device("cpu"))
        returning = {each: layer for each, layer in layers.items() if each in self._returning_whole}
        # units inside would take such a backward for the step's
        has_units = any(is_unit(part) for part in block.modules() if part is not block)

        def results(*, whole: bool, evaluates: bool) -> list[Result]:
            if evaluates:
                block.eval()
            with with_whole_layers(layers, made) if whole else nullcontext(), _noting(returning) as found:
                found.extend(_results(block, plain, given, with_gradients=block.training and not has_units))
                return found

        with enlarged(block), self._runs(block) as changes:
            made = whole_parameters(layers)
            for evaluates in (False, True):
                runs = (
                    partial(outcome, partial(results, whole=each, evaluates=evaluates), changes, device)
                    for each in (True, False)
                )
                (whole, drawn_whole), (split, drawn) = _compared(name, *runs)
                if drawn == drawn_whole:
                    break
                if not evaluates:
                    _warn_of_draws(block, name)
            else:
                return  # what draws other numbers can't be compared
        apart = first_apart(zip(split, whole), _APART[in_32_bits(block.parameters())])
        if apart is not None or [each.name for each in split] != [each.name for each in whole]:
            raise PlanError(
                f"tensor_parallel_plan: {name} computes something else when it is split than whole, first in {apart}"
                " (sentence 12 of the contract). What follows a 'colwise' layer, up to a 'rowwise' one, is given a part"
                " of all features, which a norm over them needs whole, and queries, keys and values of one layer each"
                f" by itself: choose 'colwise_gather_output' and 'rowwise_split_input', or leave both out. {_STYLES}"
            )


_STYLES = (
    "Where gradients differ: what runs on split features, or on whole ones that meet them (a gate, or keys of a single"
    ' head), has style "replicated_with_grad_allreduce" or "shared_output", which add them up, and what all ranks'
    " compute alike has none."
)


def _are_parts(given: Any, block: nn.Module) -> bool:
    """Whether ranks are given different values, such as another block's keys of their heads; a collective call."""
    meshes = (p.device_mesh for p in block.parameters() if isinstance(p, DTensor))
    axis = next((mesh for mesh in meshes if mesh.mesh_dim_names == (TENSOR_AXIS,)), None)
    if axis is None:
        return False
    own = {str(number): each for number, each in enumerate(tree.tensors(given)) if each.is_floating_point()}
    return bool(differing(exchanged(axis.get_group(), fingerprints(own))[0], _APART[True]))


def _compared(name: str, whole: Callable[[], _Outcome], split: Callable[[], _Outcome]) -> tuple[_Outcome, _Outcome]:
    """The outcomes of both runs.

    Raises:
        PlanError: One of them fails.
    """
    try:
        as_whole = whole()
    except (OpaqueError, PlanError):
        raise
    except torch.OutOfMemoryError:
        split()  # with the other ranks, which may have had the memory
        warnings.warn(f"tensor_parallel_plan: {name} isn't compared with itself whole: out of memory.", stacklevel=2)
        raise OpaqueError from None
    except Exception as error:
        raise PlanError(
            f"tensor_parallel_plan: {name} doesn't run with whole layers, with which it is compared"
            f" ({type(error).__name__}: {error}). Have its code take sizes from tensors (x.size(-1)), not those of one"
            " rank, or leave these layers out of the plan."
        ) from error
    try:
        return as_whole, split()
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, (ShardError, torch.OutOfMemoryError)):
            raise
        text = str(error).partition("\n")[0].rstrip(".")
        raise PlanError(
            f"The first step fails with tensor_parallel_plan: {text}. {name} runs with whole layers, and as it is split"
            " gets this rank's features only: leave out of the plan what can't be split (it comes with the model, if"
            " you gave none), or use tensor_parallel_size=1."
        ) from error


def _results(module: nn.Module, run: Forward, given: Any, *, with_gradients: bool) -> Iterator[Result]:
    """What code returns for copies of its arguments, and the gradients of these and of the module's parameters."""
    arguments = copied(given)
    floats = [each for each in tree.tensors(arguments) if each.is_floating_point()]
    if with_gradients and floats:
        floats[0].requires_grad_()  # the first block may be given a batch, and stands for those that are given more
    leaves = [each for each in floats if each.requires_grad]
    # code may change in place what it is given, but no leaves
    args, kwargs = tree.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, arguments)
    first = next(iter(tree.tensors(given)), None)
    returned = tree.tensors(run(*args, **kwargs))
    for each in returned:
        yield Result("what it returns", each.detach().clone(), None if first is None else first.detach())
    ends = [each for each in returned if each.requires_grad]
    if not with_gradients or not ends:
        return
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    backs = [_noise_like(end, number) for number, end in enumerate(ends)]
    gradients = torch.autograd.grad(ends, [*leaves, *named.values()], backs, allow_unused=True)
    for leaf, gradient in zip(leaves, gradients):
        yield Result("the gradient of its input", _whole_gradient(leaf, gradient), backs[0])
    of_parameters = {
        name: _whole_gradient(p, gradient) for (name, p), gradient in zip(named.items(), gradients[len(leaves) :])
    }
    largest = max((float(each.norm()) for each in of_parameters.values()), default=0.0)
    least = _SMALL_GRADIENT[in_32_bits(named.values())] * largest
    yield from (Result(f"the gradient of {name}", gradient, least=least) for name, gradient in of_parameters.items())


def _noise_like(tensor: Tensor, seed: int) -> Tensor:
    return torch.empty_like(tensor).normal_(generator=torch.Generator(tensor.device).manual_seed(seed))


def _whole_gradient(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return full_tensor(gradient)


@contextmanager
def _noting(layers: Layers) -> Iterator[list[Result]]:
    """Yields what layers return inside, in running order."""
    found: list[Result] = []

    def returns(name: str, _: nn.Module, __: Any, returned: Any) -> None:
        found.extend(Result(f"what {name} returns", each.detach().clone()) for each in tree.tensors(returned))

    with ExitStack() as inside:
        for name, (layer, _) in layers.items():
            inside.callback(layer.register_forward_hook(partial(returns, name)).remove)
        yield found


class _FirstCalls:
    """Compares a block's first call in training, and one before that without training."""

    _is_comparing = False  # any block: what runs for a comparison isn't compared itself

    def __init__(self, block: nn.Module, compare: Callable[[tuple[Any, Any]], None]) -> None:
        self._block = block
        self._compare = compare
        self._compared: bool | None = None  # whether in training

    def wrap(self) -> None:
        """Wrap the block's forward, until its call in training was compared."""
        own, attributes = self._block.forward, vars(self._block)
        had = "forward" in attributes

        @wraps(own)
        def compared(*args: Any, **kwargs: Any) -> Any:
            if self._is_due():
                trains = self._compared = self._trains
                # otherwise a later replacement calls this wrapper, and stays
                if trains and attributes.get("forward") is compared:
                    del attributes["forward"]
                    attributes.update({"forward": own} if had else {})
                caches = [*filter(is_cache, (*args, *kwargs.values()))]
                is_decoding = False
                with suppress(ValueError):
                    is_decoding = any(is_filled(cache, self._block) for cache in caches)
                if is_decoding:
                    return own(*args, **kwargs)  # with keys of this rank's heads, of which whole layers have more
                _FirstCalls._is_comparing = True
                try:
                    with suppress(OpaqueError, *([] if trains or not caches else [Exception])):  # needs them
                        self._compare((args, kwargs))
                finally:
                    _FirstCalls._is_comparing = False
            return own(*args, **kwargs)

        attributes["forward"] = compared

    def _is_due(self) -> bool:
        if _FirstCalls._is_comparing or self._compared or (self._compared is not None and not self._trains):
            return False
        # hooks of users would see the additional runs
        inside = (part for part in self._block.modules() if part is not self._block)
        return not any(has_forward_hooks_beside(part, ("torch.", "lightning_shard.", "lightning.")) for part in inside)

    @property
    def _trains(self) -> bool:
        return self._block.training and torch.is_grad_enabled()


def _warn_of_draws(module: nn.Module, name: str) -> None:
    """Warn, on the first of the ranks that hold parts of a module, that it draws random numbers for split features."""
    meshes = (parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor))
    coordinate = next((mesh.get_coordinate() for mesh in meshes), None)
    if coordinate is not None and not any(coordinate):
        warnings.warn(
            f"tensor_parallel_plan: {name} draws random numbers, as for dropout, for features or heads that the plan"
            " splits. All tensor ranks draw the same ones, so features of different ranks are dropped together. Where"
            " that matters, drop them where they are whole, behind the 'rowwise' layer.",
            stacklevel=2,
        )


def _kind(module: nn.Module, *, numbered: bool) -> list[Any]:
    """What code may decide by: modules' classes and sizes, plain values, such as a layer's number, and functions."""
    return [
        (
            name,
            type(part),
            [
                (key, each if each is None else each.shape)
                for key, each in (*part._parameters.items(), *part._buffers.items())
            ],
            [(key, each) for key, each in vars(part).items() if _is_setting(each) and (numbered or key != "layer_idx")],
        )
        for name, part in module.named_modules()
    ]


def _is_setting(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(entry, PLAIN) for entry in value)
    return isinstance(value, (*PLAIN, types.FunctionType, types.BuiltinFunctionType))


def _is_whole(style: ParallelStyle, side: str) -> bool:
    return isinstance(style, Split) and getattr(style, side) == REPLICATED
