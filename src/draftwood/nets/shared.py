"""A checkpoint that lacks what it shares with its target: the words are the target's own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from draftwood.errors import CheckpointError
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.tokenizer import Tokenizer
from draftwood.model.weights import Matrix

SHARED = ("model.embed_tokens.weight", "lm_head.weight")


class SharedWords:
    """Layers of its own between the embedding and the head of a target."""

    def __init__(self, name: str, config: ModelConfig, own: Mapping[str, Tensor], target: Checkpoint) -> None:
        self.name, self.config = name, config
        self._own, self._target = own, target

    def has(self, name: str) -> bool:
        """Whether it has it, or its target does."""
        return name in self._own or (name in SHARED and self._target.has(name))

    def tensor(self, name: str) -> Tensor:
        """Its own, or one of the words."""
        if name in SHARED:
            return self._target.tensor(name)
        if name not in self._own:
            raise CheckpointError(f"'{self.name}' has no tensor {name}.")
        return self._own[name]

    def matrix(self, name: str) -> Matrix:
        """Its own, or one of the words, as the target stores it."""
        return self._target.matrix(name) if name in SHARED else self.tensor(name)

    def forget(self) -> None:
        """Keep nothing in memory of the words."""
        self._target.forget()

    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self._target.tokenizer()
