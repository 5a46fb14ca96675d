"""Acceptance laws by name, one file each."""

from draftwood.protocols import Verifier
from draftwood.verifiers.block import Block
from draftwood.verifiers.match import Match
from draftwood.verifiers.walk import Walk

LAWS: dict[str, type[Verifier]] = {law.name: law for law in (Match, Walk, Block)}

__all__ = ["LAWS", "Block", "Match", "Walk"]
