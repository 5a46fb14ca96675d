"""Token recycling: behind every token, what the target held likeliest when it last ran that token, rejected nodes too.

One table on the device serves all requests, but a request reads only what others of its salt (`cache_salt`) have left:
each row says whose it is, and another salt's rows count as empty. Its size is fixed; where two salts want one row, the
later one has it. How likely an entry is to be right is measured, by its rank and its share of the target's mass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwood.drafters.best_first import grow
from draftwood.drafters.points import HostTrees, PointTree
from draftwood.drafting import Proposal, Silent
from draftwood.growers.ranked import linked_proposal
from draftwood.model.runner import ModelRunner
from draftwood.ops.beam import Offers, likeliest_tree, offered
from draftwood.ops.choice import ranked
from draftwood.protocols import LOGITS, BatchView, Features, Randomness
from draftwood.tree import POINT_TREE, Verdict, nodes_on

BINS = 8  # of an entry's share
WEIGHT = 4.0  # trials that an entry's own share counts for beforehand
MEMORY = 1000.0  # trials after which old ones count half
MOST_KEPT = 16  # entries behind a token


class SuccessorTable:
    """The likeliest tokens behind each token, by salt, and how often such entries were right."""

    def __init__(self, vocab_size: int, kept: int, device: torch.device) -> None:
        self.kept = kept
        self._rows = 1 << (vocab_size - 1).bit_length()  # a power of two, so that each token of one salt has its own
        rows = self._rows + 1  # the last takes what is to be dropped
        self.tokens = torch.zeros(rows, kept, dtype=torch.int64, device=device)
        self.shares = torch.zeros(rows, kept, dtype=torch.float32, device=device)
        self.salts = torch.full((rows,), -2, dtype=torch.int64, device=device)  # whose each row is
        prior = (torch.arange(BINS, dtype=torch.float64) + 0.5).div(BINS).repeat(kept)
        counts = torch.stack([WEIGHT * prior, torch.full_like(prior, WEIGHT)])
        self._counts = pad(counts, (0, 1), value=1.0).to(device)  # [2, kept * BINS + 1] hits and trials
        self._first = (torch.arange(kept) * BINS).to(device)  # where the counts of each rank begin

    def behind(self, tokens: Tensor, salts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What may follow `tokens` [B, k] in texts of `salts` [B], if anything is known, and the counts that each entry
        belongs to. [B, k, kept], [B, k], [B, k, kept].
        """
        rows = self._row(tokens.clamp(min=0), salts[:, None])
        known = self.salts[rows] == salts[:, None]
        bins = (self.shares[rows] * BINS).long().clamp(max=BINS - 1)
        return self.tokens[rows], known, bins + self._first

    def chances(self, cells: Tensor) -> Tensor:
        """How often entries of such counts were right. Any shape."""
        hits, trials = self._counts.unbind(0)
        return (hits / trials)[cells].clamp(max=1)

    def learn(self, tokens: Tensor, then: Tensor, there: Tensor, salts: Tensor) -> None:
        """The target said `then` [B, k] behind `tokens` [B, k], `there` where that is so."""
        entries, known, cells = self.behind(tokens, salts)
        cells = torch.where((known & there)[..., None], cells, self._counts.shape[1] - 1).view(-1)
        hits = (entries == then[..., None]).view(-1).double()
        self._counts.index_add_(1, cells, torch.stack([hits, torch.ones_like(hits)]))
        self._counts.mul_(torch.where(self._counts[1] > MEMORY, 0.5, 1.0))

    def write(self, tokens: Tensor, salts: Tensor, logits: Tensor, preferred: Tensor) -> None:
        """Keep the likeliest tokens of `logits` [M, V] behind `tokens` [M]; where one comes again, those of a
        `preferred` [M] place, or else the last. Places without token or salt are dropped.
        """
        best = ranked(logits, self.kept)
        shares = logits.gather(1, best).float().softmax(-1)
        rows = torch.where((tokens >= 0) & (salts >= 0), self._row(tokens, salts), self._rows)
        order = (2 * rows + preferred).argsort(stable=True)
        rows = rows[order]
        rows = torch.where(pad(rows[1:] != rows[:-1], (0, 1), value=True), rows, self._rows)
        self.tokens.index_copy_(0, rows, best[order])
        self.shares.index_copy_(0, rows, shares[order])
        self.salts.index_copy_(0, rows, torch.where(rows < self._rows, salts[order], -2))

    def reader(self, salt: int) -> Callable[[int, float], dict[int, float]]:
        """What may follow a token in texts of a salt, and how likely; on the host."""
        tokens, shares, salts = self.tokens.numpy(), self.shares.numpy(), self.salts.numpy()
        hits, trials = self._counts.tolist()

        def successors(token: int, least: float) -> dict[int, float]:
            row = (token + salt) & (self._rows - 1)
            if salts[row] != salt:
                return {}
            bins = (min(int(share * BINS), BINS - 1) for share in shares[row].tolist())
            cells = (rank * BINS + place for rank, place in enumerate(bins))
            return {token: hits[c] / trials[c] for token, c in zip(tokens[row].tolist(), cells, strict=True)}

        return successors

    def _row(self, tokens: Tensor, salts: Tensor) -> Tensor:
        return (tokens + salts) & (self._rows - 1)


