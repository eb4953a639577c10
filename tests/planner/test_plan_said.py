"""What a plan says to people, and why it refuses what can't be planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import plan
from lightning_shard.cli import main
from lightning_shard.errors import ConfigurationError
from recipes.gpt import LanguageModel
from tests.planner.test_planned import TOKENS, gpt, planned


class TestWhatIsSaid:
    def test_of_a_single_stage_each_device_needs_it_and_of_several_one_needs_most(self) -> None:
        single = planned(data_parallel_size=2, device_memory=2**30)
        assert "fits: each device needs" in str(single)
        assert "(136 tokens) on each of 2 data ranks" in str(single)
        several = planned(pipeline_parallel_size=2, device_memory=2**30)
        assert "fits: a device of stage 0 needs most, " in str(several)
        header, first, *_ = str(several).split("\n\n")[1].splitlines()
        assert "in flight" in header
        assert first.split()[4] == "2"  # of 1F1B's first of two stages

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"accumulate_grad_batches": 0}, r"accumulate_grad_batches \(0\) must be an integer of at least 1"),
            ({"device_memory": -1}, r"device_memory \(-1\) must be"),
            (
                {"device_type": "gpu-of-mine"},
                "device_type='gpu-of-mine' is not a torch device type: use cuda",
            ),
            ({"device_type": None}, "device_type=None is not a torch device type"),
            ({"device": 3}, "device=3 must be the name of a profile"),
            ({"device": "h100", "device_type": "cuda", "cpu_offload": True}, "cpu_offload=True isn't timed"),
            ({"accumulate_grad_batches": None}, r"accumulate_grad_batches \(None\) must be"),
            ({"asynchronous_saving": "yes"}, "asynchronous_saving='yes' is neither True nor False"),
            ({"layout": "pp2"}, "layout='pp2' must be a Layout, or the sizes"),
            ({"layout": {"pipeline": 2}}, "layout has 'pipeline', which is none of pipeline_parallel_size"),
            ({"layout": {"pipeline_parallel_size": None}}, r"pipeline_parallel_size \(None\) must be an integer"),
            ({"layout": {"data_parallel_size": "auto"}}, "how many ranks are left isn't known"),
            ({"precision": "8-true"}, "precision='8-true' isn't supported"),
            ({"batch": torch.zeros(0, 17, dtype=torch.long)}, "The batch has no samples"),
            ({"module": nn.Linear(2, 2)}, "Linear isn't a LightningModule"),
        ],
    )
    def test_what_cant_be_planned_is_refused_with_its_reason(self, settings: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            plan(**{"module": gpt, "batch": TOKENS, "layout": {}, "device_type": "cpu", **settings})

    def test_a_precision_may_have_any_name_that_a_trainer_takes(self) -> None:
        made, named = (plan(gpt, TOKENS, layout={}, device_type="cpu", precision=one) for one in ("bf16", "bf16-mixed"))
        assert made.to_json() == named.to_json()


def small() -> tuple[LanguageModel, Tensor]:
    return gpt(layers=2), TOKENS[:1]


_MODULES = {
    "fine": "from tests.planner.test_plan_said import small as build\nprint('hello')\n",
    "wrong": "raise RuntimeError('at import')\n",
    "asks": "def build(path): return path\n",
}


_PLAN = {"blocks.*.attention.query": "colwise", "blocks.*.attention.key": "colwise"}
_PLAN |= {"blocks.*.attention.value": "colwise", "blocks.*.attention.output": "rowwise"}


def test_a_plan_on_the_command_line_splits_a_module_of_ones_own_and_a_search_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(_MODULES["fine"])
    (tmp_path / "plan.yaml").write_text(json.dumps(_PLAN))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def say(*options: str) -> str:
        assert main(["plan", "own:build", *options]) == 0
        return capsys.readouterr().out

    inline = say("--tensor", "2", "--tensor-parallel-plan", json.dumps(_PLAN))
    assert say("--tensor", "2", "--tensor-parallel-plan", "plan.yaml") == inline
    assert inline != say("--tensor", "1")
    search = ("--search", "--devices", "2", "--device", "h100", "--most", "30", "--global-batch", "2")
    found = say(*search, "--html", "found.html", "--trace", "found.json")
    assert "tensor_parallel_size=2 needs a plan and LanguageModel brings none: pass tensor_parallel_plan" in found
    assert "the fastest, as settings of a recipe:\n  strategy.pipeline_parallel_size=" in found
    assert "strategy.pipeline_parallel_size=" in (tmp_path / "found.html").read_text()
    assert "<svg" in (tmp_path / "found.html").read_text()
    assert json.loads((tmp_path / "found.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("fine:build --tensor-parallel-plan absent.yaml", "tensor_parallel_plan='absent.yaml' can't be read"),
        ("wrong:build", "wrong can't be imported (RuntimeError: at import): run this in the folder"),
        ("absent:build", "absent can't be imported (ModuleNotFoundError: No module named 'absent')"),
        ("fine:", "names no function"),
        ("fine:absent", "fine has no function 'absent'"),
        ("asks:build", "TypeError: build() missing 1 required positional argument: 'path'"),
        ("fine:build --search --devices 2 --device h100 --cpu-offload", "cpu_offload=True can't be searched"),
        ("fine:build --pipeline 0", "pipeline_parallel_size (0) must be an integer of at least 1"),
        ("fine", "fine is neither a setting of a recipe"),
        ("recipe=absent", "Could not find 'recipe/absent' Available options in 'recipe': "),
        ("recipe=demo absent=3", "Could not override 'absent'"),
        (
            "recipe=demo trainer.devices=4 --pipeline 3",
            "pipeline_parallel_size (3) × tensor_parallel_size (1) must divide",
        ),
    ],
)
def test_a_command_that_cant_be_understood_says_why(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in _MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plan", *arguments.split()]) == 1
    assert said in capsys.readouterr().err
