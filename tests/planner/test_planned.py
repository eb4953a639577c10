"""Plans: what they say of a layout follows from the model, and what can't be known is said."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import plan
from lightning_shard.cli import main
from lightning_shard.cli_plan import _first_batch
from lightning_shard.dryrun.counting.counts import Ledger, TwoParts
from lightning_shard.dryrun.planned import Plan
from lightning_shard.errors import ConfigurationError, PlanError
from lightning_shard.pipeline.runtime.split_backward import backward_but_products
from lightning_shard.pipeline.schedules.schedule import to_csv
from recipes import plans
from recipes.gpt import LanguageModel
from recipes.text import TextFolder
from tests.training.mixtures import ListedMixture, Mixture
from tests.training.parallel.small import Descends

TOKENS = torch.zeros(8, 17, dtype=torch.long)


def gpt(**sizes: int) -> LanguageModel:
    return LanguageModel(**{"width": 32, "heads": 2, "layers": 4, "context": 16, **sizes})


def planned(build: Any = gpt, batch: Any = TOKENS, **settings: Any) -> Plan:
    """A plan on the CPU; one object for equal settings of the GPT."""
    key = repr(settings)
    if build is gpt and batch is TOKENS and key in _PLANNED:
        return _PLANNED[key]
    sizes = {name: settings.pop(name) for name in list(settings) if name.endswith(("_parallel_size", "_replicas"))}
    made = plan(build, batch, layout=sizes, device_type="cpu", **settings)
    if build is gpt and batch is TOKENS:
        _PLANNED[key] = made
    return made


_PLANNED: dict[str, Plan] = {}


class Tied(LanguageModel):
    def __init__(self) -> None:
        super().__init__(width=32, heads=2, layers=4, context=16)
        self.model.head.weight = self.model.token_embedding.weight


class TestConserving:
    @pytest.mark.parametrize(
        "sizes",
        [
            {},
            {"pipeline_parallel_size": 2, "data_parallel_size": 4, "data_parallel_replicas": 2},
            {"pipeline_parallel_size": 2, "data_parallel_size": 2, "tensor_parallel_size": 2}
            | {"tensor_parallel_plan": plans.GPT},
        ],
        ids=str,
    )
    def test_parameters_of_all_ranks_add_up_to_the_model(self, sizes: dict[str, Any]) -> None:
        made = planned(batch=TOKENS if "pipeline_parallel_size" in sizes else TOKENS[:2], **sizes)
        whole = sum(p.numel() for p in gpt().parameters())
        layout = made.layout
        shards = sum(stage.parameters for stage in made.stages) * layout.shard_size
        # norms and positions aren't split by the plan: each tensor rank holds them
        tensors = [p for part in _all_parts(made) for p in part.parameters]
        repeated = sum(p.numel for p in tensors if p.local_shape == p.shape) * (layout.tensor_parallel_size - 1)
        assert made.model_parameters == whole
        assert shards * layout.tensor_parallel_size == whole + repeated

    def test_a_tied_parameter_is_on_both_stages_and_saved_once(self) -> None:
        made = planned(Tied, pipeline_parallel_size=2)
        own = [p.numel() for p in Tied().parameters()]
        tied = 256 * 32
        assert made.model_parameters == sum(own)
        assert sum(stage.parameters for stage in made.stages) == sum(own) + tied
        state = sum(4 * numel * 3 + 4 for numel in own)  # and a step
        assert state < made.checkpoint.bytes < state + 2**17

    def test_several_stages_on_a_rank_hold_as_much_as_one_with_all_their_blocks(self, tmp_path: Path) -> None:
        sizes = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
        one_each, made = planned(**sizes), planned(**sizes, schedule="Interleaved1F1B")
        assert [memory.stages for memory in made.stages] == [(0, 2), (1, 3)]
        for kind in ("parameters", "optimizer"):
            of_all, of_one_each = (sum(stage.peak.bytes[kind] for stage in plan.stages) for plan in (made, one_each))
            assert of_all == of_one_each
        assert sum(stage.parameters for stage in made.stages) == sum(stage.parameters for stage in one_each.stages)
        assert made.stages[0].peak.bytes["activations"] > one_each.stages[0].peak.bytes["activations"]
        assert made.checkpoint.bytes == pytest.approx(one_each.checkpoint.bytes, rel=0.01)
        assert made.checkpoint.files == one_each.checkpoint.files
        assert made.placement.ranks_of("model.blocks.2") == made.placement.ranks_of("model.blocks.0") == (2, 3)
        assert "0, 2" in str(made)
        assert made.to_json()["stages"][0]["blocks"] == [[0, 1], [2, 3]]
        order = tmp_path / "order.csv"
        order.write_text(to_csv(made.schedule))
        assert planned(**sizes, schedule=str(order)).stages == made.stages

    def test_buffers_are_held_whole_by_every_rank_and_saved_once(self) -> None:
        class Buffered(LanguageModel):
            def __init__(self) -> None:
                super().__init__(width=32, heads=2, layers=4, context=16)
                self.model.head.register_buffer("table", torch.zeros(1000, 100))
                self.register_buffer("cache", torch.zeros(70), persistent=False)

        for sizes in ({"data_parallel_size": 2}, {"pipeline_parallel_size": 2}):
            plain, made = planned(**sizes), planned(Buffered, **sizes)
            for before, stage in zip(plain.stages, made.stages, strict=True):
                assert {m.bytes["buffers"] - before.peak.bytes["buffers"] for m in stage.moments} == {4 * 100_070}
                assert stage.peak.total == before.peak.total + 4 * 100_070
            assert made.checkpoint.bytes == plain.checkpoint.bytes + 4 * 100_000
            assert "390.9 KiB" in str(made)

    def test_the_plan_leaves_the_module_as_it_was(self) -> None:
        module = gpt()
        before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
        planned(module, pipeline_parallel_size=2)
        after = dict(module.named_parameters())
        assert before.keys() == after.keys()
        assert all(id(after[name]) == key and torch.equal(after[name], value) for name, (key, value) in before.items())


class TestMonotone:
    def test_recomputing_keeps_less_and_selectively_less_of_less(self) -> None:
        peaks = [
            planned(pipeline_parallel_size=2, activation_checkpointing=setting).stages[0].peak.bytes["activations"]
            for setting in (None, "selective", True)
        ]
        assert peaks[0] > peaks[1] > peaks[2] > 0

    def test_more_shards_hold_less(self) -> None:
        one, other = planned(data_parallel_size=2).stages[0], planned(data_parallel_size=4).stages[0]
        assert one.peak.bytes["parameters"] == 2 * other.peak.bytes["parameters"]
        assert one.peak.bytes["optimizer"] > other.peak.bytes["optimizer"]

    def test_offloaded_state_is_on_the_host(self) -> None:
        stage = plan(gpt, TOKENS, layout={"data_parallel_size": 2}, cpu_offload=True).stages[0]
        assert stage.peak.bytes["parameters"] == stage.peak.bytes["optimizer"] == 0
        assert stage.host["optimizer"] > stage.host["parameters"] > 0


class Builds(L.LightningModule):
    """A module with linear layers, whose rest a test writes."""

    def __init__(self, layers: int = 2, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.blocks(batch) + torch.ones(batch.shape[-1])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TestPrecision:
    @pytest.mark.parametrize(("precision", "item_bytes"), [("64-true", 8), ("bf16-true", 2)])
    def test_a_true_one_is_that_of_the_module_its_batch_and_all_that_is_made_of_them(
        self, precision: str, item_bytes: int
    ) -> None:
        build, batch, layout = partial(Builds, 3, 8), torch.ones(4, 8), {"data_parallel_size": 2}
        made = (plan(build, batch, layout=layout, precision=one) for one in ("32-true", precision))
        single, other = (each.stages[0].peak.bytes for each in made)
        for kind in ("parameters", "optimizer", "gathered", "batch", "activations"):
            assert single[kind] > 0
            assert other[kind] == single[kind] * item_bytes / 4, kind


class TestCounting:
    def test_what_a_forward_keeps_is_what_a_real_one_keeps(self) -> None:
        module = gpt()
        counts = planned().counts
        ledger = Ledger()
        with ledger:
            loss = module.loss(TOKENS)
        parts = (*counts.everywhere, *(part for _, part in counts.in_order()), counts.loss)
        assert sum(part.plain.kept for part in parts) == ledger.live
        loss.backward()

    def test_what_products_keep_between_both_parts_of_a_backward_is_what_a_real_ones_keep(self) -> None:
        made = planned(pipeline_parallel_size=2, schedule="ZBVZeroBubble")
        module, ledger = gpt(), Ledger()
        parts = [*(part for _, part in made.counts.in_order()), made.counts.loss]
        owed = [part.plain.parts for part in parts if part.plain.parts is not None]
        assert len(owed) == len(parts)
        with ledger:
            loss = module.loss(TOKENS[:2])
            products = backward_but_products([loss], [None], [], checks=False)
        had = {name for name, p in module.named_parameters() if p.grad is not None}
        del loss
        kept = ledger.live - sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
        assert sum(part.owed for part in owed) == kept
        late = {part.parameters[place].name for part in parts for place in (part.plain.parts or TwoParts()).late}
        assert late == {name for name, _ in module.named_parameters()} - had
        assert len(products) == len(late)
        # of each matrix one of three products, and what a weight's costs is half of the rest of the backward
        [block] = {part.plain.parts.weights.flops for part in parts[2:4] if part.plain.parts is not None}
        assert block == 2 * 2 * 16 * 12 * 32**2
        assert made.counts.blocks[1].recomputed.parts is None

    @pytest.mark.long
    def test_transformers_models_get_no_mask_that_no_step_makes(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, vocab_size=32, intermediate_size=32, use_cache=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that it can't be run, and is estimated
            made = planned(lambda: OfTokens(transformers.AutoModelForCausalLM.from_config(config)))
        assert any("one sequence" in each for each in made.counts.assumed)
        module, ledger = OfTokens(transformers.AutoModelForCausalLM.from_config(config)), Ledger()
        with ledger:
            loss = module.training_step(TOKENS, 0)
        parts = (*made.counts.everywhere, *(part for _, part in made.counts.in_order()), made.counts.loss)
        assert sum(part.plain.kept for part in parts) == pytest.approx(ledger.live, rel=0.02)
        del loss

    def test_flops_of_a_block_are_those_of_its_matrices(self) -> None:
        counts = planned().counts
        tokens, width = 8 * 16, 32
        products = 2 * tokens * 12 * width**2
        attention = 2 * 2 * 8 * 16 * 16 * width
        assert counts.blocks[0].plain.forward.flops == products + attention
        assert counts.blocks[2].plain.backward.flops > 2 * products


class OfTokens(L.LightningModule):
    """A network of tokens to logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(tokens).logits.flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Stack(nn.Module):
    """Experts that compute with shapes alone: each row with its own expert's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.matrix = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, tokens: Tensor, choice: Tensor, scale: Tensor) -> Tensor:
        products = [torch.bmm(tokens.unsqueeze(1), self.matrix[choice[:, k]]).squeeze(1) for k in range(choice.size(1))]
        return sum((product * scale[:, k, None] for k, product in enumerate(products)), torch.zeros_like(tokens))


class Mixed(Mixture):
    def __init__(self) -> None:
        super().__init__(16)
        self.experts = Stack()  # type: ignore[assignment]


class OfMixtures(Builds):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block(), block())


class TestExperts:
    STATES = torch.zeros(2, 8, 16)
    PLAN: ClassVar = {"blocks.*.experts": "experts"}

    def test_are_dealt_and_exchange_rows_there_and_back(self) -> None:
        sizes = {"data_parallel_size": 4, "expert_parallel_size": 2}
        made = planned(partial(OfMixtures, Mixed), self.STATES, expert_parallel_plan=self.PLAN, **sizes)
        assert "spread evenly" in made.counts.assumed[0]
        whole = sum(p.numel() for p in OfMixtures(Mixed).parameters())
        assert 4 * made.stages[0].parameters >= whole  # padded where 4 doesn't divide
        block = made.counts.blocks[1]
        assert [p.local_shape for p in block.parameters if p.is_expert] == [(2, 16, 16)]
        rows = 2 * 2 * 8
        half_of_what_is_sent = (2 * rows * 16 + rows) * 4 // 2
        assert block.plain.forward.traffic == {"expert": half_of_what_is_sent}

    def test_of_stacks_that_pick_their_rows_find_as_many_for_each(self) -> None:
        sizes = {"data_parallel_size": 2, "expert_parallel_size": 2}
        made = planned(partial(OfMixtures, partial(Mixture, 16)), self.STATES, expert_parallel_plan=self.PLAN, **sizes)
        assert any("as many tokens choose each" in text or "spread evenly" in text for text in made.counts.assumed)
        listed = partial(OfMixtures, partial(ListedMixture, 16, "all"))
        with pytest.raises(ConfigurationError, match=r"is a list of modules.* plan with expert_parallel_size=1"):
            planned(listed, self.STATES, expert_parallel_plan=self.PLAN, **sizes)


class ReadsWeights(Builds):
    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.blocks[0].weight.norm())  # type: ignore[arg-type]


class NeedsValues(Builds):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch[: int(batch.sum())], batch_idx)


class Strange(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("it needs a device")


class StrangelyOptimized(Builds):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Strange(self.parameters(), lr=0.1)


class TestWhatCantBeKnown:
    def test_a_module_that_computes_with_its_weights_is_refused_with_the_way_out(self) -> None:
        with pytest.raises(ConfigurationError, match=r"ReadsWeights can't build.*configure_model"):
            planned(ReadsWeights, torch.zeros(4, 4))

    def test_a_step_that_needs_values_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"can't be run on tensors without values .*needs no values"):
            planned(NeedsValues, torch.zeros(4, 4), device_memory=2**30)

    def test_an_optimizer_that_cant_be_asked_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"state isn't known \(RuntimeError: it needs a device\)"):
            planned(StrangelyOptimized, torch.zeros(4, 4))

    def test_sizes_that_dont_divide_are_refused(self) -> None:
        with pytest.raises(PlanError, match="must divide"):
            planned(tensor_parallel_size=3, tensor_parallel_plan=plans.GPT)
        with pytest.raises(ConfigurationError, match="can't be cut into 3"):
            planned(pipeline_parallel_size=3, microbatches=3)


class TestTheAnswer:
    def test_says_what_would_make_it_fit(self) -> None:
        free = planned(pipeline_parallel_size=2, microbatches=2)
        made = planned(pipeline_parallel_size=2, microbatches=2, device_memory=int(0.9 * free.peak_bytes))
        assert made.fits is False
        [first] = made.remedies
        assert first.setting == "microbatches=4"
        again = planned(pipeline_parallel_size=2, microbatches=4, device_memory=made.device_memory)
        assert again.fits is True
        assert again.peak_bytes == first.peak_bytes
        assert "microbatches=4 would" in str(made)

    def test_is_json(self) -> None:
        made = planned(pipeline_parallel_size=2, activation_checkpointing="selective", device_memory=2**40)
        read = json.loads(json.dumps(made.to_json()))
        assert read["fits"] is True
        assert [stage["ranks"] for stage in read["stages"]] == [[1, 1], [0, 0]]
        assert read["peak"] == max(sum(stage["memory"].values()) for stage in read["stages"])

    def test_says_which_device_has_which_layer(self) -> None:
        placement = planned(pipeline_parallel_size=2, data_parallel_size=2).placement
        assert placement.ranks_of("model.blocks.0.mlp.up") == (2, 3)
        assert "model.head" in placement.layers_of(0)
        assert placement.stages[0].memory
        with pytest.raises(KeyError, match="no block"):
            placement.ranks_of("model.nothing")
        with pytest.raises(IndexError, match="no rank 4 among the 4"):
            placement.layers_of(4)


class TestTheCommand:
    def test_plans_what_a_function_gives(self, capsys: pytest.CaptureFixture[str]) -> None:
        name = f"{__name__}:with_batch"
        assert main(["plan", name, "--pipeline", "2", "--device-type", "cpu", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["layout"]["pipeline_parallel_size"] == 2
        assert main(["plan", name, "--pipeline", "2", "--device-type", "cpu", "--device-memory", "10KiB"]) == 1
        assert "does not fit" in capsys.readouterr().out

    @pytest.mark.long
    def test_plans_a_recipe(self, capsys: pytest.CaptureFixture[str]) -> None:
        recipe = ["model=gpt_tiny", "data=random_tokens", "data.context=16", "data.vocabulary=256", "trainer.devices=4"]
        assert main(["plan", *recipe, "--pipeline", "2", "--tensor", "2"]) == 0
        said = capsys.readouterr().out
        assert "4 cuda devices, 2 pipeline × 1 data × 2 tensor" in said

    def test_a_recipes_global_batch_is_dealt_to_the_planned_ranks(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"ab" * 1000)
        data = TextFolder(str(tmp_path), context=10, global_batch_size=12)
        assert len(_first_batch(data, 4)) == 3

    def test_says_what_a_function_must_give(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", f"{__name__}:gpt"]) == 1
        assert "a LightningModule and the batch" in capsys.readouterr().err


def with_batch() -> tuple[LanguageModel, Tensor]:
    return gpt(), torch.zeros(8, 17, dtype=torch.long)


def _all_parts(made: Plan) -> list[Any]:
    counts = made.counts
    return [*counts.everywhere, *(part for _, part in counts.in_order()), counts.loss]


class WithDropout(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(4)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


def test_dropout_counts_as_on_a_gpu_in_blocks_that_are_recomputed_too() -> None:
    def activations(recomputing: bool | None) -> int:
        made = plan(WithDropout, torch.zeros(8, 16, 32), layout={}, activation_checkpointing=recomputing)
        return int(made.stages[0].peak.bytes["activations"])

    assert activations(True) < activations(None) / 4
