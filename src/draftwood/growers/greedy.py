"""DySpec's tree: drawn without replacement, grown wherever the next draw is likeliest to be accepted.

Where the next token is drawn follows from what was drawn before, never from its own value, and nothing that was drawn
is thrown away: the laws that try siblings one after the other stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.cache.kv import Places
from draftwood.drafting import Front, FrontierModel, Proposal, State
from draftwood.growers.fixed import MAX_NODES
from draftwood.growers.pickers import Frontier
from draftwood.growers.ranked import asked_in, packed
from draftwood.ops.beam import linked
from draftwood.protocols import BatchView, Randomness
from draftwood.shape import TreeShape, num_words
from draftwood.tree import DraftLaw, Draw, TokenTree


@dataclass(frozen=True)
class Greedy:
    """`nodes` draws in `forwards` rounds: a forward of the network tells what follows the nodes drawn before it, then
    the likeliest places of all are drawn at, one after the other. With a forward for each node it is DySpec's own tree.
    """

    nodes: int
    forwards: int
    deepest: int | None = None

    law = DraftLaw(frozenset({Draw.WITHOUT_REPLACEMENT}), chain=False, grown=True)
    surplus = 1

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES or not 1 <= self.forwards <= self.nodes:
            raise ValueError(f"a tree has 1 to {MAX_NODES} draft nodes and no more forwards than nodes")

    @property
    def max_nodes(self) -> int:
        """All draws."""
        return self.nodes

    @property
    def sizes(self) -> range:
        """Any."""
        return range(self.nodes + 1)

    @property
    def levels(self) -> int:
        """Every round may go one deeper."""
        return self.forwards if self.deepest is None else min(self.forwards, self.deepest)

    def depth_of(self, nodes: int) -> int:
        """All of them may lie on one path, one of each round."""
        return min(nodes, self.levels)

    def staged(self, nodes: int) -> int:
        """All nodes but those of the last round."""
        return self._each(nodes) * max(0, self._rounds(nodes) - 1)

    def within_depth(self, deepest: int) -> Greedy:
        """As many draws, none deeper."""
        return replace(self, deepest=deepest if self.deepest is None else min(self.deepest, deepest))

    def _each(self, nodes: int) -> int:
        """Draws of a round."""
        return -(-nodes // min(self.forwards, nodes)) if nodes else 0

    def _rounds(self, nodes: int) -> int:
        return -(-nodes // self._each(nodes)) if nodes else 0

    def grow(self, model: FrontierModel, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Round by round."""
        if not nodes:
            return Proposal.bare(view)
        each, rounds = self._each(nodes), self._rounds(nodes)
        growth = _Growth.begun(view, self.depth_of(nodes), num_words(1 + self.staged(nodes)))
        logits, state = model.begin(view)
        growth.expand(logits, None, model, rng)
        for number in range(rounds):
            if number:
                state = growth.extend(model, each, state, rng)
            for _ in range(min(each, nodes - number * each)):
                growth.draw(rng)
        return growth.proposal(self.depth_of(nodes), each * (rounds - 1))


