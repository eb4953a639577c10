"""The library against real servers: DCP writes to S3, a plain web server serves the same files, diff spans stores."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_shard import checkpoint
from lightning_shard.cli import main
from tests.servers import serve


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_and_diff_across_stores(tmp_path, capsys):
    state = {"w": torch.randn(300, 400), "optimizer": {"m": torch.ones(5)}, "step": 4}
    with serve("s3", tmp_path / "s3") as s3, serve("http", tmp_path / "s3") as http:
        url = f"{s3.url}/runs/step=4.ckpt"
        dcp.save(state, storage_writer=checkpoint.DcpWriter(url, storage_options=s3.options))
        for reader in (
            checkpoint.DcpReader(url, storage_options=s3.options),
            checkpoint.DcpReader(f"{http.url}/runs/step=4.ckpt"),
        ):
            into = {"w": torch.zeros(300, 400), "optimizer": {"m": torch.zeros(5)}, "step": 0}
            dcp.load(into, storage_reader=reader)
            assert torch.equal(into["w"], state["w"])
            assert torch.equal(into["optimizer"]["m"], torch.ones(5))
            assert into["step"] == 4
        local = tmp_path / "local"
        checkpoint.save({"w": state["w"]}, local, optimizer=state["optimizer"], trainer_state={"step": 5})
        options = [f"{key}={json.dumps(value)}" for key, value in s3.options.items()]
        flags = [part for option in options for part in ("--other-storage-option", option)]
        assert main(["diff", str(local), url, *flags, "--only", "model", "--only", "optimizer"]) == 0
        assert main(["diff", str(local), url, *flags]) == 1
        assert "5 in a, 4 in b" in capsys.readouterr().out
