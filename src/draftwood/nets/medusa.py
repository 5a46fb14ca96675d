"""Heads on the target's last feature, one for each token ahead: blockwise, Medusa, Hydra."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.nets.parts import VocabularyHead


class ResBlock(nn.Module):
    """x + silu(W x + b); a linear shortcut where it changes the width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.res_connection = nn.Linear(inputs, outputs) if inputs != outputs else None
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[*, inputs] -> [*, outputs]."""
        shortcut = x if self.res_connection is None else self.res_connection(x)
        return shortcut + F.silu(self.linear(x))


class HeadStack(nn.Module):
    """Head number i guesses the i-th token after the next one, from the feature of the last position the target ran.

    Medusa's heads see that feature alone. Grounded ones (Hydra) also see the tokens in between, so their guesses depend
    on the path they are on.
    """

    def __init__(
        self, hidden: int, last_layer: int, num_layers: int, heads: Sequence[VocabularyHead], grounded: bool
    ) -> None:
        super().__init__()
        self.reads, self.grounded, self.hidden = (last_layer,), grounded, hidden
        widths = [(i + 2) * hidden if grounded else hidden for i in range(len(heads))]
        blocks = [
            nn.Sequential(ResBlock(width, hidden), *(ResBlock(hidden, hidden) for _ in range(num_layers - 1)))
            for width in widths
        ]
        self.blocks = nn.ModuleList(blocks)
        self.heads = heads
        self.own = nn.ModuleList([head for head in heads if isinstance(head, nn.Module)])
        if grounded:
            self._begin_as_shortcut()

    @property
    def guesses(self) -> int:
        """Tokens ahead."""
        return len(self.heads)

    @torch.no_grad()
    def _begin_as_shortcut(self) -> None:
        """Hydra starts as Medusa: the feature passes, the tokens are not looked at yet."""
        for block in self.blocks:
            shortcut = block[0].res_connection  # type: ignore[index]
            shortcut.weight.zero_()
            shortcut.bias.zero_()
            shortcut.weight[:, : self.hidden] = torch.eye(self.hidden)

    def logits(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        """Of head `number`, behind a path [*, number + 1, hidden] of embedded tokens. [*, hidden] -> [*, R]."""
        x = torch.cat([feature, path.flatten(-2)], -1) if self.grounded else feature
        return self.heads[number](self.blocks[number](x))
