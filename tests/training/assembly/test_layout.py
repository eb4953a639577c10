"""Ranks to coordinates: one box of ranks, and no world that doesn't fit."""

from __future__ import annotations

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_shard  # noqa: F401  (registers the strategy)
from lightning_shard.errors import LayoutError
from lightning_shard.layout import Layout

small = st.integers(1, 4)


@given(pipeline=small, data=small, replicas=small, tensor=small)
def test_every_rank_has_a_place_of_its_own(pipeline: int, data: int, replicas: int, tensor: int) -> None:
    world = pipeline * data * replicas * tensor
    layouts = [
        Layout.resolve(
            world,
            rank,
            pipeline_parallel_size=pipeline,
            tensor_parallel_size=tensor,
            data_parallel_replicas=replicas,
        )
        for rank in range(world)
    ]
    assert {(at.pipeline_rank, at.data_rank, at.tensor_rank) for at in layouts} == {
        (p, d, t) for p in range(pipeline) for d in range(data * replicas) for t in range(tensor)
    }
    for at in layouts:
        assert at.data_parallel_size == data * replicas
        assert at.shard_size == data
        own = next(ranks for ranks in at.pipelines() if at.rank in ranks)
        assert own.index(at.rank) == at.pipeline_rank
        assert {(layouts[r].data_rank, layouts[r].tensor_rank) for r in own} == {(at.data_rank, at.tensor_rank)}
        group = next(ranks for ranks in at.groups("data") if at.rank in ranks)
        assert group.index(at.rank) == at.data_rank
        assert {(layouts[r].pipeline_rank, layouts[r].tensor_rank) for r in group} == {
            (at.pipeline_rank, at.tensor_rank)
        }
    for groups in (layouts[0].pipelines(), layouts[0].groups("data")):
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(world))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"pipeline_parallel_size": 3}, r"\(3\) × tensor_parallel_size \(1\) = 3 must divide .* \(8\).*\[1, 2, 4, 8\]"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3}, r"= 6 must equal .* \(8\).*data_parallel_size=4"),
        ({"data_parallel_replicas": 3}, r"\(3\) must divide data_parallel_size \(8\)"),
        ({"pipeline_parallel_size": True}, r"\(True\) must be an integer"),
        ({"data_parallel_size": "all"}, r"\('all'\) must be an integer of at least 1 or \"auto\""),
    ],
)
def test_sizes_that_dont_fit_say_what_would(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Layout.resolve(8, **sizes)


_TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
_SLURM = {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_NODE = {"SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "devices", "nodes", "said"),
    [
        (_TORCHRUN, 4, 1, r"devices=4, num_nodes=1\) has 4 ranks, and 2 were started \(torchrun's.*use devices=2"),
        (_TORCHRUN, 1, 1, r"devices=1, num_nodes=1\) has 1 ranks, and 2 were started.*use devices=2, or start 1"),
        (_TORCHRUN, 1, 3, r"has 3 ranks, and 2 were started.*or start 1 processes on each of 3 machines"),
        (_SLURM | _NODE, 4, 1, r"has 4 ranks, and 2 were started \(.*SLURM_NTASKS\): use devices=2"),
    ],
)
def test_devices_that_arent_the_ranks_that_were_started_are_refused_when_the_trainer_is_made(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], devices: int, nodes: int, said: str
) -> None:
    for name, value in {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    settings = {"accelerator": "cpu", "strategy": "hybrid_shard", "logger": False, "enable_checkpointing": False}
    with pytest.raises(LayoutError, match=said):
        L.Trainer(devices=devices, num_nodes=nodes, **settings)
    L.Trainer(devices=2, **settings)
