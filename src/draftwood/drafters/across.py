"""How a model drafts for a target of another vocabulary: token by token, or by text."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.drafters.intersection import Bridge
from draftwood.drafting import Grower
from draftwood.errors import IncompatibleParts
from draftwood.growers import Best, Levels
from draftwood.tree import POINT_CHAIN

NEARLY_ALL = 0.9  # of the target's tokens: vocabularies that differ in markers and padding


@dataclass(frozen=True)
class WayAcross:
    """How a model drafts for a target of another vocabulary."""

    by_token: bool
    why: str


def way_across(bridge: Bridge, grower: Grower) -> WayAcross:
    """By text where chains of chosen tokens will do: then the draft model reads what was said in its own tokens. Else
    token by token: that has draws and branches, and costs no more than a draft model of the same vocabulary.
    """
    common = f"{bridge.share:.0%} of the target's tokens are in both"
    if not len(bridge.common):
        raise IncompatibleParts("The draft model has no token in common with the target; take another one, or ngram.")
    if bridge.share >= NEARLY_ALL:
        return WayAcross(True, f"token by token ({common})")
    if grower.law == POINT_CHAIN and isinstance(grower, Levels) and isinstance(grower.picker, Best):
        return WayAcross(False, f"by text, which is encoded again ({common}; trees and draws would go token by token)")
    return WayAcross(True, f"token by token, since its tree branches or draws ({common})")
