"""Trains the model of the configuration in ``conf/``; every value can be overridden on the command line.

python recipes/train.py strategy.pipeline_parallel_size=2 trainer.devices=4
python recipes/train.py strategy.tensor_parallel_size=2 trainer.devices=4 checkpoint.resume=last
python recipes/train.py data=folder data.path=my_texts
python recipes/train.py checkpoint=s3 checkpoint.dirpath=s3://bucket/my_run checkpoint.resume=last
python recipes/train.py recipe=gpt_175b --plan      # estimates memory and time instead of training
"""

import sys

import hydra
import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.callbacks import TQDMProgressBar
from names import OF_TRAINING, refuse_unknown_names, refuse_unknown_overrides
from omegaconf import DictConfig
from tokens import TokensPerSecond

from lightning_shard.cli import main


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def train(config: DictConfig) -> None:
    refuse_unknown_names(config)
    L.seed_everything(config.seed, verbose=False)
    model = instantiate(config.model)
    data = instantiate(config.data)
    strategy = instantiate(config.strategy, _convert_="all")
    checkpoint = instantiate(
        {name: value for name, value in config.checkpoint.items() if name not in OF_TRAINING["checkpoint"]}
    )
    bar = [TQDMProgressBar()] if config.trainer.enable_progress_bar else []  # one line; steps may have no end
    callbacks = [checkpoint, TokensPerSecond(), *bar]
    trainer = instantiate(config.trainer, _partial_=True)(strategy=strategy, callbacks=callbacks)
    trainer.fit(model, data, ckpt_path=config.checkpoint.resume)


if __name__ == "__main__":
    if "--plan" in sys.argv[1:]:
        sys.exit(main(["plan", *(argument for argument in sys.argv[1:] if argument != "--plan")]))
    refuse_unknown_overrides(sys.argv[1:])
    train()
