"""To and from what other programs read and write: plain Lightning's .ckpt, transformers folders, safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, distributed

from lightning_shard import HybridShardStrategy, ShardedCheckpointIO, checkpoint
from lightning_shard.errors import CheckpointError
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, NETWORKS, QUIET, Model, Tokens, layout, loader, world

SAVED, TRAINED = 2, 4  # an epoch has two steps
ONE_PROCESS = "one_process"
LAYOUTS = {"pp2": layout(pipeline=2), "tp2": layout(tensor=2)}


class Tuned(Model):
    """Two groups, which a pipeline's stages share; hyperparameters; and weights from a folder, if asked for."""

    def __init__(self, network: str = "llama", start: str | None = None, decay: float = 0.1) -> None:
        super().__init__(network)
        self.save_hyperparameters(ignore="start")
        self.start = start
        self.losses: list[float] = []

    def on_fit_start(self) -> None:
        if self.start is not None:
            checkpoint.load(self.start, into=self.model)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.hparams["decay"]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit(module: L.LightningModule, strategy: Any = "auto", folder: str | None = None, **options: Any) -> L.Trainer:
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    settings = {**QUIET, "enable_checkpointing": folder is not None, "max_steps": TRAINED}
    devices = 1 if strategy == "auto" else world(LAYOUTS["pp2"])
    callbacks = [keep] if folder is not None else []
    trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=callbacks, **settings)
    trainer.fit(module, loader(GLOBAL_BATCH, samples=2 * GLOBAL_BATCH), **options)
    return trainer


def both_ways(name: str, folder: str, plain: str, pretrained: str) -> dict[str, Any]:
    def strategy() -> HybridShardStrategy:
        return HybridShardStrategy(**LAYOUTS[name])

    own = Tuned()
    fit(own, strategy(), folder)
    resumed = Tuned()
    fit(resumed, strategy(), ckpt_path=plain)
    started = Tuned()
    trainer = fit(started, strategy(), ckpt_path=pretrained)
    assert trainer.global_step == TRAINED
    of_one_process, loaded = Tuned(), Tuned(start=pretrained)
    if is_long := name == "tp2":
        fit(of_one_process, strategy(), ckpt_path=f"{Path(plain).parent}/{ONE_PROCESS}")
        for path in (plain, pretrained):
            trainer.validate(Tuned(), loader(GLOBAL_BATCH, samples=GLOBAL_BATCH), ckpt_path=path, verbose=False)
        fit(loaded, strategy())
    saved = f"{folder}/step={SAVED}.ckpt"
    checkpoint.gather(saved, f"{folder}/all.safetensors", optimizer=True)
    checkpoint.gather(saved, f"{folder}/plain.ckpt")
    checkpoint.gather(saved, f"{folder}/hf", format="transformers", max_shard_bytes=60_000)
    with pytest.raises(CheckpointError, match="dtype"):
        checkpoint.gather(saved, f"{folder}/no.safetensors", dtype=torch.int8 if distributed.get_rank() else None)
    return {
        "own": own.losses,
        "resumed": [resumed.losses, *([of_one_process.losses] if is_long else [])],
        "started": [started.losses, *([loaded.losses] if is_long else [])],
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, list[float]]]:
    """A stock Trainer's checkpoint of the second step, a transformers folder, and the losses from both."""
    folder = tmp_path_factory.mktemp("plain")
    uninterrupted = Tuned()
    fit(uninterrupted, folder=str(folder))
    torch.manual_seed(5)
    model = NETWORKS["llama"]()
    model.save_pretrained(folder / "hf")
    started = Tuned()
    started.model.load_state_dict(model.state_dict())
    fit(started)
    losses = {"uninterrupted": uninterrupted.losses, "started": started.losses}
    saved = folder / f"step={SAVED}.ckpt"
    # as a Trainer on one process saves with this plugin: its optimizer's state is whole in the trainer state
    ShardedCheckpointIO().save_checkpoint(torch.load(saved, weights_only=False), folder / ONE_PROCESS)
    return str(saved), str(folder / "hf"), losses


