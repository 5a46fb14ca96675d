"""Paged tree attention: what the reference computes, and the same bits however a row is computed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from draftwood.batch import AttentionShape, ForwardBatch, Pages
from draftwood.ops.reference import DenseAttention

pytest.importorskip("triton")

from draftwood.ops.cuda.attention import TreeAttention, tails_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
# On a GPU float32 products are unrolled into single additions, and take half a minute each to compile.
PLAIN = torch.bfloat16 if ON_GPU else torch.float32
DTYPES = [PLAIN, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Part:
    """One sequence: committed tokens before this forward, pending ones, and a tree's parents (-1: the root)."""

    before: int
    pending: int = 0
    parents: tuple[int, ...] = ()

    @property
    def base(self) -> int:
        return self.before + self.pending

    def path(self, node: int) -> list[int]:
        upwards = []
        while node >= 0:
            upwards.append(node)
            node = self.parents[node]
        return upwards[::-1]


def chain(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length - 1))


def bush(size: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(max(-1, i - 9), i) for i in range(size))


def signed_words(nodes: list[int], count: int) -> list[int]:
    bits = sum(1 << node for node in nodes)
    words = [bits >> 64 * w & (1 << 64) - 1 for w in range(count)]
    return [word - (1 << 64) if word >> 63 else word for word in words]


