"""Several drafters in one tree: what each proposes, by how often such proposals of it were right.

Any drafters: made on the host or on the device, networks, draft models. Each proposes as if it were alone and is told
what became of its nodes; text that others have proposed it reads as it reads a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from draftwood.drafters.branches import as_points
from draftwood.drafters.calibration import Calibration
from draftwood.drafters.graft import Candidates, Rated, Waiting
from draftwood.drafters.graft_host import HostWaiting, Listed, graft_on_host
from draftwood.drafters.points import ListsTrees
from draftwood.drafters.several import Several, fitting
from draftwood.drafters.unknown import read_unknown
from draftwood.drafting import MOST_MEMBERS, Drafter, Proposal
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Features, HostView, Randomness
from draftwood.tree import POINT_TREE, DraftLaw, Draw, Verdict


class CombinedDrafter(Several):
    """The likeliest nodes of several drafters' trees, at most `nodes`; less likely ones than `least` stay out.

    Of the first source that draws its tokens all nodes keep their draws; those of others that draw count as chosen.
    """

    def __init__(self, sources: Sequence[Drafter] | Mapping[str, Drafter], nodes: int = 8, least: float = 0.2) -> None:
        if not isinstance(sources, Mapping):
            sources = {f"{type(source).__name__} {number}": source for number, source in enumerate(sources, 1)}
        if not 2 <= len({id(source) for source in sources.values()}) == len(sources) <= MOST_MEMBERS:
            raise ValueError(f"a combined drafter needs at least two different ones, and at most {MOST_MEMBERS}")
        if nodes < 1 or not 0 <= least < 1:
            raise ValueError("a combined drafter needs at least one node and 0 <= least < 1")
        drawing = [name for name, source in sources.items() if _keeps_draws(source.law)]
        super().__init__({name: sources[name] for name in dict.fromkeys((*drawing[:1], *sources))})
        self._listers = [source if isinstance(source, ListsTrees) else None for source in self.sources]
        self.max_nodes, self.least = nodes, least
        self._drawing = bool(drawing)
        self._calibration = Calibration(2 * len(sources))  # of each source, and of so many that agree
        self._waiting: Waiting | HostWaiting | None = None

    @property
    def sources(self) -> list[Drafter]:
        """The first that draws, then the others in order."""
        return [guard.drafter for guard in self.guards]

    @property
    def law(self) -> DraftLaw:
        """Chosen tokens, beside the draws of one source."""
        if not self._drawing:
            return POINT_TREE
        own = self.guards[0].law
        return DraftLaw(POINT_TREE.draws | own.draws, chain=False, grafted=True, grown=own.grown)

    @property
    def remembers(self) -> bool:
        """What each source had proposed."""
        return True

    @property
    def surplus(self) -> int:
        """Merged trees say how likely nodes are."""
        return 1 if self._drawing else 2

    @property
    def sizes(self) -> Sequence[int]:
        """Any."""
        return range(self.max_nodes + 1)

    def attach(self, target: ModelRunner) -> None:
        """Tell all of them, and count on their device."""
        self._target = target
        self._calibration.to(target.device)
        super().attach(target)

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """Ask those that wait."""
        for number, guard in enumerate(self.guards):
            if guard.waits:
                guard.prepare(view, size, self._share(number, nodes))

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """All their trees as one."""
        self._waiting = None
        if nodes == 0:
            return Proposal.bare(view)
        own = replace(view, min_accept_prob=view.min_accept_prob / 2)  # likelier where they agree
        least, sources = max(self.least, view.min_accept_prob), range(len(self.guards))
        if view.may_look:
            listed = [self._listed(number, own, nodes, rng) for number in sources]
            whole, self._waiting = graft_on_host(listed, self._calibration, view, nodes, least)
            return whole
        made = [self._of(number, own, nodes, rng) for number in sources]
        if not any(proposal.tree.num_drafted for proposal in made):
            return Proposal.bare(view)
        rated = Rated.of(Candidates.of(made), self._calibration, len(made))
        self._waiting = rated.waiting(view)
        return rated.taken(view, nodes, least, made[0].tree.q)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Count what was right, and tell each what became of its nodes; what it does not know of a path it reads."""
        if self._waiting is not None:
            self._waiting.learn(self._calibration, view, proposal.tree, verdict)
            self._waiting = None
        drafted = proposal.columns is not None and proposal.tree.num_drafted > 0
        for number, guard in enumerate(self.guards):
            own = proposal.of_member(number)
            guard.commit(view, own, verdict, {layer: features[layer] for layer in guard.needs})
            if drafted and guard.reads:
                read_unknown(guard, self._target, view, own, verdict)

    def _share(self, number: int, nodes: int) -> int:
        """Nodes that a source may propose of so many: the first, if it draws, leaves some to the others."""
        guard = self.guards[number]
        if number > 0 or not self._drawing:
            return fitting(guard, nodes)
        smallest = min((size for size in guard.sizes if 0 < size <= nodes), default=0)
        return fitting(guard, max(nodes - nodes // 3, smallest))

    def _of(self, number: int, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """One source's proposal, with draws only if they are kept."""
        guard, nodes = self.guards[number], self._share(number, nodes)
        made = guard.propose(view, nodes, rng) if nodes else Proposal.bare(view)
        if made.tree.q is None or (number == 0 and self._drawing):
            return made
        every = torch.ones_like(view.lengths, dtype=torch.bool)
        points = as_points(made.tree, every, may_repeat=Draw.IID in guard.law.draws)
        return replace(made, tree=replace(points, q=None))

    def _listed(self, number: int, view: BatchView, nodes: int, rng: Randomness) -> Listed:
        """The same as lists, which some sources have before they make tensors of them."""
        lister, share = self._listers[number], self._share(number, nodes)
        if lister is None:
            return Listed.of(self._of(number, view, nodes, rng).packed())
        trees = self.guards[number].proposed(view, lambda: lister.listed(view, share)) if share else None
        return Listed([], None) if trees is None else Listed(trees.trees, trees.chances)


def _keeps_draws(law: DraftLaw) -> bool:
    """Whether a source's draws can stand beside chosen nodes: not those of paths, whose nodes are drawn more than
    once.
    """
    return not law.draws <= POINT_TREE.draws and not law.paths
