"""What all drafters share that guess from the target's own features, whatever their network looks like.

A feature arrives when the target has run its token: for prompts and roots in `read`, for accepted nodes in `observe`.
The last committed token has not been run, so of a sequence of n tokens those of positions 0 … n - 2 are there.
Keys and values of the network lie under the target's own pages, so what the target shares or caches is shared here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.model.config import ModelConfig
from draftwood.model.runner import ModelRunner
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.ops import plan_attention
from draftwood.protocols import BatchView, Budget, Features, FrontierModel, Grower, Randomness, Span
from draftwood.tree import DraftLaw, TokenTree, Verdict

READ_FROM = 16  # pending features from which on they are read without waiting for the next guess


@dataclass
class Pending:
    """Features of one sequence that its network has not read yet: positions start … start + count - 1."""

    start: int
    parts: list[Tensor] = field(default_factory=list)  # each [k, width]
    count: int = 0

    @property
    def end(self) -> int:
        """The position whose feature comes next."""
        return self.start + self.count

    def add(self, rows: Tensor) -> None:
        """The next ones."""
        self.parts.append(rows)
        self.count += len(rows)

    def take(self, count: int) -> Tensor:
        """The first so many, which are pending no longer. [count, width]."""
        rows = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        self.parts = [rows[count:].clone()] if count < len(rows) else []  # what is left of a prompt is short
        self.start, self.count = self.start + count, self.count - count
        return rows[:count]


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
    return Pages(torch.zeros(shape, dtype=target.model.dtype, device=target.device), memory.page_size)


def text_ends(view: BatchView, ready: Sequence[int]) -> list[Span]:
    """Behind what the target has run of the sequences `ready`: all but their last tokens."""
    lengths = [(view.seq_ids[b], len(view.tokens[b]) - 1) for b in ready]
    return [Span(seq_id, (), length, length) for seq_id, length in lengths]


class Net(Protocol):
    """What the base asks of a network, which is a module besides."""

    reads: tuple[int, ...]


class FeatureDrafter:
    """Base: keeps features until the network reads them, and lets a grower ask the network.

    Subclasses say what their network reads of features (`digest`), how many tokens ahead they can guess, and how
    (`begin`). Nothing is computed of features before somebody reads them: steps without guesses should cost nothing.
    """

    deepest: int | None = None  # tokens ahead; None: any number
    target: ModelRunner

    def __init__(self, net: Net, words: TargetEmbeddings, grower: Grower) -> None:
        self.net, self.words, self.grower = net, words, grower
        self._pending: dict[int, Pending] = {}

    @property
    def law(self) -> DraftLaw:
        """The grower's."""
        return self.grower.law

    @property
    def max_nodes(self) -> int:
        """The grower's."""
        return self.grower.max_nodes

    @property
    def needs(self) -> frozenset[int]:
        """The layers its network reads."""
        return frozenset(self.net.reads)

    def attach(self, target: ModelRunner) -> None:
        """Whose features it will see, and under whose pages its own lie."""
        self.target = target

    def digest(self, features: Tensor) -> Tensor:
        """What the network reads of features [N, len(reads) * hidden]. [N, width]."""
        raise NotImplementedError

    def settle(self, spans: Sequence[Span]) -> None:
        """Committed tokens have been run; read along, if there is something to read for."""

    def begin(self, view: BatchView, ready: Sequence[int]) -> FrontierModel:
        """The network at the roots of the sequences `ready` of the view."""
        raise NotImplementedError

    def has_room(self, seq_id: int, length: int) -> bool:
        """Whether there are pages for what it will write behind `length` tokens."""
        return True

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """Keep what the target made of prompts and roots."""
        rows = self.joined(features)
        sizes = [span.end - span.start for span in spans]
        for span, part in zip(spans, rows.split(sizes), strict=True):
            self._add(span.seq_id, span.start, part)
        self.settle(spans)

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """Keep what it made of the nodes that were accepted."""
        accepted = verdict.length.tolist()
        if not any(accepted):
            return
        deep = torch.arange(1, verdict.path.shape[1], device=verdict.path.device) <= verdict.length[:, None]
        nodes = verdict.path[:, 1:][deep]
        rows = self.joined({layer: part[nodes] for layer, part in features.items()})
        for b, part in enumerate(rows.split(accepted)):
            if accepted[b]:
                self._add(view.seq_ids[b], len(view.tokens[b]), part)

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """A tree for every sequence whose features are all there; bare roots for the others."""
        ready = self._ready(view, budget)
        sitting = torch.zeros_like(view.max_nodes)
        sitting[ready] = 1
        depth = view.max_depth if self.deepest is None else view.max_depth.clamp(max=self.deepest)
        view = replace(view, max_nodes=view.max_nodes * sitting, max_depth=depth)
        if not ready:
            return TokenTree.roots(view.roots)
        with torch.inference_mode():
            return self.grower.grow(self.begin(view, ready), view, budget, rng).build()[0]

    def release(self, seq_id: int) -> None:
        """Forget it."""
        self._pending.pop(seq_id, None)

    @property
    def module(self) -> nn.Module:
        """Its network, with the weights it guesses with."""
        return self.net  # type: ignore[return-value]

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Guess with these weights of its network from now on. Only between steps; what was read before stays.

        In place: captured graphs know nothing but addresses.
        """
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                weight.copy_(weights[name])
        self.refresh()

    def refresh(self) -> None:
        """The network's weights are others now; subclasses renew what they have made of them."""

    def take(self, spans: Sequence[Span]) -> Tensor:
        """Features [start, end) of each as the network reads them; they are pending no longer. [N, width]."""
        parts = [self._pending[span.seq_id].take(span.end - span.start) for span in spans]
        return self.digest(torch.cat(parts))

    def joined(self, features: Features) -> Tensor:
        """The layers its network reads, side by side. [N, len(reads) * hidden]."""
        return torch.cat([features[layer] for layer in self.net.reads], -1).to(self.words.dtype)

    def _add(self, seq_id: int, start: int, rows: Tensor) -> None:
        """What does not follow what is there begins anew: the sequence was pushed out, or shares another's pages."""
        known = self._pending.get(seq_id)
        if known is None or known.end != start:
            known = self._pending[seq_id] = Pending(start)
        known.add(rows)

    def _ready(self, view: BatchView, budget: Budget) -> list[int]:
        if budget.max_nodes < 1:
            return []
        rooms, depths = view.max_nodes.tolist(), view.max_depth.tolist()
        return [
            b
            for b, (seq_id, tokens) in enumerate(zip(view.seq_ids, view.tokens, strict=True))
            if rooms[b] > 0 and depths[b] > 0 and self._up_to_date(seq_id, len(tokens))
        ]

    def _up_to_date(self, seq_id: int, length: int) -> bool:
        pending = self._pending.get(seq_id)
        return pending is not None and pending.count > 0 and pending.end == length - 1 and self.has_room(seq_id, length)
