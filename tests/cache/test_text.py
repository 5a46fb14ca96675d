"""Prompts where a captured graph finds them: a buffer holds what the host would stage, and nothing else."""

from __future__ import annotations

import pytest
import torch

from draftwood.cache.prefill_buffer import SEQUENCES, PrefillBuffer
from draftwood.protocols import Span
from tiny import CPU, tiny_runner

ROWS, PAGES = 32, 12


@pytest.mark.parametrize(
    "pieces",
    [[(0, 7)], [(4, 9), (0, 1), (13, 15)], [(0, ROWS)], [(0, 2)] * SEQUENCES],
    ids=["one", "some", "full", "many"],
)
def test_a_frame_holds_what_the_host_would_stage(pieces: list[tuple[int, int]]) -> None:
    cache = tiny_runner().cache
    text = list(range(100, 100 + ROWS))
    spans = [Span(i, text, start, end) for i, (start, end) in enumerate(pieces)]
    for span in spans:
        cache.tables.open(span.seq_id, [1])
        assert cache.tables.reserve(span.seq_id, ROWS)
    frame = PrefillBuffer(ROWS, PAGES, cache.page_size, cache.scratch_page, CPU)
    frame.fill(cache.stage_text([Span(0, text, 0, ROWS)]))  # nothing of this may be left
    frame.fill(cache.stage_text(spans))
    wanted, found = cache.stage_text(spans), frame.batch
    count, number = len(wanted.tokens), len(spans)
    for name in ("tokens", "positions", "slots", "visible"):
        assert torch.equal(getattr(found, name)[:count], getattr(wanted, name)), name
    assert torch.equal(found.row_offsets[: number + 1], wanted.row_offsets)
    assert torch.equal(found.num_keys[:number], wanted.num_keys)
    for own, table in zip(wanted.block_table, found.block_table, strict=False):
        assert torch.equal(table[: len(own[own >= 0])], own[own >= 0])
    # Rows of no piece belong to a sequence of their own, on the scratch page.
    assert found.row_offsets[-2] == count
    assert found.row_offsets[-1] == ROWS
    assert (found.slots[count:] // cache.page_size == cache.scratch_page).all()
    assert (found.block_table[number:] == cache.scratch_page).all()
