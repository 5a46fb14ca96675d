"""Which drafter runs which network."""

from __future__ import annotations

from torch import nn

from draftwood.drafters.block import BlockDrafter
from draftwood.drafters.features import FeatureDrafter
from draftwood.drafters.parallel_features import ParallelEagleDrafter
from draftwood.drafters.pointwise import HeadStackDrafter
from draftwood.drafters.recurrent import RecurrentDrafter
from draftwood.drafters.shallow import ShallowDrafter
from draftwood.errors import IncompatibleParts
from draftwood.nets.block import BlockNet
from draftwood.nets.parallel import ParallelEagle
from draftwood.nets.pointwise import HeadStack
from draftwood.nets.recurrent import Eagle1, Eagle3, MultiToken
from draftwood.nets.shallow import Kangaroo
from draftwood.nets.words import TargetWords
from draftwood.protocols import Grower


def drafter_of(net: nn.Module, words: TargetWords, grower: Grower) -> FeatureDrafter | ShallowDrafter:
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
