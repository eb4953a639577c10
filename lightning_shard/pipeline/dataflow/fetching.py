"""Finds which values cross the cuts: in a signature's first microbatch, a stage fetches what it misses, in place.

How stages ask each other for values by name, and why they can't deadlock: ``docs/decisions/crossing.md``. A stage keeps
its named results (:class:`Ledger`) until all later stages are done.

A value is fetched itself, never what it is computed from. So an operation's unknown operands, unless they are *late*
(computed from a later stage's parameters), are fetched where no earlier stage would know its result:

1. it needs them as numbers, or for the size of its result;
2. it comes after this stage's first own block: no earlier stage runs it;
3. it combines them with what no earlier stage has: a parameter of this stage alone, or what is computed from one;
4. it writes into a known tensor, or an activation checkpoint encloses it, which will run it again;
5. it is one of a hook on a block, which aren't counted and so have no names.

What stays unknown was therefore computed before this stage's first own block. The previous stage has run that too: it
knows the value, or has an unknown one of the same name, and asks onward. Stage 0 has none but late ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.aliasing import SharedMemory
from lightning_shard.pipeline.dataflow.crossing import LateValue, Passage, held_parameter, sendable_parameter
from lightning_shard.pipeline.dataflow.messages import Key
from lightning_shard.pipeline.dataflow.taint import Hollow, Unknown, put_values
from lightning_shard.torch_private import is_in_function, saves_by_hooks

#: Asks the previous stage for values of these names, with the sentence of the error if they can't be had.
Ask = Callable[[Sequence[Key], str], Mapping[Key, Tensor]]


class _Named(NamedTuple):
    """A value, and its version when it got its name."""

    tensor: Tensor
    version: int


class Ledger:
    """One stage's values of a microbatch, by name.

    Args:
        passage: That of the microbatch.
        ask: Asks the previous stage.
        own: The names of this stage's parameters around the blocks that no earlier stage has.
        root: The LightningModule.
        aliased: Names of received values that shared memory with another one where they were computed.

    Attributes:
        memory: Notes which sent and received values share memory.
    """

    def __init__(
        self, passage: Passage, ask: Ask, own: Collection[str], root: nn.Module, aliased: Collection[Key]
    ) -> None:
        self._passage = passage
        self._ask = ask
        self._root = root
        self.memory = SharedMemory(aliased)
        self._named: dict[Key, _Named] = {}
        self._keys: dict[int, Key] = {}
        self._others: dict[Key, Key] = {}
        self._names_of_own = own
        self._own: set[int] = set()
        self._parameters = {key[1]: tensor for key, tensor in passage.received.items() if key[0] == "parameter"}

    def begin(self) -> None:
        """The user's step begins; parameters around the blocks are unsharded."""
        own = (held_parameter(self._root, name) for name in self._names_of_own)
        self._own = {id(parameter) for parameter in own if parameter is not None}

    # Names

    def enter(self, key: Key, tensor: Tensor) -> None:
        """A value has got its name."""
        if isinstance(tensor, Hollow):
            return
        if isinstance(tensor, Unknown):
            tensor.key = key
        self._named[key] = _Named(tensor, -1 if tensor.is_inference() else tensor._version)
        self._keys[id(tensor)] = key

    def enter_other(self, key: Key, unknown: Unknown) -> None:
        """An unknown value has one more name, by which no earlier stage knows it."""
        if unknown.key is not None:
            self._others[key] = unknown.key

    def is_own(self, operands: Iterable[Any]) -> bool:
        """Whether an operation on these has a result that no earlier stage knows."""
        return self._passage.entered_at is None and any(id(leaf) in self._own for leaf in operands)

    def comes_of_own(self, results: Iterable[Tensor]) -> None:
        """These are computed from parameters that no earlier stage has."""
        self._own.update(id(leaf) for leaf in results if not isinstance(leaf, Unknown))

    def is_written(self, tensors: Iterable[Tensor]) -> None:
        """Operations are about to change these in place: the names that they have stand for their present values."""
        for tensor in tensors:
            key = self._keys.get(id(tensor))
            if key is not None and not isinstance(tensor, Unknown) and self._named[key].tensor is tensor:
                with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self._passage.differentiates):
                    copy = tensor.clone()
                self._named[key] = _Named(copy, copy._version)

    def forget_from(self, number: int) -> None:
        """Forget the results of operations from this number on: the stage's part has ended before."""
        self._named = {k: each for k, each in self._named.items() if k[0] != "operation" or k[1] < number}

    # What the user's code computes

    def substituted(self, arguments: Any) -> Any:
        """The arguments, with received parameters in place of hollow ones."""
        if not self._parameters:
            return arguments
        return tree.map_leaves(self._substitute, arguments)

    def _substitute(self, leaf: Any) -> Any:
        return self._parameters.get(leaf.fqn, leaf) if isinstance(leaf, Hollow) else leaf

    def late(self, unknown: Sequence[Unknown]) -> tuple[str, ...]:
        """The parameters of later stages that these values are computed from."""
        names: dict[str, None] = {}
        for leaf in unknown:
            if not isinstance(leaf, Hollow):
                names |= dict.fromkeys(leaf.late)
            elif leaf.holder > self._passage.stage:
                names[leaf.fqn] = None
        return tuple(names)

    def knows_operands(
        self, name: str, operands: Sequence[Any], *, into_known: bool = False, combines: bool = False
    ) -> bool:
        """Before an operation: fetch its unknown operands where it must know them; returns whether it did."""
        unknown = [leaf for leaf in operands if isinstance(leaf, Unknown)]
        if not unknown or not self._passage.active or self.late(unknown) or not all(map(self._can_be_fetched, unknown)):
            return False
        passage = self._passage
        must = combines or passage.entered_at is not None or passage.in_hooks or into_known or self.is_own(operands)
        if not must and not (saves_by_hooks() and not any(isinstance(leaf, Hollow) for leaf in unknown)):
            return False
        self._passage.on_missing(unknown, f"{name} computes with {unknown[0].origin.at_end}.")
        return True

    def _can_be_fetched(self, leaf: Unknown) -> bool:
        return isinstance(leaf, Hollow) or (leaf.key in self._named and self._named[leaf.key].tensor is leaf)

    # Fetching

    def fetch(self, values: Sequence[Unknown], sentence: str) -> None:
        """Get values from the previous stage, and put them into the user's tensors.

        Raises:
            LateValue: They are computed from parameters of a later stage.
            StepError: They can't be had for another reason.
        """
        unknown = [*{id(leaf): leaf for leaf in values}.values()]
        if late := self.late(unknown):
            raise LateValue(sentence, late)
        if not torch.is_grad_enabled() and self._passage.differentiates and is_in_function():
            raise StepError(f"{sentence} An autograd function's forward uses it, which isn't given it.", breaks=1)
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self._passage.differentiates):
            missing: dict[Key, list[Unknown]] = {}
            for leaf in unknown:
                if isinstance(leaf, Hollow):
                    missing.setdefault(("parameter", leaf.fqn), []).append(leaf)
                elif not self._can_be_fetched(leaf) or self._passage.stage == 0:
                    raise StepError(sentence, breaks=1)
                else:
                    missing.setdefault(leaf.key, []).append(leaf)
            self.receive([*missing], sentence)
            for key, leaves in missing.items():
                for leaf in leaves:
                    self._put(key, leaf)

    def receive(self, keys: Sequence[Key], sentence: str) -> None:
        """Ask for those of these names that weren't received yet."""
        if wanted := [key for key in keys if key not in self._passage.received]:
            self._passage.received.update(self._ask(wanted, sentence))

    def fetch_if_possible(self, values: Iterable[Tensor]) -> None:
        """Get those of these values that are unknown, and that an earlier stage may know."""
        unknown = [leaf for leaf in values if isinstance(leaf, Unknown) and not isinstance(leaf, Hollow)]
        if found := [leaf for leaf in unknown if self._can_be_fetched(leaf) and not self.late([leaf])]:
            self._passage.on_missing(found, "A call of the network leaves it in what it is given.")

    def known(self, tensors: Iterable[Tensor]) -> dict[Key, Tensor]:
        """By name, those of these tensors that are known, and have the value of that name."""
        ids = {id(tensor) for tensor in tensors if not isinstance(tensor, Unknown)}
        found = ((key, *named) for key, named in self._named.items() if id(named.tensor) in ids)
        return {key: tensor for key, tensor, before in found if before in (-1, tensor._version)}

    def _put(self, key: Key, leaf: Unknown) -> None:
        value = self._passage.received[key]
        if isinstance(leaf, Hollow):
            self._parameters[leaf.fqn] = value
            return
        put_values(leaf, value.clone())
        if leaf.requires_grad:
            self._passage.in_place_of.append(leaf)
        self.memory.receives(key, leaf)
        self._named[key] = _Named(leaf, -1 if leaf.is_inference() else leaf._version)

    # Serving

    def answer(self, keys: Sequence[Key], sentence: str) -> dict[Key, Tensor]:
        """The values of these names, after asking onward for those that aren't known here; they will be sent.

        Raises:
            StepError: This stage didn't compute one, or can't.
        """
        passage = self._passage
        names = [self._others.get(key, key) for key in keys]
        received = passage.received
        self.receive([key for key in names if key not in received and self._is_unknown(key, sentence)], sentence)
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(passage.differentiates):
            for key, name in zip(keys, names):
                value = self._value(name, sentence)
                passage.sent[key] = value.clone()
                self.memory.sends(key, value)
        return {key: passage.sent[key] for key in keys}

    def _is_unknown(self, key: Key, sentence: str) -> bool:
        if key[0] == "parameter":
            return key[1] in self._passage.hollow
        if key not in self._named:
            raise StepError(
                f"{sentence} Stage {self._passage.stage} didn't compute it (internal name: {' '.join(map(str, key))}):"
                " a step must run the same code on every stage (its code around the blocks may not depend on random"
                " numbers, or on what a stage holds).",
                breaks=1,
            )
        tensor = self._named[key].tensor
        if not isinstance(tensor, Unknown):
            return False
        if late := self.late([tensor]):
            raise StepError(str(LateValue(sentence, late)), breaks=1)
        if self._passage.stage == 0:
            raise StepError(sentence, breaks=1)
        return True

    def _value(self, key: Key, sentence: str) -> Tensor:
        if key in self._passage.received:
            return self._passage.received[key]
        if key[0] == "parameter":
            return sendable_parameter(self._root, key[1], self._passage.stage)
        tensor, version = self._named[key]
        if version not in (-1, tensor._version):
            raise StepError(
                f"{sentence} It shares its memory with a tensor that the step changes in place (a view, or what a hook"
                " or an attribute keeps), and has another value by now: change that by a new tensor (h = h + x in place"
                " of h += x, inplace=False), keep a copy (h[:, 0].clone()), or use pipeline_parallel_size=1.",
                breaks=3,
            )
        return tensor