@pytest.mark.parametrize("name", ["pp2", pytest.param("tp2", marks=pytest.mark.long)])
def test_plain_checkpoints_and_folders_go_in_and_come_out(
    name: str, tmp_path: Path, plain: tuple[str, str, dict[str, list[float]]]
) -> None:
    stock, pretrained, losses = plain
    ranks = run_ranks(both_ways, 2, name, str(tmp_path), stock, pretrained, elastic=True)
    for seen in ranks:
        assert seen["own"] == pytest.approx(losses["uninterrupted"], rel=2e-6)
        for resumed in seen["resumed"]:
            assert resumed == pytest.approx(losses["uninterrupted"][SAVED:], rel=2e-6)
        for started in seen["started"]:
            assert started == pytest.approx(losses["started"], rel=2e-6)

    # a stock Trainer goes on from what was gathered, and the module comes with its hyperparameters
    module = Tuned()
    fit(module, ckpt_path=str(tmp_path / "plain.ckpt"), weights_only=True)
    assert module.losses == pytest.approx(ranks[0]["own"][SAVED:], rel=2e-6)
    again = Tuned.load_from_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    assert again.hparams["decay"] == 0.1
    ours = Tuned.load_from_checkpoint(tmp_path / f"step={SAVED}.ckpt", decay=0.2)  # without gathering
    assert ours.hparams["decay"] == 0.2
    assert all(torch.equal(value, ours.state_dict()[key]) for key, value in again.state_dict().items())

    # the same bytes as one process gathers
    stored = checkpoint.read(tmp_path / f"step={SAVED}.ckpt")
    checkpoint.gather(stored.path, tmp_path / "alone.safetensors", optimizer=True)
    assert (tmp_path / "all.safetensors").read_bytes() == (tmp_path / "alone.safetensors").read_bytes()
    assert not list(tmp_path.glob("**/*.tmp"))
    assert not (tmp_path / "no.safetensors").exists()
    weights = load_file(tmp_path / "all.safetensors")
    assert set(weights) == {*stored, *(f"optimizer.{key}" for key in stored.optimizer)}

    # transformers loads the folder as it is
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model) is transformers.LlamaForCausalLM
    x = Tokens().x[:2]
    with torch.no_grad():
        assert torch.equal(model(x).logits, again.model(x).logits)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[f"model.{key}"]), key


# -- one process ------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(60)} | {"[UNK]": 60}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]")


class Tied(Tuned):
    """GPT-2 with its head tied to the embedding, deeper within the module, and a tokenizer."""

    def __init__(self) -> None:
        super().__init__("gpt2")
        config = self.model.config
        config.tie_word_embeddings = True
        self.model = torch.nn.ModuleDict({"net": transformers.GPT2LMHeadModel(config)})
        self.tokenizer = tokenizer()
        assert self.model["net"].lm_head.weight is self.model["net"].transformer.wte.weight

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model["net"](batch["x"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def train_tied(folder: str) -> None:
    fit(Tied(), HybridShardStrategy(), folder)


def test_tied_weights_and_a_tokenizer_in_a_transformers_folder(tmp_path: Path) -> None:
    run_ranks(train_tied, 2, str(tmp_path), elastic=True)
    saved = tmp_path / f"step={SAVED}.ckpt"
    assert checkpoint.verify(saved).ok
    out = tmp_path / "hf"
    checkpoint.gather(saved, out, format="transformers", dtype=torch.bfloat16)
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    stored = checkpoint.read(saved)
    assert torch.equal(model.lm_head.weight, stored["model.net.lm_head.weight"].full().bfloat16())
    assert transformers.AutoTokenizer.from_pretrained(out)("w3 w59").input_ids == [3, 59]
    # and back: the tied one needn't be in the file
    fresh = Tied()
    checkpoint.load(out, into=fresh.model["net"], cast=True)
    assert torch.equal(fresh.model["net"].lm_head.weight, model.lm_head.weight.float())
    module = Tied()
    checkpoint.gather(saved, tmp_path / "plain.ckpt")
    fit(module, ckpt_path=str(tmp_path / "plain.ckpt"))
    assert len(module.losses) == TRAINED - SAVED
