"""Text generated in evaluation steps, on layouts: what one process generates."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.testing import run_ranks
from tests.parity import VOCABULARY, layout, llama, trainer_of, world

LONGEST, NOTHING = 12, -1
PROMPTS = torch.randint(3, VOCABULARY, (16, 5), generator=torch.Generator().manual_seed(5))


class Generates(L.LightningModule):
    """How many tokens are added depends on the prompts, so data ranks call the network different numbers of times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = llama()
        self.model.generation_config.pad_token_id = 0

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits[:, -1:].argmax(-1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.model(batch, labels=batch).loss
        self.log("loss", loss)
        if batch_idx == 0:
            self.log("mean", self._generated(batch).float().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = batch
        for _ in range(2):
            tokens = torch.cat([tokens, self(tokens)], 1)
        tokens = self._generated(tokens)
        return torch.nn.functional.pad(tokens, (0, LONGEST - tokens.size(1)), value=NOTHING)

    def _generated(self, prompts: Tensor) -> Tensor:
        more = 1 + int(prompts.sum()) % 5
        return self.model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=more)


def evaluate(sizes: dict[str, int] | None, schedule: str = "1F1B") -> tuple[dict[str, Any], list[list[int]]]:
    L.seed_everything(3)
    trainer = trainer_of({**sizes, "schedule": schedule}, world(sizes)) if sizes is not None else trainer_of(None)
    module = Generates()
    data = DataLoader(PROMPTS, batch_size=4)
    [logged] = trainer.validate(module, data, verbose=False)
    predicted = trainer.predict(module, data)
    return {name: float(value) for name, value in logged.items()}, torch.cat(predicted).tolist()


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Any], list[list[int]]]:
    return evaluate(None)


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")]


@pytest.mark.parametrize("schedule", ["1F1B", *OTHERS])
def test_stages_generate_what_one_process_does(alone: Any, schedule: str) -> None:
    for logged, predicted in run_ranks(evaluate, 2, layout(pipeline=2), schedule, elastic=True, timeout_s=60):
        assert predicted == alone[1]
        assert logged == pytest.approx(alone[0], rel=1e-4)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.long)])
def test_data_ranks_generate_different_numbers_of_tokens(alone: Any, stages: int) -> None:
    schedule = "Interleaved1F1B" if stages > 1 else "1F1B"
    sizes = layout(pipeline=stages, data=2)
    of_ranks = run_ranks(evaluate, world(sizes), sizes, schedule, elastic=True, timeout_s=60)
    assert of_ranks[2:] in ([], of_ranks[:2])
    predicted = [rows for _, rows in of_ranks[:2]]
    lengths = [[LONGEST - row.count(NOTHING) for row in rows] for rows in predicted]
    assert lengths[0] != lengths[1]
    whole = {tuple(row[:5]): row for row in alone[1]}
    assert len(whole) == len(PROMPTS) == sum(map(len, predicted))
    for row in [row for rows in predicted for row in rows]:
        pairs = [(a, b) for a, b in zip(row, whole[tuple(row[:5])]) if NOTHING not in (a, b)]
        assert len(pairs) > 7
        assert all(a == b for a, b in pairs)
