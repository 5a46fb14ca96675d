"""What the device knows of the running sequences, so that a step needs nothing from the host but which of them run.

A sequence whose prompt is prefilled gets a row: its tokens, length, sampling settings, logit edits and block table.
Every step advances the rows by the tokens it gained. The host follows one step behind, or, on a CPU, at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.cache.row_settings import EditTables, RowSettings
from draftwood.protocols import BatchView, StepMode, Truncation
from draftwood.tree import TokenTree, Verdict

NUM_FACTS = 4  # numbers of an outcome before its tokens


@dataclass(frozen=True)
class StepInputs:
    """What the host tells a step, in one piece: a captured step reads it where it was written before the launch."""

    flat: Tensor  # [4 B + E + Q] int64, of which the others are parts
    sequences: Tensor  # [4, B] row, draft nodes that have room, index of the law, index of the drafter
    edited: Tensor  # [E] sequences of the batch whose logits are edited, padded with any
    scored: Tensor  # [Q] sequences that ask for log-probabilities, padded with any

    @classmethod
    def over(cls, flat: Tensor, batch: int, edited: int) -> StepInputs:
        """The parts of `flat`."""
        sequences, lists = flat[: 4 * batch].view(4, batch), flat[4 * batch :]
        return cls(flat, sequences, lists[:edited], lists[edited:])


def input_numbers(
    sequences: Sequence[tuple[int, int, int, int]],
    edited: Sequence[int],
    scored: Sequence[int],
    room: tuple[int, int, int],
    padding_row: int,
) -> list[int]:
    """The numbers of `StepInputs` for a step with `room` for so many sequences, edited and scored ones."""
    batch, most_edited, most_scored = room
    padded = [*sequences, *[(padding_row, 0, 0, 0)] * (batch - len(sequences))]
    columns = [number for column in zip(*padded, strict=True) for number in column]
    return [*columns, *_filled(edited, most_edited), *_filled(scored, most_scored)]


def _filled(numbers: Sequence[int], count: int) -> list[int]:
    return [*numbers, *[numbers[0] if numbers else 0] * (count - len(numbers))]


@lru_cache(maxsize=1024)
def salt_number(salt: str) -> int:
    """A number for a salt, such that no two salts have the same one; at least 0."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little") >> 2


