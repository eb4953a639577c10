"""What ``docs/models.md`` says of architectures is still so: a sample here, all of them with ``-m long``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_shard.testing import preload
from tests.models import page, survey

SAMPLE = ("diffusion transformer", "LlamaForCausalLM", "T5ForConditionalGeneration")

preload("tests.models.networks", "tests.models.transformers_models", "lightning_shard.testing.recorder")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(survey.RESULTS.read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.long) for name in survey.all_of_it()]
)
def test_an_architecture_is_alike_or_refused_as_the_page_says(name: str, results: dict[str, Any]) -> None:
    row = survey.all_of_it()[name]()
    assert _kinds(row) == _kinds(results["rows"][name]), row


def test_nothing_is_wrong_or_a_raw_exception(results: dict[str, Any]) -> None:
    bad = {name for name, row in results["rows"].items() if {"different", "crashed"} & {*_kinds(row).values()}}
    assert not bad
    assert len(results["rows"]) > 300
    assert set(SAMPLE) <= results["rows"].keys()


def test_the_page_is_that_of_the_results(results: dict[str, Any]) -> None:
    assert page.page(results) == survey.PAGE.read_text(), "write it: python -m tests.models.survey --page"


def _kinds(row: dict[str, Any]) -> dict[str, str]:
    if "layouts" not in row:
        return {key: "" for key in ("not built", "random") if key in row}
    return {layout: result["result"] for layout, result in row["layouts"].items()}
