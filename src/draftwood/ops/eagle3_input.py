"""What a layer reads that takes a token and a feature side by side (EAGLE-3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PairNorms:
    """The norms of a token's embedding and of a feature, each root-mean-square over `hidden` numbers."""

    token: Tensor  # [hidden]
    feature: Tensor  # [hidden]
    eps: float
    before_residual: bool  # the stream begins with the normed feature


def side_by_side(
    table: Tensor, tokens: Tensor, features: Tensor, rows: Tensor, norms: PairNorms
) -> tuple[Tensor, Tensor]:
    """What the stream begins with and what attention reads, for tokens [N] of an embedding `table` [V, hidden] and rows
    `rows` [N] of `features` [M, hidden]. [N, hidden], [N, 2 * hidden].
    """
    if tokens.is_cuda:
        from draftwood.ops.cuda.eagle3_input import side_by_side as launch

        return launch(table, tokens, features, rows, norms)
    feature = features[rows]
    embedded, shape = table[tokens].to(feature.dtype), feature.shape[-1:]
    normed = F.rms_norm(feature, shape, norms.feature, norms.eps)
    wide = torch.cat([F.rms_norm(embedded, shape, norms.token, norms.eps), normed], -1)
    return normed if norms.before_residual else feature, wide
