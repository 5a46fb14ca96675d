"""EAGLE-3 that guesses several tokens in one pass (P-EAGLE): rows behind the text read a mask for their token, and for
their feature one that was learnt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwood.model.config import ModelConfig
from draftwood.nets.eagle import Eagle3, Eagle3Spec
from draftwood.nets.parts import VocabularyHead


@dataclass(frozen=True)
class Ahead:
    """How it looks ahead."""

    mask_token: int  # whose embedding stands for a token that is not known
    guesses: int  # tokens of a pass


class ParallelEagle(Eagle3):
    """The same rows as EAGLE-3's as far as the target has been; what lies behind is not fed back, but masked.

    Published ones bring an embedding of their own, which was trained with them.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: Eagle3Spec,
        head: VocabularyHead,
        ahead: Ahead,
        embedding: Tensor | None = None,
    ) -> None:
        super().__init__(config, spec, head)
        self.ahead = ahead
        self.mask_hidden = nn.Parameter(torch.randn(len(spec.reads) * spec.target_hidden))
        self.embed_tokens = None if embedding is None else nn.Embedding.from_pretrained(embedding, freeze=False)
