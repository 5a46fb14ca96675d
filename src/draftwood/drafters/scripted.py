"""A drafter that is told what to say: for tests, ablations and the ceiling of what speculation could give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftwood.drafters.points import PointDrafter, PointTree
from draftwood.tree import POINT_CHAIN, POINT_TREE

Script = Callable[[Sequence[int]], Sequence[Sequence[int]]]


class ScriptedDrafter(PointDrafter):
    """`script` maps the committed tokens to the paths to guess; they share what they have in common."""

    def __init__(self, script: Script, max_nodes: int, *, chain: bool = False) -> None:
        self.script = script
        self.max_nodes = max_nodes
        self.law = POINT_CHAIN if chain else POINT_TREE

    def fill(self, tree: PointTree, seq_id: int, tokens: Sequence[int]) -> None:
        """Whatever the script says."""
        for path in self.script(tokens):
            tree.add_path(path)
