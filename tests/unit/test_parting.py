"""What counts as a difference between one process and a layout."""

import torch

from lightning_shard.testing.compare import Moment, first_parting
from lightning_shard.testing.layouts import parse


def _differs(difference: float) -> bool:
    def moment(mean: float) -> Moment:
        return Moment(state={"norm.running_mean": torch.tensor([mean]), "norm.running_var": torch.tensor([1.0])})

    return first_parting({"0": moment(2e-3)}, [{"0": moment(2e-3 + difference)}], parse("dp1", {}), 1e-4) is not None


def test_a_running_mean_is_looked_at_beside_its_deviation() -> None:
    assert not _differs(1e-6)
    assert _differs(1e-4)
