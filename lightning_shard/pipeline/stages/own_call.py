"""A call of a block that its stage holds: what the block does is noted, and sent where later stages use it.

Later stages have stand-ins for the block. So besides its output they may use what it wrote to, set on itself and in
objects that it was given, and what hooks of its submodules saw.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow import kept
from lightning_shard.pipeline.dataflow.crossing import called_now
from lightning_shard.pipeline.dataflow.kept import Found
from lightning_shard.pipeline.dataflow.messages import BlockCall, Change, Held, Kept, Key, Slot, described
from lightning_shard.pipeline.dataflow.objects import alike
from lightning_shard.pipeline.dataflow.side_effects import Before, check_sendable
from lightning_shard.pipeline.dataflow.taint import Unknown, refuse
from lightning_shard.state.walk import is_object
from lightning_shard.user_hooks import forward_hooks

if TYPE_CHECKING:
    from lightning_shard.pipeline.stages.stage import Stage


class OwnCall:
    """One call, from the block's pre-hook to its hook.

    Args:
        stage: The stage, which runs a microbatch.
        index: The block's place.
        found: What all searches have found that it keeps there.
    """

    def __init__(self, stage: Stage, index: int, block: nn.Module, found: Found, arguments: Any) -> None:
        self._stage = stage
        self._index = index
        self._name = stage.blocks[index]
        self._block = block
        self._found = found
        self._arguments = arguments
        self._passage = passage = stage.passage
        self._hands_on = index == stage.owned[-1]  # the next stage gets its output as the hidden state
        is_looked_at = found.unset and not (passage.searching or stage.is_last)
        self._unset = found.still_unset() if is_looked_at else []
        self._before: Before | None = None
        self._seen_inside: list[tuple[str, bool, Any]] = []
        self._inside: list[RemovableHandle] = []
        changes_objects = passage.follows(index)
        if stage.is_last or not (passage.searching or passage.wanted or changes_objects):
            return  # no later stage, or none that asks
        if passage.wants("inside", index):
            self._watch_inside()
        if passage.wants("changed", index) or changes_objects:
            self._before = Before(block, arguments, deeply=passage.searching)

    def end(self, output: Any) -> None:
        """The block returned: note and send what it did.

        Raises:
            StepError: It did what can't be sent, or something else than for an earlier microbatch of the same shapes.
        """
        if self._inside:
            self.remove_hooks()
        if self._passage.searching:
            refuse(output, f"What {self._name} returns")  # it may use a part that an earlier stage holds
        if not self._stage.is_last:
            self._note(output)

    def remove_hooks(self) -> None:
        """Remove the hooks of its submodules; also where the call, or the whole step, ends within the block."""
        while self._inside:
            self._inside.pop().remove()

    def _watch_inside(self) -> None:
        """Record what forward hooks of the block's submodules see, for the stages where a stand-in replaces it."""
        for path, module in self._block.named_modules():
            if path and forward_hooks(module):
                note = partial(self._note_inside, path)
                self._inside.append(module.register_forward_hook(note, with_kwargs=True, prepend=True))

    def _note_inside(self, path: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        passage = self._passage
        for place, (_, leaf) in enumerate(tree.walk((args, kwargs, output))):
            key: Key = ("inside", self._index, len(self._seen_inside), place)
            if type(leaf) is Tensor:
                passage.produced(key, leaf)
            elif key in passage.wanted:
                raise StepError(
                    f"A forward hook of {self._name}.{path} collects a {type(leaf).__name__}, which can't"
                    " be sent to the pipeline stage that uses it: collect what the block returns.",
                    breaks=3,
                )
        seen = tree.map_leaves(Slot.of, (args, kwargs, output))
        self._seen_inside.append((path, torch.is_grad_enabled(), seen))

    def _note(self, output: Any) -> None:
        passage, index, before = self._passage, self._index, self._before
        if passage.searching or self._hands_on:
            check_sendable(self._name, output)
        if passage.searching or passage.wanted or self._hands_on:
            for place, leaf in enumerate(tree.leaves(output)):
                key: Key = ("block", index, place)
                if passage.ledger is not None and isinstance(leaf, Tensor):
                    passage.ledger.enter(key, leaf)
                if isinstance(leaf, Tensor) and (self._hands_on or key in passage.wanted):
                    passage.send(key, leaf)
        if before is not None:
            changed = before.changed(self._name, output)
            for place, tensor in changed:
                passage.produced(("changed", index, place), tensor, written=True)
            in_objects = self._note_objects(output, before)
        if not passage.searching:
            self._check_as_agreed(output)
            self._note_kept_as_agreed()
            if self._unset and len(self._unset) != len(self._found.still_unset()):
                self._warn_of_set()
            return
        assert before is not None
        passage.blocks[index] = BlockCall(
            tree.map_leaves(partial(before.slot, self._name), output),
            tuple(self._seen_inside),
            self._note_kept(before),
            tuple(place for place, _ in changed),
            before.returned_containers(output),
            in_objects,
        )

    def _note_kept(self, before: Before) -> tuple[Kept, ...]:
        """What submodules keep: also what they kept in an earlier microbatch, and this call has left alone."""
        found = before.attributes.changed(self._found.names)
        self._found.add(found, self._block)
        for each in found:
            self._send_kept(each)
            is_one = each.in_place and (isinstance(each.value, Tensor) or is_object(each.value))
            if is_one and not tree.is_node(each.value):
                self._stage.warn_if_shared(self._path_of(each.module, each.name), each.value)
        return tuple(replace(each, value=kept.slots(each.value)) for each in found)

    def _note_kept_as_agreed(self) -> None:
        """Send what later stages use of what the block keeps, whether or not this call has set it anew.

        Raises:
            StepError: It is of another kind, or a text or ``None`` where these aren't.
        """
        passage, index = self._passage, self._index
        if not passage.blocks[index].kept:
            return
        asked = {key[2:4] for key in passage.wanted if key[:2] == ("kept", index)}
        for agreed in passage.blocks[index].kept:
            is_asked = (agreed.module, agreed.name) in asked
            value = getattr(self._block.get_submodule(agreed.module), agreed.name, None)
            if is_asked:
                self._send_kept(replace(agreed, value=value))
            elif value is not None and not kept.is_told_otherwise(agreed.value, value):
                continue  # no later stage uses it
            if (slots := kept.slots(value)) != agreed.value:
                path = self._path_of(agreed.module, agreed.name)
                raise StepError(
                    f"{path} is {described(slots)}, and was {described(agreed.value)} for an earlier microbatch of the"
                    " same shapes: what a block keeps may depend on a batch's shapes, not on its values or on earlier"
                    " batches. Or use pipeline_parallel_size=1.",
                    breaks=1,
                )

    def _warn_of_set(self) -> None:
        """Warn of attributes that the block has set, and left at ``None`` when it was seen what it keeps."""
        for path, key in set(self._unset) - set(self._found.still_unset()):
            del self._found.unset[path, key]
            warnings.warn(
                f"{self._path_of(path, key)} was None after the first microbatch of these"
                " shapes, and is set now. Later pipeline stages don't see it, where a step uses it: what a block keeps"
                " may depend on a batch's shapes, not on its values or on earlier batches.",
                stacklevel=2,
            )

    def _path_of(self, module: str, key: str) -> str:
        return ".".join(filter(None, (self._name, module, key)))

    def _send_kept(self, each: Kept) -> None:
        for place, leaf in enumerate(kept.leaves(each.value)):
            key: Key = ("kept", self._index, each.module, each.name, place)
            if isinstance(leaf, Unknown):  # in a container that blocks of earlier stages hold, too
                if self._passage.ledger is not None:
                    self._passage.ledger.enter_other(key, leaf)
            elif (tensor := kept.as_tensor(leaf, self._stage.device)) is not None:
                self._passage.produced(key, tensor)

    def _note_objects(self, output: Any, before: Before) -> tuple[Change, ...]:
        passage, index = self._passage, self._index
        changes, tensors = before.changed_objects(self._name, output)
        written = {id(before.objects[each.path].held[key]) for each in changes for key in each.written}
        for number, tensor in enumerate(tensors):
            passage.produced(("object", index, number), tensor, written=id(tensor) in written)
        agreed = passage.blocks[index].objects if index in passage.blocks else changes
        if not passage.searching and not alike([*map(vars, changes)], [*map(vars, agreed)]):
            raise StepError(
                f"{self._name} changes an object that it is given otherwise than for an earlier microbatch of the"
                " same shapes: numbers, arrays and texts that it sets there may depend on a batch's shapes, not on"
                " its values. Or use pipeline_parallel_size=1.",
                breaks=1,
            )
        return changes

    def _check_as_agreed(self, output: Any) -> None:
        blocks = self._passage.blocks
        if self._index not in blocks:
            raise StepError(called_now(self._name), breaks=1)
        agreed = blocks[self._index].output
        self._check_handed_on(agreed, output)
        slots = _slots_like(agreed, output) if self._hands_on or tree.is_node(output) else None
        if slots is not None and not (slots == agreed if isinstance(slots, Slot) else alike(slots, agreed)):
            raise StepError(
                f"{self._name} returns {described(slots)}, and returned {described(agreed)} for an earlier"
                " microbatch of the same shapes: what a block returns may depend on a batch's shapes, not on its values"
                " (pad it), and what needs gradients may change where an epoch begins (on_train_epoch_start). Or use"
                " pipeline_parallel_size=1.",
                breaks=1,
            )

    def _check_handed_on(self, agreed: Any, output: Any) -> None:
        """Check that the arguments that the block returned for an earlier microbatch are returned."""
        places = [getattr(slot, "argument", None) for slot in tree.leaves(agreed)]
        if places.count(None) == len(places):
            return
        arguments = tree.leaves(self._arguments)
        for place, leaf in zip(places, tree.leaves(output)):
            if place is not None and (place >= len(arguments) or arguments[place] is not leaf):
                raise StepError(
                    f"{self._name} returns something new in place of an argument that it returned for an earlier"
                    " microbatch of the same shapes, which later pipeline stages take for it: return a copy"
                    " (x.clone()) where it is left as it is, or use pipeline_parallel_size=1.",
                    breaks=3,
                )


def _slots_like(agreed: Any, output: Any) -> Any:
    """A block's output with slots for tensors; its arguments, and other objects, as agreed if their types are."""
    told = iter(tree.leaves(agreed))

    def slot(leaf: Any) -> Any:
        known = next(told, None)
        return known if isinstance(known, Held) and known.kind == type(leaf).__name__ else Slot.of(leaf)

    return tree.map_leaves(slot, output)
