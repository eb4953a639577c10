"""transformers' architectures, each as small as its configuration lets it be, with batches that it takes."""

from __future__ import annotations

import itertools
import math
import pickle
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.models.layers import few_layers
from tests.training.models.networks import EPSILON
from tests.training.models.overrides import TEXT, Input, override
from tests.training.models.sizes import AT_MOST, CLASSES, MORE_SIZES, SIZES, STAGES, VARIANTS, VOCABULARY

SAMPLES, STEPS = 8, 2
MOST_PARAMETERS = 6_000_000
MOST_MEMORY_BYTES = 12 << 30

FAMILIES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder–decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""Families of one task, in the order in which a class of several is counted."""


class NotBuilt(Exception):
    """No small model of this architecture was found; says why the last attempt failed."""


class Model(L.LightningModule):
    """As a user's: it knows of no layout."""

    def __init__(self, architecture: str, config: Any, joined: Sequence[str] = ()) -> None:
        super().__init__()
        self.model = class_of(architecture)(config)
        self.model.train()
        self.joined = joined

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self(batch)
        return output.logits if "logits" in output else output[0]

    def forward(self, batch: dict[str, Tensor]) -> Any:
        inputs = {name: value for name, value in batch.items() if name != "target"}
        return self.model(**inputs | {name: inputs[name].flatten(0, 1) for name in self.joined})

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        output = self(batch)
        if "loss" in output:
            return output.loss
        target = batch["target"] if "target" in batch else batch["labels"]
        return F.cross_entropy(output[0].flatten(0, -2), target.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3, eps=EPSILON)


@dataclass(frozen=True)
class Found:
    """A small model that runs on one process: its pickled configuration and what its batches are."""

    config: bytes
    inputs: Mapping[str, Input]
    parameters: int
    has_all_kinds: bool
    """Whether its configuration has layers of all kinds that the whole one has."""


def architectures() -> dict[str, tuple[str, str, str]]:
    """By class: family, model type and class, each class once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str, str]] = {}
    for family, mapping in FAMILIES.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, (family, model_type, name))
    return found


def find_small(family: str, model_type: str, architecture: str) -> Found:
    """Try sizes until a model is small and its loss is a number.

    Raises:
        NotBuilt: None did.
    """
    bound_memory()
    first: Exception | None = None  # of the most usual sizes
    kind = class_of(architecture).config_class or _config_class(model_type)
    own = override(architecture, model_type)
    settings, inputs = (own.config, own.inputs) if own else ({}, {})
    of_all_kinds = True, False  # rather sizes that fit worse than layers of one kind alone
    for keeps, more, variant in itertools.product(of_all_kinds, [MORE_SIZES] if own else [{}, MORE_SIZES], VARIANTS):
        sizes = [*{**SIZES, **more, **variant}.items(), *(STAGES.items() if more else ())]
        try:
            config = _small(kind, sizes, settings, keeps)
            return _try(architecture, config, lambda model: {**_inputs(family, model), **inputs}, keeps)
        except Exception as error:
            first = first or error
    raise NotBuilt(f"{type(first).__name__}: {first}") from first


def read(found: Found) -> Any:
    """The configuration."""
    return pickle.loads(found.config)


def make(architecture: str, found: Found) -> Model:
    bound_memory()
    joined = tuple(name for name, each in found.inputs.items() if each.joined)
    return Model(architecture, read(found), joined)


def batches(found: Found, steps: int = STEPS) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield {name: _tensor(each, generator) for name, each in found.inputs.items()}


def _tensor(each: Input, generator: torch.Generator) -> Tensor:
    if each.same is not None:
        return torch.tensor(each.same).expand(SAMPLES, *each.shape).clone()
    if not each.end:
        return torch.randn((SAMPLES, *each.shape), generator=generator)
    numbers = torch.randint(3, each.end, (SAMPLES, *each.shape), generator=generator).squeeze()
    numbers[..., : len(each.first)] = torch.tensor(each.first, dtype=torch.long)
    return numbers


def bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def makers(architecture: str, found: Found) -> tuple[Any, Any]:
    return partial(make, architecture, found), partial(batches, found)


def _try(architecture: str, config: Any, inputs: Callable[[Any], Mapping[str, Input | None]], keeps: bool) -> Found:
    with torch.device("meta"):
        meta = class_of(architecture)(config)
    size = sum(parameter.numel() for parameter in meta.parameters())
    if size > MOST_PARAMETERS:
        raise NotBuilt(f"{size:,} parameters")
    kept = {name: each for name, each in inputs(meta).items() if each}
    found = Found(pickle.dumps(config), kept, size, keeps)
    torch.manual_seed(1)
    loss = make(architecture, found).loss(next(batches(found)))
    if not math.isfinite(loss) or not loss.requires_grad:
        raise NotBuilt(f"its loss is {loss}")
    return found


def _inputs(family: str, model: Any) -> dict[str, Input]:
    config = model.config
    if family == "vision":
        side = getattr(config, "image_size", None) or 32
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": Input((channels, height, width)), "labels": Input((1,), CLASSES)}
    if family in ("speech", "audio", "speech to text"):
        name = model.main_input_name
        bins = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 16))
        if name == "input_values" and "AudioSpectrogram" not in type(model).__name__:
            shape: tuple[int, ...] = (1600,)
        elif "Whisper" in type(model).__name__:
            shape = (bins, 2 * config.max_source_positions)
        else:
            shape = (32, bins)
        labels = Input((1,), CLASSES) if family == "audio" else Input((4,), VOCABULARY - 4)
        return {name: Input(shape), "labels": labels}
    return {"input_ids": TEXT, "labels": TEXT}


def class_of(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)


def _config_class(model_type: str) -> Any:
    import transformers

    return type(transformers.AutoConfig.for_model(model_type))


def _small(kind: Any, sizes: Sequence[tuple[str, Any]], own: Mapping[str, Any], keeps_kinds: bool) -> Any:
    """A configuration with these sizes where it has such a setting, parts of composed ones included; no dropout.

    ``own`` are settings of this architecture, which come before the sizes. With ``keeps_kinds`` it has layers of all
    kinds that the whole one has.
    """
    base = kind()
    renamed = getattr(kind, "attribute_map", {})
    settings: dict[str, Any] = {}
    for name, value in sizes:
        if value is None or name in renamed or name in own or not hasattr(base, name):
            continue
        now = getattr(base, name)
        if now is None or isinstance(now, (list, tuple)) == isinstance(value, (list, tuple)):
            settings[name] = value[: len(now)] if isinstance(now, (list, tuple)) else value
    if keeps_kinds:
        whole = base.to_dict()
        settings |= {name: most for name, most in AT_MOST.items() if (whole.get(name) or 0) > most}
        few = few_layers(base)
        settings |= {} if few.keys() & own.keys() else few
    for name, value in base.to_dict().items():
        if ("drop" in name or name == "mask_time_prob") and isinstance(value, float):
            settings[name] = 0.0
    parts = getattr(kind, "sub_configs", {})
    for name in parts:
        part = getattr(base, name, None)
        if part is not None:
            settings[name] = _small(type(part), sizes, own.get(name, {}), keeps_kinds)
    if getattr(base, "is_encoder_decoder", False):
        settings["decoder_start_token_id"] = SIZES["decoder_start_token_id"]  # a T5 has none by default
    settings |= {name: value for name, value in own.items() if name not in parts}
    return kind(**{name: value for name, value in settings.items() if value is not None})
