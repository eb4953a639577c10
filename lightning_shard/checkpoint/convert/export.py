"""Plans the files that ``gather`` writes in each format: which tensors, under which names, and which small files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.convert.outfile import OutFile, Source
from lightning_shard.checkpoint.engine import groups
from lightning_shard.checkpoint.foreign.lightning_ckpt import TRANSFORMERS_KEY, put_together
from lightning_shard.checkpoint.foreign.torchfile import Skeleton, fake_tensor, skeleton
from lightning_shard.checkpoint.format.header import check_name, dtype_name, header_of, tensor_table
from lightning_shard.checkpoint.format.typed_json import decode
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor
from lightning_shard.checkpoint.names import Rename, new_names, unmatched
from lightning_shard.checkpoint.store import open_store
from lightning_shard.errors import CheckpointError, StateMismatchError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


@dataclass(frozen=True)
class Bundle:
    """All files to write: those of tensors, and then the small ones, as bytes by name."""

    files: list[OutFile]
    small: dict[str, bytes] = field(default_factory=dict)

    @property
    def sources(self) -> list[Source]:
        return [source for file in self.files for _, source in file.tensors]


@dataclass(frozen=True)
class Naming:
    """Which of the model's tensors to write, under which names and in which dtype."""

    dtype: torch.dtype | None = None
    strip_prefix: str | None = None
    rename: Rename | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise CheckpointError(f"dtype ({self.dtype!r:.80}) must be a floating one, such as torch.bfloat16.")

    def of(self, stored: Mapping[str, StoredTensor]) -> dict[str, Source]:
        """The sources by their new names."""
        return {new: self.source(stored[old]) for new, old in self.names(stored).items()}

    def names(self, old: Iterable[str]) -> dict[str, str]:
        """New names to old ones. Nothing compares them with what was wanted, as a load does, so it is said here."""
        old = list(old)
        found = new_names(old, self.strip_prefix, self.rename)
        if old and not found:
            raise StateMismatchError("rename leaves out all tensors of the model: let it return new names of some.")
        if old and (without := unmatched(old, self.strip_prefix, self.rename)):
            raise StateMismatchError(
                f"No tensor's name begins with {' or '.join(map(repr, without)):.200}, which rename is to replace; a"
                f" name is {old[0].removeprefix(self.strip_prefix or '')!r}, for example. Pass what names begin with,"
                " or leave rename out."
            )
        return found

    def source(self, stored: StoredTensor) -> Source:
        convert = self.dtype is not None and stored.dtype.is_floating_point
        return Source(stored, self.dtype if convert and self.dtype is not None else stored.dtype)


# -- safetensors ------------------------------------------------------------------------------------------------------


def safetensors(
    checkpoint: Checkpoint, name: str, naming: Naming, max_shard_bytes: int | None, *, optimizer: bool
) -> Bundle:
    """The model's tensors and, if ``optimizer``, the optimizer's with the prefix ``optimizer.``."""
    sources = naming.of(checkpoint)
    for key, stored in checkpoint.optimizer.items() if optimizer else ():
        if sources.setdefault(f"optimizer.{key}", Source(stored, stored.dtype)).stored is not stored:
            raise StateMismatchError(f"The model has a tensor named 'optimizer.{key}' itself: gather without it.")
    return _sharded(sources, name, max_shard_bytes)


