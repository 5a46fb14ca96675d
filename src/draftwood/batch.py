"""What a forward takes and gives. One layout for prefill, decode, verification and draft growth.

A row's attention mask is small integers: it sees the first `visible` keys of its sequence, and of the keys staged
from `tree_base` on those whose bit is set in `ancestors`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from draftwood.states import StagedTrees, StateStore


@dataclass(frozen=True, eq=False)
class Source:
    """What an encoder reads for one sequence. It takes the first slots of the sequence: keys and values that the
    decoder's layers make of the encoder's states lie there, one slot for each state.
    """

    tokens: tuple[int, ...]  # one for each state: what was read, or any token where that is no text of the decoder's
    inputs: Tensor  # token ids [n], or features [bins, frames]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def key(self) -> str:
        """A name for what is read; the same for the same inputs only."""
        said = f"{self.inputs.dtype} {tuple(self.inputs.shape)} {len(self.tokens)} ".encode()
        content = self.inputs.contiguous().view(-1).numpy().tobytes()
        return hashlib.blake2b(said + content, digest_size=32).hexdigest()


@dataclass(frozen=True, eq=False)
class Images:
    """What the images of one prompt are to its model: embeddings that stand where the prompt has image tokens."""

    rows: Tensor  # [n] int64 the image tokens of the prompt, ascending
    embeds: Tensor  # [n, hidden]
    turns: Tensor | None  # [3, prompt] int64 time, height and width that rotation goes by; None: by positions
    shift: int  # what is to be added to the positions of tokens behind the prompt for that
    key: str  # a name for what is seen; the same for the same images only
    blocks: tuple[tuple[int, int], ...] = ()  # [start, end) of rows that see each other, whichever comes first

    def whole(self, end: int) -> int:
        """Where a piece of the prompt that would end at `end` has to end: not within rows that see each other."""
        return next((stop for start, stop in self.blocks if start < end < stop), end)


@dataclass(frozen=True)
class ForwardBatch:
    """N rows of S sequences; the rows of a sequence are contiguous, in the order of `row_offsets`."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64 where a row's key and value go
    visible: Tensor  # [N] int64
    ancestors: Tensor  # [N, W] int64
    row_offsets: Tensor  # [S + 1] int64
    tree_base: Tensor  # [S] int64 index of the first staged tree key
    num_keys: Tensor  # [S] int64 keys in use once this batch is written, tree included
    block_table: Tensor  # [S, P] int64 pages, -1 padded
    logit_rows: Tensor  # [K] int64 rows whose logits are wanted
    max_rows: int | None = None  # the most rows a sequence has; None: as many as there are
    linear: bool = False  # no row is a tree node: `ancestors` is empty everywhere
    max_nodes: int | None = None  # keys staged behind a sequence's text; None: as many as `ancestors` has bits
    max_depth: int | None = None  # of the deepest tree node; None: as many as `ancestors` has bits
    logits_in_order: bool = False  # `logit_rows` rise: if there are as many as rows, they are all of them
    parts: tuple[ForwardBatch, ...] = ()  # what it was joined of: rows so different that attention takes them apart
    pieces: tuple[tuple[int, int], ...] = ()  # [start, end) of each sequence's rows in its text, where the host knows
    states: Tensor | None = None  # [S] int64 where recurrent layers keep their state of each sequence; None: unknown
    is_text: bool = False  # all rows are committed: states move on over them. Else they move when a path is kept
    columns: Tensor | None = None  # [N] int64 places behind the text, -1: the last token; None: each follows the last
    taken_in: Tensor | None = None  # [N] bool rows of text that states hold already, or never will; None: none
    adapters: Tensor | None = None  # [N] int64 which of the model's adapters each row has, -1: none; None: none has
    source_lengths: Tensor | None = None  # [S] first keys of each sequence that are of its source; None: no encoder
    unread: tuple[tuple[int, Source], ...] = ()  # sequences that have rows of their source here
    turns: Tensor | None = (
        None  # [3, N] int64 what rotation goes by, where images have rows of their own; else positions
    )
    embed_rows: Tensor | None = None  # [K] int64 rows that begin with `embeds` instead of their tokens' embeddings
    embeds: Tensor | None = None  # [K, hidden]

    @property
    def turned_by(self) -> Tensor:
        """What rotation goes by: time, height and width of each row. [3, N]."""
        return self.positions.expand(3, -1) if self.turns is None else self.turns

    def at_logits(self, rows: Tensor) -> Tensor:
        """Of something that all rows have, what those have whose logits are wanted. [N, *] -> [K, *]."""
        if self.parts:
            return self.parts[0].at_logits(rows[: len(self.parts[0].tokens)])
        every = self.logits_in_order and len(self.logit_rows) == len(rows)
        return rows if every else rows.index_select(0, self.logit_rows)


