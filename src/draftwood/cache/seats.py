"""What the device knows of the sequences that are decoding, so that a round needs nothing from the host.

A sequence that has caught up with its prompt takes a seat: its tokens, its length, how it is sampled and which pages
it owns lie there, and every round moves them on by what it earned. The host follows one round behind.
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
class SeatedView(BatchView):
    """A view whose sequences are known by their seats alone; its host-side fields are empty."""

    rows: Tensor  # [B] int64 seats
    block_table: Tensor  # [B, P] int64, never -1
    history: Tensor  # [seats, length] int64 all tokens of all seats

    @cached_property
    def num_run(self) -> Tensor:
        """Tokens of each that the target has run: all but the last. [B]."""
        return self.lengths - 1


@dataclass(frozen=True)
class Kind:
    """What a round's sequences have in common: the code that draws for them."""

    law: str | None
    greedy: bool
    truncates: bool
    traced: bool = False  # some request wants to know what was guessed

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Kind | None:
        """None where some request asks for what only the host can do, or for a law of its own."""
        laws = {p.law for p in params}
        by_hand = any(p.edits_logits or p.steers_guesses or p.logprobs is not None or p.min_tokens for p in params)
        if by_hand or len(laws) != 1:  # nobody at all has no law either
            return None
        greedy, truncates = all(p.greedy for p in params), any(p.truncates for p in params)
        return cls(laws.pop(), greedy, truncates, any(p.trace for p in params))

    @property
    def params(self) -> SamplingParams:
        """A request like them."""
        return SamplingParams(
            temperature=0.0 if self.greedy else 1.0, top_p=0.5 if self.truncates else 1.0, law=self.law
        )


class Seats:
    """Device memory for `capacity` sequences, and one seat more for rows that only fill a batch up."""

    def __init__(self, capacity: int, max_length: int, page_size: int, scratch_page: int, device: torch.device) -> None:
        seats, pages = capacity + 1, -(-max_length // page_size)
        self.device = device
        self.capacity = capacity
        self.nobody = capacity
        self.history = torch.zeros(seats, max_length, dtype=torch.int64, device=device)
        self.length = torch.ones(seats, dtype=torch.int64, device=device)
        self.seed = torch.zeros(seats, dtype=torch.int64, device=device)
        self.block_table = torch.full((seats, pages), scratch_page, dtype=torch.int64, device=device)
        self.sampling = torch.ones(seats, 4, dtype=torch.float64, device=device)  # temperature, top k, top p, min p
        self._scratch_page = scratch_page
        self._free = list(range(capacity))[::-1]
        self._seat_of: dict[int, int] = {}
        self._pages: dict[int, int] = {}  # seat -> pages the device knows of

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._seat_of

    @property
    def seated(self) -> set[int]:
        """Sequences that have a seat."""
        return set(self._seat_of)

    def sit(self, seq_id: int, tokens: Sequence[int], params: SamplingParams, seed: int) -> None:
        """Give a sequence that has caught up a seat."""
        seat = self._seat_of[seq_id] = self._free.pop()
        self._pages[seat] = 0
        self.block_table[seat] = self._scratch_page  # behind its own pages it must not find those of whoever sat here
        self.history[seat, : len(tokens)] = self._upload(tokens)
        numbers = self._upload([len(tokens), seed])
        self.length[seat], self.seed[seat] = numbers[0], numbers[1]
        self.sampling[seat] = self._upload((params.temperature, *Truncation.limits(params)), torch.float64)

    def leave(self, seq_id: int) -> None:
        """The sequence is gone, or starts over; one that has no seat is fine."""
        seat = self._seat_of.pop(seq_id, None)
        if seat is not None:
            self._free.append(seat)

    def grant(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Tell the device which pages sequences own, where that has changed. Pages are only ever added at the end."""
        news = {self._seat_of[seq_id]: own for seq_id, own in pages.items()}
        news = {seat: own for seat, own in news.items() if len(own) != self._pages[seat]}
        if not news:
            return
        width = max(map(len, news.values()))
        table = [[*own, *[self._scratch_page] * (width - len(own))] for own in news.values()]
        packed = self._upload([[seat, *own] for seat, own in zip(news, table, strict=True)])
        self.block_table[packed[:, 0], :width] = packed[:, 1:]
        self._pages.update({seat: len(own) for seat, own in news.items()})

    @property
    def num_pages(self) -> int:
        """Of the longest sequence there is room for."""
        return self.block_table.shape[1]

    def most_pages(self, seq_ids: Sequence[int]) -> int:
        """That one of these sequences has been granted."""
        return max(self._pages[self._seat_of[seq_id]] for seq_id in seq_ids)

    def rows(self, seq_ids: Sequence[int], size: int) -> Tensor:
        """The seats of a round of `size` rows. [size]."""
        seats = [self._seat_of[seq_id] for seq_id in seq_ids]
        return self._upload(seats + [self.nobody] * (size - len(seats)))

    def view(self, rows: Tensor, kind: Kind, pages: int) -> SeatedView:
        """What a round may know of the sequences on seats `rows` [B], of which none has more than so many pages."""
        count = len(rows)
        integers, numbers, temperature, table = self._gathered(rows, pages)
        lengths, seeds, roots, top_k = integers.unbind(0)
        view = SeatedView(
            seq_ids=(),
            tokens=(),
            prompt_lengths=(),
            params=(kind.params,) * count,
            bad_words=((),) * count,
            lengths=lengths,
            seeds=seeds,
            temperature=temperature,
            max_nodes=lengths,  # nobody asks: every tree has its fixed shape
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
            from draftwood.ops.cuda.seats import opened

            return opened(*parts)
        lengths, sampling = self.length[rows], self.sampling[rows]
        roots = self.history[rows, lengths - 1]
        integers = torch.stack([lengths, self.seed[rows], roots, sampling[:, 1].long()])
        return integers, sampling[:, 2:].t().contiguous(), sampling[:, 0].float(), table[rows]

    def advance(self, view: SeatedView, tree: TokenTree, verdict: Verdict, outcome: Tensor) -> None:
        """Move every sequence on by what it earned. To `outcome` [B, 3 + D] goes what the host wants to know: how many
        were accepted, the bonus, how many were drafted, then the accepted tokens.
        """
        if view.rows.is_cuda:
            from draftwood.ops.cuda.seats import closed

            return closed(
                view.rows, view.lengths, tree.tokens, verdict.path, verdict.length, verdict.bonus,
                self.history, self.length, self.nobody, outcome,
            )  # fmt: skip
        accepted = tree.tokens[verdict.path[:, 1:].clamp(min=0)]  # [B, D], as far as the length says
        bonus, length = verdict.bonus[:, None], verdict.length[:, None]
        gained = torch.cat([accepted, bonus], 1).scatter(1, length, bonus)
        at = view.lengths[:, None] + torch.arange(gained.shape[1])
        last = self.history.shape[1] - 1
        self.history[view.rows[:, None], at.clamp(max=last)] = gained
        self.length[view.rows] = (view.lengths + verdict.length + 1).clamp(max=last)
        self.length[self.nobody] = 1
        drafted = (tree.tokens.view(len(view.rows), -1)[:, 1:] >= 0).sum(1, keepdim=True)
        outcome.copy_(torch.cat([length, bonus, drafted, accepted], 1))

    def _upload(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        """Numbers of the host, without waiting for the device."""
        tensor = torch.tensor(values, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
