"""A plan drawn: what its table says is what its pictures show."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import cli, plan
from lightning_shard.dryrun.pictures.plans import pictures_of
from lightning_shard.dryrun.pictures.timelines import gibibytes
from lightning_shard.pipeline.schedules.simulate import Costs, simulate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def build() -> tuple[Small, Tensor]:
    return Small(), torch.zeros(8, 16)


def test_a_plans_pictures_say_what_its_table_says() -> None:
    made = plan(*build(), layout={"pipeline_parallel_size": 2, "data_parallel_size": 1}, device_memory=2**30)
    timeline, memory, balance = pictures_of(made)
    assert "1F1B, 2 stages, 4 microbatches" in timeline.title
    assert len(timeline.facts[1]) == 2 * 2 * 4
    assert memory.title.endswith(f"at most {gibibytes(made.peak_bytes)} on a rank")
    for stage, row in zip(made.stages, balance.facts[1], strict=True):
        assert row[-1] == gibibytes(stage.peak.total)
    seconds = simulate(made.schedule, Costs.of_forwards([0.5, 0.25]))
    assert "s: " in pictures_of(made, seconds)[0].title


def test_one_stage_has_no_timeline_but_memory_of_it() -> None:
    made = plan(*build(), layout={"data_parallel_size": 2})
    assert [picture.title.split(":")[0] for picture in pictures_of(made)] == [
        "Memory over the step",
        "What fills a device of each stage, at its peak",
    ]


def test_the_command_writes_a_page_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    html, svg = tmp_path / "plan.html", tmp_path / "plan.svg"
    verb = ["plan", "tests.unit.test_plan_pictures:build", "--pipeline", "2"]
    assert cli.main([*verb, "--html", str(html), "--picture", str(svg)]) == 0
    assert "reckoned, not measured" in html.read_text()
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert cli.main([*verb, "--picture", str(tmp_path / "plan.pdf")]) == 1
