"""Predicted outputs: the caller expects an answer, and it becomes a branch of the tree beside another drafter's ideas.

Where the answer goes another way, the place to go on from is found again in the expected text. Which tokens are guessed
follows from committed text alone, and those trees are verified as chosen tokens, so every law for such trees is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwood.cache.resident import ResidentDrafter, attach, resident_of
from draftwood.drafters.points import PointTree
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Drafter, Features, Randomness, Span
from draftwood.tree import DraftLaw, TokenTree, Verdict
from draftwood.treebuilder import Woven

LOOK_BACK = 8  # tokens of the answer that are looked for in the expected text
NEAR = 32  # how far from the old place a single token may be found again
FIRST, SHORTEST, LONGEST = 8, 2, 32  # tokens guessed at a time: at first, after failures, after successes


class Alignment:
    """How far an answer has come in the text that was expected, token by token."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = tuple(expected)
        self.at = 0  # what is expected next
        self.matched = 0  # tokens that came as expected
        self._recent: list[int] = []
        self._ends: dict[int, list[int]] = {}
        for end, token in enumerate(self.expected, 1):
            self._ends.setdefault(token, []).append(end)

    def follow(self, tokens: Sequence[int]) -> None:
        """The answer goes on with `tokens`."""
        for token in tokens:
            self._recent = [*self._recent[1 - LOOK_BACK :], token]
            if self.at < len(self.expected) and self.expected[self.at] == token:
                self.matched += 1
                self.at += 1
            else:
                self.at = self._found_again(token)

    def _found_again(self, token: int) -> int:
        """Behind the place most like the end of the answer, the nearest of them; else as if one token was replaced."""
        likeness = [(self._common(end), -abs(end - self.at), end) for end in self._ends.get(token, ())]
        found = [match for match in likeness if match[0] > 1 or -match[1] <= NEAR]
        return max(found)[2] if found else min(self.at + 1, len(self.expected))

    def _common(self, end: int) -> int:
        """How many of the last tokens also stand before `end`."""
        count = 0
        while count < min(end, len(self._recent)) and self.expected[end - 1 - count] == self._recent[-1 - count]:
            count += 1
        return count


