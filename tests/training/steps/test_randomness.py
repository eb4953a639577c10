"""Generators come back from tensors as they were, and a step leaves no trace in them."""

from __future__ import annotations

import multiprocessing
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from lightning_shard.plugin.steps import randomness, unseeded

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


def test_another_bit_generator_than_numpys_first_is_put_back_too() -> None:
    numpy: Any = np.random
    own, before = np.random.MT19937(3), numpy.get_bit_generator()
    numpy.set_bit_generator(own)
    try:
        with randomness.preserved(CPU):
            numpy.set_bit_generator(np.random.PCG64(3))
            draw()
        assert numpy.get_bit_generator() is own
        test_what_is_drawn_inside_leaves_no_trace()
        test_numpys_second_gaussian_number_waits_after_a_step_where_it_did_before(1)
    finally:
        numpy.set_bit_generator(before)


def test_a_replaced_generator_of_numpys_leaves_no_trace_either() -> None:
    randomness.seed_all(5)
    np.random.rand(3)
    expected = np.random.rand(3)
    randomness.seed_all(5)
    np.random.rand(3)
    drawn = []
    for _ in range(2):
        put_back = randomness.remember(CPU, np.random.MT19937(0))
        randomness.seed_all(7)
        drawn.append(draw())
        put_back()
    assert drawn[0] == drawn[1]
    assert np.array_equal(np.random.rand(3), expected)


def test_what_is_drawn_from_numpys_generator_shows() -> None:
    for draw_one in (np.random.rand, np.random.standard_normal):
        randomness.seed_all(5)
        before = randomness.where_others_stand()
        assert randomness.where_others_stand() == before
        draw_one()
        assert randomness.where_others_stand() != before


def test_a_modules_own_generators_are_seeded_each_by_its_name_and_put_back() -> None:
    own: dict[str, Any] = {
        "torch": torch.Generator(),
        "numpy": np.random.default_rng(1),
        "old": np.random.RandomState(1),
        "python": random.Random(1),
    }
    generators = randomness.AllGenerators(CPU, own)

    def draw_all() -> tuple[Any, ...]:
        drawn = torch.rand((), generator=own["torch"]).item(), own["numpy"].random(), own["old"].rand()
        return (*drawn, own["python"].random(), *draw())

    put_back = generators.remember()
    expected = draw_all()
    put_back()
    with generators.preserved():
        generators.seed(7)
        seeded = draw_all()
        assert len(set(seeded)) == len(seeded)
        generators.seed(7)
        assert draw_all() == seeded
    assert draw_all() == expected != seeded


def test_seeds_differ_by_every_part_and_are_stable() -> None:
    seeds = {randomness.derive(1, "train", step, part) for step in range(20) for part in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert randomness.derive(1, "train", 2) == randomness.derive(1, "train", 2) != randomness.derive(1, "train", 3)


def test_a_seed_is_torchs_own() -> None:
    torch.manual_seed(2**62 + 1)
    expected = torch.rand(8)
    randomness.seed_all(2**62 + 1)
    assert torch.equal(torch.rand(8), expected)


def made() -> list[float]:
    """The first numbers of generators that are made without a seed, or given one of the system's."""
    generators = [np.random.default_rng(), np.random.RandomState(), np.random.Generator(np.random.PCG64())]
    drawn = [generator.random() for generator in (random.Random(), *generators, random.Random(None))]
    np.random.seed()
    random.seed()
    return [*drawn, np.random.rand(), random.random()]


def test_generators_that_a_step_makes_draw_the_same_on_every_rank() -> None:
    runs = []
    for number in (5, 5, 6):
        with unseeded.seeded(), randomness.preserved(CPU):
            randomness.seed_all(number)
            runs.append(made() + made())
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 2 * len(runs[0])
    assert not {*made()} & {*made()}


def test_generators_made_in_a_block_move_none_of_those_around_it() -> None:
    with unseeded.seeded(), randomness.preserved(CPU):
        randomness.seed_all(5)
        expected = made(), made()
        for _ in range(2):
            randomness.seed_all(5)
            first = made()
            put_back = randomness.remember(CPU)
            randomness.seed_all(6)
            assert not {*made()} & {*expected[0], *expected[1]}
            put_back()
            assert (first, made()) == expected


def test_generators_with_a_seed_and_those_of_other_threads_are_left_alone() -> None:
    expected = np.random.default_rng(3).random(), random.Random(3).random(), random.Random("a").random()
    drawn: list[list[float]] = []
    for _ in range(2):
        with unseeded.seeded(), randomness.preserved(CPU):
            randomness.seed_all(5)
            assert (
                np.random.default_rng(3).random(),
                random.Random(3).random(),
                random.Random("a").random(),
            ) == expected
            other = threading.Thread(target=lambda: drawn.append(made()))
            other.start()
            other.join()
    assert not {*drawn[0]} & {*drawn[1]}


def tell(sender: Any) -> None:
    sender.send(made())


def test_processes_that_a_step_forks_draw_as_ever() -> None:
    """The workers of a loader that a step goes over drew the same numbers, each as the others."""
    fork = multiprocessing.get_context("fork")
    drawn: list[list[float]] = []
    with unseeded.seeded(), randomness.preserved(CPU):
        randomness.seed_all(5)
        for _ in range(2):
            receiver, sender = fork.Pipe(duplex=False)
            worker = fork.Process(target=tell, args=(sender,))
            worker.start()
            drawn.append(receiver.recv())
            worker.join()
    assert not {*drawn[0]} & {*drawn[1]}
