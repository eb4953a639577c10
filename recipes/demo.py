"""End-to-end demo: train, kill the run, resume on another layout, gather, and compare with a plain model.

Every step is a command or a call that you could run yourself. The demo ends at the first result that isn't as expected.
"""

import csv
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpt import LanguageModel
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from text import TextFolder

from lightning_shard import checkpoint

TRAIN = Path(os.path.relpath(Path(__file__).with_name("train.py")))
OUTPUT = Path("outputs/demo")
SAVED = OUTPUT / "checkpoints" / "last.ckpt"
GATHERED = OUTPUT / "model.safetensors"
FIRST = ["trainer.devices=4", "strategy.pipeline_parallel_size=2"]
SECOND = ["trainer.devices=4", "strategy.tensor_parallel_size=2", "checkpoint.resume=last"]
KILL_AFTER_STEP = 120
# Nats. The layouts add in different orders in fp32, over some twenty optimizer steps.
SAME_CURVE = 1e-4
# Nats. Equal weights on the same text.
SAME_MODEL = 1e-5

console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)

    title(f"1. Train on 4 processes, 2 stages × 2 data; kill them all after step {KILL_AFTER_STEP}")
    first = run_training(FIRST, "first", kill_after=KILL_AFTER_STEP)
    left = checkpoint.inspect(SAVED)
    check(checkpoint.verify(SAVED).ok, f"the kill left a sound checkpoint of step {left.global_step} behind")

    title("2. Resume on 4 processes, 2 tensor × 2 data, from that checkpoint")
    second = run_training(SECOND, "second")
    twice = [step for step in first if step in second]
    check(
        bool(twice) and min(second) > (left.global_step or 0),
        f"steps {min(twice)} to {max(twice)} were trained on both layouts",
    )
    apart = max(abs(first[step]["train_loss"] - second[step]["train_loss"]) for step in twice)
    check(apart < SAME_CURVE, f"their losses are the same on both, to {apart:.0e} nats")

    title("3. Gather the sharded checkpoint to one file, load that into a plain model in this process")
    whole = checkpoint.inspect(SAVED)
    check(checkpoint.verify(SAVED).ok, f"the checkpoint of step {whole.global_step} is sound")
    checkpoint.gather(SAVED, GATHERED)
    model, data = plain_model(GATHERED)
    loss, entropy = held_out_loss(model, data), data.byte_entropy()
    last_validation = second[max(second)]["val_loss"]
    check(abs(loss - last_validation) < SAME_MODEL, f"its held-out loss is the last validation's, to {SAME_MODEL} nats")
    check(loss < 0.75 * entropy, "which is clearly below the entropy of single bytes")

    table = Table("what the demo did", "figures")
    table.add_row("text: Python's standard library", f"{len(data.train_text) / 1e6:.1f} MB")
    table.add_row("2 stages × 2 data, killed after", f"step {max(first)}, loss {first[max(first)]['train_loss']:.4f}")
    table.add_row("2 tensor × 2 data, resumed from", f"step {left.global_step}, to step {whole.global_step}")
    table.add_row("losses of the steps done twice", f"{apart:.1e} nats apart at most")
    table.add_row("checkpoint, optimizer included", f"{whole.bytes / 1e6:.1f} MB in {len(whole.files)} files")
    table.add_row("gathered: the model in one file", f"{GATHERED.stat().st_size / 1e6:.1f} MB, {GATHERED}")
    table.add_row("entropy of single held-out bytes", f"{entropy:.6f} nats")
    table.add_row("last validation, 4 processes", f"{last_validation:.6f} nats")
    table.add_row("plain model, 1 process", f"{loss:.6f} nats")
    table.add_row("time", f"{time.monotonic() - began:.0f} s")
    console.print()
    console.print(table)


def run_training(overrides: list[str], name: str, kill_after: int | None = None) -> dict[int, dict[str, float]]:
    """Run recipes/train.py and show its progress; returns what it logged, by step.

    With ``kill_after``, all its processes are killed after that step, as by a machine's failure.
    """
    command = [sys.executable, str(TRAIN), "recipe=demo", *overrides]
    console.print("$ python " + " ".join(command[1:]), style="dim")
    log = OUTPUT / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    metrics = OUTPUT / "logs" / name / "metrics.csv"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, f"trainer.logger.version={name}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shown = 0
            while process.poll() is None:
                time.sleep(0.2)
                shown = show_progress(metrics, shown)
                if kill_after is not None and max(read_metrics(metrics), default=0) >= kill_after:
                    console.print("   all processes killed", style="dim")
                    return read_metrics(metrics)
            show_progress(metrics, shown)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode or kill_after is not None:
        console.print(log.read_text()[-5000:], markup=False)
        sys.exit(f"demo: the {name} training ended too early, with exit code {process.returncode}; see {log}")
    return read_metrics(metrics)


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """What Lightning's CSVLogger wrote, by the number of finished optimizer steps."""
    by_step: dict[int, dict[str, float]] = {}
    if path.exists():
        for row in csv.DictReader(path.read_text().splitlines()):
            figures = {name: float(value) for name, value in row.items() if value and name not in ("epoch", "step")}
            by_step.setdefault(int(row["step"]) + 1, {}).update(figures)
    return by_step


def show_progress(metrics: Path, shown: int) -> int:
    """Print what was logged after step ``shown``; returns the newest step."""
    newest = shown
    for step, row in read_metrics(metrics).items():
        if step > shown and "val_loss" in row:
            console.print(f"   step {step:4}   loss {row['train_loss']:.4f}   held out {row['val_loss']:.4f}")
            newest = step
    return newest


def plain_model(path: Path) -> tuple[LanguageModel, TextFolder]:
    """The run's model with the weights of one file, and the run's data; uses nothing of this package."""
    config = OmegaConf.load(OUTPUT / "config" / "config.yaml")
    model, data = instantiate(config.model), instantiate(config.data)
    model.load_state_dict(load_file(path))
    data.setup()
    return model, data


@torch.no_grad()
def held_out_loss(model: LanguageModel, data: TextFolder) -> float:
    losses = [(model.loss(batch).item(), len(batch)) for batch in data.val_dataloader()]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def title(text: str) -> None:
    console.print(f"\n{text}", style="bold")


def check(holds: bool, claim: str) -> None:
    if not holds:
        sys.exit(f"demo: FAILED: {claim}")
    console.print(f"   [green]✓[/green] {claim}")


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