class RecyclingDrafter(Silent):
    """The likeliest paths along the table, as a tree of at most `nodes` nodes and `depth` levels.

    `width`: entries behind a token, and nodes of a level that are followed. Less likely ones than `least` stay out.
    """

    law = POINT_TREE
    surplus = 2
    needs = frozenset({LOGITS})
    _table: SuccessorTable

    def __init__(self, nodes: int = 8, width: int = 8, depth: int = 6, least: float = 0.2) -> None:
        if nodes < 1 or depth < 1 or not 1 <= width <= MOST_KEPT:
            raise ValueError(f"recycling needs at least one node and level, and a width of 1 to {MOST_KEPT}")
        if not 0 <= least < 1:
            raise ValueError("recycling needs 0 <= least < 1")
        self._width, self._depth, self._least = width, depth, least
        self.max_nodes = min(nodes, width + (depth - 1) * width**2)

    @property
    def sizes(self) -> Sequence[int]:
        """Any."""
        return range(self.max_nodes + 1)

    def attach(self, target: ModelRunner) -> None:
        """A table of its vocabulary."""
        vocab_size = target.model.config.vocab_size
        self._width = min(self._width, vocab_size)
        self._table = SuccessorTable(vocab_size, self._width, target.device)

    def depth(self, nodes: int) -> int:
        """The likeliest may all lie on one path."""
        return min(nodes, self._depth)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """Level by level: of what follows the likeliest nodes of the last level, the likeliest."""
        if nodes == 0:
            return Proposal.bare(view)
        if view.may_look:
            return self.listed(view, nodes).proposal()
        least = max(self._least, view.min_accept_prob)
        depth, salts = self.depth(nodes), _salts(view)
        offers = Offers.room(view.size, self._width, depth, view.roots.device, nodes)
        front, chosen = view.roots[:, None], None
        for level in range(depth):
            tokens, known, cells = self._table.behind(front, salts)
            scores = self._table.chances(cells).log().float().masked_fill(~known[..., None], -torch.inf)
            chosen = offered(offers, level, scores, tokens, chosen)
            front = chosen.tokens
        if view.max_depth is not None:
            offers = offers.within(view.max_depth)
        links = likeliest_tree(offers, view.roots, nodes)
        scores = offers.scores.gather(1, links.offers)
        view = replace(view, min_accept_prob=least)
        return linked_proposal(links, scores, torch.zeros_like(links.offers), view, depth, certain=False)

    def listed(self, view: BatchView, nodes: int) -> HostTrees:
        """The likeliest nodes of any level, grown on the host: single rows are read faster there."""
        least = max(self._least, view.min_accept_prob)
        grown, deepest = [], self.depth(nodes)
        rooms = [nodes] * view.size if view.max_nodes is None else view.max_nodes.clamp(max=nodes).tolist()
        depths = [deepest] * view.size if view.max_depth is None else view.max_depth.clamp(max=deepest).tolist()
        for root, salt, room, depth in zip(view.roots.tolist(), _salts(view).tolist(), rooms, depths, strict=True):
            tree = PointTree(root, room, depth)
            grow(tree, root, self._table.reader(salt), lambda _, token: token, least)
            grown.append(tree)
        return HostTrees.of(grown)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Measure what was known of the path, then keep what the target said at every node."""
        tree, path, salts = proposal.tree, verdict.path, _salts(view)
        tokens, steps = tree.tokens[path.clamp(min=0)], torch.arange(path.shape[1], device=path.device)
        there = steps <= verdict.length[:, None]
        then = pad(tokens[:, 1:], (0, 1)).scatter(1, verdict.length[:, None], verdict.bonus[:, None])
        self._table.learn(tokens, then, there, salts)
        self._table.write(tree.tokens, salts[tree.owner], features[LOGITS], nodes_on(tree, path, there))


def _salts(view: BatchView) -> Tensor:
    """The salt of each sequence. [B]."""
    return torch.zeros_like(view.rows) if view.salts is None else view.salts[view.rows]
