"""Networks that aren't transformers': torch's own modules, and what people write with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training.models import adapted, vision

WIDTH, LENGTH, VOCABULARY, SAMPLES, STEPS = 16, 8, 32, 8, 2
EPSILON = 1e-5
"""AdamW makes a whole step of any gradient well above it: not of one that is 0 but for rounding."""


class Supervised(L.LightningModule):
    """A network, its inputs and what should come out."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, target = batch
        output = self(*inputs)
        if target.is_floating_point():
            return F.mse_loss(output, target)
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.network(*inputs)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self(*batch[:-1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3, eps=EPSILON)


# Of unlike layers, one after the other


def mlp() -> nn.Module:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, WIDTH))


def vgg() -> nn.Module:
    def stage(channels_in: int, channels_out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        return [conv, nn.GroupNorm(2, channels_out), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    return nn.Sequential(*stage(3, 8), *stage(8, 16), nn.Flatten(), nn.Linear(16 * 4, 32), nn.ReLU(), nn.Linear(32, 10))


class MlpByAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.relu(self.second(F.relu(self.first(x)))))


# Recurrent


class Recurrent(nn.Module):
    """One module of several layers."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=4, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


class RecurrentStack(nn.Module):
    """A list of layers, each of which returns its state too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            y, _state = layer(x)
            x = x + y
        return self.head(x)


# torch's transformers


def _layer(kind: Any) -> nn.Module:
    return kind(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(_layer(nn.TransformerEncoderLayer), 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shared(nn.Module):
    """One block, four times, as ALBERT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


# The LightningModule and its network


class WithItsHead(Supervised):
    """A backbone, with the head beside it on the LightningModule."""

    def __init__(self) -> None:
        backbone = Tied()
        backbone.head = nn.Identity()  # type: ignore[assignment]
        super().__init__(backbone)
        self.classifier = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.network(tokens))


class WithItsLoss(Supervised):
    """The network gives its loss, as transformers' do, and has nothing to predict."""

    predict_step = L.LightningModule.predict_step

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.network(*batch)


class TwoViews(Supervised):
    """The network is called twice in a step, on two views of the samples."""

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        one, other = (self.network(view) for view in batch)
        return 1 - F.cosine_similarity(one, other.detach()).mean()


class ItsOwnNetwork(Supervised):
    """The blocks are on the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCABULARY, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.network(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(LENGTH, 16), nn.GELU(), nn.Linear(16, LENGTH))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


def mixer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(MixerBlock() for _ in range(4)), nn.LayerNorm(WIDTH))


# Diffusion


class ConditionedBlock(nn.Module):
    """As of a diffusion transformer: scaled and shifted by the time, looking at the context."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.context = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(time))[:, None].chunk(3, -1)
        y = self.norms[0](x) * (1 + scale) + shift
        x = x + gate * self.attention(y, y, y, need_weights=False)[0]
        x = x + self.context(x, context, context, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, WIDTH, 4, 4)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.text = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 3 * 4 * 4)

    def forward(self, noisy: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.into(noisy).flatten(2).transpose(1, 2)
        time, context = self.time(time[:, None]), self.text(text)
        for block in self.blocks:
            x = block(x, time, context)
        return F.fold(self.out(self.norm(x)).transpose(1, 2), noisy.shape[-2:], 4, stride=4)


# What goes in


def _tokens(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(0, VOCABULARY, (SAMPLES, *shape), generator=generator)


def _floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(SAMPLES, *shape, generator=generator)


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 10, (SAMPLES,), generator=generator)


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    batch: tuple[Callable[[torch.Generator], Tensor], ...]
    plan: dict[str, str] | None = None


_TEXT = (_tokens(LENGTH), _tokens(LENGTH))
_VECTORS = (_floats(WIDTH), _floats(WIDTH))
_IMAGES, _LABELLED = (_floats(3, 16, 16), _floats(3, 16, 16)), (_floats(3, 8, 8), _classes)
_PAIRS = (_floats(3, 16, 16), _tokens(LENGTH))
_NOISY = (_floats(3, 16, 16), _floats(), _tokens(4), _floats(3, 16, 16))

NETWORKS: dict[str, Network] = {
    "nn.Sequential, an MLP": Network(mlp, _VECTORS, {"network.2": "colwise", "network.4": "rowwise"}),
    "nn.Sequential, convolutions (VGG)": Network(vgg, _LABELLED),
    "MLP of three attributes": Network(MlpByAttributes, _VECTORS, {"first": "colwise", "second": "rowwise"}),
    "MLP-Mixer": Network(mixer, (_floats(LENGTH, WIDTH), _floats(LENGTH, WIDTH))),
    "nn.LSTM of 4 layers": Network(partial(Recurrent, nn.LSTM), _TEXT),
    "nn.GRU of 4 layers": Network(partial(Recurrent, nn.GRU), _TEXT),
    "nn.ModuleList of nn.LSTM": Network(RecurrentStack, _TEXT),
    "nn.TransformerEncoder": Network(Encoder, _TEXT, {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}),
    "nn.Transformer": Network(Translator, (*_TEXT, _tokens(LENGTH))),
    "GPT with tied embeddings": Network(Tied, _TEXT, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}),
    "one block four times": Network(Shared, _TEXT),
    "backbone, head on the LightningModule": Network(WithItsHead, _TEXT),
    "blocks on the LightningModule": Network(ItsOwnNetwork, _TEXT),
    "network called twice in a step": Network(lambda: TwoViews(mlp()), _VECTORS),
    "ResNet with GroupNorm": Network(vision.ResNet, _LABELLED),
    "ResNet with BatchNorm": Network(partial(vision.ResNet, nn.BatchNorm2d), _LABELLED),
    "ConvNeXt": Network(vision.ConvNeXt, _LABELLED),
    "EfficientNet with squeeze and excitation": Network(vision.EfficientNet, _LABELLED),
    "Swin": Network(vision.Swin, _LABELLED),
    "U-Net": Network(vision.UNet, _IMAGES),
    "diffusion transformer": Network(DiffusionTransformer, _NOISY),
    "Llama with LoRA (peft)": Network(adapted.lora_llama, _TEXT),
    "GPT-2 with LoRA (peft)": Network(adapted.lora_gpt2, _TEXT),
    "T5 with LoRA (peft)": Network(adapted.lora_t5, (*_TEXT, _tokens(LENGTH))),
    "BERT with a head": Network(adapted.BertWithAHead, (_tokens(LENGTH), _classes)),
    "ViT and BERT, contrastive": Network(lambda: WithItsLoss(adapted.Contrastive()), _PAIRS),
    "LLaVA, images and text": Network(adapted.Llava, (_floats(3, 16, 16), *_TEXT)),
    "CLIP": Network(lambda: WithItsLoss(adapted.Clip()), _PAIRS),
    "Mixtral with its load-balancing loss": Network(lambda: WithItsLoss(adapted.Balanced()), _TEXT),
}


def make(name: str) -> Supervised:
    network = NETWORKS[name].make()
    return network if isinstance(network, Supervised) else Supervised(network)


def batches(name: str) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield tuple(draw(generator) for draw in NETWORKS[name].batch)
