"""Rows of a forward without an engine: pieces of texts, and trees behind texts that are in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.kv import stage_trees
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Span
from draftwood.tree import TokenTree


def text_batch(runner: ModelRunner, spans: Sequence[Span]) -> ForwardBatch:
    """Rows of texts, with logits at all of them."""
    rows = sum(span.end - span.start for span in spans)
    return runner.cache.stage_text(spans, torch.arange(rows, device=runner.device))


def tree_batch(runner: ModelRunner, spans: Sequence[Span], tree: TokenTree) -> ForwardBatch:
    """A tree, root and all, behind each text; its last token is the root."""
    view = SimpleNamespace(
        lengths=torch.tensor([span.end for span in spans], device=runner.device),
        block_table=runner.cache.block_table(spans).clamp(min=0),
        source_lengths=text_batch(runner, spans).source_lengths,
    )
    chain = tree.tries.shape[1] == 1
    return stage_trees(view, tree, runner.cache.page_size, runner.model.config.max_positions, chain=chain)  # type: ignore[arg-type]


def tree_logits(runner: ModelRunner, spans: Sequence[Span], tree: TokenTree) -> Tensor:
    """Logits at every node, roots included, once all but the last token of each text has been run. [M, V]."""
    text = [replace(span, end=span.end - 1) for span in spans if span.end - 1 > span.start]
    if text:
        runner.forward(runner.cache.stage_text(text))
    return runner.forward(tree_batch(runner, spans, tree)).logits
