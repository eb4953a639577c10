"""Data modules: text files as windows of bytes or tokens, each one's last tenth held out; and random tokens."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

HELD_OUT_PART = 10
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Windows(Dataset[Tensor]):
    """Windows of ``context + 1`` bytes, overlapping by one byte, so that each byte but the first is predicted once."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


class TextFolder(L.LightningDataModule):
    """The files of a folder and its subfolders, in the order of their names.

    Args:
        path: A folder, or one file.
        pattern: A glob pattern of the files to use.
        context: Bytes of context of a prediction.
        batch_size: Windows per data-parallel rank.
        global_batch_size: Training windows over all data-parallel ranks, so that a step is the same on any number of
            ranks that divides it. Default: ``batch_size`` per rank.
        held_out_windows: The maximum number of windows for validation, evenly spread over the held-out text.
        num_workers: DataLoader workers.
        tokenizer: A folder with a transformers tokenizer: windows are of its tokens then, not of bytes.
    """

    def __init__(
        self,
        path: str,
        *,
        pattern: str = "*.txt",
        context: int = 128,
        batch_size: int = 16,
        global_batch_size: int | None = None,
        held_out_windows: int = 256,
        num_workers: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer: Any = None
        if tokenizer is not None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.path, self.pattern, self.context = Path(path), pattern, context
        self.batch_size, self.global_batch_size = batch_size, global_batch_size
        self.held_out_windows, self.num_workers = held_out_windows, num_workers
        self.train_text = self.held_out_text = torch.empty(0, dtype=torch.uint8)

    def files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        return sorted(path for path in self.path.rglob(self.pattern) if path.is_file())

    def setup(self, stage: str | None = None) -> None:
        if len(self.train_text):
            return
        train, held_out = bytearray(), bytearray()
        for path in self.files():
            content = path.read_bytes()
            cut = len(content) - len(content) // HELD_OUT_PART
            train += content[:cut]
            held_out += content[cut:]
        if len(held_out) <= self.context:
            raise ValueError(
                f"{self.path} has {len(train) + len(held_out)} bytes in files named {self.pattern}: too little to hold"
                f" out one window of {self.context + 1} bytes in the last tenth of every file. Give it more text, or"
                " set data.path, data.pattern or a smaller data.context."
            )
        self.train_text, self.held_out_text = self._encoded(train), self._encoded(held_out)
        unit = "tokens" if self.tokenizer else "bytes"
        rank_zero_info(
            f"{len(self.train_text):,} {unit} of text to train on; {len(self.held_out_text):,} held out, where single"
            f" {unit} have an entropy of {self.byte_entropy():.3f} nats."
        )

    def _encoded(self, text: bytearray) -> Tensor:
        if self.tokenizer is None:
            return torch.frombuffer(text, dtype=torch.uint8)
        return torch.tensor(self.tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False))

    def train_dataloader(self) -> DataLoader[Tensor]:
        windows = Windows(self.train_text, self.context)
        return DataLoader(windows, self._own_batch(), shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Tensor]:
        windows = Windows(self.held_out_text, self.context)
        count = min(self.held_out_windows, len(windows))
        spread = torch.utils.data.Subset(windows, [i * len(windows) // count for i in range(count)])
        return DataLoader(spread, self.batch_size, num_workers=self.num_workers)

    def _own_batch(self) -> int:
        """The training batch size of a data-parallel rank."""
        if self.global_batch_size is None:
            return self.batch_size
        assert self.trainer is not None
        ranks = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        if self.global_batch_size % ranks:
            raise ValueError(
                f"data.global_batch_size ({self.global_batch_size}) must be a multiple of the {ranks} data ranks:"
                " choose one that all numbers of ranks that may be left divide."
            )
        return self.global_batch_size // ranks

    def byte_entropy(self) -> float:
        """The entropy of single held-out bytes or tokens, in nats: the loss of the best model without context."""
        counts = torch.bincount(self.held_out_text, minlength=256)
        shares = counts[counts > 0] / counts.sum()
        return -sum(share * math.log(share) for share in shares.tolist())


class StandardLibrary(TextFolder):
    """The source files of the running Python's standard library, without its tests."""

    def __init__(self, **options: Any) -> None:
        super().__init__(sysconfig.get_path("stdlib"), pattern="*.py", **options)

    def files(self) -> list[Path]:
        return [path for path in super().files() if not NOT_SOURCE & set(path.relative_to(self.path).parts)]


class RandomTokens(L.LightningDataModule):
    """Windows of ``context + 1`` random tokens, for plans and timings; there is nothing to learn."""

    def __init__(self, vocabulary: int, context: int, batch_size: int, windows: int = 1024) -> None:
        super().__init__()
        self.vocabulary, self.context, self.batch_size, self.windows = vocabulary, context, batch_size, windows

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary, (self.windows, self.context + 1), generator=generator)
        return DataLoader(tokens, self.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
