"""What all drafters share that draft from the target's own features, whatever their network looks like.

A feature is kept under its token's slot of the target's cache once the target has run the token: text in `ingest`,
accepted nodes in `commit`. The last committed token has not been run, so of a sequence of n tokens those of positions
0 … n - 2 are there. Keys and values of the network lie under the same slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.cache.kv import Places, stage_behind
from draftwood.drafters.grown import GrownDrafter
from draftwood.drafting import Front, Grower, Proposal, State, Vocabulary
from draftwood.links import may_look
from draftwood.model.config import ModelConfig
from draftwood.model.runner import ModelRunner
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.ops import plan_attention
from draftwood.ops.staging import staged
from draftwood.protocols import BatchView, Features, Randomness
from draftwood.tree import Verdict

DIGEST_FROM = 16  # rows of features from which on they are digested without waiting for the next draft


class PagedAttend:
    """Attention over pages, for the rows of one forward."""

    def __init__(self, batch: ForwardBatch, pages: Pages, config: ModelConfig) -> None:
        self._batch, self._pages = batch, pages
        self._plan = plan_attention(batch, pages, AttentionShape(None, config.head_dim**-0.5))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[N, H, D], [N, K, D], [N, K, D] -> [N, H * D]."""
        write(self._pages, layer, self._batch.slots, key, value)
        return self._plan.run(layer, query)


