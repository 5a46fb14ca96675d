"""Which drafter runs which network, and with which tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from draftwood.drafters.dflash import BlockDrafter
from draftwood.drafters.eagle import RecurrentDrafter
from draftwood.drafters.features import FeatureDrafter
from draftwood.drafters.kangaroo import ShallowDrafter
from draftwood.drafters.medusa import HeadStackDrafter
from draftwood.drafters.peagle import ParallelEagleDrafter
from draftwood.drafters.substitute import SubstituteDrafter
from draftwood.drafting import Grower
from draftwood.errors import IncompatibleParts
from draftwood.nets.dflash import BlockNet
from draftwood.nets.eagle import Eagle1, Eagle3, MultiToken
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import ParallelEagle
from draftwood.nets.student import MaskedStudent

DEFAULT_TREE = "chain"


def drafter_of(net: nn.Module, words: TargetEmbeddings, grower: Grower) -> FeatureDrafter | ShallowDrafter:
    """A network on a target, as a drafter with any tree."""
    net = net.to(device=words.device, dtype=words.dtype).eval().requires_grad_(False)
    if isinstance(net, ParallelEagle):
        return ParallelEagleDrafter(net, words, grower)
    if isinstance(net, Eagle3 | Eagle1 | MultiToken):
        return RecurrentDrafter(net, words, grower)
    if isinstance(net, BlockNet):
        return BlockDrafter(net, words, grower)
    if isinstance(net, HeadStack):
        return HeadStackDrafter(net, words, grower)
    if isinstance(net, Kangaroo):
        return ShallowDrafter(net, words, grower)
    raise IncompatibleParts(f"A {type(net).__name__} does not read features.")


@dataclass(frozen=True)
class UsualTree:
    """The tree a network gets where none is asked for: more guesses cost a CPU time, and a GPU hardly any."""

    on_cpu: str
    on_gpu: str


USUAL: Mapping[type, UsualTree] = {
    Eagle3: UsualTree("chain:depth=5", "beam:nodes=63,width=6,depth=6"),
    BlockNet: UsualTree("chain:depth=6", "beam:nodes=63,width=6,depth=6"),
    HeadStack: UsualTree("static:widths=3x2x1", "beam:nodes=63,width=16,depth=4"),
    ParallelEagle: UsualTree("chain:depth=8", "chain:depth=8"),
    Kangaroo: UsualTree("chain:depth=5", "chain:depth=5"),
    MaskedStudent: UsualTree("chain:depth=8", "chain:depth=8"),
    SubstituteDrafter: UsualTree("best-first:nodes=64,width=8,forwards=8", "best-first:nodes=512,width=32,forwards=16"),
}


def usual_tree(kind: type, device: torch.device) -> str:
    """For a network of this kind."""
    usual = USUAL.get(kind, UsualTree(DEFAULT_TREE, DEFAULT_TREE))
    return usual.on_gpu if device.type == "cuda" else usual.on_cpu
