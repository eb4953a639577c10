"""Collects the files that a transformers folder has beside the weights, from a module with such a model and tokenizer.

transformers isn't imported here: if a module has parts of it, it has been imported already.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.checkpoint.convert.export import CONFIG, GENERATION_CONFIG
from lightning_shard.parallel.fsdp.units import class_name

MAX_TOKENIZER_BYTES = 64 * 2**20


def describe(module: nn.Module, *holders: Any) -> dict[str, Any] | None:
    """The configs of the transformers models in a module, and a tokenizer's files; None if it holds no model.

    Args:
        holders: Objects other than the module that may have the tokenizer as an attribute, such as a data module.

    Returns:
        ``"models"``: by the prefix of their tensors' names (``"model."``), file names to their text; ``"tokenizer"``:
        file names to their bytes, as tensors.
    """
    known = sys.modules.get("transformers.modeling_utils")
    if known is None:
        return None
    models: dict[str, dict[str, str]] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, known.PreTrainedModel) and not any(prefix.startswith(outer) for outer in models):
            models[prefix] = _configs(part)
    if not models:
        return None
    base = sys.modules.get("transformers.tokenization_utils_base")
    attributes = [value for holder in (module, *holders) if holder is not None for value in vars(holder).values()]
    tokenizer = next((v for v in attributes if base is not None and isinstance(v, base.PreTrainedTokenizerBase)), None)
    return {"models": models, "tokenizer": _files(tokenizer, len(tokenizer)) if tokenizer is not None else {}}


def _configs(model: Any) -> dict[str, str]:
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [class_name(model)]
    files = {CONFIG: json.dumps(config)}
    if getattr(model, "generation_config", None) is not None:
        files[GENERATION_CONFIG] = model.generation_config.to_json_string()
    return files


@functools.lru_cache(maxsize=1)
def _files(tokenizer: Any, size: int) -> dict[str, Tensor]:
    """A tokenizer's files, cached by it and its number of tokens; a failure doesn't fail the checkpoint."""
    files: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:
            rank_zero_warn(f"The tokenizer isn't in the checkpoint, since it can't be saved: {error!r}.")
            return {}
        paths = [entry.path for entry in os.scandir(folder) if entry.is_file()]
        total = sum(os.path.getsize(path) for path in paths)
        if total > MAX_TOKENIZER_BYTES:
            rank_zero_warn(f"The tokenizer isn't in the checkpoint, since it has {total:,} bytes.")
            return {}
        for path in sorted(paths):
            with open(path, "rb") as file:
                files[os.path.basename(path)] = torch.from_numpy(np.frombuffer(file.read(), np.uint8).copy())
    return files