def write(pages: Pages, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Keys and values [N, K, D] to their slots [N]."""
    pages.layers[layer].index_copy_(1, slots, torch.cat([key, value], 1).transpose(0, 1))


def pages_under(target: ModelRunner, config: ModelConfig) -> Pages:
    """Room for a network's keys and values, slot by slot as the target's."""
    memory = target.cache.memory
    shape = (config.num_layers, 2, config.num_kv_heads, memory.store.shape[3], config.head_dim)
    store = torch.zeros(shape, dtype=target.model.dtype, device=target.device)
    target.cache.lay_beside(store, 3)
    return Pages(store, memory.page_size)


def vectors_under(target: ModelRunner, width: int) -> Tensor:
    """One vector for each of the target's slots, and one more behind them. [slots + 1, width]."""
    slots = target.cache.memory.store.shape[3]
    vectors = torch.zeros(slots + 1, width, dtype=target.model.dtype, device=target.device)
    target.cache.lay_beside(vectors, 0)
    return vectors


def at_depths(slots: Tensor, front: Front) -> Tensor:
    """Of something that a network gives for every token ahead [B, guesses, width], what stands behind the nodes of
    `front`. [B, k, width].
    """
    if front.level is not None:
        return slots[:, front.level : front.level + 1].expand(-1, front.tokens.shape[1], -1)
    slot = front.depth.clamp(max=slots.shape[1] - 1)
    return slots.gather(1, slot[..., None].expand(-1, -1, slots.shape[2]))


class Net(Protocol):
    """What the base asks of a network, which is a module besides."""

    reads: tuple[int, ...]


@dataclass(frozen=True)
class _Unread:
    """Rows that the target has run, and the drafter has not looked at yet."""

    slots: Tensor  # [N]
    positions: Tensor  # [N]
    features: Tensor | None  # [N, len(reads) * hidden]; None: they are kept already
    text: ForwardBatch | None  # which rows these are, if the network has to run them too


class FeatureDrafter(GrownDrafter):
    """Base: keeps features, and lets a grower ask the network.

    Subclasses say what they keep of features (`store`), and how the network gives logits (`begin`, `extend`). Where
    the host may look, features wait until there are some together or a draft is wanted: single rows cost much, and
    steps without drafts should cost nothing.
    """

    target: ModelRunner

    def __init__(self, net: Net, words: TargetEmbeddings, grower: Grower, deepest: int | None = None) -> None:
        """`deepest`: how many tokens ahead the network drafts; None: any number."""
        self.net, self.words = net, words
        super().__init__(grower if deepest is None else grower.within_depth(deepest))
        self.needs = frozenset(net.reads)
        self._unread: list[_Unread] = []

    def attach(self, target: ModelRunner) -> None:
        """Whose features it will see, and under whose slots its own memory lies."""
        self.target = target
        target.cache.before_moves(self._read_all)

    def store(self, slots: Tensor, positions: Tensor, features: Tensor) -> None:
        """Keep what is needed of features [N, len(reads) * hidden] of positions [N] at their slots [N]."""
        raise NotImplementedError

    def read(self, batch: ForwardBatch) -> None:
        """Run rows of text, whose features are kept, through the network; asked only of those that `reads`."""

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """See `FrontierModel`."""
        raise NotImplementedError

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """See `FrontierModel`."""
        raise NotImplementedError

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """See `FrontierModel`."""
        raise NotImplementedError

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """As the grower asks; every feature is there."""
        if nodes == 0:
            return Proposal.bare(view)
        self._read_all()
        return self.grower.grow(self, view, nodes, rng)

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Keep what the target made of rows of text, and run the network over them if it needs that."""
        rows = None if features is None else self.joined(features)
        self._add(_Unread(batch.slots, batch.positions, rows, batch if self.reads else None))

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Keep what it made of the accepted path. Where that is not looked at, what lies behind is kept as well, and
        written over before it is read.
        """
        path = verdict.path
        slots, positions = self.around_end(view, -1, path.shape[1] - 1)
        nodes = path.reshape(-1)
        if view.may_look and path.shape[1] > 1:
            kept = (_numbers(view.size, 0, path.shape[1], path.device) <= verdict.length[:, None]).view(-1)
            slots, positions, nodes = slots[kept], positions[kept], nodes[kept]
        rows = self.joined(features).index_select(0, nodes.clamp(min=0))
        self._add(_Unread(slots, positions, rows, None))

    def joined(self, features: Features) -> Tensor:
        """The layers its network reads, side by side. [N, len(reads) * hidden]."""
        return torch.cat([features[layer] for layer in self.net.reads], -1).to(self.words.dtype)

    def around_end(self, view: BatchView, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Slots and positions of the tokens `start` … `end` - 1 behind each length. 2 x [B * (end - start)]."""
        steps, (highest, page_size) = _numbers(view.size, start, end, view.lengths.device), self._limits
        positions, slots, _ = staged(view.lengths, view.block_table, steps, steps, 0, page_size, highest - 1, True)
        return slots, positions

    def stage(self, view: BatchView, tokens: Tensor, places: Places, logit_rows: Tensor | None = None) -> ForwardBatch:
        """Rows behind all but the last token, which the target has not run."""
        highest, page_size = self._limits
        return stage_behind(view.num_run, view.block_table, tokens, places, page_size, highest, logit_rows)

    @property
    def module(self) -> nn.Module:
        """Its network, with the weights it drafts with."""
        return self.net  # type: ignore[return-value]

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with these weights of its network from now on. Only between steps; what was read before stays.

        In place: captured graphs know nothing but addresses.
        """
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                weight.copy_(weights[name])
        self.refresh()

    def refresh(self) -> None:
        """The network's weights are others now; subclasses renew what they have made of them."""

    @property
    def _limits(self) -> tuple[int, int]:
        """The target's positions, and tokens of its pages."""
        return self.target.model.config.max_positions, self.target.cache.page_size

    def _add(self, unread: _Unread) -> None:
        self._unread.append(unread)
        if not may_look(unread.slots) or sum(len(rows.slots) for rows in self._unread) >= DIGEST_FROM:
            self._read_all()

    def _read_all(self) -> None:
        """Store all features first, in the order they came in, then read all texts."""
        unread, self._unread = self._unread, []
        parts = [(rows.slots, rows.positions, rows.features) for rows in unread if rows.features is not None]
        if parts:
            self.store(*(column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True)))
        for rows in unread:
            if rows.text is not None:
                self.read(rows.text)


# What follows from sizes alone is made once: a captured step would launch every small kernel again and again.
@lru_cache(maxsize=1024)
def _numbers(size: int, start: int, end: int, device: torch.device) -> Tensor:
    """`start` … `end` - 1 for every sequence. [B, n]."""
    return torch.arange(start, end, device=device).expand(size, -1).contiguous()
