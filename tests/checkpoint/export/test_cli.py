"""The command line on checkpoints: exit codes, JSON, tables, one-line errors."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lightning_shard import checkpoint
from lightning_shard.cli import main
from tests.checkpoint.manifests import edit, flip


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step=3.ckpt"
    state = {
        f"model.layers.{i}.a_rather_long_module_name.gate_projection.weight": torch.randn(50, 20) for i in range(12)
    }
    checkpoint.save(
        state,
        path,
        optimizer={"m": torch.ones(4)},
        trainer_state={"global_step": 3, "epoch": 1},
        layout={"tensor_parallel_size": 2, "rank": 0},
    )
    return path


def test_inspect_for_machines(saved, capsys):
    assert main(["inspect", str(saved), "--json", "--biggest", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["global_step"] == 3
    assert report["epoch"] == 1
    assert report["layout"] == {"tensor_parallel_size": 2, "rank": 0}
    assert report["section_bytes"] == {"model": 48000, "optimizer": 16}
    assert len(report["biggest"]) == 2


def test_verify_tells_by_its_exit_code(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    assert "sound" in capsys.readouterr().out
    (file,) = (saved / "model").iterdir()
    flip(file)
    assert main(["verify", str(saved)]) == 1
    assert "1 fault" in capsys.readouterr().out
    assert main(["verify", str(saved), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["faults"][0]["file"] == f"model/{file.name}"


def test_gather(saved, tmp_path, capsys):
    out, hf, ckpt = (str(tmp_path / name) for name in ("model.safetensors", "hf/model.safetensors", "x.ckpt"))
    assert main(["gather", str(saved), out]) == 0
    assert "12 tensors" in capsys.readouterr().out
    assert len(load_file(out)) == 12
    assert main(["gather", str(saved), out, "--optimizer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 13
    assert main(["gather", str(saved), hf, "--max-shard-bytes", "10KB"]) == 0
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) == 6
    renames = ["--strip-prefix", "model.", "--rename", "layers.0.=first.", "--rename", "layers.1.=second."]
    assert main(["gather", str(saved), out, "--format", "safetensors", *renames]) == 0
    assert {name.partition(".")[0] for name in load_file(out)} == {"first", "second", "layers"}
    assert main(["gather", str(saved), ckpt, "--dtype", "bfloat16", "--no-optimizer"]) == 0
    content = torch.load(ckpt, weights_only=True)
    assert {tensor.dtype for tensor in content["state_dict"].values()} == {torch.bfloat16}
    assert "optimizer_states" not in content
    assert main(["gather", str(saved), ckpt, "--dtype", "float33"]) == 2
    assert main(["gather", str(saved), str(tmp_path / "none"), "--format", "transformers"]) == 1
    assert "--config" in capsys.readouterr().err


def test_errors_are_one_line_and_no_traceback(tmp_path, saved, capsys):
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("lightning-shard: ")
    assert err.count("\n") == 1
    assert main(["verify", str(tmp_path / "nothing"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "CheckpointNotFoundError"
    assert main(["inspect", "nosuchprotocol://x/y"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_names_and_attempts_are_shown_as_they_are_and_command_no_terminal(tmp_path, capsys):
    names = ["[bold]a", "\x1b[31mred", "line\nfeed"]
    tensor = "\U000e0001\x1b]0;evil\x07[/red][link=evil]"
    for name in names:
        checkpoint.save({tensor: torch.ones(2)}, tmp_path / "f" / name, layout="[bold]\x1b[2J")
    edit(tmp_path / "f" / names[0], lambda manifest: manifest.update(attempt="[/x]\x1b[31m"))
    assert main(["list", str(tmp_path / "f")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert {line.split("  ")[0] for line in out.splitlines()[1:]} == {"[bold]a", "\\u001b[31mred", "line\\nfeed"}
    assert "[/x]\\u001b[31m" in out
    for verb in ("verify", "inspect"):
        assert main([verb, str(tmp_path / "f" / names[1])]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
    assert "[/red][link=evil]" in out.replace("\n", "").replace(" ", "")
    assert main(["verify", str(tmp_path / "f" / names[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert main(["inspect", str(tmp_path / "f" / names[1]), "--json"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert json.loads(out)["biggest"][0]["name"] == tensor


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["inspect"], ["gather", "x"], ["inspect", "x", "--storage-option", "novalue"],
             ["gather", "x", "y", "--max-shard-bytes", "large"]], ids=" ".join,
)  # fmt: skip
def test_a_command_line_that_is_not_understood_exits_with_2(argv, capsys):
    assert main(argv) == 2
    assert "usage:" in capsys.readouterr().err


def test_storage_options_reach_the_store(capsys):
    checkpoint.save({"t": torch.ones(2)}, "memory://cli/a.ckpt")
    assert main(["verify", "memory://cli/a.ckpt", "--storage-option", "skip_instance_cache=true"]) == 0
