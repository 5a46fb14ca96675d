"""Networks that guess a whole block in one pass (DFlash, DSpark, TreeFlash), with any grower.

The network runs once a round. A tree over its slots costs nothing more than correcting each slot for the token before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from draftwood.cache.kv import NodeRows
from draftwood.drafters.features import READ_FROM, FeatureDrafter, PagedAttend, pages_under, text_ends, write
from draftwood.drafters.growths import growth_of
from draftwood.drafters.resident_features import ResidentBlock
from draftwood.batch import ForwardBatch, Pages
from draftwood.model.runner import ModelRunner
from draftwood.nets.dflash import BlockNet
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.native import NativeLayers, native_layers, native_linear
from draftwood.protocols import BatchView, FrontierModel, Grower, Span
from draftwood.treebuilder import TreeBuilder


class BlockDrafter(FeatureDrafter):
    """A `BlockNet`, and a grower."""

    net: BlockNet
    _native: NativeLayers | None

    def __init__(self, net: BlockNet, words: TargetEmbeddings, grower: Grower) -> None:
        super().__init__(net, words, grower)
        self.deepest = net.spec.guesses

    @cached_property
    def pages(self) -> Pages:
        """Under the target's; in rounds on a device others are used instead."""
        return pages_under(self.target, self.net.config)

    def attach(self, target: ModelRunner) -> None:
        """Its layers run on the target's kernels where they can."""
        super().attach(target)
        net, possible = self.net, not self.net.spec.norm_in_head
        self._native = native_layers(net, net.config, net.head, self.words) if possible else None

    def refresh(self) -> None:
        """The kernels have weights of their own."""
        if self._native is not None:
            self._native.refresh()

    def digest(self, features: Tensor) -> Tensor:
        """What the layers make keys and values of."""
        return self.net.hidden_norm(native_linear(self.net.fc)(features))

    def has_room(self, seq_id: int, length: int) -> bool:
        """A block is written behind the text, however small the tree will be."""
        return self.target.cache.tables.reserve(seq_id, length - 1 + self.net.spec.block_size)

    def settle(self, spans: Sequence[Span]) -> None:
        """Every layer sees each of the target's positions through its own keys and values, written once."""
        due = [(span, self._pending[span.seq_id]) for span in spans]
        due = [(span, pending) for span, pending in due if pending.count > READ_FROM]
        self.write_context([Span(span.seq_id, span.tokens, pending.start, pending.end - 1) for span, pending in due])

    def write_context(self, spans: Sequence[Span]) -> None:
        """Keys and values of the pending features [start, end) of each."""
        if not spans:
            return
        with torch.inference_mode():
            context = self.take(spans)
            batch = self.target.cache.stage(spans, None)
            self.keep(context, batch.positions, batch.slots, self.pages)

    def keep(self, context: Tensor, positions: Tensor, slots: Tensor, pages: Pages) -> None:
        """Keys and values of rows of context [N, hidden], every layer's own."""
        if self._native is not None and self._native.write_context is not None:
            return self._native.write_context(context, positions, slots, pages)
        for layer in range(self.net.config.num_layers):
            write(pages, layer, slots, *self.net.keys_values(layer, context, positions))

    def begin(self, view: BatchView, ready: Sequence[int]) -> FrontierModel:
        """Write what is pending, then run the block."""
        tokens = [(view.seq_ids[b], view.tokens[b]) for b in ready]
        pending = self._pending
        self.write_context([Span(s, t, pending[s].start, len(t) - 1) for s, t in tokens])
        return _Growth(self, ready)

    def run(self, view: BatchView, ready: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Outputs and logits of the blocks behind the sequences `ready`. [n, guesses, hidden], [n, guesses, R]."""
        spec, device = self.net.spec, self.target.device
        size, count = spec.block_size, len(ready)
        tokens, embedded = self.block(view.roots[list(ready)])
        number = torch.arange(1, size + 1, device=device).expand(count, -1).reshape(-1)
        every = torch.full((count * size, 1), (1 << size) - 1, device=device)
        owner = torch.arange(count, device=device).repeat_interleave(size)
        nodes = NodeRows(owner, number, tokens.reshape(-1), number, every)
        batch = self.target.cache.stage(text_ends(view, ready), nodes, torch.arange(count * size, device=device))
        output, logits = self.through(batch, self.pages, embedded.flatten(0, 1))
        first = size - spec.guesses
        return output.view(count, size, -1)[:, first:], logits.view(count, size, -1)[:, first:]

    def block(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Each root and the masks behind it, as tokens and embedded. [n] -> [n, block], [n, block, hidden]."""
        spec = self.net.spec
        masks = torch.full((len(roots), spec.block_size - 1), spec.mask_token or 0, device=roots.device)
        tokens = torch.cat([roots[:, None], masks], 1)
        if self.net.mask_embedding is None:
            return tokens, self.words.embed(tokens)
        first = self.words.embed(roots)[:, None]
        return tokens, torch.cat([first, self.net.mask_embedding.expand(*masks.shape, -1).to(first.dtype)], 1)

    def resident(self, target: ModelRunner) -> ResidentBlock | None:
        """In rounds on the device, if its trees can grow there."""
        growth = growth_of(self.grower, self.deepest)
        return None if growth is None else ResidentBlock(self, growth, target)

    def through(self, batch: ForwardBatch, pages: Pages, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and logits of the rows of blocks. [N, hidden] -> [N, hidden], [N, R]."""
        if self._native is not None:
            hidden, logits = self._native.run(batch, pages, embedded, None)
            return self.net.norm(hidden), logits
        attend = PagedAttend(batch, pages, self.net.config)
        output = self.net.run(embedded, batch.positions, attend)
        return output, self.net.head(output)


@dataclass
class _Growth:
    """One block's slots, as a tree asks for them."""

    drafter: BlockDrafter
    ready: Sequence[int]
    outputs: Tensor = field(init=False)  # [B, guesses, hidden]
    base: Tensor = field(init=False)  # [B, guesses, R] logits of every slot before correction

    def begin(self, view: BatchView) -> Tensor:
        """Logits at the roots. [B, V]."""
        outputs, base = self.drafter.run(view, self.ready)
        self.outputs = outputs.new_zeros(len(view.seq_ids), *outputs.shape[1:])
        self.base = base.new_zeros(len(view.seq_ids), *base.shape[1:])
        self.outputs[list(self.ready)], self.base[list(self.ready)] = outputs, base
        return self._logits(view.roots[:, None], torch.zeros_like(view.roots)[:, None])[:, 0]

    def extend(self, builder: TreeBuilder, columns: Tensor) -> Tensor:
        """Logits after the nodes in `columns`. [B, k] -> [B, k, V]."""
        depth = builder.depth.gather(1, columns)
        return self._logits(builder.tokens.gather(1, columns), depth)

    def _logits(self, before: Tensor, slot: Tensor) -> Tensor:
        """After tokens `before` [B, k], in slots `slot` [B, k]. [B, k, V]."""
        net = self.drafter.net
        slot = slot.clamp(max=self.outputs.shape[1] - 1)[..., None]
        output = self.outputs.gather(1, slot.expand(-1, -1, self.outputs.shape[-1]))
        base = self.base.gather(1, slot.expand(-1, -1, self.base.shape[-1]))
        return net.head.spread(net.corrected(output, base, before, self.drafter.words.embed(before)))
