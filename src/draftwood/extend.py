"""The public surface for drafters and acceptance laws of your own. Import these names from here and from `draftwood`.

A drafter is an object passed as `LLM(drafter=…)`, a law one passed as `LLM(law=…)`. For most drafters it is enough to
derive from `PointDrafter` and override `fill` (examples/own_drafter.py); for most laws, to derive from `NodeLaw` and
override `odds` (examples/own_law.py). Anything else implements the protocols `Drafter` and `Verifier`.

The same drafter serves every device. Where `BatchView.may_look` says so, trees may have any size, and values may be
looked at. Otherwise the step is captured as a CUDA graph: every tree has exactly the `nodes` that were asked for, with
absent nodes where there is nothing to draft (`TokenTree.without`), and no method but `prepare` may look at values.
`Silent` has the methods that most drafters need not care for. A drafter with a network of its own gives logits at the
nodes of a growing tree (`FrontierModel`) and leaves the shape to a `Grower`.

Stability. Every name in `__all__` follows semantic versioning. While the version is 0.x a minor version may change
them; from 1.0 on only a major version may. Either way the changelog names the change.

- Settled, and meant to be in 1.0 as they are: `PointDrafter.fill` and `PointTree.add` / `add_path`; `NodeLaw.odds` and
  the fields of `Odds` and `Scope`; what a `TokenTree` says of its nodes (`tokens`, `parents`, `offsets`, `draw`,
  `q_row`, `q`), `Verdict`, `Draw`, `DraftLaw`.
- May still change before 1.0: the other methods of `Drafter`, `FrontierModel` and `Grower`, and the fields of
  `BatchView`, `HostView` and `Proposal`, which may gain members.
- Not covered: every other module of the package, names with a leading underscore, and the derivation of random keys
  (`draftwood.rng`). `NodeLaw.verify` derives its own keys; only a `Drafter` that *draws* its tokens, and says so in its
  `DraftLaw`, has to do so itself.

A drafter cannot make an answer wrong, as long as its `DraftLaw` tells the truth about how tokens were chosen. A law
can: `lossless = True` is a claim that the engine trusts. Check it by enumeration, as tests/test_extend.py does.
"""

from __future__ import annotations

from draftwood.batch import ForwardBatch
from draftwood.drafters.points import HostDrafter, PointDrafter, PointTree
from draftwood.drafting import Drafter, FrontierModel, Grower, Proposal, Silent
from draftwood.protocols import BatchView, Features, HostView, Randomness, Verifier
from draftwood.shape import NodeMap, TreeShape
from draftwood.tree import POINT_CHAIN, POINT_TREE, DraftLaw, Draw, TokenTree, Verdict
from draftwood.verifiers.law import NodeLaw, Odds, Scope

__all__ = [
    "POINT_CHAIN",
    "POINT_TREE",
    "BatchView",
    "DraftLaw",
    "Drafter",
    "Draw",
    "Features",
    "ForwardBatch",
    "FrontierModel",
    "Grower",
    "HostDrafter",
    "HostView",
    "NodeLaw",
    "NodeMap",
    "Odds",
    "PointDrafter",
    "PointTree",
    "Proposal",
    "Randomness",
    "Scope",
    "Silent",
    "TokenTree",
    "TreeShape",
    "Verdict",
    "Verifier",
]
