"""Predicted outputs: the caller expects an answer, and it becomes a branch of the tree beside another drafter's nodes.

Where the answer goes another way, the place to go on from is found again in the expected text. Which tokens are drafted
follows from committed text alone, and those trees are verified as chosen tokens, so every law for such trees is exact.
The other trees of the batch stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.cache.batch_state import uploaded
from draftwood.drafters.branches import as_points, with_branches
from draftwood.drafters.unknown import read_unknown
from draftwood.drafting import Drafter, Proposal
from draftwood.faults import Compound, DrafterHealth
from draftwood.model.runner import ModelRunner
from draftwood.protocols import PREDICTED, BatchView, Features, HostView, Randomness
from draftwood.tree import DraftLaw, Draw, Verdict

LOOK_BACK = 8  # tokens of the answer that are looked for in the expected text
NEAR = 32  # how far from the old place a single token may be found again
FIRST, SHORTEST = 8, 2  # tokens drafted at a time: at first, after failures; after successes up to PREDICTED


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
class _Following:
    """One answer's place, and how many tokens to draft from there."""

    alignment: Alignment
    read: int = 0
    length: int = FIRST
    path: tuple[int, ...] = ()

    def next_path(self, news: Sequence[int]) -> tuple[int, ...]:
        """What is expected to follow once the answer has gone on with `news`."""
        self._learn(news)
        self.alignment.follow(news)
        self.read += len(news)
        at = self.alignment.at
        self.path = self.alignment.expected[at : at + self.length]
        return self.path

    def _learn(self, news: Sequence[int]) -> None:
        if not self.path or not news:
            return
        if self.path[: len(news)] == tuple(news[: len(self.path)]) and len(news) >= len(self.path):
            self.length = min(2 * self.length, PREDICTED)
        elif self.path[0] != news[0]:
            self.length = max(self.length // 2, SHORTEST)


@dataclass
class PredictedDrafter:
    """Another drafter's trees, with a branch for what the caller expects where a caller does.

    The inner drafter keeps no state of the branch's nodes (their columns are 0). The text of an accepted branch it
    reads afterwards, if it reads text at all.
    """

    drafter: Drafter
    _target: ModelRunner = field(init=False)
    _answers: dict[int, _Following] = field(default_factory=dict)
    _prepared: list[list[int]] = field(default_factory=list)  # of each sequence: if it has a prediction, and the path
    _frames: dict[int, Tensor] = field(default_factory=dict)  # by sequences: the same on the device [B, 1 + PREDICTED]

    @property
    def health_of_members(self) -> Sequence[DrafterHealth]:
        """The inner drafter's members', if it has any."""
        return self.drafter.health_of_members if isinstance(self.drafter, Compound) else ()

    @property
    def law(self) -> DraftLaw:
        """The inner drafter's; answers with a prediction get trees of chosen tokens."""
        return self.drafter.law

    @property
    def max_nodes(self) -> int:
        """The inner drafter's; what is predicted gets room of its own."""
        return self.drafter.max_nodes

    @property
    def sizes(self) -> Sequence[int]:
        """The inner drafter's."""
        return self.drafter.sizes

    @property
    def surplus(self) -> int:
        """The inner drafter's."""
        return self.drafter.surplus

    @property
    def needs(self) -> frozenset[int]:
        """The inner drafter's."""
        return self.drafter.needs

    @property
    def reads(self) -> bool:
        """Whether the inner drafter does."""
        return self.drafter.reads

    @property
    def waits(self) -> bool:
        """Whether the inner drafter does; requests with a prediction wait in any case."""
        return self.drafter.waits

    @property
    def remembers(self) -> bool:
        """Whether the inner drafter does."""
        return self.drafter.remembers

    def attach(self, target: ModelRunner) -> None:
        """Pass it on."""
        self._target = target
        self.drafter.attach(target)

    def depth(self, nodes: int) -> int:
        """The inner drafter's; a branch is as deep as it has nodes."""
        return self.drafter.depth(nodes)

    def staged(self, nodes: int) -> int:
        """The inner drafter's."""
        return self.drafter.staged(nodes)

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """Find the place of every answer in what was expected of it; the inner drafter's trees, if it waits."""
        self._prepared = []
        expected = view.predictions or [()] * len(view.seq_ids)
        self._prepared = [[int(bool(tokens)), *self._path(view, b, tokens)] for b, tokens in enumerate(expected)]
        if size in self._frames:
            self._frames[size].copy_(uploaded(_table(self._prepared, size, PREDICTED), self._frames[size].device))
        if self.drafter.waits:
            rooms = [room - PREDICTED * bool(p) for room, p in zip(view.max_nodes, view.predictions, strict=False)]
            own = replace(view, max_nodes=tuple(max(room, 0) for room in rooms)) if view.predictions else view
            self.drafter.prepare(own, size, nodes)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """The inner drafter's trees, and the branches."""
        if not view.mode.predicted:
            return self.drafter.propose(view, nodes, rng)
        if view.may_look and len(self._prepared) != view.size:
            return Proposal.bare(view)
        table = self._paths(view)
        known, expecting, paths = table[:, 0] >= 0, table[:, 0] > 0, table[:, 1:]
        own = self.drafter.propose(view, nodes, rng) if nodes else Proposal.bare(view)
        own = own.packed() if view.may_look else replace(own, tree=own.tree.without(~known[own.tree.owner]))
        points = as_points(own.tree, expecting, may_repeat=Draw.IID in self.law.draws)
        whole = with_branches(replace(own, tree=points), paths)
        if view.may_look or view.max_nodes is None:
            return whole
        # The view's room is that of own nodes; a path by itself is no longer than all the room there is.
        return whole.limited(replace(view, max_nodes=view.max_nodes + PREDICTED * expecting))

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Pass it on."""
        self.drafter.ingest(batch, features)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Pass it on; what was accepted of a branch the inner drafter reads as text."""
        self.drafter.commit(view, proposal, verdict, features)
        if not (view.mode.predicted and self.drafter.reads and proposal.tree.num_drafted):
            return
        read_unknown(self.drafter, self._target, view, proposal, verdict)

    def release(self, seq_id: int) -> None:
        """Forget it."""
        self._answers.pop(seq_id, None)
        self.drafter.release(seq_id)

    def _path(self, view: HostView, b: int, expected: tuple[int, ...]) -> tuple[int, ...]:
        """What is expected to come next, as far as there is room."""
        if not expected:
            return ()
        following = self._answers.setdefault(view.seq_ids[b], _Following(Alignment(expected)))
        path = following.next_path(view.tokens[b][view.prompt_lengths[b] + following.read :])
        return path[: min(view.max_nodes[b], view.max_depth[b])]

    def _paths(self, view: BatchView) -> Tensor:
        """Whether sequences have predictions, 0 or 1, and the paths they follow, -1 padded. [B, 1 + P].

        Both are -1 where nothing was prepared: some laws are only right for draws, others only for chosen tokens.
        """
        if view.may_look:
            return _table(self._prepared, view.size, max(0, *(len(row) - 1 for row in [*self._prepared, [0]])))
        if view.size not in self._frames:  # a graph is about to be captured, or nothing is
            prepared = self._prepared if len(self._prepared) <= view.size else []
            self._frames[view.size] = uploaded(_table(prepared, view.size, PREDICTED), view.roots.device)
        frame = self._frames[view.size]
        table = frame.clone()
        frame.fill_(-1)
        return table


def _table(rows: list[list[int]], size: int, length: int) -> Tensor:
    """Rows of a flag and a path, -1 padded, as many as asked for. [size, 1 + length], on the host."""
    padded = [[*row, *[-1] * (1 + length - len(row))] for row in rows]
    return torch.tensor(padded + [[-1] * (1 + length)] * (size - len(rows)), dtype=torch.int64)
