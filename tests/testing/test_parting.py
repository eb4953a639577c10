"""What counts as a difference between one process and a layout, and what is said of one."""

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


def test_numbers_of_any_kind_are_compared() -> None:
    """Imaginary parts were left out, and integers of two data ranks an error."""

    def parts(one: torch.Tensor, others: list[torch.Tensor]) -> bool:
        ranks = [{"0": Moment(outputs={"": other})} for other in others]
        return first_parting({"0": Moment(outputs={"": one})}, ranks, parse(f"dp{len(others)}", {}), 1e-4) is not None

    assert parts(torch.tensor([1 + 1j]), [torch.tensor([1 + 2j])])
    assert not parts(torch.tensor([1 + 1j]), [torch.tensor([1 + 1j])])
    assert not parts(torch.arange(4), [torch.arange(2), torch.arange(2, 4)])
    assert parts(torch.arange(4), [torch.arange(2), torch.arange(2)])
    assert not parts(torch.arange(3), [torch.arange(2), torch.tensor([2])])


def test_complex_and_sparse_values_are_compared_and_shown() -> None:
    """A complex number where one process had a float, a conjugated tensor and a sparse one ended the comparison."""

    def parts(one: object, *others: object) -> bool:
        ranks = [{"0": Moment(outputs={"": other}, weight=1.0)} for other in others]
        return first_parting({"0": Moment(outputs={"": one})}, ranks, parse(f"dp{len(others)}", {}), 1e-4) is not None

    waves = torch.tensor([1 + 2j, 3 - 1j])
    assert parts(waves.conj(), waves)
    assert not parts(waves.conj(), torch.tensor([1 - 2j, 3 + 1j]))
    assert not parts(waves.to_sparse(), waves.to_sparse())
    assert parts(waves.to_sparse(), (2 * waves).to_sparse())
    assert parts(1.0, 1.0 + 1j)
    assert not parts(2j, 2j)
    assert parts(2j, 3j)
    assert not parts(2j, 1j, 3j)  # the mean of two data ranks
    assert not parts(waves, waves - 1j, waves + 1j)
