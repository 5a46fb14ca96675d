"""What a drafter shares with its target: embedding, final norm and rows of the head, read from the same checkpoint."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from draftwood.model.checkpoint import Checkpoint
from draftwood.model.weights import Matrix, as_numbers


class TargetEmbeddings:
    """The target's own words. Quantised matrices stay so, and only the rows that are asked for become numbers."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config = checkpoint.config
        self.device, self.dtype = device, dtype
        self._embedding = self._moved(checkpoint.matrix("model.embed_tokens.weight"))
        self._head = self._embedding if config.tied_head else checkpoint.matrix("lm_head.weight")
        self._norm = checkpoint.tensor("model.norm.weight").to(device, dtype)

    def to(self, dtype: torch.dtype) -> TargetEmbeddings:
        """The same words as numbers of another kind; in memory they are the same."""
        words = copy.copy(self)
        words.dtype = dtype
        return words

    def with_embedding(self, matrix: Tensor) -> TargetEmbeddings:
        """The same words read through another embedding [V, hidden]."""
        words = copy.copy(self)
        words._embedding = matrix
        return words

    @property
    def table(self) -> Tensor | None:
        """The embedding as numbers of some kind, where that is how it is kept. [V, hidden]."""
        return self._embedding if isinstance(self._embedding, Tensor) else None

    def embed(self, tokens: Tensor) -> Tensor:
        """[*] -> [*, hidden]."""
        return self._rows(self._embedding, tokens.reshape(-1)).view(*tokens.shape, self.config.hidden_size)

    def head(self, tokens: Tensor | None = None) -> Tensor:
        """The output head, or some of its rows. [R, hidden]."""
        matrix = self._head
        place = matrix.device if isinstance(matrix, Tensor) else matrix.codes.device
        every = torch.arange(self.config.vocab_size, device=place)
        return self._rows(matrix, every if tokens is None else tokens.to(place)).to(self.device)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """What the head reads. [*, hidden] -> [*, hidden]."""
        return torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], self._norm.to(hidden.dtype), self.config.norm_eps
        )

    def _rows(self, matrix: Matrix, rows: Tensor) -> Tensor:
        return as_numbers(matrix[rows])[:, : self.config.hidden_size].to(self.dtype)

    def _moved(self, matrix: Matrix) -> Matrix:
        """On a CPU as it is stored; elsewhere memory is cheaper than the many small steps of making numbers of it."""
        if self.device.type == "cpu":
            return matrix
        return as_numbers(matrix)[:, : self.config.hidden_size].to(self.device, self.dtype).contiguous()
