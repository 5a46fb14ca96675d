"""What requests ask of their rows of the batch state: settings, and tables of what is done to their logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.protocols import LogitEdits
from draftwood.request import SamplingParams

NO_EDITS = (1.0, 0.0, 0.0)  # repetition, presence and frequency penalty
BIASES, STOPS = 1024, 128  # of one request that tables have room for: as many as the server takes. More move them


@dataclass(frozen=True)
class RowSettings:
    """What a sequence's row holds besides its tokens."""

    params: SamplingParams
    seed: int
    prompt_length: int
    max_length: int  # tokens of prompt and answer together
    max_depth: int  # draft tokens one behind the other
    stop_ids: frozenset[int] = frozenset()  # that its `min_tokens` defers
    adapter: int = -1  # of the target; -1: none
    source_length: int = 0  # first tokens that an encoder reads
    turn_shift: int = 0  # what images add to the positions of the tokens behind them, for rotation

    @property
    def edits(self) -> bool:
        """Whether its logits are edited on the device."""
        return edits_on_device(self.params)


def edits_on_device(params: SamplingParams) -> bool:
    """Whether a request has biases, penalties or a minimum length; grammars and bad words are masks of the host."""
    return bool(params.logit_bias or params.min_tokens) or params.penalises


class EditTables:
    """Logit edits of every row, as wide as the widest request so far."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self.bias_tokens, self.bias = self._room(BIASES, torch.int64), self._room(BIASES, torch.float64)
        self.stop_tokens = self._room(STOPS, torch.int64)
        self.penalties = torch.tensor([NO_EDITS] * rows, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(rows, 3, dtype=torch.int64, device=device)  # minimum, of the prompt, of the source
        self.version = 0  # changes when a table moves: captured steps know addresses
        self._dirty: set[int] = set()

    def _room(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._rows, width, dtype=dtype, device=self._device)

    def write(self, row: int, settings: RowSettings) -> None:
        """The edits of a new occupant; clears those of the one before."""
        if not settings.edits and row not in self._dirty:
            return
        params, stops = settings.params, sorted(settings.stop_ids)
        self._widen(len(params.logit_bias), len(stops))
        for table, values in (
            (self.bias_tokens, list(params.logit_bias)),
            (self.bias, list(params.logit_bias.values())),
            (self.stop_tokens, stops + stops[:1] * (self.stop_tokens.shape[1] - len(stops))),
            (self.penalties, [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]),
            (self.lengths, _bounds(settings, deferring=bool(stops))),
        ):
            table[row] = 0
            table[row, : len(values)] = torch.tensor(values, dtype=table.dtype)
        (self._dirty.add if settings.edits else self._dirty.discard)(row)

    def view(self, which: Tensor, rows: Tensor, lengths: Tensor, history: Tensor) -> LogitEdits:
        """The edits of the sequences `which` [E] of a step, whose sequences have these rows and lengths [B]."""
        rows, lengths = rows[which], lengths[which]
        min_lengths, prompt_lengths, source_lengths = self.lengths[rows].unbind(1)
        return LogitEdits(
            which=which,
            bias_tokens=self.bias_tokens[rows],
            bias=self.bias[rows],
            penalties=self.penalties[rows],
            stop_tokens=self.stop_tokens[rows],
            min_lengths=min_lengths,
            source_lengths=source_lengths,
            prompt_lengths=prompt_lengths,
            lengths=lengths,
            history=history[rows],
        )

    def _widen(self, biases: int, stops: int) -> None:
        if biases > self.bias.shape[1]:
            extra = max(biases, 2 * self.bias.shape[1]) - self.bias.shape[1]
            self.bias_tokens = torch.nn.functional.pad(self.bias_tokens, (0, extra))
            self.bias = torch.nn.functional.pad(self.bias, (0, extra))
            self.version += 1
        if stops > self.stop_tokens.shape[1]:
            more = self.stop_tokens[:, :1].expand(-1, stops - self.stop_tokens.shape[1])
            self.stop_tokens = torch.cat([self.stop_tokens, more], 1)
            self.version += 1


def _bounds(settings: RowSettings, *, deferring: bool) -> list[int]:
    shortest = settings.prompt_length + settings.params.min_tokens if deferring else 0
    return [shortest, settings.prompt_length, settings.source_length]
