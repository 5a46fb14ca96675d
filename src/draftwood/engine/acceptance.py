"""How many tokens a step is expected to gain, by how much is drafted; learned from steps."""

from __future__ import annotations

import itertools
import math

from draftwood.engine.timing import Mean
from draftwood.protocols import StepReport


class ChainAcceptance:
    """Of chains: by depth, and by how many sequences get a proposal at all."""

    MEMORY = 0.97  # what a step's weight becomes with each one after it, and with each step that drafts nothing
    ENOUGH = 150.0, 0.85  # proposals that are remembered, of which a step may be so many that it is most of them
    RECENT, SURPRISE = 0.8, 3.5  # a step's weight in what is recent; deviations from which on that is the truth
    USUAL = 0.99  # a step's weight, after the next one, in what is usual of all requests
    LEAST = 6.0  # sequences of a depth that are remembered however long nothing is drafted
    PRIOR = 0.7  # chance that a node behind an accepted one is accepted, before anything is known
    PRIOR_WEIGHT = 2.0

    def __init__(self, most: int) -> None:
        self._most = most
        self._hits = [0.0] * (most + 1)
        self._trials = [0.0] * (most + 1)
        if most:  # what is assumed of the first node is forgotten as what is learned; of others it is as above them
            self._hits[1], self._trials[1] = self.PRIOR * self.PRIOR_WEIGHT, self.PRIOR_WEIGHT
        self.proposing = Mean(1.0, 1.0)  # share of sequences that get a proposal
        self._recent = [0.0, 0.0]  # of first nodes: hits and trials
        self._usual = [0.0] * (most + 1), [0.0] * (most + 1)  # hits and trials by depth of all requests

    def join(self, share: float) -> None:
        """Such a share of the sequences is new: of their text is known what is usual."""
        for own, usual in zip((self._hits, self._trials), self._usual, strict=True):
            for depth in range(1, self._most + 1):
                few = min(1.0, self.LEAST / self._usual[1][depth]) if self._usual[1][depth] else 0.0
                own[depth] = (1 - share) * own[depth] + share * (few * usual[depth] if few else own[depth])

    def survival(self) -> list[float]:
        """The chance that the first, the first two, … nodes of a chain are all accepted."""
        chances, alive, chance = [], 1.0, self.PRIOR
        for depth in range(1, self._most + 1):
            # What is not known of a depth yet is taken to be as above it, or no step would ever look deeper.
            weight = self.PRIOR_WEIGHT if depth > 1 else 0.1
            chance = (self._hits[depth] + chance * weight) / (self._trials[depth] + weight)
            alive *= chance
            chances.append(alive)
        return chances

    def tokens(self, batch: int) -> list[float]:
        """Expected of a sequence and step, by nodes from 0."""
        share = max(self.proposing.value, 1 / batch)
        return list(itertools.accumulate((share * chance for chance in self.survival()), initial=1.0))

    def observe(self, report: StepReport) -> None:
        """How far each proposal of a step that drafted came."""
        proposed = [(drafted, accepted) for drafted, accepted in report.outcomes if drafted]
        if proposed:
            most, least = self.ENOUGH
            self._keep(min(self.MEMORY, max(least, 1 - len(proposed) / most)), 0.0)
            self._notice(sum(accepted > 0 for _, accepted in proposed), len(proposed))
            for counts in self._usual:
                counts[:] = [self.USUAL * count for count in counts]
        for drafted, accepted in proposed:
            for depth in range(1, min(drafted, accepted + 1, self._most) + 1):
                for hits, trials in ((self._hits, self._trials), self._usual):
                    trials[depth] += 1
                    hits[depth] += accepted >= depth
        self.proposing = self.proposing.learn(len(proposed) / report.num_sampling)

    def _notice(self, hits: int, trials: int) -> None:
        """Forget most of what was learnt if the last few steps cannot be explained by it: the text has changed."""
        self._recent = [self.RECENT * old + new for old, new in zip(self._recent, (hits, trials), strict=True)]
        known, weight = self._trials[1], self._recent[1]
        if known < self.LEAST or weight < min(4, 2 * trials):
            return
        chance, recent = self._hits[1] / known, self._recent[0] / weight
        samples = weight * (1 + self.RECENT)  # independent ones that a weighted mean is as good as
        if abs(recent - chance) > self.SURPRISE * math.sqrt(max(chance * (1 - chance), 0.02) / samples):
            self._keep(self.LEAST / known, 0.0)
            self._recent = [0.0, 0.0]

    def fade(self) -> None:
        """A step drafted nothing: what is known stays true, but less of it is needed to change it."""
        self._keep(self.MEMORY, self.LEAST)

    def _keep(self, share: float, least: float) -> None:
        for depth, trials in enumerate(self._trials):
            kept = max(share * trials, min(trials, least))
            self._hits[depth] *= kept / trials if trials else 0.0
            self._trials[depth] = kept


