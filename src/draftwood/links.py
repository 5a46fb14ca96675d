"""Trees as lists of the host, how they become tensors, and when the host may look at tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BITS = 64  # nodes a word of an ancestor set
LOOKED_AT = frozenset({"cpu"})  # devices whose values the host may look at: elsewhere it would wait, or a graph breaks


def may_look(values: Tensor) -> bool:
    """Whether the host may look at values where that saves work."""
    return values.device.type in LOOKED_AT


@dataclass
class HostLinks:
    """Trees as plain lists, with everything about their structure that one pass can tell."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)  # bit i: local node i + 1
    offsets: list[int] = field(default_factory=lambda: [0])

    def add_tree(self, tokens: list[int], parents: list[int]) -> None:
        """Append one tree; `parents` count inside it."""
        start, tree = self.offsets[-1], len(self.offsets) - 1
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = parent + start if parent >= 0 else -1
            self.tokens.append(token)
            self.parents.append(above)
            self.owner.append(tree)
            self.local.append(i)
            self.depth.append(self.depth[above] + 1 if parent >= 0 else 0)
            self.children.append([])
            self.ancestors.append(self.ancestors[above] | 1 << (i - 1) if parent >= 0 else 0)
            if parent >= 0:
                self.children[above].append(start + i)
        self.offsets.append(len(self.tokens))

    def tries(self) -> list[list[int]]:
        """The children of every node, -1 padded."""
        width = max(1, max(map(len, self.children), default=1))
        return [children + [-1] * (width - len(children)) for children in self.children]

    def words(self) -> list[list[int]]:
        """The ancestor sets as signed 64-bit words."""
        return words_of(self.ancestors, max(1, -(-max(self.local, default=0) // BITS)))


def words_of(sets: Sequence[int], count: int) -> list[list[int]]:
    """Sets of bits as `count` signed 64-bit words each."""
    sign, mask = 1 << (BITS - 1), (1 << BITS) - 1
    return [[((bits >> BITS * w & mask) ^ sign) - sign for w in range(count)] for bits in sets]


def table_of(numbers: Sequence, device: torch.device | None) -> Tensor:
    """Whole numbers of the host; by way of NumPy, which takes half as long for nested lists."""
    table = torch.from_numpy(np.array(numbers, dtype=np.int64))
    return table if device is None else table.to(device)