@dataclass
class _Growth:
    """A batch's trees while they grow. Node 0 is the root; nodes are numbered as they are drawn."""

    view: BatchView
    room: Tensor  # [B, 1] levels
    tokens: list[Tensor]  # each [B]
    parents: list[Tensor]
    levels: list[Tensor]
    values: list[Tensor]  # [B] the chance of the way to each, as the draft has it; 0: it does not exist
    laws: list[Tensor]  # [B, V] that each was drawn from
    left: Tensor  # [B, E, V] what is left to draw behind each expanded node, not normalised
    chances: Tensor  # [B, E] of the way to the next draw there
    bits: Tensor  # [B, E, W] the columns on the way to each expanded node
    fronts: tuple[Front, ...] = ()

    @classmethod
    def begun(cls, view: BatchView, deepest: int, words: int) -> _Growth:
        """Bare roots."""
        zero, one = torch.zeros_like(view.lengths), torch.ones_like(view.temperature, dtype=torch.float64)
        room = torch.full_like(view.lengths, deepest)
        if view.max_depth is not None:
            room = torch.minimum(room, view.max_depth)
        none = one.new_zeros(view.size, 0)
        bits = zero.new_zeros(view.size, 1, words)
        return cls(view, room[:, None], [view.roots], [zero - 1], [zero], [one], [], none[..., None], none, bits)

    def expand(self, logits: Tensor, level: int | None, model: FrontierModel, rng: Randomness) -> None:
        """Logits at the nodes drawn since the last time [B, k, R]: something can be drawn behind them now."""
        count = logits.shape[1]
        columns = torch.arange(len(self.tokens) - count, len(self.tokens), device=logits.device)
        depth = torch.stack(self.levels[-count:], 1)
        vocabulary = model.vocabulary(0 if level is None else level)
        frontier = Frontier(columns.expand(self.view.size, -1), depth, logits, self.view, rng, vocabulary)
        q = frontier.q.double()
        values = torch.stack(self.values[-count:], 1).masked_fill(depth >= self.room, 0.0)
        self.left = q if not self.laws else torch.cat([self.left, q], 1)
        self.chances = torch.cat([self.chances, values], 1)

    def draw(self, rng: Randomness) -> None:
        """One more node, where it is likeliest to be accepted; absent where nothing is left that is worth a row."""
        chance, place = self.chances.max(1)
        least = self.view.min_accept_prob
        there = (chance > 0) & (chance >= least)
        behind = self.left.gather(1, place[:, None, None].expand(-1, 1, self.left.shape[-1])).squeeze(1)
        total = behind.sum(-1, keepdim=True)
        q = behind / torch.where(total > 0, total, 1)
        parent = place[:, None]  # nodes are expanded in the order in which they were drawn
        empty = self.view.temperature.new_zeros(self.view.size, 1, 1)
        frontier = Frontier(parent, parent, empty, self.view, rng)
        token = frontier.pick(q[:, None], len(self.tokens))[:, 0]
        share = q.gather(1, token[:, None])[:, 0]
        rest = behind.scatter(1, token[:, None], 0.0)
        self.left = self.left.scatter(1, place[:, None, None].expand(-1, 1, rest.shape[-1]), rest[:, None])
        after = torch.where(there & (rest.sum(-1) > 0), chance * (1 - share), 0.0)
        self.chances = self.chances.scatter(1, parent, after[:, None])
        self.tokens.append(token)
        self.parents.append(place)
        self.levels.append(torch.stack(self.levels, 1).gather(1, parent)[:, 0] + 1)
        self.values.append(torch.where(there, chance * share, 0.0))
        self.laws.append(q)

    def extend(self, model: FrontierModel, width: int, state: State, rng: Randomness) -> State:
        """Ask the network about all nodes of the last round."""
        number, words = len(self.fronts) + 1, self.bits.shape[-1]
        own, own_bit = asked_in(self.view.size, width, number, words, self.view.roots.device)
        parent, depth = torch.stack(self.parents[-width:], 1), torch.stack(self.levels[-width:], 1)
        bits = own_bit | self.bits.gather(1, parent[..., None].expand_as(own_bit))
        tokens = torch.stack(self.tokens[-width:], 1)
        places = Places(own - 1, depth - 1, bits.flatten(0, 1), number + 1, number * width)
        if number == 1:
            front = Front(tokens, depth, 1, parent, None, (), places)
        else:
            forward, row = (parent + width - 1) // width, (parent - 1).clamp(min=0) % width
            front = Front(tokens, depth, None, row, forward, self.fronts, places)
        self.fronts, self.bits = (*self.fronts, front), torch.cat([self.bits, bits], 1)
        logits, state = model.extend(self.view, front, state)
        self.expand(logits, front.level, model, rng)
        return state

    def proposal(self, deepest: int, asked: int) -> Proposal:
        """Everything that was drawn; the network keeps the first `asked` nodes, at their own numbers."""
        view, count = self.view, len(self.laws)
        tokens, parents, levels = (torch.stack(own[1:], 1) for own in (self.tokens, self.parents, self.levels))
        every = torch.arange(count, device=tokens.device).expand_as(tokens)
        links = linked(view.roots, tokens, parents, levels, every, count, deepest)
        offsets, owner, local = packed(view.size, 1 + count, tokens.device)
        shape = TreeShape(
            links.parents, offsets, owner, local, links.depth, links.ancestors, links.tries, deepest, 1 + count
        )
        row = torch.where(local > 0, owner * count + local - 1, -1)
        draw = torch.where(local > 0, int(Draw.WITHOUT_REPLACEMENT), 0)
        tree = TokenTree(links.tokens, shape, draw, row, torch.stack(self.laws, 1).flatten(0, 1))
        columns = torch.where(local <= asked, local, 0)
        return Proposal(tree.without(torch.stack(self.values, 1).view(-1) <= 0), columns).limited(view)
