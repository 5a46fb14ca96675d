"""Keys and values in pages: stage a forward's rows to slots, and keep the accepted path.

A sequence of length n (root included) with a tree of three draft nodes, before and after the path root, a, c:

    index    0 … n-1        n    n+1   n+2            0 … n-1     n    n+1
    holds    committed      a     b     c      ->     committed   a     c        (b is overwritten)

A chain is already in place, so nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.cache.blocks import PageTables
from draftwood.model.batch import ForwardBatch
from draftwood.model.config import ModelConfig
from draftwood.tree import TokenTree, Verdict


@dataclass(frozen=True)
class Span:
    """Committed tokens [start, end) of one sequence that a forward has to run."""

    seq_id: int
    tokens: Sequence[int]
    start: int
    end: int


@dataclass(frozen=True)
class NodeRows:
    """Draft nodes to run: K rows of trees that hang behind the last token of some span."""

    span: Tensor  # [K] int64 index of the span
    index: Tensor  # [K] int64 the node's number in its own tree, 1 …: where its key is staged
    tokens: Tensor  # [K] int64
    depth: Tensor  # [K] int64
    ancestors: Tensor  # [K, W] int64

    @classmethod
    def of_tree(cls, tree: TokenTree, span: Tensor) -> NodeRows:
        """All draft nodes of `tree`, whose b-th tree belongs to span `span[b]`."""
        drafted = tree.parents >= 0
        owner = span[tree.owner[drafted]]
        return cls(owner, tree.local[drafted], tree.tokens[drafted], tree.depth[drafted], tree.ancestors[drafted])


class KVCache:
    """The pages' tensors and the tables that say who owns them."""

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tables = PageTables(num_pages, page_size)
        self.device = device
        # Heads before slots: one head's keys of a run of pages are one matrix.
        self.store = torch.zeros(
            config.num_layers, 2, config.num_kv_heads, num_pages * page_size, config.head_dim, dtype=dtype, device=device
        )  # [L, 2, H, slots, D]

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.tables.page_size

    @property
    def num_bytes(self) -> int:
        """Memory of all pages."""
        return self.store.numel() * self.store.element_size()

    def block_table(self, spans: Sequence[Span]) -> Tensor:
        """The pages of each span's sequence. [S, P], -1 padded."""
        pages = [self.tables.pages(span.seq_id) for span in spans]
        widest = max(len(own) for own in pages)
        return torch.tensor([own + [-1] * (widest - len(own)) for own in pages], device=self.device)

    def slots(self, block_table: Tensor, span: Tensor, index: Tensor) -> Tensor:
        """Slots of key number `index` of spans `span`; [S, P], [K], [K] -> [K]."""
        page = block_table[span, index // self.page_size]
        return page * self.page_size + index % self.page_size

    def stage(self, spans: Sequence[Span], nodes: NodeRows | None, logit_rows: Tensor | None = None) -> ForwardBatch:
        """Rows for every pending token of `spans` and every node, with their slots and masks.

        Without `logit_rows` (indices into pending tokens followed by nodes), logits are wanted at each span's
        last pending token, then at every node.
        """
        staged = _Staging.of(spans, nodes, self.device)
        table = self.block_table(spans)
        num_pending = staged.ends[-1]
        if logit_rows is None:
            last = torch.tensor(staged.ends[1:], device=self.device) - 1
            extra = torch.arange(num_pending, staged.span.shape[0], device=self.device)
            logit_rows = torch.cat([last, extra])
        order = torch.argsort(staged.span, stable=True)
        placed = torch.empty_like(order)
        placed[order] = torch.arange(order.shape[0], device=self.device)
        counts = torch.bincount(staged.span, minlength=len(spans))
        highest = torch.zeros(len(spans), dtype=torch.int64, device=self.device)
        highest = highest.scatter_reduce(0, staged.span, staged.index + 1, "amax")
        return ForwardBatch(
            tokens=staged.tokens[order],
            positions=staged.positions[order],
            slots=self.slots(table, staged.span, staged.index)[order],
            visible=staged.visible[order],
            ancestors=staged.ancestors[order],
            row_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            tree_base=staged.base,
            num_keys=torch.maximum(highest, staged.base),
            block_table=table,
            logit_rows=placed[logit_rows],
        )

    def commit(self, batch: ForwardBatch, tree: TokenTree, verdict: Verdict, span: Tensor) -> None:
        """Move the keys and values of accepted nodes to where committed tokens live."""
        index = tree.local[verdict.path.clamp(min=0)]  # [B, D + 1]
        self.keep(batch.block_table[span], batch.tree_base[span], index, verdict.length)

    def keep(self, block_table: Tensor, base: Tensor, index: Tensor, length: Tensor) -> None:
        """Move staged nodes `index` [B, D + 1] (root first, `length` of the others count) right behind `base` [B]."""
        depth = torch.arange(index.shape[1], device=self.device).expand_as(index)
        moves = (depth >= 1) & (depth <= length[:, None]) & (index != depth)
        if not bool(moves.any()):
            return
        owner, step = moves.nonzero(as_tuple=True)
        source = self.slots(block_table, owner, base[owner] + index[owner, step] - 1)
        target = self.slots(block_table, owner, base[owner] + step - 1)
        self.store[:, :, :, target] = self.store[:, :, :, source]


@dataclass(frozen=True)
class _Staging:
    """Pending tokens of all spans followed by all nodes, before they are sorted by sequence."""

    tokens: Tensor
    positions: Tensor
    span: Tensor
    index: Tensor  # which key of its sequence a row writes
    visible: Tensor
    ancestors: Tensor
    base: Tensor  # [S]
    ends: list[int]  # [S + 1] pending rows before each span

    @classmethod
    def of(cls, spans: Sequence[Span], nodes: NodeRows | None, device: torch.device) -> _Staging:
        tokens: list[int] = []
        index: list[int] = []
        owner: list[int] = []
        ends = [0]
        for i, span in enumerate(spans):
            tokens += span.tokens[span.start : span.end]
            index += range(span.start, span.end)
            owner += [i] * (span.end - span.start)
            ends.append(len(tokens))
        pending, at, spans_at = torch.tensor([tokens, index, owner], dtype=torch.int64, device=device)
        base = torch.tensor([span.end for span in spans], device=device)
        if nodes is None or nodes.tokens.shape[0] == 0:
            no_tree = torch.zeros(len(tokens), 1, dtype=torch.int64, device=device)
            return cls(pending, at, spans_at, at, at + 1, no_tree, base, ends)
        before = base[nodes.span]
        return cls(
            tokens=torch.cat([pending, nodes.tokens]),
            positions=torch.cat([at, before - 1 + nodes.depth]),
            span=torch.cat([spans_at, nodes.span]),
            index=torch.cat([at, before + nodes.index - 1]),
            visible=torch.cat([at + 1, before]),
            ancestors=torch.cat([nodes.ancestors.new_zeros(len(tokens), nodes.ancestors.shape[1]), nodes.ancestors]),
            base=base,
            ends=ends,
        )
