"""A small language model of the target's width and vocabulary, whose words are the target's own (DistillSpec)."""

from __future__ import annotations

from torch import Tensor, nn

from draftwood.model.config import ModelConfig
from draftwood.nets.parts import Attend, DecoderLayer, Norm


class Student(nn.Module):
    """Decoder layers between the target's embedding and its head; parameters are named as in any Llama checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_layers)])
        self.model.norm = Norm(config.hidden_size, config.norm_eps)

    def run(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the head reads. [*, hidden], [*] -> [*, hidden]."""
        hidden = embedded
        for i, layer in enumerate(self.model.layers):  # type: ignore[arg-type]
            hidden = layer(hidden, positions, i, attend)
        return self.model.norm(hidden)  # type: ignore[operator]


class MaskedStudent(Student):
    """One that guesses several tokens at once: behind a text and masks, what stands after each (PARD).

    The mask is a token of the target's that texts do not have, and as all words it stays what it is: the layers learn
    what it stands for.
    """

    def __init__(self, config: ModelConfig, mask_token: int, guesses: int) -> None:
        super().__init__(config)
        self.mask_token, self.guesses = mask_token, guesses
