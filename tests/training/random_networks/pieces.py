"""What random networks are combined of: lines of source text, by kind of input or by name."""

from __future__ import annotations

CLASSES = {"tokens": 20, "vectors": 5, "images": 5}

HEADER = """import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from typing import NamedTuple
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

D = 16


class Out(NamedTuple):
    h: torch.Tensor
    measure: torch.Tensor


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_sigma = nn.Parameter(torch.zeros(()))

    def forward(self, loss):
        return loss * torch.exp(-self.log_sigma) + self.log_sigma


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


@torch.compile(backend="aot_eager")
def scaled(x):
    return x / (x.pow(2).mean() + 1.0).sqrt() if x.ndim == 1 else torch.tanh(x) + x
"""

EMBEDDINGS = {
    "tokens": "nn.Embedding(20, D)",
    "vectors": "nn.Linear(6, D)",
    "images": "nn.Conv2d(3, D, 3, stride=2, padding=1)",
}
NORMS = {"tokens": "nn.LayerNorm(D)", "vectors": "nn.LayerNorm(D)", "images": "nn.GroupNorm(2, D)"}
LINEAR = {"tokens": "nn.Linear(D, D)", "vectors": "nn.Linear(D, D)", "images": "nn.Conv2d(D, D, 1)"}
POOLED = {"tokens": ".mean(1)", "vectors": "", "images": ".mean((2, 3))"}
OVER_POSITIONS = {"tokens": "[:, None]", "vectors": "", "images": "[:, :, None, None]"}
INPUTS = {
    "tokens": "torch.randint(0, 20, (8, 6), generator=g)",
    "vectors": "torch.randn(8, 6, generator=g)",
    "images": "torch.randn(8, 3, 8, 8, generator=g)",
}

# By kind of input and name: lines of a block's __init__, and of its forward, which computes y of h.
LAYERS: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "tokens": {
        "mlp": (
            ["self.norm = nn.LayerNorm(D)", "self.up = nn.Linear(D, 2 * D)", "self.down = nn.Linear(2 * D, D)"],
            ["y = self.down(F.gelu(self.up(self.norm(h))))"],
        ),
        "attention": (
            ["self.norm = nn.LayerNorm(D)", "self.qkv = nn.Linear(D, 3 * D)", "self.out = nn.Linear(D, D)"],
            [
                "q, k, v = self.qkv(self.norm(h)).chunk(3, -1)",
                "y = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))",
            ],
        ),
        "recurrent": (["self.gru = nn.GRU(D, D, batch_first=True)"], ["y, _ = self.gru(h)"]),
        "convolution": (
            ["self.conv = nn.Conv1d(D, D, 3, padding=1)"],
            ["y = self.conv(h.transpose(1, 2)).transpose(1, 2)"],
        ),
        "mixture": (
            ["self.gate = nn.Linear(D, 2)", "self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))"],
            ["w = self.gate(h).softmax(-1)", "y = sum(w[..., i : i + 1] * e(h) for i, e in enumerate(self.experts))"],
        ),
    },
    "vectors": {
        "gated": (
            ["self.a = nn.Linear(D, D)", "self.b = nn.Linear(D, D)"],
            ["y = torch.tanh(self.a(h)) * torch.sigmoid(self.b(h))"],
        ),
        "bottleneck": (
            ["self.norm = nn.LayerNorm(D)", "self.a = nn.Linear(D, 4)", "self.b = nn.Linear(4, D)"],
            ["y = self.b(F.silu(self.a(self.norm(h))))"],
        ),
    },
    "images": {
        "convolution": (
            ["self.norm = nn.GroupNorm(2, D)", "self.conv = nn.Conv2d(D, D, 3, padding=1)"],
            ["y = F.relu(self.conv(self.norm(h)))"],
        ),
        "sequential": (
            ["self.conv = nn.Sequential(nn.Conv2d(D, D, 1), nn.GELU(), nn.Conv2d(D, D, 1))"],
            ["y = self.conv(h)"],
        ),
        "depthwise": (
            ["self.conv = nn.Conv2d(D, D, 3, padding=1, groups=D)", "self.point = nn.Conv2d(D, D, 1)"],
            ["y = self.point(F.silu(self.conv(h)))"],
        ),
    },
}

# Plans by which tensor ranks split layers.
PLANS = {
    "mlp": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "bottleneck": {"blocks.*.a": "colwise", "blocks.*.b": "rowwise"},
}

# What a block returns, and how its output is taken apart.
RETURNS = {
    "tensor": ("return h + y", ["h = {call}"]),
    "tuple": ("return h + y, {measure}", ["h, measure = {call}"]),
    "tuple with None": ("return h + y, None", ["h, _ = {call}"]),
    "dict": ("return {{'h': h + y, 'measure': {measure}}}", ["o = {call}", "h, measure = o['h'], o['measure']"]),
    "named tuple": ("return Out(h + y, {measure})", ["o = {call}", "h, measure = o.h, o.measure"]),
}
FIRST_OF = {"tensor": "", "tuple": "[0]", "tuple with None": "[0]", "dict": "['h']", "named tuple": ".h"}

LOSSES = {
    "cross entropy": "F.cross_entropy({pred}, {y})",
    "log likelihood": "F.nll_loss({pred}.log_softmax(-1), {y})",
    "squares": "F.mse_loss(pred, y)",
    "binary": "F.binary_cross_entropy_with_logits(pred, y)",
    "smooth": "F.smooth_l1_loss(pred, y)",
    "by hand": "(pred - y).pow(2).mean()",
    "weighed": "((pred - y).pow(2).flatten(1).mean(1) * weight).mean()",
}
OF_CLASSES = ("cross entropy", "log likelihood")

OPTIMIZERS = {
    "AdamW": ["return torch.optim.AdamW(self.parameters(), lr=1e-3)"],
    "SGD": ["return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-2)"],
    "RMSprop": ["return torch.optim.RMSprop(self.parameters(), lr=1e-3)"],
    "groups": [
        "decays = [q for _, q in self.named_parameters() if q.ndim > 1]",
        "others = [q for _, q in self.named_parameters() if q.ndim <= 1]",
        "groups = [{'params': decays, 'weight_decay': 0.1}, {'params': others, 'weight_decay': 0.0, 'lr': 2e-3}]",
        "return torch.optim.AdamW(groups, lr=1e-3)",
    ],
    "Adagrad": ["return torch.optim.Adagrad(self.parameters(), lr=1e-3)"],
    "NAdam": ["return torch.optim.NAdam(self.parameters(), lr=1e-3, weight_decay=1e-2)"],
    "Adafactor": ["return torch.optim.Adafactor(self.parameters(), lr=1e-2)"],
    "by module": [
        "groups = {}",
        "for name, q in self.named_parameters():",
        "    groups.setdefault(name.split('.')[0], []).append(q)",
        "groups = [{'params': group, 'lr': 1e-3 * (1 + i)} for i, group in enumerate(groups.values())]",
        "return torch.optim.Adamax(groups)",
    ],
    "scheduled": [
        "adam = torch.optim.Adam(self.parameters(), lr=1e-3)",
        "schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))",
        "return {'optimizer': adam, 'lr_scheduler': {'scheduler': schedule, 'interval': 'step'}}",
    ],
}
TRAINERS = [
    {},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 2},
]