class BatchState:
    """Device state of `capacity` sequences, and a padding row for batches that are not full."""

    def __init__(
        self,
        capacity: int,
        max_length: int,
        page_size: int,
        scratch_page: int,
        device: torch.device,
        *,
        has_sources: bool = False,
        has_turns: bool = False,
        scratch_state: int | None = None,
    ) -> None:
        rows, pages = capacity + 1, -(-max_length // page_size)
        self.device = device
        self.capacity = capacity
        self.padding_row = capacity
        self.history = torch.zeros(rows, max_length, dtype=torch.int64, device=device)
        self.length = torch.ones(rows, dtype=torch.int64, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_table = torch.full((rows, pages), scratch_page, dtype=torch.int64, device=device)
        self.sampling = torch.ones(rows, 4, dtype=torch.float64, device=device)  # temperature, top k, top p, min p
        self.limits = torch.zeros(rows, 2, dtype=torch.int64, device=device)  # longest text, deepest tree
        self.salt = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.adapter = torch.full((rows,), -1, dtype=torch.int64, device=device)
        # First tokens that an encoder reads; None: there is no encoder.
        self.source_length = torch.zeros(rows, dtype=torch.int64, device=device) if has_sources else None
        # What is added to positions for rotation; None: images have no rows and columns.
        self.turn_shift = torch.zeros(rows, dtype=torch.int64, device=device) if has_turns else None
        self.edits = EditTables(rows, device)
        kept = scratch_state is not None  # the model has recurrent layers
        self.states = torch.full((rows,), scratch_state, dtype=torch.int64, device=device) if kept else None
        self._scratch_page = scratch_page
        self._free = list(range(capacity))[::-1]
        self._row_of: dict[int, int] = {}
        self._pages: dict[int, list[int]] = {}  # row -> pages in its block table

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._row_of

    @property
    def sequences(self) -> set[int]:
        """Sequences that have a row."""
        return set(self._row_of)

    def add(self, seq_id: int, tokens: Sequence[int], settings: RowSettings, state: int | None = None) -> None:
        """Give a prefilled sequence a row; `state`: where its state lies, if it has one."""
        row, params = self._free.pop(), settings.params
        self._row_of[seq_id] = row
        self._pages[row] = []
        self.block_table[row] = self._scratch_page  # clear the previous occupant's block table
        self.history[row, : len(tokens)] = self._upload(tokens)
        salt = salt_number(params.cache_salt)
        numbers = [len(tokens), settings.seed, salt, settings.adapter, settings.max_length, settings.max_depth]
        numbers = self._upload(numbers)
        self.length[row], self.seed[row], self.salt[row], self.adapter[row] = numbers[:4]
        self.limits[row] = numbers[4:]
        if self.source_length is not None:
            self.source_length[row] = settings.source_length
        if self.turn_shift is not None:
            self.turn_shift[row] = settings.turn_shift
        self.sampling[row] = self._upload((params.temperature, *Truncation.limits(params)), torch.float64)
        self.edits.write(row, settings)
        if self.states is not None and state is not None:
            self.states[row] = state

    def remove(self, seq_id: int) -> None:
        """Free a sequence's row; one that has none is fine."""
        row = self._row_of.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    def update_block_tables(self, pages: Mapping[int, list[int]]) -> None:
        """Upload the block tables that have changed: pages were appended, or the last ones exchanged for others."""
        news = {self._row_of[seq_id]: own for seq_id, own in pages.items()}
        news = {row: own for row, own in news.items() if own != self._pages[row]}
        if not news:
            return
        width = max(max(len(own), len(self._pages[row])) for row, own in news.items())
        table = [[*own, *[self._scratch_page] * (width - len(own))] for own in news.values()]
        packed = self._upload([[row, *own] for row, own in zip(news, table, strict=True)])
        self.block_table[packed[:, 0], :width] = packed[:, 1:]
        self._pages.update({row: list(own) for row, own in news.items()})

    @property
    def num_pages(self) -> int:
        """Width of the block table."""
        return self.block_table.shape[1]

    def most_pages(self, seq_ids: Sequence[int]) -> int:
        """Pages of the longest of these sequences."""
        return max(len(self._pages[self._row_of[seq_id]]) for seq_id in seq_ids)

    def rows(self, seq_ids: Sequence[int]) -> list[int]:
        """The rows of sequences."""
        return [self._row_of[seq_id] for seq_id in seq_ids]

    def view(self, inputs: StepInputs, mode: StepMode, pages: int) -> BatchView:
        """The view of a step, with at most `pages` pages for each sequence."""
        rows, max_nodes, law, drafter = inputs.sequences.unbind(0)
        integers, numbers, temperature, table = self._gathered(rows, pages)
        lengths, seeds, roots, top_k = integers.unbind(0)
        limited = mode.limited
        return BatchView(
            lengths=lengths,
            seeds=seeds,
            roots=roots,
            temperature=temperature,
            rows=rows,
            history=self.history,
            block_table=table,
            states=None if self.states is None else self.states[rows],
            salts=self.salt,
            mode=mode,
            truncation=Truncation(top_k, *numbers.unbind(0)) if mode.truncates else None,
            max_nodes=max_nodes if limited else None,
            max_depth=self._max_depth(rows, lengths) if limited else None,
            law=law if len(mode.laws) > 1 else None,
            drafter=drafter if len(mode.drafters) > 1 else None,
            adapters=self.adapter[rows] if mode.adapted else None,
            edits=self.edits.view(inputs.edited, rows, lengths, self.history) if len(inputs.edited) else None,
            source_lengths=None if self.source_length is None else self.source_length[rows],
            turn_shifts=None if self.turn_shift is None else self.turn_shift[rows],
        )

    def _max_depth(self, rows: Tensor, lengths: Tensor) -> Tensor:
        longest, deepest = self.limits[rows].unbind(1)
        return torch.minimum(longest - lengths - 1, deepest).clamp(min=0)

    def _gathered(self, rows: Tensor, pages: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Length, seed, last token and top k [4, B]; top p and min p [2, B]; temperature [B]; pages [B, P]."""
        table = self.block_table[:, :pages]
        parts = (rows, self.length, self.seed, self.sampling, self.history, table)
        if rows.is_cuda:
            from draftwood.ops.cuda.batch_state import opened

            return opened(*parts)
        lengths, sampling = self.length[rows], self.sampling[rows]
        roots = self.history[rows, lengths - 1]
        integers = torch.stack([lengths, self.seed[rows], roots, sampling[:, 1].long()])
        return integers, sampling[:, 2:].t().contiguous(), sampling[:, 0].float(), table[rows]

    def advance(self, view: BatchView, tree: TokenTree, verdict: Verdict, usable: Tensor) -> Tensor:
        """Append what every sequence gained. For the host: number of accepted tokens, the bonus token, number of
        drafted tokens, whether the bonus token had a distribution (`usable` [B]), then the accepted tokens.
        [B, 4 + D] int64.
        """
        if view.rows.is_cuda:
            from draftwood.ops.cuda.batch_state import closed

            return closed(
                view.rows, view.lengths, tree.tokens, tree.offsets, verdict.path, verdict.length, verdict.bonus,
                usable, self.history, self.length, self.padding_row,
            )  # fmt: skip
        accepted = tree.tokens[verdict.path[:, 1:].clamp(min=0)]  # [B, D], as far as the length says
        bonus, length = verdict.bonus[:, None], verdict.length[:, None]
        gained = torch.cat([accepted, bonus], 1).scatter(1, length, bonus)
        at = view.lengths[:, None] + torch.arange(gained.shape[1])
        last = self.history.shape[1] - 1
        self.history[view.rows[:, None], at.clamp(max=last)] = gained
        self.length[view.rows] = (view.lengths + verdict.length + 1).clamp(max=last)
        self.length[self.padding_row] = 1
        there = (tree.tokens >= 0).long()
        drafted = torch.zeros_like(verdict.bonus).index_add_(0, tree.owner, there) - 1
        return torch.cat([length, bonus, drafted[:, None], usable[:, None].long(), accepted], 1)

    def _upload(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        """An asynchronous copy to the device."""
        return uploaded(torch.tensor(values, dtype=dtype), self.device)


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
