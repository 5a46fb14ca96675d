"""Accepted tokens that a drafter with a network of its own did not propose: it reads them as text."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.cache.kv import Places, stage_behind
from draftwood.drafting import Drafter, Proposal
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView
from draftwood.tree import Verdict


def read_unknown(drafter: Drafter, target: ModelRunner, view: BatchView, proposal: Proposal, verdict: Verdict) -> None:
    """Let `drafter` read the accepted paths that have nodes it keeps nowhere (their columns are 0); all paths where
    values may not be looked at.
    """
    path, longest, length = verdict.path, verdict.path.shape[1] - 1, verdict.length
    if view.may_look:
        step = torch.arange(longest + 1, device=path.device)
        accepted = (step > 0) & (step <= length[:, None])
        rows = (accepted & (proposal.columns_of(path) == 0)).any(1).nonzero()[:, 0]
        if not len(rows):
            return
        view, path, length = view.take(rows), path[rows], length[rows]
        longest = int(length.max())
    tokens = proposal.tree.tokens[path[:, 1 : 1 + longest].clamp(min=0)].clamp(min=0)
    places, no_logits = _behind_text(view.size, longest, tokens.device)
    limits = target.cache.page_size, target.model.config.max_positions
    # Keys and values behind a path's end are written over before they are read; states never take such rows in.
    sources = view.source_lengths
    batch = stage_behind(view.lengths, view.block_table, tokens, places, *limits, no_logits, sources)
    beyond = (places.index >= length[:, None]).view(-1)
    drafter.ingest(replace(batch, states=view.states, is_text=True, taken_in=beyond), None)


@lru_cache(maxsize=1024)
def _behind_text(size: int, count: int, device: torch.device) -> tuple[Places, Tensor]:
    """Places of the first `count` tokens behind each text, and no rows of logits."""
    steps = torch.arange(count, device=device).expand(size, -1).contiguous()
    return Places(steps, steps), torch.empty(0, dtype=torch.int64, device=device)
