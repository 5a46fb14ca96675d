"""An early exit from the target: an adapter on the output of its first layers, and its own head (Kangaroo).

The draft model is the target's own first layers with this behind them, so the network is small, and what it adds to
them is one attention: no mlp, as published.
"""

from __future__ import annotations

from torch import Tensor, nn

from draftwood.model.config import ModelConfig
from draftwood.nets.parts import Attend, Norm, SelfAttention, VocabularyHead


class AttentionLayer(nn.Module):
    """Half of a decoder layer: attention behind its norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config)

    def forward(self, hidden: Tensor, positions: Tensor, layer: int, attend: Attend) -> Tensor:
        """[*, hidden] -> [*, hidden]."""
        return hidden + self.self_attn(self.input_layernorm(hidden), positions, layer, attend)


class Kangaroo(nn.Module):
    """Row i reads what the target's first `exit_layer` layers made of token i, and guesses token i + 1."""

    def __init__(self, config: ModelConfig, exit_layer: int, head: VocabularyHead) -> None:
        super().__init__()
        self.config, self.exit_layer, self.reads = config, exit_layer, (exit_layer - 1,)
        self.layers = nn.ModuleList([AttentionLayer(config) for _ in range(config.num_layers)])
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.head = head

    def run(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the head reads. [*, hidden], [*] -> [*, hidden]."""
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, i, attend)
        return self.norm(hidden)
