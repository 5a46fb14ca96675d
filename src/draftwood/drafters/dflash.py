"""Networks that draft a whole block in one pass (DFlash, DSpark, TreeFlash), with any grower.

The network runs once a step. A tree over its slots costs nothing more than correcting each slot for the token before.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, Pages
from draftwood.cache.kv import Places
from draftwood.drafters.features import FeatureDrafter, PagedAttend, at_depths, pages_under, write
from draftwood.drafting import Front, Grower, State, Vocabulary
from draftwood.model.runner import ModelRunner
from draftwood.nets.dflash import BlockNet
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.native import NativeLayers, native_layers, native_linear
from draftwood.protocols import BatchView


class BlockDrafter(FeatureDrafter):
    """A `BlockNet`, and a grower. Every layer sees each of the target's positions through keys and values of its own,
    written once.
    """

    net: BlockNet
    _native: NativeLayers | None
    _pages: Pages

    def __init__(self, net: BlockNet, words: TargetEmbeddings, grower: Grower) -> None:
        super().__init__(net, words, grower, net.spec.guesses)

    def attach(self, target: ModelRunner) -> None:
        """Its layers run on the target's kernels where they can."""
        super().attach(target)
        net, possible = self.net, not self.net.spec.norm_in_head
        self._native = native_layers(net, net.config, net.head, self.words) if possible else None
        self._pages = pages_under(target, net.config)

    def refresh(self) -> None:
        """The kernels have weights of their own."""
        if self._native is not None:
            self._native.refresh()

    def staged(self, nodes: int) -> int:
        """A block is written behind the text, however small the tree will be."""
        return self.net.spec.block_size - 1 if nodes else 0

    def digest(self, features: Tensor) -> Tensor:
        """What the layers make keys and values of. [N, len(reads) * hidden] -> [N, hidden]."""
        return self.net.hidden_norm(native_linear(self.net.fc)(features))

    def store(self, slots: Tensor, positions: Tensor, features: Tensor) -> None:
        """Keys and values of every layer."""
        context = self.digest(features)
        if self._native is not None and self._native.write_context is not None:
            return self._native.write_context(context, positions, slots, self._pages)
        for layer in range(self.net.config.num_layers):
            write(self._pages, layer, slots, *self.net.keys_values(layer, context, positions))

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """Also outputs and logits of all slots before correction. [B, guesses, hidden], [B, guesses, R]."""
        spec, size = self.net.spec, view.size
        tokens, embedded = self._block(view.roots)
        batch = self.stage(view, tokens, _block_places(size, spec.block_size, tokens.device))
        found = self._run(batch, embedded.flatten(0, 1))
        first = spec.block_size - spec.guesses
        outputs, base = (part.view(size, spec.block_size, -1)[:, first:] for part in found)
        return self._corrected(outputs[:, :1], base[:, :1], view.roots[:, None]), (outputs, base)

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """The slots of their depths, corrected for each of them."""
        outputs, base = (at_depths(part, front) for part in state)
        logits = self._corrected(outputs, base, front.tokens)
        return logits if front.level is not None else self.net.head.spread(logits), state

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """What its head knows."""
        return None if level is None else self.net.head

    def _block(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Each root and the masks behind it, as tokens and embedded. [B] -> [B, block], [B, block, hidden]."""
        spec = self.net.spec
        masks = roots.new_full((len(roots), spec.block_size - 1), spec.mask_token or 0)
        tokens = torch.cat([roots[:, None], masks], 1)
        if self.net.mask_embedding is None:
            return tokens, self.words.embed(tokens)
        first = self.words.embed(roots)[:, None]
        return tokens, torch.cat([first, self.net.mask_embedding.expand(*masks.shape, -1).to(first.dtype)], 1)

    def _run(self, batch: ForwardBatch, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and logits of the rows of blocks. [N, hidden] -> [N, hidden], [N, R]."""
        if self._native is not None:
            hidden, logits = self._native.run(batch, self._pages, embedded, None)
            return self.net.norm(hidden), logits
        attend = PagedAttend(batch, self._pages, self.net.config)
        output = self.net.run(embedded, batch.positions, attend)
        return output, self.net.head(output)

    def _corrected(self, outputs: Tensor, base: Tensor, before: Tensor) -> Tensor:
        """After tokens `before` [B, k], in slots with these outputs and logits. [B, k, R]."""
        return self.net.corrected(outputs, base, before, self.words.embed(before))


@lru_cache(maxsize=1024)
def _block_places(size: int, rows: int, device: torch.device) -> Places:
    """Blocks behind the texts, each of whose rows sees all of its block."""
    steps = torch.arange(rows, device=device).expand(size, rows).contiguous()
    every = torch.full((size * rows, 1), (1 << rows) - 1, device=device)
    return Places(steps, steps, every, rows, rows)
