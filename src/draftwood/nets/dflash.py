"""Networks that guess a whole block in one pass: DFlash's backbone, and what corrects its slots for each other.

The block is the last committed token and masks. Its rows see the target's features of everything before them, each
layer through its own keys and values, and all of each other. Slot j guesses the token after position j of the block;
the slots do not know what was chosen for the others, so a `Corrector` adds what the token before says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from draftwood.model.config import ModelConfig
from draftwood.nets.parts import Attend, DecoderLayer, Norm, NormedHead, VocabularyHead


@dataclass(frozen=True)
class BlockSpec:
    """The conventions in which published block drafters differ."""

    reads: tuple[int, ...]
    target_hidden: int
    block_size: int  # rows of a block, the last committed token's among them
    mask_token: int | None  # the target's token that stands for what is to be guessed; None: `mask_embedding`
    from_anchor: bool = True  # the first row guesses too (DSpark); otherwise it is only read (DFlash)
    norm_in_head: bool = False  # TreeFlash: outputs stay un-normed, since its corrector adds to them before the norm

    @property
    def guesses(self) -> int:
        """Tokens of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1


class Corrector(Protocol):
    """Makes a slot's guess depend on the token before it."""

    def __call__(self, hidden: Tensor, base: Tensor, before: Tensor, embedded: Tensor) -> Tensor:
        """Logits of slots with outputs `hidden` [*, hidden] and logits `base` [*, R] after the tokens `before` [*],
        `embedded` [*, hidden] by the target. [*, R].
        """
        ...


class Markov(nn.Module):
    """DSpark: a table of low rank says which tokens follow which."""

    def __init__(self, vocabulary: int, size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor, embedded: Tensor) -> Tensor:
        """[*, R]."""
        return base + self.markov_w2(self.markov_w1(before))


class HiddenCorrection(nn.Module):
    """TreeFlash: the token before changes the slot's output, and the head reads that again.

    Published TreeFlash has no norm of its own for the output, but the backbone's last one (`backbone_norm`), and biases
    where it goes in.
    """

    def __init__(
        self, config: ModelConfig, head: VocabularyHead, inner: int, *, backbone_norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        hidden, published = config.hidden_size, backbone_norm is not None
        self.embed_norm = Norm(hidden, 1e-6 if published else config.norm_eps)
        own = Norm(hidden, config.norm_eps)
        self.hidden_norm = None if published else own
        self.gate_proj = nn.Linear(2 * hidden, inner, bias=published)
        self.up_proj = nn.Linear(2 * hidden, inner, bias=published)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        nn.init.zeros_(self.down_proj.weight)
        self._head = [head]  # the backbone's, not a part of this one
        self._norm = [own if backbone_norm is None else backbone_norm]  # likewise

    def forward(self, hidden: Tensor, base: Tensor, before: Tensor, embedded: Tensor) -> Tensor:
        """[*, R]."""
        both = torch.cat([self.embed_norm(embedded), self._norm[0](hidden)], -1)
        inner = torch.nn.functional.silu(self.gate_proj(both)) * self.up_proj(both)
        return self._head[0](hidden + self.down_proj(inner))


class Independent:
    """DFlash itself: slots stay as they are."""

    def __call__(self, hidden: Tensor, base: Tensor, before: Tensor, embedded: Tensor) -> Tensor:
        """[*, R]."""
        return base


class Confidence(nn.Module):
    """DSpark: how likely a slot's guess will be accepted, by its output and the token before, never by the guess."""

    def __init__(self, hidden: int, table: Markov | None = None) -> None:
        super().__init__()
        self._table = [table]  # the corrector's, not a part of this one
        self.proj = nn.Linear(hidden + (table.markov_w1.embedding_dim if table else 0), 1)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Log-odds. [*, hidden], [*] -> [*]."""
        table = self._table[0]
        known = hidden if table is None else torch.cat([hidden, table.markov_w1(before)], -1)
        return self.proj(known).squeeze(-1)


class BlockNet(nn.Module):
    """The backbone, its head and its corrector."""

    def __init__(
        self,
        config: ModelConfig,
        spec: BlockSpec,
        head: VocabularyHead,
        corrector: Corrector | None = None,
        confidence: Confidence | None = None,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.config, self.spec, self.reads = config, spec, spec.reads
        self.fc = nn.Linear(len(spec.reads) * spec.target_hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_layers)])
        self.norm = Norm(hidden, eps)
        self.mask_embedding = None if spec.mask_token is not None else nn.Parameter(torch.zeros(hidden))
        self.head = NormedHead(self.norm, head) if spec.norm_in_head else head
        self.markov_head = corrector or Independent()
        self.confidence_head = confidence

    def context(self, features: Tensor) -> Tensor:
        """What the layers see of the target. [*, len(reads) * target hidden] -> [*, hidden]."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, layer: int, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of the target's positions, once and for all. [*, hidden], [*] -> [*, K, D] each."""
        return self.layers[layer].self_attn.keys_values(context, positions)  # type: ignore[union-attr]

    def run(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs of a block's rows, as its head takes them. [*, hidden], [*] -> [*, hidden]."""
        hidden = embedded
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, i, attend)
        return hidden if self.spec.norm_in_head else self.norm(hidden)

    def corrected(self, output: Tensor, base: Tensor, before: Tensor, embedded: Tensor) -> Tensor:
        """Logits of slots once the token before each is known. [*, R]."""
        return self.markov_head(output, base, before, embedded)
