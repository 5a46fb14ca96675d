"""Acceptance laws by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftwood.tree import DraftLaw, Draw
from draftwood.verifiers.block import Block, Traversal
from draftwood.verifiers.by_request import ByRequest
from draftwood.verifiers.gbv import GreedyPaths
from draftwood.verifiers.law import NodeLaw, Odds, Scope
from draftwood.verifiers.layer import Pooled, Proportional
from draftwood.verifiers.lossy import Lenient, Mixture, Relaxed, Threshold, Typical
from draftwood.verifiers.match import Match
from draftwood.verifiers.optimal import Optimal
from draftwood.verifiers.rules import KSeq, Rejection
from draftwood.verifiers.walk import TopDown


@dataclass(frozen=True)
class LawEntry:
    """A law that can be had by name."""

    make: Callable[..., NodeLaw | Match]
    says: str
    on_cpu_only: bool = False  # it asks the host at every node

    def __call__(self, **settings: Any) -> NodeLaw | Match:
        """Make it."""
        return self.make(**settings)

    @property
    def defaults(self) -> dict[str, Any]:
        """Its settings."""
        return {name: p.default for name, p in inspect.signature(self.make).parameters.items()}


def _walk(name: str, scope: Scope | None = None) -> Callable[[], NodeLaw]:
    return lambda: TopDown(name, Rejection(), scope)


LAWS: dict[str, LawEntry] = {
    "match": LawEntry(lambda: Match(), "the target draws its own token and looks for it: the same text for a seed"),
    "coupled": LawEntry(
        lambda: Match("coupled"), "match, with a drafter that shares the target's noise (--tree coupled)"
    ),
    "token": LawEntry(_walk("token", Scope(chain=True)), "one path, token by token (Leviathan; Chen)"),
    "block": LawEntry(Block, "one path as a whole: the best any lossless law can do there (Sun)"),
    "naive": LawEntry(
        lambda: TopDown("naive", Rejection(tried=1)), "weigh the first child, look for the residual in the rest"
    ),
    "walk": LawEntry(_walk("walk"), "one child after the other against what is left: recursive rejection"),
    "rrs": LawEntry(_walk("rrs", Scope(frozenset({Draw.IID}))), "walk on independent draws (SpecInfer)"),
    "rrsw": LawEntry(
        _walk("rrsw", Scope(frozenset({Draw.WITHOUT_REPLACEMENT}))),
        "walk on draws without replacement (RSD, Sequoia, EAGLE)",
    ),
    "kseq": LawEntry(lambda: TopDown("kseq", KSeq()), "all independent siblings at the same lowered bar (SpecTr)"),
    "hybrid": LawEntry(
        _walk("hybrid", Scope(frozenset({Draw.POINT, Draw.TAIL}))),
        "walk on chosen children and one tail draw: optimal there",
    ),
    "traversal": LawEntry(Traversal, "whole paths, depth first from the leaves up (Weng)"),
    "layer": LawEntry(lambda: Pooled("layer"), "a layer at a time, all its draws against one target (UniVer family)"),
    "layer-proportional": LawEntry(
        lambda: Proportional("layer-proportional", Rejection()), "a layer at a time, each node with its share"
    ),
    "layer-kseq": LawEntry(
        lambda: Proportional("layer-kseq", KSeq()),
        "K-SEQ on whole paths, through the layer lift (see docs/lossless.md)",
    ),
    "gbv": LawEntry(GreedyPaths, "the greatest of K paths as a block, with fallback and recycling (Thomas, Pal)"),
    "optimal": LawEntry(Optimal, "the best sibling rule by linear programming; for toys (scipy)", on_cpu_only=True),
    "typical": LawEntry(Typical, "good enough by the target's entropy (Medusa)"),
    "threshold": LawEntry(Threshold, "target sampling with lowered bars (SGLang)"),
    "relaxed": LawEntry(Relaxed, "near the top of the target's row (TensorRT-LLM)"),
    "lenient": LawEntry(Lenient, "rejection sampling with a lowered bar (Leviathan)"),
    "mixture": LawEntry(Mixture, "lossless for a mixture of target and draft; says how far it went"),
}


AUTO = "auto"  # the law that suits the drafts and the request


def default_law(law: DraftLaw) -> str:
    """The law that suits such drafts: the most accepted of what is lossless and cheap."""
    if law.draws <= {Draw.POINT}:
        return "match"  # for chosen tokens no lossless law accepts more, and this one keeps the very text of a seed
    if law.chain:
        return "block"
    if law.paths:
        return "layer-kseq"
    return "traversal" if Draw.WITHOUT_REPLACEMENT in law.draws else "layer"


__all__ = [
    "AUTO",
    "LAWS",
    "Block",
    "ByRequest",
    "GreedyPaths",
    "LawEntry",
    "Match",
    "NodeLaw",
    "Odds",
    "Scope",
    "TopDown",
    "Traversal",
    "default_law",
]