def with_text(batch: ForwardBatch, text: ForwardBatch) -> ForwardBatch:
    """A batch and, behind its rows, some text of other sequences, of which no logits are wanted; tables of one width.

    Weights are read once for both.
    """
    names = ("tokens", "positions", "slots", "visible", "tree_base", "num_keys", "block_table")
    both = {name: torch.cat([getattr(batch, name), getattr(text, name)]) for name in names}
    offsets = torch.cat([batch.row_offsets, text.row_offsets[1:] + len(batch.tokens)])
    no_ancestors = batch.ancestors.new_zeros(len(text.tokens), batch.ancestors.shape[1])
    ancestors = torch.cat([batch.ancestors, no_ancestors])
    rows = None if batch.max_rows is None or text.max_rows is None else max(batch.max_rows, text.max_rows)
    sources = None
    if batch.source_lengths is not None and text.source_lengths is not None:
        sources = torch.cat([batch.source_lengths, text.source_lengths])
    behind = len(batch.tree_base)
    unread = (*batch.unread, *((behind + i, source) for i, source in text.unread))
    turns = adapters = None
    if batch.turns is not None or text.turns is not None:
        turns = torch.cat([batch.turned_by, text.turned_by], 1)
    if batch.adapters is not None or text.adapters is not None:
        adapters = torch.cat([_adapters_of(batch), _adapters_of(text)])
    embed_rows = None if text.embed_rows is None else text.embed_rows + len(batch.tokens)  # trees have no images
    return replace(
        batch, **both, row_offsets=offsets, ancestors=ancestors, max_rows=rows, linear=batch.linear and text.linear,
        logits_in_order=False, parts=(batch, text), pieces=(), states=None, source_lengths=sources, unread=unread,
        turns=turns, embed_rows=embed_rows, embeds=text.embeds, adapters=adapters,
    )  # fmt: skip


def _adapters_of(batch: ForwardBatch) -> Tensor:
    return torch.full_like(batch.tokens, -1) if batch.adapters is None else batch.adapters


@dataclass(frozen=True)
class GivenRows:
    """What a forward begins with instead of tokens; contiguous, in the model's dtype. It may be written over."""

    residual: Tensor  # [N, hidden]
    wide: Tensor | None = None  # [N, inputs of the first layer's attention], normed already


ROUTES = -2  # among the layers that are asked for: which experts each row went to


@dataclass(frozen=True)
class ForwardOutput:
    """Logits at `logit_rows`, and the whole residual stream after each layer that was asked for."""

    logits: Tensor  # [K, V]
    features: Mapping[int, Tensor]  # layer -> [N, hidden]; `ROUTES` -> [N, mixtures, top_k]
    staged: StagedTrees | None = None  # what recurrent layers have made of rows that are not committed yet


@dataclass(frozen=True)
class AttentionShape:
    """What attention needs to know beside batch and cache."""

    window: int | None  # a row sees only keys less than this many positions before it
    scale: float
    softcap: float | None = None  # scores become cap tanh(score / cap)
    sinks: bool = False  # `run` is given one more score for each head, behind which no value stands


@dataclass(frozen=True)
class Pages:
    """Keys and values of all layers in pages; written in place by a forward, moved by a commit."""

    store: Tensor  # [L, 2, H, slots, D]: one head's keys of a run of pages are one matrix
    page_size: int
    states: tuple[StateStore, ...] = ()  # of the recurrent layers

    @cached_property
    def layers(self) -> tuple[Tensor, ...]:
        """Each layer's keys and values as one tensor to write to. L x [2 H, slots, D]."""
        return self.store.flatten(1, 2).unbind(0)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.store.dtype

    @property
    def packed_as(self) -> int:
        """0 where vectors are numbers, as here; else what kernels know their codes by (ops/packed.py)."""
        return 0

    def write(self, layer: int, slots: Tensor, key_value: Tensor) -> None:
        """Keys and values [N, 2 H, D] to their slots [N]."""
        self.layers[layer].index_copy_(1, slots, key_value.transpose(0, 1))

    def read(self, layer: int, slots: slice | Tensor) -> Tensor:
        """[2 H, keys, D]."""
        return self.layers[layer][:, slots]
