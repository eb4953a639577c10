"""Messages for steps that call blocks in another order than they are placed, or none of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_shard.arguments import few

_ONE_STAGE = "use pipeline_parallel_size=1"
_MAY = (
    "may depend on the kind of step, the epoch and a batch's shapes, not on its values, its number or random numbers,"
    " as where layers are dropped. Call all of them, and choose between what goes in and what comes out by torch.where;"
    f" or {_ONE_STAGE}."
)


def none_called(method: str, blocks: Sequence[str]) -> str:
    """The message for a step that calls no block."""
    return (
        f"{method} returned without calling the network, or it runs none of {few(blocks)} (a block's methods other than"
        " __call__ don't count); with several pipeline stages every step calls the network once, and at least one of"
        f" its blocks: call it, name modules that every step calls by pipeline_blocks, or {_ONE_STAGE}."
    )


def out_of_order(method: str, name: str, before: Collection[str]) -> str:
    """The message for a step that calls a block after blocks of later stages."""
    return (
        f"{method} came to {few(before)} before {name}, which an earlier pipeline stage holds. A step may leave blocks"
        " out, and calls the others in the order in which they are placed: name blocks in the order in which every step"
        f" runs them (pipeline_blocks=[…]), or {_ONE_STAGE}."
    )


def missing_now(method: str, names: Collection[str]) -> str:
    """The message for a microbatch without blocks that an earlier one of its shapes has called."""
    return (
        f"{method} didn't call {few(names)}, and did for an earlier microbatch of the same shapes: which blocks run"
        f" {_MAY}"
    )


def called_now(name: str) -> str:
    """The message for a block that runs, and didn't for an earlier microbatch of the same shapes."""
    return f"{name} runs, and didn't for an earlier microbatch of the same shapes: which blocks run {_MAY}"
