"""A mixture of experts in torch: each row runs through the few MLPs that a router picks for it.

What a row gets does not depend on the others: products are made expert by expert, sums in the order of its choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.model.layers import gated, wide
from draftwood.model.spec import ExpertsSpec
from draftwood.ops.linear import Linear
from draftwood.ranks import ALONE, Ranks

FEW = 4  # rows times choices an expert: up to there weights are gathered on an accelerator, which needs no host


@dataclass(frozen=True)
class ExpertWeights:
    """The matrices of all experts, and their biases."""

    gate_up: Tensor  # [E, in, 2 * inner]
    down: Tensor  # [E, inner, out]
    gate_up_bias: Tensor | None  # [E, 2 * inner]
    down_bias: Tensor | None  # [E, out]


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that runs for every row, as strongly as its gate says."""

    gate_up: Linear
    down: Linear
    weight: Linear | None  # -> [1]; None: it counts in full
    activation: str


@dataclass(frozen=True)
class Experts:
    """Router, experts and the one that is shared."""

    spec: ExpertsSpec
    router: Linear
    weights: ExpertWeights
    shared: SharedExpert | None
    rounding: Callable[[Tensor], Tensor] | None = None  # of what products read
    ranks: Ranks = ALONE  # each of which has a part of every expert
    allowed: Tensor | None = None  # [E] uint8 which may be chosen; None: all

    def narrowed(self, allowed: Tensor, top_k: int) -> Experts:
        """The same with a router that picks `top_k` of those allowed."""
        return replace(self, allowed=allowed, spec=replace(self.spec, top_k=top_k))

    def __call__(self, x: Tensor, routes: list[Tensor] | None = None) -> Tensor:
        """[N, hidden] -> [N, hidden]; `routes` gets what was chosen."""
        weight, chosen = self._choices(x)
        if routes is not None:
            routes.append(chosen)
        read = x if self.rounding is None else self.rounding(x)
        each = self._on_device(read, chosen) if self._few(x, chosen) else self._one_by_one(read, chosen)
        mixed = (each * weight[..., None].to(each.dtype)).sum(1)
        return self.ranks.sum(mixed if self.shared is None else mixed + self._shared(x, self.shared))

    def _choices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How much of which experts each row gets. Twice [N, top_k]."""
        scores = self.router(x).to(wide(x.dtype))
        chances = (scores if self.allowed is None else scores.masked_fill(self.allowed == 0, -torch.inf)).softmax(-1)
        weight, chosen = chances.topk(self.spec.top_k, -1)
        if self.spec.normalised:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight, chosen

    def _few(self, x: Tensor, chosen: Tensor) -> bool:
        return x.device.type != "cpu" and chosen.numel() <= FEW * self.spec.top_k

    def _on_device(self, x: Tensor, chosen: Tensor) -> Tensor:
        """All products at once, each with weights of its own. [N, top_k, hidden]."""
        flat, rows = chosen.flatten(), x.repeat_interleave(chosen.shape[1], 0)
        w = self.weights
        made = _product(rows[:, None], w.gate_up[flat], None if w.gate_up_bias is None else w.gate_up_bias[flat])
        out = _product(self._gated(made), w.down[flat], None if w.down_bias is None else w.down_bias[flat])
        return out.view(*chosen.shape, -1)

    def _one_by_one(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Expert by expert, the rows that have picked it. [N, top_k, hidden]."""
        flat, w = chosen.flatten(), self.weights
        order = flat.argsort(stable=True)
        out = x.new_empty(len(flat), w.down.shape[-1])
        counts = torch.bincount(flat, minlength=self.spec.count).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                places = order[start : start + count]
                bias = None if w.gate_up_bias is None else w.gate_up_bias[expert]
                made = self._gated(_product(x[places // chosen.shape[1]], w.gate_up[expert], bias))
                out[places] = _product(made, w.down[expert], None if w.down_bias is None else w.down_bias[expert])
                start += count
        return out.view(*chosen.shape, -1)

    def _gated(self, made: Tensor) -> Tensor:
        gate, up = made.chunk(2, -1)
        wider = gated(self.spec.expert.activation, gate, up)
        return wider if self.rounding is None else self.rounding(wider.flatten(0, -2)).view(wider.shape)

    def _shared(self, x: Tensor, shared: SharedExpert) -> Tensor:
        gate, up = shared.gate_up(x).chunk(2, -1)
        made = shared.down(gated(shared.activation, gate, up))
        return made if shared.weight is None else torch.sigmoid(shared.weight(x)) * made


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = x @ weight
    return made if bias is None else made + (bias if made.dim() == 2 else bias[:, None])