class TreeAcceptance:
    """Of trees: by their size.

    A level that follows the text quickly, along a curve over sizes; and for each size that has run how its gain
    relates to that curve, which is learned slowly, since few steps cannot tell sizes apart.
    """

    HOPE = 3.0  # tokens that the largest tree is expected to gain before anything is known
    # Gains grow like this power of the logarithm of a tree's size; beams of the shipped block head and EAGLE-3 with 6,
    # 31 and 63 nodes lie within a tenth of it.
    POWER = 0.6
    SURE = 20.0  # samples that the curve counts for, against those of a size
    SLOW = 100.0  # samples that a size's relation to the curve stands for
    FADE = 0.97  # what is known of the level counts after a step that drafted nothing
    CROWD = 8  # a step of so many sequences or more is as many samples
    LEAST = 4.0  # samples that are remembered of a level when all sequences are new
    USUAL = 100.0  # samples that what is usual of all requests stands for

    def __init__(self, most: int) -> None:
        self._most = most
        self._largest = Mean(self.HOPE, 2.0)  # gain of the largest tree, by the curve
        self._sizes: dict[int, tuple[Mean, Mean]] = {}  # size -> its gain, and that by the curve
        self._usual = Mean()  # of the largest, over all requests

    def gain(self, nodes: int) -> float:
        """Tokens that a tree of so many nodes is expected to gain its sequence, the target's own not counted."""
        return self._largest.value * self._share(nodes) * self._relation(nodes) if nodes else 0.0

    def _share(self, nodes: float) -> float:
        """What a tree of so many nodes gains, of what the largest would, by the curve."""
        return (math.log1p(nodes) / math.log1p(self._most)) ** self.POWER

    def _relation(self, nodes: int) -> float:
        """Its gain, of what the curve says."""
        gain, curve = self._sizes.get(nodes, (Mean(), Mean()))
        some = self.SURE * max(curve.value, 0.01)
        return (gain.weight * gain.value + some) / (curve.weight * curve.value + some)

    def observe(self, report: StepReport) -> None:
        """What the trees of a step gained; sequences without one count, as they wait for the others all the same."""
        trees = [drafted for drafted, _ in report.outcomes if drafted] or [report.room]
        share, relation = self._share(sum(trees) / len(trees)), self._relation(report.room)
        sample, of = report.accepted / report.num_sampling, float(min(self.CROWD, report.num_sampling))
        gain, curve = self._sizes.get(report.room, (Mean(), Mean()))
        curve = curve.learn(self._largest.value * share, of, self.SLOW)
        self._sizes[report.room] = gain.learn(sample, of, self.SLOW), curve
        self._largest = self._largest.learn(sample / (share * relation), of)
        self._usual = self._usual.learn(sample / (share * relation), of, self.USUAL)

    def join(self, share: float) -> None:
        """Such a share of the sequences is new: of their text is known what is usual."""
        if self._usual.weight:
            level = self._largest.value + share * (self._usual.value - self._largest.value)
            self._largest = Mean(level, self._largest.fade(1 - share, self.LEAST).weight)

    def fade(self) -> None:
        """A step drafted nothing: what is known stays true, but less of it is needed to change it."""
        self._largest = self._largest.fade(self.FADE, 2.0)
