"""Networks for images, small, with the structure of torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
_group_norm = partial(nn.GroupNorm, 4)
Norm = Callable[[int], nn.Module]


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Its stages are attributes."""

    def __init__(self, norm: Norm = _group_norm) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(8, 8, 1, norm), Residual(8, 8, 1, norm))
        self.layer2 = nn.Sequential(Residual(8, 16, 2, norm), Residual(16, 16, 1, norm))
        self.layer3 = nn.Sequential(Residual(16, 32, 2, norm), Residual(32, 32, 1, norm))
        self.fc = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(x.mean((2, 3)))


class ChannelsLast(nn.LayerNorm):
    """A LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """One Sequential of stages, with downsampling between them."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32)
        features: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 8, 2, 2), ChannelsLast(8))]
        for width, wider in pairwise((*widths, 0)):
            features.append(nn.Sequential(ConvNeXtBlock(width), ConvNeXtBlock(width)))
            if wider:
                features.append(nn.Sequential(ChannelsLast(width), nn.Conv2d(width, wider, 2, 2)))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(ChannelsLast(32), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.classifier(self.features(x)))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


class InvertedResidual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        inner = 2 * width
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), _group_norm(inner), nn.SiLU(inplace=True)),
            nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False),
            SqueezeExcite(inner),
            nn.Sequential(nn.Conv2d(inner, out, 1, bias=False), _group_norm(out)),
        )
        self.is_residual = stride == 1 and width == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.is_residual else self.layers(x)


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), _group_norm(8), nn.SiLU(inplace=True))
        stages = (
            nn.Sequential(InvertedResidual(width, out, stride), InvertedResidual(out, out, 1))
            for width, out, stride in ((8, 8, 1), (8, 16, 2), (16, 32, 2))
        )
        self.features = nn.Sequential(stem, *stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class WindowAttention(nn.Module):
    """Over windows of 2 × 2, shifted by one in every other block, with a bias by relative position."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.position_bias = nn.Parameter(torch.randn(9, 2) * 0.1)
        places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        relative = (places[:, :, None] - places[:, None] + 1).permute(1, 2, 0)
        self.register_buffer("index", relative[..., 0] * 3 + relative[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        samples, height, width, channels = x.shape
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        windows = x.view(samples, height // 2, 2, width // 2, 2, channels).transpose(2, 3).reshape(-1, 4, channels)
        query, key, value = self.qkv(windows).view(-1, 4, 3, 2, channels // 2).permute(2, 0, 3, 1, 4)
        bias = self.position_bias[self.index].permute(2, 0, 1)
        y = F.scaled_dot_product_attention(query, key, value, bias[None]).transpose(1, 2).reshape(-1, 4, channels)
        y = self.out(y).view(samples, height // 2, width // 2, 2, 2, channels).transpose(2, 3).reshape(x.shape)
        return torch.roll(y, (self.shift, self.shift), (1, 2))


class SwinBlock(nn.Module):
    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, shift)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = (x[:, row::2, column::2] for column in range(2) for row in range(2))
        return self.reduction(self.norm(torch.cat([*corners], -1)))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        stages = (nn.Sequential(SwinBlock(width, 0), SwinBlock(width, 1)) for width in (8, 16))
        first, second = stages
        self.features = nn.Sequential(first, PatchMerging(8), second)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean((1, 2)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, 2, padding=1) for c in (4, 8, 16))
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (16, 8, 4))
        self.into, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = F.silu(layer(x))
        x = self.middle(x)
        for layer in self.up:
            x = F.silu(layer(x)) + skips.pop()
        return self.out(x)
