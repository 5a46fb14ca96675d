"""Tree shapes. A grower decides which nodes exist and whether their tokens are chosen or drawn; it knows no network.

Whatever looks at drawn tokens to throw nodes away would bias a law that trusts their draws, so a grower that draws
only ever adds: where it grows next may depend on what it drew, what it keeps may not.
"""

from draftwood.growers.fixed import Levels, StaticShape, chain
from draftwood.growers.greedy import Greedy
from draftwood.growers.paths import Paths
from draftwood.growers.pickers import (
    Best,
    ChildPicker,
    Children,
    Coupled,
    Frontier,
    Hybrid,
    Independent,
    WithoutReplacement,
)
from draftwood.growers.ranked import Beam, BestFirst
from draftwood.growers.sequoia import sequoia

__all__ = [
    "Beam",
    "Best",
    "BestFirst",
    "ChildPicker",
    "Children",
    "Coupled",
    "Frontier",
    "Greedy",
    "Hybrid",
    "Independent",
    "Levels",
    "Paths",
    "StaticShape",
    "WithoutReplacement",
    "chain",
    "sequoia",
]
