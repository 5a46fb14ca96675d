"""Attention of whole long prompts against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.cache.kv import KVCache
from draftwood.ops import prefill
from draftwood.ops.prefill import PrefillAttention
from draftwood.ops.reference import DenseAttention
from draftwood.protocols import Span
from tiny import tiny_runner

SHAPE = AttentionShape(None, 0.3)


def staged(cache: KVCache, spans: list[tuple[int, int]]) -> ForwardBatch:
    for number, (_, end) in enumerate(spans):
        cache.tables.open(number, [], None)
        assert cache.tables.reserve(number, end)
    return cache.stage_text([Span(number, list(range(end)), start, end) for number, (start, end) in enumerate(spans)])


@pytest.mark.parametrize("lengths", [[8], [5, 16, 7]])
def test_whole_prompts_are_the_references(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "STEP", 4)
    monkeypatch.setattr(prefill, "LONGEST", 16)
    cache = tiny_runner(num_pages=20, page_size=4).cache
    batch = staged(cache, [(0, length) for length in lengths])
    draw = torch.Generator().manual_seed(1)
    store = torch.randn(cache.memory.store.shape, generator=draw, dtype=torch.float64)
    pages = Pages(store, 4)
    heads, dim = store.shape[2], store.shape[4]
    query = torch.randn(sum(lengths), 2 * heads, dim, generator=draw, dtype=torch.float64)
    assert PrefillAttention.suits(batch, SHAPE)
    got = PrefillAttention.plan(batch, pages, SHAPE)
    assert {len(slots) % 4 for slots in got.slots} == {0}, "few sizes to plan"
    for layer in range(store.shape[0]):
        expected = DenseAttention.plan(batch, pages, SHAPE).run(layer, query)
        torch.testing.assert_close(got.run(layer, query), expected, atol=1e-12, rtol=1e-12)


def test_what_it_does_not_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "STEP", 4)
    monkeypatch.setattr(prefill, "LONGEST", 16)
    cache = tiny_runner(num_pages=40, page_size=4).cache
    numbers = itertools.count()
    for spans, suits in [([(0, 9)], True), ([(4, 9)], False), ([(0, 3)], False), ([(0, 17)], False)]:
        for number in range(next(numbers)):
            cache.tables.close(number) if number in cache.tables else None
        assert PrefillAttention.suits(staged(cache, spans), SHAPE) is suits, spans
        cache.tables.close(0)
    batch = staged(cache, [(0, 9)])
    assert PrefillAttention.suits(batch, AttentionShape(9, 1.0))
    assert not PrefillAttention.suits(batch, AttentionShape(8, 1.0)), "a window that hides keys"
    assert not PrefillAttention.suits(batch, AttentionShape(None, 1.0, softcap=1.0))
    assert not PrefillAttention.suits(batch, AttentionShape(None, 1.0, sinks=True))