def _sharded(sources: Mapping[str, Source], name: str, max_shard_bytes: int | None) -> Bundle:
    # wide dtypes first, as safetensors orders them, so that each tensor is aligned to its element size
    order = sorted(sources, key=lambda key: (-sources[key].dtype.itemsize, key))
    if max_shard_bytes is None:
        return Bundle([_safetensors_file(name, order, sources)])
    shards = [*groups(order, lambda key: sources[key].nbytes, max_shard_bytes)] or [[]]
    stem = name.removesuffix(".safetensors")
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {key: file for file, keys in zip(names, shards) for key in keys}
    total = sum(source.nbytes for source in sources.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    files = [_safetensors_file(file, keys, sources) for file, keys in zip(names, shards)]
    return Bundle(files, {f"{stem}.safetensors.index.json": json.dumps(index, indent=2).encode() + b"\n"})


def _safetensors_file(name: str, keys: Sequence[str], sources: Mapping[str, Source]) -> OutFile:
    for key in keys:
        check_name(key)
    described = [(key, dtype_name(sources[key].dtype, key), sources[key].stored.entry.shape) for key in keys]
    table, spans = tensor_table(described)
    header = header_of(table, {"format": "pt"})
    tensors = [(len(header) + begin, sources[key]) for key, (begin, _) in zip(keys, spans, strict=True)]
    return OutFile(name, len(header) + (spans[-1][1] if spans else 0), [(0, header)], tensors)


# -- a transformers folder --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pretrained:
    """A transformers model in a checkpoint: the prefix of its tensors' names, and the files beside its weights."""

    prefix: str
    files: dict[str, bytes]


def pretrained(
    checkpoint: Checkpoint, prefix: str | None, config: Any, storage_options: dict[str, Any] | None
) -> Pretrained:
    """Find the transformers model in a checkpoint: its config from the checkpoint or ``config``, and its prefix."""
    tree = checkpoint.state_json()
    raw = tree.get(TRANSFORMERS_KEY) if isinstance(tree, dict) else None
    if not (isinstance(raw, dict) and {"models", "tokenizer"} <= raw.keys()):
        raw = None  # a program's own state under this key
    known = decode(raw, lambda name: checkpoint.trainer[name].full()) if raw else {"models": {}, "tokenizer": {}}
    models = known["models"]
    if prefix is None and (config is None or len(models) == 1):
        if len(models) > 1:
            raise CheckpointError(
                f"{checkpoint.path} holds {len(models)} transformers models: choose one with strip_prefix="
                f"{' or '.join(map(repr, models))}."
            )
        prefix = next(iter(models), "")
    prefix = prefix or ""
    files = {name: data.numpy().tobytes() for name, data in known["tokenizer"].items()}
    if config is not None:
        return Pretrained(prefix, files | _config_files(config, storage_options))
    if prefix not in models:
        held = f"; it holds {', '.join(map(repr, models))}" if models else ""
        raise CheckpointError(
            f"{checkpoint.path} has no config of a transformers model whose names begin with {prefix!r}{held}. Give it"
            " as config=, a transformers config or the folder that the model came from, and the beginning of its"
            " tensors' names as strip_prefix=."
        )
    return Pretrained(prefix, files | {name: text.encode() for name, text in models[prefix].items()})


def _config_files(config: Any, storage_options: dict[str, Any] | None) -> dict[str, bytes]:
    if hasattr(config, "to_json_string"):
        return {CONFIG: config.to_json_string().encode()}
    if not isinstance(config, (str, os.PathLike)):
        raise CheckpointError(f"config ({type(config).__name__}) must be a transformers config or a folder with one.")
    store = open_store(config, storage_options)
    if not store.exists(CONFIG):
        raise CheckpointError(f"config ({os.fspath(config)}) has no {CONFIG}: give the folder of a transformers model.")
    names = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)
    return {name: store.read(name) for name in names if store.exists(name)}


def transformers(checkpoint: Checkpoint, found: Pretrained, naming: Naming, max_shard_bytes: int | None) -> Bundle:
    """The model's tensors under its own names; of tensors that share memory only the first, as ``save_pretrained``."""
    own = {name: stored for name, stored in checkpoint.items() if name.startswith(found.prefix)}
    own = {name: stored for name, stored in own.items() if checkpoint.alias_of(name) not in own}
    sources = replace(naming, strip_prefix=found.prefix).of(own)
    weights = _sharded(sources, "model.safetensors", max_shard_bytes)
    files = dict(found.files)
    if CONFIG in files:  # only on the rank that writes it
        config = json.loads(files[CONFIG])
        config["dtype"] = _common_dtype(sources)
        files[CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    return Bundle(weights.files, {**weights.small, **files})


def _common_dtype(sources: Mapping[str, Source]) -> str | None:
    """The floating dtype of most elements; None without floating tensors."""
    counts: dict[torch.dtype, int] = {}
    for source in sources.values():
        if source.dtype.is_floating_point:
            counts[source.dtype] = counts.get(source.dtype, 0) + source.stored.numel()
    return str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.") if counts else None


# -- Lightning's .ckpt ------------------------------------------------------------------------------------------------


Key = tuple[str, str]
"""A section, and a tensor's name in it."""


def plan_lightning(checkpoint: Checkpoint, naming: Naming, *, optimizer: bool) -> Skeleton[Key]:
    """The skeleton of Lightning's checkpoint dict: what ``torch.save`` writes, with gaps for the tensors' bytes."""
    fakes: dict[Key, Tensor] = {}

    def fake(section: str, source: Source) -> Tensor:
        key = section, source.stored.name
        if key not in fakes:
            fakes[key] = fake_tensor(source.stored.shape, source.dtype)
        return fakes[key]

    def whole(section: str, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        return {name: fake(section, Source(tensor, tensor.dtype)) for name, tensor in stored.items()}

    model = {
        new: fake("model", naming.source(checkpoint[checkpoint.alias_of(old) or old]))
        for new, old in naming.names(checkpoint).items()
    }
    others = whole("trainer", checkpoint.trainer)
    states = whole("optimizer", checkpoint.optimizer)
    referred: set[str] = set()

    def refer(name: str) -> Tensor:
        referred.add(name)
        return states[name]

    rest = decode(checkpoint.state_json(), others.__getitem__, refer, plain_enums=True)
    own = {name: state for name, state in states.items() if name not in referred}
    return skeleton(put_together(model, own if optimizer else None, rest), fakes)


def lightning(checkpoint: Checkpoint, name: str, naming: Naming, plan: Skeleton[Key]) -> Bundle:
    """The ``.ckpt`` file of a plan of :func:`plan_lightning`."""
    sections = {"model": checkpoint, "optimizer": checkpoint.optimizer, "trainer": checkpoint.trainer}
    tensors = []
    for (section, key), begin in plan.places.items():
        stored = sections[section][key]
        source = naming.source(stored) if section == "model" else Source(stored, stored.dtype)
        tensors.append((begin, source))
    return Bundle([OutFile(name, plan.size, plan.literals, tensors)])
