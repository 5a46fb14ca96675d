"""What a simulation replays: what steps cost and how many tokens drafts gained. As JSON, or recorded from an engine."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftwood.costs import StepCosts
from draftwood.errors import InvalidRequest
from draftwood.protocols import Budget, Load, StepReport
from draftwood.request import GuessedTree

FORMAT = "draftwood-recording/1"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CONTEXTS = (64, 4096, 32768)


@dataclass(frozen=True)
class Fleet:
    """Hardware that is not there, by its figures: a step takes as long as the slower of reading weights and computing,
    then keys and values, then what devices tell each other.
    """

    billions: float  # parameters
    bytes_each: float = 2.0  # of a parameter
    gb_per_second: float = 4800.0  # of all devices together, or of the link that offloaded weights come over
    tflops: float = 800.0  # likewise, as far as they are reached
    kv_bytes: float = 0.0  # of one token in all layers
    seconds: float = 0.0  # of a step beside all that
    experts: int = 0  # of a layer; 0: there are none
    active: int = 0  # that each token goes to
    expert_share: float = 0.0  # of the parameters

    def __post_init__(self) -> None:
        if min(self.billions, self.bytes_each, self.gb_per_second, self.tflops) <= 0:
            raise InvalidRequest("A fleet's billions, bytes_each, gb_per_second and tflops must be above 0.")
        if self.experts and not (0 < self.active <= self.experts and 0 <= self.expert_share <= 1):
            raise InvalidRequest("A fleet with experts needs active (1 to experts) and expert_share (0 to 1).")

    def costs(self) -> StepCosts:
        """What its steps take."""
        speed = 1e9 * self.gb_per_second
        line = [self._weights(rows) + self.seconds for rows in ROWS]
        keys = [self.kv_bytes * context / speed for context in CONTEXTS]
        lines = tuple(tuple(time + own for time in line) for own in keys)
        return StepCosts(ROWS, CONTEXTS, lines, keys[0], self.kv_bytes / speed)

    def _weights(self, rows: int) -> float:
        read = self.billions * self.bytes_each * self._touched(rows) / self.gb_per_second
        used = 1.0 if not self.experts else 1 - self.expert_share * (1 - self.active / self.experts)
        return max(read, 2e-3 * self.billions * used * rows / self.tflops)

    def _touched(self, rows: int) -> float:
        """Share of the weights that so many rows read: each goes to experts of its own."""
        if not self.experts:
            return 1.0
        distinct = 1 - (1 - self.active / self.experts) ** rows
        return 1 - self.expert_share * (1 - distinct)


Histogram = tuple[float, ...]  # how often 0, 1, 2, … tokens were accepted


@dataclass(frozen=True)
class Recording:
    """What steps cost, and what became of drafts, by the kind of text."""

    costs: StepCosts
    texts: Mapping[str, Mapping[int, Histogram]]  # by nodes
    draft_seconds: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # of a step, and of each sequence
    silent: Mapping[str, float] = field(default_factory=dict)  # share of sequences and steps with nothing to propose
    chain: bool = True
    padded: bool = True  # all sequences run as many nodes, as in captured steps
    reads: bool = False

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts.values()):
            raise InvalidRequest("A recording needs at least one kind of text, with what was accepted for some size.")
        for name, sizes in self.texts.items():
            for nodes, counts in sizes.items():
                if nodes < 1 or not counts or min(counts) < 0 or sum(counts) <= 0 or len(counts) > nodes + 1:
                    raise InvalidRequest(
                        f"The text '{name}' of the recording has no histogram of 0 to {nodes} accepted tokens for "
                        f"{nodes} nodes."
                    )

    @property
    def max_nodes(self) -> int:
        """The largest tree."""
        return max(max(sizes) for sizes in self.texts.values())

    def depth(self, nodes: int) -> int:
        """The most tokens that a tree of so many nodes has ever gained."""
        if self.chain:
            return nodes
        return max(len(counts) - 1 for sizes in self.texts.values() for n, counts in sizes.items() if n <= nodes)

    def accepted(self, text: str, nodes: int, draw: random.Random) -> int:
        """What became of one tree. A chain is a longer one cut off; other sizes lie between those recorded."""
        sizes = self.texts[text]
        known = sorted(sizes)
        if nodes <= 0:
            return 0
        if self.chain or nodes >= known[-1]:
            longer = next((size for size in known if size >= nodes), known[-1])
            return min(nodes, _drawn(sizes[longer], draw))
        right = bisect.bisect_left(known, nodes)
        below, above = (known[right - 1] if right else 0), known[right]
        share = (math.log1p(nodes) - math.log1p(below)) / (math.log1p(above) - math.log1p(below))
        chosen = above if draw.random() < share else below
        return min(nodes, _drawn(sizes[chosen], draw)) if chosen else 0

    def drafting(self, nodes: int, batch: int) -> float:
        """Seconds that drafting adds."""
        if not nodes or not self.draft_seconds:
            return 0.0
        known = sorted(self.draft_seconds)
        step, each = self.draft_seconds[min(known, key=lambda size: abs(math.log1p(size) - math.log1p(nodes)))]
        return step + each * batch

    def save(self, path: Path) -> None:
        """As JSON."""
        record = asdict(self) | {"format": FORMAT, "costs": self.costs.record()}
        path.write_text(json.dumps(record, indent=1))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Refuses, with the reason, what is none."""
        try:
            raw = json.loads(path.read_text())
            if not isinstance(raw, dict) or raw.get("format") != FORMAT:
                raise InvalidRequest(f"{path} is no recording: its format is not '{FORMAT}'.")
            return cls(
                costs=Fleet(**raw["fleet"]).costs() if "fleet" in raw else _costs(raw["costs"]),
                texts={
                    name: {int(n): tuple(map(float, counts)) for n, counts in sizes.items()}
                    for name, sizes in raw["texts"].items()
                },
                draft_seconds={int(n): (float(a), float(b)) for n, (a, b) in raw.get("draft_seconds", {}).items()},
                silent={name: float(share) for name, share in raw.get("silent", {}).items()},
                **{name: bool(raw[name]) for name in ("chain", "padded", "reads") if name in raw},
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"{path} cannot be read as a recording: {type(error).__name__}: {error}.") from error


