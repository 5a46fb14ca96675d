"""What a drafter shares with its target: embedding, final norm and rows of the head, read from the same checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.model.checkpoint import Checkpoint
from draftwood.model.weights import Matrix, Quantised, as_numbers


class TargetWords:
    """The target's own words. Quantised matrices stay so, and only the rows that are asked for become numbers."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config = checkpoint.config
        self.device, self.dtype = device, dtype
        self._embedding = _moved(checkpoint.matrix("model.embed_tokens.weight"), device)
        name = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
        self._head = self._embedding if config.tied_head else _moved(checkpoint.matrix(name), device)
        self._norm = checkpoint.tensor("model.norm.weight").to(device, dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """[*] -> [*, hidden]."""
        return self._rows(self._embedding, tokens.reshape(-1)).view(*tokens.shape, self.config.hidden_size)

    def head(self, tokens: Tensor | None = None) -> Tensor:
        """The output head, or some of its rows. [R, hidden]."""
        every = torch.arange(self.config.vocab_size, device=self.device)
        return self._rows(self._head, every if tokens is None else tokens.to(self.device))

    def final_norm(self, hidden: Tensor) -> Tensor:
        """What the head reads. [*, hidden] -> [*, hidden]."""
        return torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], self._norm.to(hidden.dtype), self.config.norm_eps
        )

    def _rows(self, matrix: Matrix, rows: Tensor) -> Tensor:
        return as_numbers(matrix[rows])[:, : self.config.hidden_size].to(self.dtype)


def _moved(matrix: Matrix, device: torch.device) -> Matrix:
    if isinstance(matrix, Quantised):
        return matrix.each(lambda part: part.to(device))
    return matrix.to(device)
