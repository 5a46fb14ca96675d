"""The public surface for drafters and acceptance laws of your own. Import these names from here and from `draftwood`.

A drafter is an object passed as `LLM(drafter=…)`, a law one passed as `LLM(law=…)`. For most drafters it is enough to
derive from `PointDrafter` and override `fill` (examples/own_drafter.py); for most laws, to derive from `NodeLaw` and
override `odds` (examples/own_law.py). Anything else implements the protocols `Drafter` and `Verifier`.

Stability. Every name in `__all__` follows semantic versioning. While the version is 0.x a minor version may change
them; from 1.0 on only a major version may. Either way the changelog names the change.

- Settled, and meant to be in 1.0 as they are: `PointDrafter.fill` and `PointTree.add` / `add_path`; `NodeLaw.odds` and
  the fields of `Odds` and `Scope`; the packed arrays of `TokenTree` (its dataclass fields), `Verdict`, `Draw`,
  `DraftLaw`.
- Will still change before 1.0: the methods of `Drafter` (the protocol is about to be merged with the one of drafters
  that run on a GPU) and the fields of `BatchView`, which may gain members.
- Not covered: every other module of the package, names with a leading underscore, and the derivation of random keys
  (`draftwood.rng`). `NodeLaw.verify` derives its own keys; only a `Drafter` that *draws* its tokens, and says so in its
  `DraftLaw`, has to do so itself.

A drafter cannot make an answer wrong, as long as its `DraftLaw` tells the truth about how tokens were chosen. A law
can: `lossless = True` is a claim that the engine trusts. Check it by enumeration, as tests/test_extend.py does.
"""

from __future__ import annotations

from draftwood.drafters.points import PointDrafter, PointTree
from draftwood.protocols import BatchView, Budget, Drafter, Features, Randomness, Span, Verifier
from draftwood.tree import POINT_CHAIN, POINT_TREE, DraftLaw, Draw, TokenTree, Verdict
from draftwood.treebuilder import TreeBuilder
from draftwood.verifiers.law import NodeLaw, Odds, Scope

__all__ = [
    "POINT_CHAIN",
    "POINT_TREE",
    "BatchView",
    "Budget",
    "DraftLaw",
    "Drafter",
    "Draw",
    "Features",
    "NodeLaw",
    "Odds",
    "PointDrafter",
    "PointTree",
    "Randomness",
    "Scope",
    "Span",
    "TokenTree",
    "TreeBuilder",
    "Verdict",
    "Verifier",
]