def make_batch(parts: list[Part], page_size: int = 16, spare_pages: int = 1) -> tuple[ForwardBatch, int]:
    """The forward of these parts on pages in random order, and how many pages there are."""
    words = max(1, max(-(-len(part.parents) // 64) for part in parts))
    counts = [-(-(part.base + len(part.parents)) // page_size) for part in parts]
    free = random.Random(1).sample(range(sum(counts) + 3), sum(counts))
    width = max(counts) + spare_pages
    owned = [[free.pop() for _ in range(count)] for count in counts]
    rows: list[tuple[int, int, int, list[int]]] = []
    offsets = [0]
    for part, pages in zip(parts, owned, strict=True):
        for index in range(part.before, part.base):
            rows.append((index, _slot(pages, index, page_size), index + 1, [0] * words))
        for node in range(len(part.parents)):
            path, index = part.path(node), part.base + node
            rows.append(
                (part.base - 1 + len(path), _slot(pages, index, page_size), part.base, signed_words(path, words))
            )
        offsets.append(len(rows))
    positions, slots, visible, ancestors = zip(*rows, strict=True)
    batch = ForwardBatch(
        tokens=_ints(positions),
        positions=_ints(positions),
        slots=_ints(slots),
        visible=_ints(visible),
        ancestors=_ints(ancestors),
        row_offsets=_ints(offsets),
        tree_base=_ints([part.base for part in parts]),
        num_keys=_ints([part.base + len(part.parents) for part in parts]),
        block_table=_ints([pages + [-1] * (width - len(pages)) for pages in owned]),
        logit_rows=_ints(range(len(rows))),
    )
    return batch, sum(counts) + 3


def _slot(pages: list[int], index: int, page_size: int) -> int:
    return pages[index // page_size] * page_size + index % page_size


def _ints(values: object) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=DEVICE)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Heads:
    kv: int = 1
    group: int = 3
    dim: int = 64


def make_inputs(
    batch: ForwardBatch, num_pages: int, heads: Heads, dtype: torch.dtype, page_size: int = 16
) -> tuple[Pages, Tensor]:
    draw = torch.Generator().manual_seed(3)
    store = torch.randn(2, 2, heads.kv, num_pages * page_size, heads.dim, generator=draw)
    query = torch.randn(batch.tokens.shape[0], heads.kv * heads.group, heads.dim, generator=draw)
    return Pages(store.to(DEVICE, dtype), page_size), query.to(DEVICE, dtype)


def check_parity(
    parts: list[Part],
    heads: Heads,
    dtype: torch.dtype,
    window: int | None = None,
    page_size: int = 16,
    rows: list[int] | None = None,  # these alone, of the first part
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **options: int | bool,
) -> Tensor:
    batch, num_pages = make_batch(parts, page_size)
    batch = batch if rows is None else only_rows(batch, rows, 0)
    cache, query = make_inputs(batch, num_pages, heads, dtype, page_size)
    shape = AttentionShape(window, heads.dim**-0.5, softcap, sinks is not None)
    got = TreeAttention.plan(batch, cache, shape, **options).run(1, query, sinks=sinks)  # type: ignore[arg-type]
    dense = DenseAttention.plan(batch, Pages(cache.store.float(), page_size), shape)
    expected = torch.cat(  # it gathers all keys for every row
        [
            replace(dense, mask=dense.mask[i : i + 128], owner=dense.owner[i : i + 128]).run(
                1, query[i : i + 128].float(), sinks=sinks
            )
            for i in range(0, query.shape[0], 128)
        ]
    )
    torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return got


MIXED = [Part(30, 13), Part(100, 1), Part(259, 1, bush(8)), Part(0, 3), Part(62, 1, chain(4))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batch(dtype: torch.dtype) -> None:
    for splits in (1, 3) if dtype == PLAIN else (2,):
        check_parity(MIXED, Heads(), dtype, num_splits=splits)


@pytest.mark.parametrize(
    ("window", "options"), [(None, {"num_splits": 1}), (40, {"num_splits": 3}), (None, {"exact": False})], ids=str
)
def test_capped_scores(window: int | None, options: dict[str, int]) -> None:
    check_parity(MIXED[1:], Heads(1, 3, 64), PLAIN, window, softcap=0.5, **options)


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 3}, {"exact": False}, {"linear": True, "num_splits": 2}], ids=str
)
def test_sinks(options: dict[str, int]) -> None:
    """A score of each head behind which no value stands, wherever a row's softmax ends."""
    parts = [Part(270, 2), Part(1, 1)] if "linear" in options else MIXED[1:]
    check_parity(parts, Heads(2, 3, 64), PLAIN, 40, sinks=torch.linspace(-2, 5, 6, device=DEVICE), **options)


@pytest.mark.parametrize("heads", [Heads(2, 1, 64), Heads(1, 4, 96), Heads(1, 7, 128), Heads(1, 2, 256)], ids=str)
def test_head_shapes(heads: Heads) -> None:
    check_parity([Part(260, 1, bush(3)), Part(5, 4)], heads, PLAIN)


@pytest.mark.parametrize("group", [3, 4, 16])
def test_linear_rows_need_no_tails(group: int) -> None:
    parts = [Part(70, 11), Part(510, 3), Part(1, 1)]
    for options in ({"num_splits": 1}, {"num_splits": 2, "max_rows": 11}):
        check_parity(parts, Heads(1, group, 64), PLAIN, linear=True, **options)


@pytest.mark.parametrize("splits", [1, 3])
def test_nodes_masked_where_they_lie(splits: int) -> None:
    """Every tree shape there is, without bits that a token keeps: the same numbers, in another order."""
    check_parity(MIXED, Heads(2, 3, 64), torch.float16, exact=False, num_splits=splits)
    wide = [Part(250, 1, bush(100)), Part(60, 2, chain(70)), Part(1, 1, bush(3)), Part(500, 1)]
    check_parity(wide, Heads(1, 4, 64), torch.float16, exact=False, num_splits=splits)
    check_parity(
        [Part(255, 1, bush(5))] * 2, Heads(1, 4, 64), torch.float16, exact=False, num_splits=splits, max_nodes=5
    )


def test_decode_in_one_tile_a_sequence() -> None:
    parts = [Part(before, 1) for before in (0, 255, 256, 300)]
    for splits in (1, 2):
        check_parity(parts, Heads(1, 4, 64), PLAIN, linear=True, max_rows=1, num_splits=splits)


def test_trees_of_several_words_and_depths() -> None:
    check_parity([Part(40, 1, bush(12)), Part(255, 1, bush(5)), Part(10, 1)], Heads(1, 4, 64), PLAIN)
    for before, parents in ((190, chain(70)), (500, bush(140))):
        rows = [0, 1, 63, 64, 65, len(parents) - 1]
        check_parity([Part(before, 0, parents)], Heads(1, 4, 64), PLAIN, page_size=32, rows=rows)


@pytest.mark.parametrize(
    ("page_size", "exact", "splits"),
    [(64, False, 1), (64, True, 2), (128, False, 2), (128, True, 1), (192, False, 1), (192, True, 2)],
)
def test_blocks_that_lie_in_one_page(page_size: int, exact: bool, splits: int) -> None:
    wide = [Part(250, 1, bush(70)), Part(60, 2, chain(10)), Part(300, 5)]
    check_parity(wide, Heads(1, 4, 64), PLAIN, exact=exact, num_splits=splits, page_size=page_size)


def test_tree_before_any_context() -> None:
    check_parity([Part(0, 1, bush(5)), Part(0, 0, chain(3))], Heads(1, 2, 64), PLAIN)


@pytest.mark.parametrize("window", [1, 5, 64, 300])
@pytest.mark.parametrize("splits", [1, 3])
def test_window(window: int, splits: int) -> None:
    parts = [Part(400, 1, bush(4)), Part(254, 1, chain(5)), Part(300, 2)]
    check_parity(parts, Heads(1, 2, 64), PLAIN, window=window, num_splits=splits)


def test_too_many_heads_for_a_key_head_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 16"):
        check_parity([Part(3, 1)], Heads(1, 17, 64), PLAIN)


def test_a_depth_the_host_knows_shortens_the_table() -> None:
    batch, _ = make_batch([Part(20, 1, chain(5))])
    assert tails_of(batch, 16, 5).slots.shape[1] < tails_of(batch, 16, 64).slots.shape[1]
    assert tails_of(batch, 16, 5).lengths.tolist() == [21, 22, 23, 24, 25, 26]
    check_parity([Part(20, 1, chain(5))], Heads(1, 2, 64), PLAIN, max_depth=5)


def run_with(
    batch: ForwardBatch, cache: Pages, query: Tensor, window: int | None, **options: int | bool | None
) -> Tensor:
    shape = AttentionShape(window, 0.1)
    return TreeAttention.plan(batch, cache, shape, **options).run(0, query)  # type: ignore[arg-type]


def only_rows(batch: ForwardBatch, rows: list[int], sequence: int) -> ForwardBatch:
    """Those rows of one sequence, with nobody else in their batch."""
    own = slice(sequence, sequence + 1)
    return replace(
        batch,
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        visible=batch.visible[rows],
        ancestors=batch.ancestors[rows],
        row_offsets=_ints([0, len(rows)]),
        tree_base=batch.tree_base[own],
        num_keys=batch.num_keys[own],
        block_table=batch.block_table[own],
    )


STRICT = DTYPES if ON_GPU else [torch.float16]
STRICT_PARTS = [Part(250, 2, bush(9)), Part(310, 1, chain(2)), Part(120, 5)]


@pytest.mark.parametrize("splits", [2, 3])
def test_the_last_program_of_several_joins_their_chunks_in_every_layer(splits: int) -> None:
    """Without a tree there is no second launch: bits are those of one program, and its counters are ready again."""
    batch, num_pages = make_batch([Part(300, 2), Part(700, 1), Part(20, 3)])
    cache, query = make_inputs(batch, num_pages, Heads(2, 2, 64), torch.float16)
    shape = AttentionShape(None, 0.125)
    alone = TreeAttention.plan(batch, cache, shape, linear=True, num_splits=1)
    together = TreeAttention.plan(batch, cache, shape, linear=True, num_splits=splits)
    for layer in (0, 1, 0):
        assert torch.equal(together.run(layer, query), alone.run(layer, query))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", STRICT, ids=str)
def test_bits_do_not_depend_on_splits_or_tiles(dtype: torch.dtype, window: int | None) -> None:
    batch, num_pages = make_batch(STRICT_PARTS)
    cache, query = make_inputs(batch, num_pages, Heads(1, 4, 64), dtype)
    first = run_with(batch, cache, query, window, num_splits=1, largest_tile=16)
    for splits, tile in ((1, 32), (2, 16)):
        assert torch.equal(first, run_with(batch, cache, query, window, num_splits=splits, largest_tile=tile))


@pytest.mark.parametrize("dtype", STRICT, ids=str)
def test_bits_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    batch, num_pages = make_batch(STRICT_PARTS)
    cache, query = make_inputs(batch, num_pages, Heads(1, 4, 64), dtype)
    together = run_with(batch, cache, query, None)
    ends = batch.row_offsets.tolist()
    for row, sequence in ((0, 0), (5, 0), (10, 0), (ends[1] + 2, 1), (ends[2] + 4, 2)):
        alone = run_with(only_rows(batch, [row], sequence), cache, query[row : row + 1], None, max_rows=1)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize(
    ("before", "parents", "window"),
    [
        pytest.param(40, bush(9, 1), None, id="in a block"),
        pytest.param(252, chain(6), None, id="over a chunk's end"),
        pytest.param(252, chain(6), 5, id="over a chunk's end, few keys seen"),
        pytest.param(252, chain(3), 200, id="up to a chunk's end"),
        pytest.param(255, bush(8, 1), None, id="behind a chunk"),
        pytest.param(300, bush(130, 2), None, id="three words"),
        pytest.param(189, chain(70), None, id="deep"),
    ],
)
@pytest.mark.parametrize("dtype", STRICT, ids=str)
def test_a_node_gives_the_bits_of_the_committed_token(
    dtype: torch.dtype, before: int, parents: tuple[int, ...], window: int | None
) -> None:
    part = Part(before, 1, parents)
    batch, num_pages = make_batch([part, Part(3, 1)])
    cache, query = make_inputs(batch, num_pages, Heads(1, 4, 64), dtype)
    path = max((part.path(node) for node in range(len(parents))), key=len)
    first = max(0, len(path) - 6)  # the deepest will do
    rows = [1 + node for node in path[first:]]  # row 0 is the pending token
    as_nodes = run_with(only_rows(batch, rows, 0), cache, query[rows], window)
    index = torch.arange(part.base, part.base + len(path), device=DEVICE)
    table = batch.block_table[:1]
    store = cache.store.clone()
    whole = batch.slots[[1 + node for node in path]]
    store[:, :, :, table[0, index // 16] * 16 + index % 16] = cache.store[:, :, :, whole]
    later, _ = make_batch([Part(part.base + first, len(path) - first)])
    as_tokens = run_with(replace(later, block_table=table), Pages(store, 16), query[rows], window, linear=True)
    assert torch.equal(as_nodes, as_tokens)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [64, 2048])
def test_real_sizes(size: int) -> None:
    heads = Heads(8, 4, 128)
    parts = [Part(2000, 1, bush(size)), Part(700, 1, bush(40)), Part(1500, 1)]
    for splits in (1, 8):
        check_parity(parts, heads, torch.bfloat16, page_size=64, num_splits=splits)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_bits_at_real_sizes(dim: int) -> None:
    parts = [Part(1000, 1, bush(64)), Part(2000, 1), Part(100, 300)]
    batch, num_pages = make_batch(parts, 64)
    cache, query = make_inputs(batch, num_pages, Heads(8, 4, dim), torch.bfloat16, 64)
    first = run_with(batch, cache, query, None, num_splits=1, largest_tile=16)
    for splits, tile in ((1, 32), (7, 16), (7, 32)):
        assert torch.equal(first, run_with(batch, cache, query, None, num_splits=splits, largest_tile=tile))
    for tile in (64, 128) if dim <= 128 else ():  # not promised, but good to know
        other = run_with(batch, cache, query, None, largest_tile=tile)
        torch.testing.assert_close(first, other, atol=2e-2, rtol=2e-2)
        print(f"tiles of {tile}: same bits {torch.equal(first, other)}")
    alone = run_with(only_rows(batch, [40], 0), cache, query[40:41], None, max_rows=1)
    assert torch.equal(first[40], alone[0])


@pytest.mark.gpu
@needs_gpu
def test_a_captured_run_follows_the_batch() -> None:
    parts = [Part(200, 1, bush(64)), Part(700, 1, bush(64, 1))]
    batch, _ = make_batch(parts, spare_pages=60)
    longer, num_pages = make_batch([Part(500, 1, bush(64, 2)), Part(300, 1, bush(64, 3))], spare_pages=60)
    width = min(batch.block_table.shape[1], longer.block_table.shape[1])
    fields = ("positions", "visible", "ancestors", "row_offsets", "tree_base")
    batch = replace(batch, block_table=batch.block_table[:, :width].contiguous())
    cache, query = make_inputs(batch, 2 * num_pages, Heads(2, 4, 128), torch.bfloat16)
    run_with(batch, cache, query, None, max_rows=65, num_splits=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_with(batch, cache, query, None, max_rows=65, num_splits=4)
    for name in fields:
        getattr(batch, name).copy_(getattr(longer, name))
    batch.block_table.copy_(longer.block_table[:, :width])
    graph.replay()
    assert torch.equal(out, run_with(batch, cache, query, None, max_rows=65, num_splits=4))
