"""Networks that guess token by token from the target's features: EAGLE-1 / 2, EAGLE-3 / 3.1, multi-token prediction.

Row i reads token i and what is known of position i - 1: the target's own features where the target has been, the
network's last output where it has not. Its output is both the next row's feature and, through the head, the guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from draftwood.model.config import ModelConfig
from draftwood.nets.parts import Attend, DecoderLayer, Mlp, Norm, SelfAttention, VocabularyHead
from draftwood.ops.eagle3_input import PairNorms


class RecurrentNet(Protocol):
    """What the networks of this file are to those who run and train them."""

    config: ModelConfig  # of its own layers
    reads: tuple[int, ...]  # layers of the target whose outputs are its features, side by side
    normed: bool  # the last of them goes through the target's final norm first
    head: VocabularyHead

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features as this network takes them. [*, len(reads) * target hidden] -> [*, hidden]."""
        ...

    def run(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[*, hidden] each -> [*, hidden] what the next row takes as its features."""
        ...

    def logits(self, output: Tensor) -> Tensor:
        """Of the token after each row. [*, hidden] -> [*, R]."""
        ...


@dataclass(frozen=True)
class Eagle3Spec:
    """The conventions in which published EAGLE-3 checkpoints differ."""

    reads: tuple[int, ...]
    target_hidden: int
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False  # EAGLE-3.1: the next row takes the normed output
    fc_norm: bool = False  # EAGLE-3.1: a norm for each of the target's layers
    norm_before_fc: bool = False  # one norm over all of them


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads token and feature side by side."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.self_attn = SelfAttention(config, 2 * hidden)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = Mlp(config)

    @property
    def norms(self) -> PairNorms:
        """What stands before attention, for kernels that do as `inputs` does."""
        eps = self.hidden_norm.eps
        assert eps is not None, "given when it was made"
        return PairNorms(self.input_layernorm.weight, self.hidden_norm.weight, eps, self.norm_before_residual)

    def inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the stream begins with, and what attention reads. [*, hidden] each -> [*, hidden], [*, 2 * hidden]."""
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        return normed if self.norm_before_residual else features, both

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[*, hidden] each -> [*, hidden]."""
        residual, both = self.inputs(embedded, features)
        hidden = residual + self.self_attn(both, positions, 0, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(nn.Module):
    """EAGLE-3: features of several layers fused, one wide layer, a head of its own."""

    normed = False

    def __init__(self, config: ModelConfig, spec: Eagle3Spec, head: VocabularyHead) -> None:
        super().__init__()
        hidden, width = config.hidden_size, len(spec.reads) * spec.target_hidden
        self.config, self.spec, self.reads = config, spec, spec.reads
        self.fc = nn.Linear(width, hidden, bias=False)
        self.input_norm = Norm(width, config.norm_eps) if spec.norm_before_fc else None
        norms = [Norm(spec.target_hidden, config.norm_eps) for _ in spec.reads] if spec.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        first: list[nn.Module] = [Eagle3Layer(config, spec.norm_before_residual)]
        self.layers = nn.ModuleList(first + [DecoderLayer(config) for _ in range(config.num_layers - 1)])
        self.norm = Norm(hidden, config.norm_eps)
        self.lm_head = head
        self.head = head

    def fuse(self, features: Tensor) -> Tensor:
        """[*, len(reads) * target hidden] -> [*, hidden]."""
        return self.fc(self.unfused(features))

    def unfused(self, features: Tensor) -> Tensor:
        """As `fc` reads them. [*, len(reads) * target hidden] -> the same."""
        if len(self.fc_norm):
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return features if self.input_norm is None else self.input_norm(features)

    def run(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[*, hidden] each -> [*, hidden]."""
        hidden = self.layers[0](embedded, features, positions, attend)
        for i, layer in enumerate(self.layers[1:], 1):
            hidden = layer(hidden, positions, i, attend)
        return self.handed_on(hidden)

    @property
    def first(self) -> Eagle3Layer:
        """The layer that reads tokens and features."""
        return self.layers[0]  # type: ignore[return-value]

    def handed_on(self, hidden: Tensor) -> Tensor:
        """What the next row takes of the last layer's output. [*, hidden] -> [*, hidden]."""
        return self.norm(hidden) if self.spec.norm_output else hidden

    def logits(self, output: Tensor) -> Tensor:
        """[*, hidden] -> [*, R]."""
        return self.head(output if self.spec.norm_output else self.norm(output))


class Eagle1Layer(DecoderLayer):
    """Its first norm is missing: the fused input goes straight into attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        del self.input_layernorm

    def forward(self, hidden: Tensor, positions: Tensor, layer: int, attend: Attend) -> Tensor:
        """[*, hidden] -> [*, hidden]."""
        hidden = hidden + self.self_attn(hidden, positions, layer, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle1(nn.Module):
    """EAGLE-1 and 2: predicts the target's last feature, and lets the target's head read it."""

    normed = True

    def __init__(self, config: ModelConfig, last_layer: int, head: VocabularyHead, bias: bool) -> None:
        super().__init__()
        self.config, self.reads = config, (last_layer,)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        first: list[nn.Module] = [Eagle1Layer(config)]
        self.layers = nn.ModuleList(first + [DecoderLayer(config) for _ in range(config.num_layers - 1)])
        self.head = head

    def fuse(self, features: Tensor) -> Tensor:
        """They are what it predicts."""
        return features

    def run(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[*, hidden] each -> [*, hidden]."""
        hidden = self.fc(torch.cat([embedded, features], -1))
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, i, attend)
        return hidden

    def logits(self, output: Tensor) -> Tensor:
        """[*, hidden] -> [*, R]."""
        return self.head(output)


class MultiToken(nn.Module):
    """The layer that some targets are trained with to predict one token further (DeepSeek-V3, Qwen3-Next)."""

    normed = True

    def __init__(self, config: ModelConfig, last_layer: int, head: VocabularyHead) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.config, self.reads = config, (last_layer,)
        self.enorm = Norm(hidden, eps)
        self.hnorm = Norm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_layers)])
        self.norm = Norm(hidden, eps)
        self.head = head

    def fuse(self, features: Tensor) -> Tensor:
        """As they are."""
        return features

    def run(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[*, hidden] each -> [*, hidden]."""
        hidden = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(features)], -1))
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, i, attend)
        return self.norm(hidden)

    def logits(self, output: Tensor) -> Tensor:
        """[*, hidden] -> [*, R]."""
        return self.head(output)