@dataclass
class _Guessing:
    """One answer's place, and how boldly to guess from there."""

    alignment: Alignment
    read: int = 0
    length: int = FIRST
    path: tuple[int, ...] = ()

    def next_path(self, answer: Sequence[int]) -> tuple[int, ...]:
        """What is expected to follow `answer`."""
        news = answer[self.read :]
        self._learn(news)
        self.alignment.follow(news)
        self.read = len(answer)
        at = self.alignment.at
        self.path = self.alignment.expected[at : at + self.length]
        return self.path

    def _learn(self, news: Sequence[int]) -> None:
        if not self.path or not news:
            return
        if self.path[: len(news)] == tuple(news[: len(self.path)]) and len(news) >= len(self.path):
            self.length = min(2 * self.length, LONGEST)
        elif self.path[0] != news[0]:
            self.length = max(self.length // 2, SHORTEST)


@dataclass(frozen=True)
class _Merged:
    """A proposal with the branches, and the way back to the drafter's own."""

    own: TokenTree
    tree: TokenTree
    origin: Tensor  # [M] each node's number in the drafter's own tree, -1 where it has none
    place: Tensor  # [m] where the drafter's own nodes are

    def own_verdict(self, verdict: Verdict) -> Verdict:
        """As far as the accepted path is the drafter's own."""
        width = verdict.path.shape[1]
        reached = torch.arange(width, device=verdict.path.device) <= verdict.length[:, None]
        path = self.origin[verdict.path.clamp(min=0)].masked_fill(~reached | (verdict.path < 0), -1)
        known = (path >= 0).long().cumprod(1)
        length = known.sum(1) - 1
        after = verdict.path.gather(1, (length + 1).clamp(max=width - 1)[:, None])[:, 0].clamp(min=0)
        bonus = torch.where(length < verdict.length, self.tree.tokens[after], verdict.bonus)
        path = path.masked_fill(known == 0, -1)[:, : self.own.max_depth + 1]
        return replace(verdict, path=path, length=length, bonus=bonus)


@dataclass
class PredictedDrafter:
    """Another drafter's trees, with a branch for what the caller expects where a caller does."""

    drafter: Drafter
    _answers: dict[int, _Guessing] = field(default_factory=dict)
    _merged: _Merged | None = None

    @property
    def law(self) -> DraftLaw:
        """The inner drafter's; answers with a prediction get trees of chosen tokens."""
        return self.drafter.law

    @property
    def max_nodes(self) -> int:
        """The inner drafter's; what is predicted gets room of its own."""
        return self.drafter.max_nodes

    @property
    def needs(self) -> frozenset[int]:
        """The inner drafter's."""
        return self.drafter.needs

    def attach(self, target: ModelRunner) -> None:
        """Pass it on, if it is wanted."""
        attach(self.drafter, target)

    def resident(self, target: ModelRunner) -> ResidentDrafter | None:
        """The inner drafter's: requests with a prediction go step by step."""
        return resident_of(self.drafter, target)

    def propose(self, view: BatchView, budget: Budget, rng: Randomness) -> TokenTree:
        """The inner drafter's trees, and the branches."""
        own = self.drafter.propose(view, budget, rng)
        rows = [b for b, expected in enumerate(view.predictions) if expected]
        if not rows:
            self._merged = None
            return own
        self._merged = self._merge(own, view, rows)
        return self._merged.tree

    def read(self, spans: Sequence[Span], features: Features) -> None:
        """Pass it on."""
        self.drafter.read(spans, features)

    def observe(self, view: BatchView, tree: TokenTree, verdict: Verdict, features: Features) -> None:
        """Tell the inner drafter what became of its own nodes; tokens that were not its own it reads as text."""
        if self._merged is None:
            return self.drafter.observe(view, tree, verdict, features)
        merged, self._merged = self._merged, None
        own = merged.own_verdict(verdict)
        self.drafter.observe(view, merged.own, own, {layer: rows[merged.place] for layer, rows in features.items()})
        if self.drafter.needs:
            self._let_read(view, merged.tree, verdict, own.length.tolist(), features)

    def release(self, seq_id: int) -> None:
        """Forget it."""
        self._answers.pop(seq_id, None)
        self.drafter.release(seq_id)

    def _merge(self, own: TokenTree, view: BatchView, rows: list[int]) -> _Merged:
        others = [b for b in range(own.num_trees) if b not in set(rows)]
        grown = [self._grow(own, view, b) for b in rows]
        device = own.tokens.device
        parts = [TokenTree.of_points([(tree.tokens, tree.parents) for tree, _ in grown], device)]
        origin = [torch.tensor([node for _, nodes in grown for node in nodes], device=device)]
        if others:
            rest, kept = own.take(torch.tensor(others, device=device))
            parts.append(rest)
            origin.append(kept)
        woven = Woven(parts, [rows, others] if others else [rows])
        origins = own.tokens.new_full((woven.tree.num_nodes,), -1)
        for i, nodes in enumerate(origin):
            origins[woven.nodes(i)] = nodes
        known = origins >= 0
        place = own.tokens.new_zeros(own.num_nodes).index_put_((origins[known],), known.nonzero()[:, 0])
        return _Merged(own, woven.tree, origins, place)

    def _grow(self, own: TokenTree, view: BatchView, b: int) -> tuple[PointTree, list[int]]:
        """The drafter's tree as chosen tokens with the branch, and the number each node had in it, or -1."""
        start, end = own.offsets[b : b + 2].tolist()
        tokens, parents = own.tokens[start:end].tolist(), (own.parents[start:end] - start).tolist()
        tree = PointTree(tokens[0], int(view.max_nodes[b]), int(view.max_depth[b]))
        copies: list[int | None] = [0]
        origin = [start]
        for i in range(1, end - start):
            above = copies[parents[i]]
            copies.append(None if above is None else tree.add(above, tokens[i]))
            if len(tree.tokens) > len(origin):
                origin.append(start + i)
        answer = view.tokens[b][view.prompt_lengths[b] :]
        guessing = self._answers.setdefault(view.seq_ids[b], _Guessing(Alignment(view.predictions[b])))
        tree.add_path(guessing.next_path(answer))
        return tree, origin + [-1] * (len(tree.tokens) - len(origin))

    def _let_read(
        self, view: BatchView, tree: TokenTree, verdict: Verdict, known: list[int], features: Features
    ) -> None:
        """Accepted tokens that the drafter did not guess are text it has not seen yet."""
        spans, nodes = [], []
        for b, length in enumerate(verdict.length.tolist()):
            if length > known[b]:
                path = verdict.path[b, 1 : length + 1]
                tokens = [*view.tokens[b], *tree.tokens[path].tolist()]
                spans.append(Span(view.seq_ids[b], tokens, len(view.tokens[b]) + known[b], len(tokens)))
                nodes.append(path[known[b] :])
        if spans:
            rows = torch.cat(nodes)
            self.drafter.read(spans, {layer: part[rows] for layer, part in features.items()})
