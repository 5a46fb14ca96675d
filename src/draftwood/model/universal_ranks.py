"""Tensor parallelism for transformers' modules: their own plan says which products are split, and how.

A rank reads the whole model and keeps its part. Whether a plan was understood is found out afterwards: what the ranks
compute together is held against what the whole model did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.errors import InvalidRequest
from draftwood.ranks import Ranks

# What every rank keeps as a whole: layers whose inputs and outputs are whole in the plan, too.
WHOLE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "replicate",
         "replicated_with_grad_allreduce")  # fmt: skip


def split(modules: Any, ranks: Ranks) -> None:
    """Keep this rank's part of everything that the modules' plan splits."""
    plan: Mapping[str, str] = modules.tp_plan
    parts = {**dict(modules.named_modules()), **dict(modules.named_parameters())}
    for name, part in parts.items():
        style = plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name))
        if style is None or style in WHOLE:
            continue
        if style not in STYLES:
            raise InvalidRequest(f"This model cannot be split: its plan asks for '{style}' at {name}. Use tp=1.")
        STYLES[style](part, ranks)


def _outputs(part: Any, ranks: Ranks) -> None:
    for own in _weights(part):
        own.data = _own(own.data, 0, ranks)


def _inputs(part: Any, ranks: Ranks) -> None:
    if isinstance(part, nn.Parameter):  # of experts, which are summed together
        part.data = _own(part.data, -1, ranks)
        return
    weight, *biases = _weights(part)
    weight.data = _own(weight.data, 1, ranks)
    for bias in biases:  # added once
        bias.data = bias.data if ranks.rank == 0 else torch.zeros_like(bias.data)
    _summed(part, ranks)


def _gate_and_up(part: Any, ranks: Ranks) -> None:
    halves = part.data.chunk(2, -2)
    part.data = torch.cat([_own(half, -2, ranks) for half in halves], -2)


def _summed(part: Any, ranks: Ranks) -> None:
    part.register_forward_hook(lambda module, asked, given: ranks.sum(given))


STYLES: Mapping[str, Callable[[Any, Ranks], None]] = {
    "colwise": _outputs,
    "rowwise": _inputs,
    "packed_colwise": _gate_and_up,
    "moe_tp_experts": _summed,
}


def _weights(part: Any) -> list[Tensor]:
    if not isinstance(part, nn.Linear):
        raise InvalidRequest(f"This model cannot be split: a {type(part).__name__} is in its plan. Use tp=1.")
    return [part.weight, *([] if part.bias is None else [part.bias])]


def _own(whole: Tensor, axis: int, ranks: Ranks) -> Tensor:
    width, rest = divmod(whole.shape[axis], ranks.size)
    if rest:
        raise InvalidRequest(
            f"This model cannot be split over {ranks.size} ranks: {whole.shape[axis]} rows or columns of one of its "
            "matrices do not divide. Choose another tp."
        )
    return whole.narrow(axis, ranks.rank * width, width).clone()