def _costs(raw: Mapping[str, Any]) -> StepCosts:
    lines = tuple(tuple(float(time) for time in line) for line in raw["seconds"])
    others = float(raw["per_sequence"]), float(raw.get("per_token", 0.0))
    return StepCosts(tuple(raw["rows"]), tuple(raw["contexts"]), lines, *others, spread=raw.get("spread"))


def _drawn(counts: Histogram, draw: random.Random) -> int:
    return draw.choices(range(len(counts)), counts)[0]


@dataclass
class Recorder:
    """A controller that always drafts `nodes` and remembers what became of it."""

    nodes: int
    costs: StepCosts | None = None
    predicted: float = 0.0  # seconds of all steps so far by these costs
    counts: list[float] = field(default_factory=list)
    proposals: int = 0
    sequences: int = 0
    drafting: list[tuple[int, float]] = field(default_factory=list)  # sequences, and seconds for all of them

    def budget(self, load: Load) -> Budget:
        """Always the same."""
        return Budget(self.nodes, why="recording")

    def observe(self, report: StepReport) -> None:
        """What each sequence gained."""
        if self.costs is not None:
            rows = report.num_rows + report.prompt_rows
            target = self.costs.at(rows, report.context, max(report.num_sampling, 1))
            self.predicted += target + (report.draft_seconds or 0.0)
        if not report.room:
            return
        for drafted, accepted in report.outcomes:
            self.sequences += 1
            if drafted:
                self.proposals += 1
                self.counts += [0.0] * (accepted + 1 - len(self.counts))
                self.counts[accepted] += 1
        if report.draft_seconds and report.num_sampling:
            self.drafting.append((report.num_sampling, report.draft_seconds))

    @property
    def histogram(self) -> Histogram:
        """Of all proposals."""
        return tuple(self.counts) or (1.0,)

    @property
    def silent(self) -> float:
        """Share of sequences and steps without one."""
        return 1 - self.proposals / self.sequences if self.sequences else 0.0

    @property
    def draft_seconds(self) -> tuple[float, float]:
        """Of a step: none of its own, and the median of each sequence's share."""
        each = sorted(seconds / count for count, seconds in self.drafting)
        return 0.0, each[len(each) // 2] if each else 0.0


def rank_rates(trees: Iterable[GuessedTree]) -> list[int]:
    """Of a hundred accepted nodes with children, how many had the first accepted, the second, …: what Sequoia's shape
    is made from. Ranks that were never accepted are left out from the first of them on.
    """
    tried, right = Counter[int](), Counter[int]()
    for tree in trees:
        seen = Counter[int]()  # children so far, by parent
        for node, parent in enumerate(tree.parents):
            if parent < 0:
                continue
            rank, seen[parent] = seen[parent], seen[parent] + 1
            if tree.accepted[parent]:
                tried[rank] += 1
                right[rank] += tree.accepted[node]
    rates = [round(100 * right[rank] / tried[rank]) for rank in sorted(tried)]
    return list(itertools.takewhile(lambda rate: rate > 0, rates))
