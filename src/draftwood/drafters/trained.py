"""Which drafter runs which network."""

from __future__ import annotations

from torch import nn

from draftwood.drafters.dflash import BlockDrafter
from draftwood.drafters.eagle import RecurrentDrafter
from draftwood.drafters.features import FeatureDrafter
from draftwood.drafters.kangaroo import ShallowDrafter
from draftwood.drafters.medusa import HeadStackDrafter
from draftwood.drafters.peagle import ParallelEagleDrafter
from draftwood.drafting import Grower
from draftwood.errors import IncompatibleParts
from draftwood.nets.dflash import BlockNet
from draftwood.nets.eagle import Eagle1, Eagle3, MultiToken
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import ParallelEagle


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
