"""What the device knows of the running sequences, so that a captured step needs nothing from the host.

A sequence whose prompt is prefilled gets a row: its tokens, length, sampling parameters and block table. Every step
advances the rows by the tokens it gained. The host follows one step behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftwood.protocols import BatchView, Truncation
from draftwood.request import SamplingParams
from draftwood.tree import TokenTree, Verdict


@dataclass(frozen=True)
class DeviceBatchView(BatchView):
    """A view of rows of the batch state; its host-side fields are empty."""

    rows: Tensor  # [B] int64 rows of the batch state
    block_table: Tensor  # [B, P] int64, never -1
    history: Tensor  # [capacity + 1, length] int64 tokens of all rows

    @cached_property
    def num_run(self) -> Tensor:
        """Tokens of each sequence that are in the target's KV cache: all but the last. [B]."""
        return self.lengths - 1


@dataclass(frozen=True)
class SamplingMode:
    """What the sequences of a captured step have in common: the code that samples for them."""

    law: str | None
    greedy: bool
    truncates: bool
    traced: bool = False  # some request asks for traces

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingMode | None:
        """None where a request needs the host, or where laws differ."""
        laws = {p.law for p in params}
        by_hand = any(p.edits_logits or p.steers_guesses or p.logprobs is not None or p.min_tokens for p in params)
        if by_hand or len(laws) != 1:  # no requests: no law
            return None
        greedy, truncates = all(p.greedy for p in params), any(p.truncates for p in params)
        return cls(laws.pop(), greedy, truncates, any(p.trace for p in params))

    @property
    def params(self) -> SamplingParams:
        """Parameters of such a request."""
        return SamplingParams(
            temperature=0.0 if self.greedy else 1.0, top_p=0.5 if self.truncates else 1.0, law=self.law
        )


class BatchState:
    """Device state of `capacity` sequences, and a padding row for batches that are not full."""

    def __init__(self, capacity: int, max_length: int, page_size: int, scratch_page: int, device: torch.device) -> None:
        rows, pages = capacity + 1, -(-max_length // page_size)
        self.device = device
        self.capacity = capacity
        self.padding_row = capacity
        self.history = torch.zeros(rows, max_length, dtype=torch.int64, device=device)
        self.length = torch.ones(rows, dtype=torch.int64, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_table = torch.full((rows, pages), scratch_page, dtype=torch.int64, device=device)
        self.sampling = torch.ones(rows, 4, dtype=torch.float64, device=device)  # temperature, top k, top p, min p
        self._scratch_page = scratch_page
        self._free = list(range(capacity))[::-1]
        self._row_of: dict[int, int] = {}
        self._pages: dict[int, int] = {}  # row -> pages in its block table

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._row_of

    @property
    def sequences(self) -> set[int]:
        """Sequences that have a row."""
        return set(self._row_of)

    def add(self, seq_id: int, tokens: Sequence[int], params: SamplingParams, seed: int) -> None:
        """Give a prefilled sequence a row."""
        row = self._row_of[seq_id] = self._free.pop()
        self._pages[row] = 0
        self.block_table[row] = self._scratch_page  # clear the previous occupant's block table
        self.history[row, : len(tokens)] = self._upload(tokens)
        numbers = self._upload([len(tokens), seed])
        self.length[row], self.seed[row] = numbers[0], numbers[1]
        self.sampling[row] = self._upload((params.temperature, *Truncation.limits(params)), torch.float64)

    def remove(self, seq_id: int) -> None:
        """Free a sequence's row; one that has none is fine."""
        row = self._row_of.pop(seq_id, None)
        if row is not None:
            self._free.append(row)

    def update_block_tables(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Upload the block tables that have changed. Pages are only ever appended."""
        news = {self._row_of[seq_id]: own for seq_id, own in pages.items()}
        news = {row: own for row, own in news.items() if len(own) != self._pages[row]}
        if not news:
            return
        width = max(map(len, news.values()))
        table = [[*own, *[self._scratch_page] * (width - len(own))] for own in news.values()]
        packed = self._upload([[row, *own] for row, own in zip(news, table, strict=True)])
        self.block_table[packed[:, 0], :width] = packed[:, 1:]
        self._pages.update({row: len(own) for row, own in news.items()})

    @property
    def num_pages(self) -> int:
        """Width of the block table."""
        return self.block_table.shape[1]

    def most_pages(self, seq_ids: Sequence[int]) -> int:
        """Pages of the longest of these sequences."""
        return max(self._pages[self._row_of[seq_id]] for seq_id in seq_ids)

    def rows(self, seq_ids: Sequence[int], size: int) -> Tensor:
        """The rows of a step of `size` sequences, padded. [size]."""
        rows = [self._row_of[seq_id] for seq_id in seq_ids]
        return self._upload(rows + [self.padding_row] * (size - len(rows)))

    def view(self, rows: Tensor, kind: SamplingMode, pages: int) -> DeviceBatchView:
        """The view of `rows` [B] for a step, with at most `pages` pages each."""
        count = len(rows)
        integers, numbers, temperature, table = self._gathered(rows, pages)
        lengths, seeds, roots, top_k = integers.unbind(0)
        view = DeviceBatchView(
            seq_ids=(),
            tokens=(),
            prompt_lengths=(),
            params=(kind.params,) * count,
            bad_words=((),) * count,
            lengths=lengths,
            seeds=seeds,
            temperature=temperature,
            max_nodes=lengths,  # unused: every tree has its fixed shape
            max_depth=lengths,
            rows=rows,
            block_table=table,
            history=self.history,
        )
        view.__dict__.update(roots=roots, truncation=Truncation(top_k, *numbers.unbind(0)))
        return view

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

    def advance(self, view: DeviceBatchView, tree: TokenTree, verdict: Verdict, outcome: Tensor) -> None:
        """Append what every sequence gained. `outcome` [B, 3 + D], for the host: number of accepted tokens, the bonus
        token, number of drafted tokens, then the accepted tokens.
        """
        if view.rows.is_cuda:
            from draftwood.ops.cuda.batch_state import closed

            return closed(
                view.rows, view.lengths, tree.tokens, verdict.path, verdict.length, verdict.bonus,
                self.history, self.length, self.padding_row, outcome,
            )  # fmt: skip
        accepted = tree.tokens[verdict.path[:, 1:].clamp(min=0)]  # [B, D], as far as the length says
        bonus, length = verdict.bonus[:, None], verdict.length[:, None]
        gained = torch.cat([accepted, bonus], 1).scatter(1, length, bonus)
        at = view.lengths[:, None] + torch.arange(gained.shape[1])
        last = self.history.shape[1] - 1
        self.history[view.rows[:, None], at.clamp(max=last)] = gained
        self.length[view.rows] = (view.lengths + verdict.length + 1).clamp(max=last)
        self.length[self.padding_row] = 1
        drafted = (tree.tokens.view(len(view.rows), -1)[:, 1:] >= 0).sum(1, keepdim=True)
        outcome.copy_(torch.cat([length, bonus, drafted, accepted], 1))

    def _upload(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        """An asynchronous copy to the device."""
        tensor = torch.tensor(values, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
