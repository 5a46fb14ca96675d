"""Pipeline parallelism as a checkpoint: a rank's layers, by the names of a model that has no others.

The first stage has the embedding, the last one the head; rows of the residual stream go from each stage to the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.errors import InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.names import EMBEDDING, HEAD, layer_shapes
from draftwood.model.tokenizer import Tokenizer
from draftwood.model.universal_folder import UniversalConfig
from draftwood.model.weights import Matrix
from draftwood.protocols import LOGITS
from draftwood.ranks import ProcessRanks

if TYPE_CHECKING:
    from draftwood.model.runner import Sliceable

_LAYER = "model.layers."


class StageCheckpoint:
    """One stage's part of another checkpoint; `config` describes that part."""

    def __init__(self, whole: Checkpoint, ranks: ProcessRanks) -> None:
        self.name = whole.name
        self.ranks = ranks
        self.stages = stages_of(whole.config, ranks.size)
        self.layers = self.stages[ranks.rank]
        self.config = replace(whole.config.part(self.layers), tied_head=True)
        self._whole = whole

    def has(self, name: str) -> bool:
        """Whether the stage has it."""
        return name != f"{HEAD}.weight" and self._whole.has(self._there(name))

    def tensor(self, name: str) -> Tensor:
        """One tensor of the stage."""
        return self._whole.tensor(self._there(name))

    def matrix(self, name: str) -> Matrix:
        """One matrix of the stage; of words, one between the first and the last needs none."""
        value, between = self._whole.matrix(self._there(name)), 0 < self.ranks.rank < self.ranks.size - 1
        return value[:1] if between and name == f"{EMBEDDING}.weight" else value

    def _there(self, name: str) -> str:
        """What the whole checkpoint calls it. A stage has one matrix of words: the embedding, or the head."""
        if name.startswith(_LAYER):
            number, _, rest = name.removeprefix(_LAYER).partition(".")
            return f"{_LAYER}{self.layers[int(number)]}.{rest}"
        is_head = name == f"{EMBEDDING}.weight" and self.ranks.rank and not self._whole.config.tied_head
        return f"{HEAD}.weight" if is_head else name

    def forget(self) -> None:
        """Keep nothing in memory of what was read so far."""
        self._whole.forget()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the weights."""
        return self._whole.tokenizer()


def stages_of(config: ModelConfig, size: int) -> list[range]:
    """The layers of each stage, such that none has much more to read than another; the last one reads the head too."""
    for reason in _obstacles(config, size):
        raise InvalidRequest(f"This model cannot run in {size} stages: {reason}. Leave pp at 1.")
    each = [sum(math.prod(shape) for _, shape in layer_shapes(config, layer)) for layer in config.layer_specs]
    total, before = sum(each) + config.vocab_size * config.hidden_size, [0, *itertools.accumulate(each)]
    begins = [0]
    for stage in range(1, size):
        least, most = begins[-1] + 1, config.num_layers - (size - stage)
        begins.append(min(range(least, most + 1), key=lambda i: abs(before[i] - total * stage / size)))
    return [range(begin, end) for begin, end in itertools.pairwise([*begins, config.num_layers])]


def _obstacles(config: ModelConfig, size: int) -> Iterator[str]:
    if isinstance(config, UniversalConfig) or config.encoder is not None or config.recurrent:
        yield "only our own decoders can, without an encoder or recurrent layers"
    if config.num_layers < size:
        yield f"it has {config.num_layers} layers"


@dataclass(frozen=True)
class Begun:
    """A forward of which this stage has done its part."""

    stage: StageModel
    needs: frozenset[int]
    number: int  # of the forward
    own: ForwardOutput  # logits on the last stage alone; of features those that lie here

    def tell(self, tensors: Sequence[Tensor]) -> None:
        """Let the other stages know what came of it."""
        self.stage.ranks.tell(tensors, self.number)

    def told(self) -> list[Tensor]:
        """What the last stage says came of it."""
        return self.stage.ranks.told(self.stage.ranks.size - 1, self.number)

    def whole(self) -> ForwardOutput:
        """With what was needed of other stages, once it is there."""
        found, ranks = dict(self.own.features), self.stage.ranks
        for other in range(ranks.size):
            theirs = sorted(layer for layer in self.needs if self.stage.owners[layer] == other)
            if theirs and other != ranks.rank:
                rows = (part.to(self.stage.device) for part in ranks.told(other, self.number))
                found |= dict(zip(theirs, rows, strict=True))
        logits = found.pop(LOGITS, self.own.logits)
        return ForwardOutput(logits, found)


class StageModel:
    """A stage as a model: every stage runs the same forwards in the same order."""

    def __init__(self, part: Sliceable, checkpoint: StageCheckpoint) -> None:
        self._part, self.config = part, part.config
        self.ranks, self._layers = checkpoint.ranks, checkpoint.layers
        self.owners = _owners(checkpoint)
        self._numbers = itertools.count()
        self.dtype, self.device, self.weights = part.dtype, part.device, part.weights
        self.implementation, self.strict = part.implementation, part.strict

    @property
    def num_bytes(self) -> int:
        """Memory of the stage's weights."""
        return self._part.num_bytes

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.ranks.rank == self.ranks.size - 1

    def forward(self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset()) -> ForwardOutput:
        """What all stages make of the rows; nothing is waited for where that is keys and values alone."""
        return self.begin(batch, cache, needs | ({LOGITS} if len(batch.logit_rows) else set())).whole()

    def begin(self, batch: ForwardBatch, cache: Pages, needs: frozenset[int]) -> Begun:
        """Run the rows through this stage; features that are needed, and logits if `LOGITS` is, go to all others."""
        rank, config = self.ranks.rank, self.config
        given = None
        if rank:
            rows = torch.empty(len(batch.tokens), config.hidden_size, dtype=self.dtype, device=self.device)
            given = GivenRows(self.ranks.receive(rows, rank - 1))
        passed = frozenset([] if self.is_last else [len(self._layers) - 1])
        here = frozenset(layer - self._layers.start for layer in needs if layer in self._layers)
        out = self._part.forward(batch if self.is_last else _without_logits(batch), cache, passed | here, given)
        for layer in passed:
            self.ranks.post(out.features[layer].contiguous(), rank + 1)
        features = {layer: out.features[layer - self._layers.start] for layer in needs if layer in self._layers}
        begun = Begun(self, needs, next(self._numbers), ForwardOutput(out.logits, features))
        found = features | ({LOGITS: out.logits} if self.is_last else {})
        if told := [found[layer] for layer in sorted(needs & found.keys())]:
            begun.tell(told)
        return begun


def _owners(checkpoint: StageCheckpoint) -> dict[int, int]:
    """The stage of each layer, and of the logits."""
    stages = checkpoint.stages
    owners = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    return owners | {LOGITS: len(stages) - 1}


def _without_logits(batch: ForwardBatch) -> ForwardBatch:
    parts = tuple(_without_logits(part) for part in batch.parts)
    return replace(batch, logit_rows=batch.logit_rows[:0], logits_in_order=False, parts=parts)
