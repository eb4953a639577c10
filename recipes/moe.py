"""The GPT with a mixture of experts in each block; still an ordinary network without any code for parallelism.

Every token goes through one shared MLP, and through those ``chosen`` of ``experts`` smaller MLPs for which the router
scores highest (DeepSeekMoE, arXiv:2401.06066).

Shapes: B batch, T tokens of a window, N tokens of a batch, D width, E experts, K experts chosen per token.
"""

from __future__ import annotations

from typing import Any

import torch
from gpt import MLP, LanguageModel
from torch import Tensor, nn
from torch.nn import functional as F


class Experts(nn.Module):
    """MLPs of one shape as two stacks of matrices, the form that ``expert_parallel_plan`` shards."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        sum_ND = torch.zeros_like(x_ND)
        for expert, (up, down) in enumerate(zip(self.up.unbind(), self.down.unbind())):
            token, place = torch.where(chosen_NK == expert)
            result = F.gelu(x_ND[token] @ up) @ down * weights_NK[token, place, None]
            sum_ND = sum_ND.index_add(0, token, result.to(sum_ND.dtype))
        return sum_ND


class Mixture(MLP):
    """A shared expert (the inherited MLP), and routed experts.

    Attributes:
        balance: The load-balancing loss of the last batch, ``E · Σ share of the choices × mean score`` over the
            experts: 1 if all are chosen equally, up to E if all tokens choose the same one (Switch Transformer,
            arXiv:2101.03961). To be minimized.
    """

    def __init__(self, width: int, experts: int, chosen: int, inner: int, shared: int) -> None:
        super().__init__(width, shared)
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, inner)
        self.balance: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        scores_NE = self.router(x_ND).float().softmax(-1)
        weights_NK, chosen_NK = scores_NE.topk(self.chosen)
        share_E = F.one_hot(chosen_NK, scores_NE.size(-1)).float().mean((0, 1))
        self.balance = scores_NE.size(-1) * (share_E * scores_NE.mean(0)).sum()
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return super().forward(x_BTD) + self.experts(x_ND, chosen_NK, weights_NK).view_as(x_BTD)


class MixtureLanguageModel(LanguageModel):
    """Trains the GPT with mixtures of experts in place of its MLPs.

    Args:
        experts: Routed experts per block.
        chosen: Routed experts per token.
        inner: The inner width of a routed expert.
        shared: The inner width of the shared expert. A token uses as many parameters as in the plain GPT if
            ``shared + chosen × inner`` is four times the width.
        balance_weight: The weight of the load-balancing loss, added to the cross entropy (the logged ``train_loss``).
        gpt: Arguments of :class:`~gpt.LanguageModel`.
    """

    def __init__(
        self,
        *,
        experts: int = 8,
        chosen: int = 2,
        inner: int = 128,
        shared: int = 256,
        balance_weight: float = 0.01,
        **gpt: Any,
    ) -> None:
        super().__init__(**gpt)
        for block in self.model.blocks:
            block.mlp = Mixture(self.hparams["width"], experts, chosen, inner, shared)
        self.model.draw_weights()

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        mixtures: list[Any] = [block.mlp for block in self.model.blocks]
        balance = torch.stack([mixture.balance for mixture in mixtures]).mean()
        self.log("train_balance", balance, sync_dist=True)
        return loss + self.hparams["balance_weight"] * balance
