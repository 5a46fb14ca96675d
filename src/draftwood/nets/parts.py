"""What drafting networks are made of; parameters carry the names of published checkpoints.

Shapes: * any leading dimensions · H heads · K key heads · D head size · V vocabulary · R draft vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.model.config import ModelConfig
from draftwood.model.layers import ACTIVATIONS


class Attend(Protocol):
    """Attention as the network's user wants it; keys and values are new ones, to be seen from now on."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[*, H, D], [*, K, D], [*, K, D] -> [*, H * D]."""
        ...


class Rope(nn.Module):
    """Turns queries and keys; dimension i is paired with i + D / 2, as checkpoints have it."""

    frequencies: Tensor  # [D / 2]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        frequencies, self.scale = config.rope.inverse_frequencies(config.head_dim)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[*, heads, D], [*] -> [*, heads, D]."""
        angles = positions[..., None].float() * self.frequencies
        cosine = (angles.cos() * self.scale)[..., None, :]
        sine = (angles.sin() * self.scale)[..., None, :]
        low, high = x.float().chunk(2, -1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1).to(x.dtype)


class Norm(nn.RMSNorm):
    """RMSNorm in the numbers it is given: where autocast rounds them, its weight is rounded as a product's is."""

    def forward(self, x: Tensor) -> Tensor:
        """[*, hidden] -> [*, hidden]."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class SelfAttention(nn.Module):
    """Projections around an attention that the caller provides."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width, dim = width or config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(width, config.num_heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = Norm(dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(dim, config.norm_eps) if config.qk_norm else None
        self.rope = Rope(config)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[*, width], [*] -> [*, K, D] each."""
        key = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        key = key if self.k_norm is None else self.k_norm(key)
        return self.rope(key, positions), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, positions: Tensor, layer: int, attend: Attend) -> Tensor:
        """[*, width] -> [*, hidden]."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        query = self.rope(query if self.q_norm is None else self.q_norm(query), positions)
        return self.o_proj(attend(layer, query, *self.keys_values(x, positions)))


class Mlp(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.activate = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[*, hidden] -> [*, hidden]."""
        return self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """The usual layer, attention and then the mlp, each behind its norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, hidden: Tensor, positions: Tensor, layer: int, attend: Attend) -> Tensor:
        """[*, hidden] -> [*, hidden]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions, layer, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Module):
    """Logits of the tokens a draft may guess: all of them, or those listed in `tokens` (FR-Spec, EAGLE-3's d2t)."""

    tokens: Tensor | None  # [R] ascending
    rows: Tensor | None

    def __init__(
        self, weight: Tensor, tokens: Tensor | None, vocabulary: int, *, own: bool, bias: Tensor | None = None
    ) -> None:
        """`weight` [R, hidden] is a parameter where it is the network's own, and rows of the target's otherwise.

        A `bias` [R] (Hydra) is always its own.
        """
        super().__init__()
        self.vocabulary = vocabulary
        self.own = own
        self.weight = nn.Parameter(weight) if own else None
        self.bias = None if bias is None else nn.Parameter(bias)
        self.register_buffer("rows", None if own else weight, persistent=False)
        self.register_buffer("tokens", tokens, persistent=False)

    @property
    def size(self) -> int:
        """R."""
        return self.matrix.shape[0]

    @property
    def matrix(self) -> Tensor:
        """[R, hidden]."""
        matrix = self.rows if self.weight is None else self.weight
        assert matrix is not None
        return matrix

    def forward(self, hidden: Tensor) -> Tensor:
        """[*, hidden] -> [*, R]."""
        return F.linear(hidden, self.matrix, self.bias)

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary: what cannot be guessed has no chance. [*, R] -> [*, V]."""
        if self.tokens is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.vocabulary), float("-inf"))
        return wide.index_copy(-1, self.tokens, logits)

    def narrow(self, logits: Tensor) -> Tensor:
        """The part of the whole vocabulary's logits that can be guessed. [*, V] -> [*, R]."""
        return logits if self.tokens is None else logits.index_select(-1, self.tokens)

    def places(self, tokens: Tensor) -> Tensor:
        """Where tokens are among those that can be guessed, -1 if they are not. [*] -> [*]."""
        if self.tokens is None:
            return tokens
        place = torch.full((self.vocabulary,), -1, dtype=torch.int64, device=tokens.device)
        place[self.tokens] = torch.arange(len(self.tokens), device=tokens.device)
        return place[tokens]


class LowRankHead(nn.Module):
    """A draft head through a bottleneck, over the whole vocabulary (SlimSpec)."""

    tokens: Tensor | None = None

    def __init__(self, hidden: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(rank, vocabulary, bias=False)

    @property
    def size(self) -> int:
        """V."""
        return self.vocabulary

    @torch.no_grad()
    def start_from(self, weight: Tensor) -> None:
        """The best approximation of a full head [V, hidden] of this rank."""
        left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
        rank = self.down.weight.shape[0]
        root = values[:rank].sqrt()
        self.down.weight.copy_(root[:, None] * right[:rank])
        self.up.weight.copy_(left[:, :rank] * root)

    def forward(self, hidden: Tensor) -> Tensor:
        """[*, hidden] -> [*, V]."""
        return self.up(self.down(hidden))

    def spread(self, logits: Tensor) -> Tensor:
        """It guesses everything."""
        return logits

    def narrow(self, logits: Tensor) -> Tensor:
        """It guesses everything."""
        return logits

    def places(self, tokens: Tensor) -> Tensor:
        """It guesses everything."""
        return tokens


class NormedHead(nn.Module):
    """A head behind a norm, for networks whose outputs must stay un-normed until then."""

    def __init__(self, norm: nn.Module, head: VocabularyHead) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    @property
    def tokens(self) -> Tensor | None:
        """The inner head's."""
        return self.head.tokens

    @property
    def vocabulary(self) -> int:
        """The inner head's."""
        return self.head.vocabulary

    @property
    def size(self) -> int:
        """R."""
        return self.head.size

    def forward(self, hidden: Tensor) -> Tensor:
        """[*, hidden] -> [*, R]."""
        return self.head(self.norm(hidden))

    def spread(self, logits: Tensor) -> Tensor:
        """[*, R] -> [*, V]."""
        return self.head.spread(logits)

    def narrow(self, logits: Tensor) -> Tensor:
        """[*, V] -> [*, R]."""
        return self.head.narrow(logits)

    def places(self, tokens: Tensor) -> Tensor:
        """[*] -> [*]."""
        return self.head.places(tokens)


class VocabularyHead(Protocol):
    """What a network may end with."""

    @property
    def tokens(self) -> Tensor | None:
        """[R] the target's tokens, in order; None: all."""
        ...

    @property
    def vocabulary(self) -> int:
        """V."""
        ...

    @property
    def size(self) -> int:
        """R."""
        ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """[*, hidden] -> [*, R]."""
        ...

    def spread(self, logits: Tensor) -> Tensor:
        """[*, R] -> [*, V]."""
        ...

    def narrow(self, logits: Tensor) -> Tensor:
        """[*, V] -> [*, R]."""
        ...

    def places(self, tokens: Tensor) -> Tensor:
        """[*] -> [*]."""
        ...
