"""Generators come back from tensors as they were, and a step leaves no trace in them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_shard.plugin.steps import randomness

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, float, float]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal(), torch.rand(()).item()


def test_captured_generators_draw_on_where_they_were() -> None:
    randomness.seed_all(5)
    draw()  # leaves a second Gaussian number waiting in numpy's and Python's generators
    state = randomness.capture(CPU)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    expected = draw(), draw()
    randomness.seed_all(6)
    randomness.restore(state, CPU)
    assert (draw(), draw()) == expected


def test_what_is_drawn_inside_leaves_no_trace() -> None:
    randomness.seed_all(5)
    expected = draw()
    randomness.seed_all(5)
    with randomness.preserved(CPU):
        randomness.seed_all(7)
        draw()
    assert draw() == expected


@pytest.mark.parametrize("drawn", range(4))
def test_numpys_second_gaussian_number_waits_after_a_step_where_it_did_before(drawn: int) -> None:
    np.random.seed(5)
    whole = np.random.standard_normal(8)
    for _ in range(2):  # noted as it stands, and where it is known to stand
        np.random.seed(5)
        np.random.standard_normal(drawn)
        for _ in range(2):
            with randomness.preserved(CPU):
                randomness.seed_all(7)
                np.random.standard_normal(3)
        assert np.array_equal(np.random.standard_normal(8 - drawn), whole[drawn:])


def test_a_modules_own_generators_are_seeded_each_by_its_name_and_put_back() -> None:
    own: dict[str, Any] = {
        "torch": torch.Generator(),
        "numpy": np.random.default_rng(1),
        "old": np.random.RandomState(1),
        "python": random.Random(1),
    }

    def draw_all() -> tuple[Any, ...]:
        drawn = torch.rand((), generator=own["torch"]).item(), own["numpy"].random(), own["old"].rand()
        return (*drawn, own["python"].random(), *draw())

    put_back = randomness.remember(CPU, own)
    expected = draw_all()
    put_back()
    with randomness.preserved(CPU, own):
        randomness.seed_all(7, own)
        seeded = draw_all()
        assert len(set(seeded)) == len(seeded)
        randomness.seed_all(7, own)
        assert draw_all() == seeded
    assert draw_all() == expected != seeded


def test_seeds_differ_by_every_part_and_are_stable() -> None:
    seeds = {randomness.derive(1, "train", step, part) for step in range(20) for part in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert randomness.derive(1, "train", 2) == randomness.derive(1, "train", 2) != randomness.derive(1, "train", 3)
