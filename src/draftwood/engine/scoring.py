"""Log-probabilities of prompts: which rows of a step give them, and what their logits say."""

from __future__ import annotations

from torch import Tensor

from draftwood.engine.plan import Plan
from draftwood.request import TokenLogprob
from draftwood.sampling import text_logprobs


def prompt_logprobs(plan: Plan, logits: Tensor) -> dict[int, list[TokenLogprob]]:
    """By the item's index, the log-probabilities that the logits at the plan's `scored_rows` give. [K, V]."""
    found: dict[int, list[TokenLogprob]] = {}
    start = 0
    for i, rows in plan.scored:
        seq = plan.items[i].seq
        behind = seq.tokens[rows.start + 1 : rows.stop + 1]
        found[i] = text_logprobs(logits[start : start + len(rows)], behind, seq.params.prompt_logprobs or 0)
        start += len(rows)
    return found
