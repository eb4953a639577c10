"""The whole way once: train, stop in mid-run, resume on another layout, gather, compare with a plain model.

Every step is a command or a call that you could give yourself; what doesn't come out as it should ends the demo.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from lightning_shard import checkpoint

HERE = Path(__file__).parent
OUTPUT = Path("outputs/demo")
FIRST = ["trainer.devices=4", "strategy.pipeline_parallel_size=2"]
SECOND = ["trainer.devices=4", "strategy.tensor_parallel_size=2", "checkpoint.resume=last"]
STOP_AFTER_STEP = 170
# Losses of two layouts in fp32: the same sums in another order, through some twenty optimizer steps.
SAME_CURVE = 1e-3
# Losses of the same weights on the same text.
SAME_MODEL = 1e-5

console = Console(highlight=False)
began = time.monotonic()


def main() -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)

    title(f"1. Train on 4 processes, 2 stages × 2 data; stop the hard way after step {STOP_AFTER_STEP}")
    first = run_training(FIRST, "first", stop_after=STOP_AFTER_STEP)

    title("2. Resume on 4 processes, 2 tensor × 2 data, from the newest checkpoint")
    second = run_training(SECOND, "second")
    twice = [(step, first[step]["train_loss"], second[step]["train_loss"]) for step in first if step in second]
    resumed_at = min(second)
    check(bool(twice), f"the second run (from step {resumed_at}) repeats steps of the first (to step {max(first)})")
    apart = max(abs(a - b) for _, a, b in twice)
    check(apart < SAME_CURVE, f"steps {twice[0][0]} to {twice[-1][0]} have the same loss on both layouts ({apart:.1e})")

    title("3. Gather the sharded checkpoint to one file, load that into a plain model")
    saved = OUTPUT / "checkpoints" / "last.ckpt"
    gathered = OUTPUT / "model.safetensors"
    checkpoint.verify(str(saved))
    checkpoint.gather(str(saved), str(gathered))
    plain_loss, entropy = evaluate_plainly(gathered)
    last_validation = [row["val_loss"] for row in second.values() if "val_loss" in row][-1]
    difference = abs(plain_loss - last_validation)
    check(difference < SAME_MODEL, f"the plain model's held-out loss is that of the last validation ({difference:.1e})")
    check(plain_loss < 0.7 * entropy, "the loss is clearly below the entropy of single bytes")

    table = Table("what", "figure", title="What the demo did", title_justify="left")
    table.add_row("2 stages × 2 data, stopped after", f"step {max(first)}, loss {first[max(first)]['train_loss']:.4f}")
    table.add_row("2 tensor × 2 data, resumed", f"step {resumed_at}, loss {second[resumed_at]['train_loss']:.4f}")
    table.add_row("greatest difference where both trained", f"{apart:.1e} nats in {len(twice)} losses")
    table.add_row("sharded checkpoint", f"{len(files(saved))} files, {size(*files(saved))}, optimizer included")
    table.add_row("gathered", f"1 file, {size(gathered)}: {gathered}")
    table.add_row("entropy of single bytes, held out", f"{entropy:.4f} nats per byte")
    table.add_row("last validation, 4 processes", f"{last_validation:.6f} nats per byte")
    table.add_row("plain model from the one file, 1 process", f"{plain_loss:.6f} nats per byte")
    table.add_row("time", f"{time.monotonic() - began:.0f} s")
    console.print(table)


def run_training(overrides: list[str], name: str, stop_after: int | None = None) -> dict[int, dict[str, float]]:
    """Run recipes/train.py and show its progress; what it logged, by step.

    With ``stop_after``, all its processes are killed after that step, as a machine that goes away does it.
    """
    command = [sys.executable, str(HERE / "train.py"), "recipe=demo", *overrides]
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
                if stop_after is not None and max(read_metrics(metrics), default=0) >= stop_after:
                    console.print("   stopped: all processes killed", style="dim")
                    return read_metrics(metrics)
            show_progress(metrics, shown)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode or stop_after is not None:
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
    """Print what is newer than step ``shown``; the newest step."""
    newest = shown
    for step, row in read_metrics(metrics).items():
        if step > shown and "val_loss" in row:
            console.print(f"   step {step:4}   loss {row['train_loss']:.4f}   held out {row['val_loss']:.4f}")
            newest = step
    return newest


def evaluate_plainly(path: Path) -> tuple[float, float]:
    """Loss of one file's weights on the held-out text, in this process and with no parallelism, and its entropy."""
    config = OmegaConf.load(OUTPUT / "config" / "config.yaml")
    model, data = instantiate(config.model), instantiate(config.data)
    model.load_state_dict(load_file(path))
    data.setup()
    with torch.no_grad():
        losses = [(model.loss(batch).item(), len(batch)) for batch in data.val_dataloader()]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses), data.byte_entropy()


def title(text: str) -> None:
    console.print(f"\n{text}", style="bold")


def check(holds: bool, claim: str) -> None:
    if not holds:
        sys.exit(f"demo: FAILED: {claim}")
    console.print(f"   [green]✓[/green] {claim}")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size(*paths: Path) -> str:
    return f"{sum(path.stat().st_size for path in paths) / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
