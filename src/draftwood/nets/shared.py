"""Checkpoints that are no files: layers with the words of a target, and bare tensors."""

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
        self.own, self.target = own, target

    def has(self, name: str) -> bool:
        """Whether it has it, or its target does."""
        return name in self.own or (name in SHARED and self.target.has(name))

    def tensor(self, name: str) -> Tensor:
        """Its own, or one of the words."""
        if name in SHARED:
            return self.target.tensor(name)
        if name not in self.own:
            raise CheckpointError(f"'{self.name}' has no tensor {name}.")
        return self.own[name]

    def matrix(self, name: str) -> Matrix:
        """Its own, or one of the words, as the target stores it."""
        return self.target.matrix(name) if name in SHARED else self.tensor(name)

    def forget(self) -> None:
        """Keep nothing in memory of the words."""
        self.target.forget()

    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self.target.tokenizer()


class BareTensors:
    """Tensors in memory, under the names of a language model; it has no texts, and words only if they are given."""

    def __init__(self, name: str, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self.name, self.config = name, config
        self._tensors = tensors

    def has(self, name: str) -> bool:
        """Whether it was given."""
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """As it was given."""
        return self._tensors[name]

    def matrix(self, name: str) -> Tensor:
        """As it was given."""
        return self._tensors[name]

    def forget(self) -> None:
        """They are the target's."""

    def tokenizer(self) -> Tokenizer:
        """There is none."""
        raise NotImplementedError("tensors have no texts")
