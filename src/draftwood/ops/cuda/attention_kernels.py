"""The kernels of `TreeAttention`; what is computed in which order stands there.

A tile is LINES lines: rows of one sequence times the GROUP query heads that share a key head.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.last_block import last_to_arrive
from draftwood.ops.cuda.online_softmax import (
    BLOCK,
    attend,
    combine,
    combined,
    load_state,
    nothing,
    store_rows,
    store_state,
    widened,
)
from draftwood.ops.cuda.pdl import ask_for, make_way, read_at_once, wait_for_predecessors

CHUNK = 256  # keys a running softmax of its own
LARGEST_GROUP = 16  # query heads of a key head: the lines of a tile with one row

_BLOCK = tl.constexpr(BLOCK)
_CHUNK = tl.constexpr(CHUNK)
_ROW_LINES = tl.constexpr(LARGEST_GROUP)
_SEQUENCES = tl.constexpr(128)  # offsets looked at together


@triton.jit
def _load_slots(keys, values, slot, there, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Keys and values at `slot`, zeros where there is none. 2 x [BLOCK, DIM_PADDED]."""
    d = tl.arange(0, DIM_PADDED)
    at = slot[:, None] * DIM + d[None, :]
    mask = there[:, None] & (d < DIM)[None, :]
    return tl.load(keys + at, mask=mask, other=0.0), tl.load(values + at, mask=mask, other=0.0)


@triton.jit
def _load_block(
    keys, values, pages, start, tile_end, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Those of a block, which lie one behind the other where pages are no smaller: what differs is where it begins."""
    i = tl.arange(0, _BLOCK)
    if tl.constexpr(PAGE) % _BLOCK == 0:
        begin = (tl.maximum(read_at_once(pages + start // PAGE), 0) * PAGE + start % PAGE) * DIM
        keys, values, slot = keys + begin, values + begin, i
    else:
        slot = slot_of(pages, start + i, start + i < tile_end, PAGE)
    return _load_slots(keys, values, slot, start + i < tile_end, DIM, DIM_PADDED)


@triton.jit
def _load_queries(query, line, real, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    d = tl.arange(0, DIM_PADDED)
    return tl.load(query + line[:, None] * DIM + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def slot_of(pages, key, there, PAGE: tl.constexpr):
    """Where key number `key` of the sequence with these pages lies; never outside the cache."""
    page = tl.maximum(tl.load(pages + key // PAGE, mask=there, other=0), 0)
    return page * PAGE + key % PAGE


@triton.jit
def _ask_for_chunk(keys, values, pages, chunk, end, DIM: tl.constexpr, PAGE: tl.constexpr):
    """Have the keys and values of a chunk on their way, if it has any: those before number `end`."""
    if chunk * _CHUNK < end:
        key = tl.minimum(chunk * _CHUNK + tl.arange(0, _CHUNK), end - 1)
        slot = slot_of(pages, key, key >= 0, PAGE)
        for part in tl.static_range(0, DIM, 64):  # 128 bytes, or two times as many
            ask_for(keys + slot * DIM + part)
            ask_for(values + slot * DIM + part)


@triton.jit
def last_at_most(offsets, number, wanted, ROWS: tl.constexpr, EXTRA: tl.constexpr):
    """The last sequence s with offsets[s] // ROWS + s * EXTRA <= wanted."""
    count = wanted * 0
    for begin in range(0, number, _SEQUENCES):
        s = begin + tl.arange(0, _SEQUENCES)
        start = tl.load(offsets + s, mask=s < number, other=0) // ROWS + s * EXTRA
        count += tl.sum(((s < number) & (start <= wanted)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _rows_of_tile(tile, offsets, num_sequences, ROWS: tl.constexpr, ONE_TILE: tl.constexpr):
    """The sequence of a tile, the tile's first row, and the end of the sequence's; no rows if the tile is spare.

    A sequence's tiles begin at the number of full ones its predecessors' rows could fill, one more for each of them.
    """
    sequence = tile
    if not ONE_TILE:
        sequence = last_at_most(offsets, num_sequences, tile, ROWS, 1)
    row_begin, row_end = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    if not ONE_TILE:
        row_begin += (tile - (row_begin // ROWS + sequence)) * ROWS
    return sequence, row_begin, row_end


@triton.jit
def _words_of(ancestors, row, real, num_words, base, MASKED: tl.constexpr):
    """Where lines have their bits, and their first two words: all that most trees have (MASKED is 2, else 3), known
    before keys are. A key's number in the tree counts from `base`.
    """
    at = ancestors + row.to(tl.int64) * num_words
    low = tl.load(at, mask=real & (MASKED > 0), other=0).to(tl.uint64)
    high = tl.load(at + 1, mask=real & (MASKED > 0) & (num_words > 1), other=0).to(tl.uint64)
    return at, num_words, base, low, high


@triton.jit
def _word(words, number, real, MASKED: tl.constexpr):
    """Word `number` of each line; nothing where there is none."""
    at, num_words, _, low, high = words
    word = tl.where(number == 0, low, tl.where(number == 1, high, 0))
    if MASKED > 2:
        word |= tl.load(at + number, mask=real & (number > 1) & (number < num_words), other=0).to(tl.uint64)
    return word


@triton.jit
def _seen_with_tree(start, end, words, real, MASKED: tl.constexpr):
    """Whether each line sees each key of a block: those before `end`, and those its bits have. Bits are not read where
    lines begin: with a window, nodes are not masked where they lie.

    A block lies in at most two words. They are shifted once for a line and halved: no key needs 64 bits. [lines, keys].
    """
    _, _, base, _, _ = words
    first, shift = (start - base) >> 6, ((start - base) & 63).to(tl.int64)  # rounded down, before the tree too
    low, high = _word(words, first, real, MASKED), _word(words, first + 1, real, MASKED)
    bits = (low >> shift) | tl.where(shift > 0, high << ((64 - shift) & 63), 0)
    before = tl.minimum(tl.maximum(end - start, 0), _BLOCK)
    bits |= tl.where(before > 0, tl.full(before.shape, 0xFFFFFFFFFFFFFFFF, tl.uint64) >> ((64 - before) & 63), 0)
    i = tl.arange(0, _BLOCK)[None, :]
    half = tl.where(i < 32, bits.to(tl.uint32)[:, None], (bits >> 32).to(tl.uint32)[:, None])
    return ((half >> (i & 31).to(tl.uint32)) & 1) == 1


@triton.jit
def _blocks(
    q, first, until, begin, end, tile_end, pages, keys, values, scale, words, real,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr, MASKED: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys first … until - 1; line i sees begin[i] … end[i] - 1 and, MASKED, its ancestors."""
    highest, total, acc = nothing(LINES, DIM_PADDED)
    sums = widened(total, LINES)
    for start in range(first, tl.minimum(until, tile_end), _BLOCK):
        key = start + tl.arange(0, _BLOCK)
        k, v = _load_block(keys, values, pages, start, tile_end, DIM, DIM_PADDED, PAGE)
        if MASKED:
            seen = _seen_with_tree(start, end, words, real, MASKED)
        else:
            seen = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        highest, sums, acc = attend(q, k, v, seen, highest, sums, acc, scale, CAP)
    return highest, tl.max(sums, 1), acc


@triton.jit
def _last_chunk(end, nodes, room):
    """The chunk of the last key that a row with `end` linear ones and so many nodes behind them may see."""
    return tl.maximum(tl.minimum(end + nodes, room) - 1, 0) // _CHUNK


@triton.jit
def _shared_end(end, length):
    """Where the keys end that rows share block by block, and the chunk a row goes on in from there."""
    is_node = length > end
    open_chunk = tl.where(is_node, end, tl.maximum(end - 1, 0)) // _CHUNK
    return tl.where(is_node, end // _BLOCK * _BLOCK, end), open_chunk


@triton.jit
def _take_chunks(
    q, own, first, last, splits, tile_begin, begin, end, tile_end, pages, keys, values, scale, words, real,
    out, states, sums, line, num_states, sink,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr, MASKED: tl.constexpr,
    HAS_TREE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One of several programs: chunks own, own + splits, …, each left as a state; as the result, if there is but one
    chunk and no tree.
    """
    for chunk in range(own, last + 1, splits):
        highest, total, acc = _blocks(
            q, tl.maximum(chunk * _CHUNK, tile_begin), (chunk + 1) * _CHUNK, begin, end, tile_end, pages, keys,
            values, scale, words, real, DIM, DIM_PADDED, PAGE, LINES, MASKED, CAP,
        )  # fmt: skip
        if HAS_TREE or first < last:
            store_state(states, sums, line, real, num_states, chunk, highest, total, acc, DIM, DIM_PADDED)
        else:
            store_rows(out, line, real, highest, total, acc, sink, DIM, DIM_PADDED)


@triton.jit
def _join_chunks(
    arrived, splits, out, states, sums, line, real, num_states, first, last, sink,
    DIM: tl.constexpr, PADDED: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The result, by the last program of those with chunks; one that a line sees nothing of changes no bit of it."""
    if first < last:  # noqa: SIM102 (no other program arrives)
        if last_to_arrive(arrived, 0, tl.minimum(splits, last - first + 1)):
            highest, total, acc = combined(states, sums, line, real, num_states, first, last + 1, DIM, PADDED, LINES)
            store_rows(out, line, real, highest, total, acc, sink, DIM, PADDED)


@triton.jit
def _leave(
    out, states, sums, line, real, num_states, all_highest, all_total, all_acc, highest, total, acc, sink,
    DIM: tl.constexpr, PADDED: tl.constexpr, HAS_TREE: tl.constexpr,
):  # fmt: skip
    """All chunks but the last, and the last: as two states for those who go on, or as the result."""
    if HAS_TREE:
        store_state(states, sums, line, real, num_states, 0, all_highest, all_total, all_acc, DIM, PADDED)
        store_state(states, sums, line, real, num_states, 1, highest, total, acc, DIM, PADDED)
    else:
        all_highest, all_total, all_acc = combine(all_highest, all_total, all_acc, highest, total, acc)
        store_rows(out, line, real, all_highest, all_total, all_acc, sink, DIM, PADDED)


@triton.jit
def _walk(
    q, first, last, tile_begin, begin, end, tile_end, pages, keys, values, scale, words, real,
    out, states, sums, line, num_states, sink,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr, HAS_TREE: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """All chunks, one after the other, by one program."""
    all_highest, all_total, all_acc = nothing(LINES, DIM_PADDED)
    highest, total, acc = nothing(LINES, DIM_PADDED)
    for chunk in range(first, last + 1):
        all_highest, all_total, all_acc = combine(all_highest, all_total, all_acc, highest, total, acc)
        highest, total, acc = _blocks(
            q, tl.maximum(chunk * _CHUNK, tile_begin), (chunk + 1) * _CHUNK, begin, end, tile_end, pages, keys, values,
            scale, words, real, DIM, DIM_PADDED, PAGE, LINES, False, CAP,
        )  # fmt: skip
    _leave(
        out, states, sums, line, real, num_states, all_highest, all_total, all_acc, highest, total, acc, sink,
        DIM, DIM_PADDED, HAS_TREE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["window", "num_sequences", "table_width", "num_slots", "num_states", "num_words", "nodes"]
)
def scan_linear(
    query, keys, values, table, offsets, positions, visible, lengths, ancestors, tree_base, out, states, sums, arrived,
    sinks, scale, window, num_sequences, table_width, num_slots, num_states, num_words, nodes,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr, ONE_TILE: tl.constexpr,
    HAS_TREE: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Everything that a tile's rows share: the blocks of keys no draft node has a part in; MASKED, all blocks.

    Program (tile, key head, j). SPLIT: chunks j, j + splits, … leave a state each; without a tree, the last program
    makes the result of them. Otherwise one walks all, and leaves two states for a tree, the last chunk and all before.
    """
    make_way()
    rows: tl.constexpr = LINES // GROUP_PADDED
    sequence, row_begin, row_end = _rows_of_tile(tl.program_id(0), offsets, num_sequences, rows, ONE_TILE)
    head = tl.program_id(1).to(tl.int64)
    row, member = row_begin + tl.arange(0, LINES) // GROUP_PADDED, tl.arange(0, LINES) % GROUP_PADDED
    real = (row < row_end) & (member < GROUP)
    line = row * (KV_HEADS * GROUP) + head * GROUP + member
    end = tl.load(visible + row, mask=real, other=0).to(tl.int32)
    begin = tl.maximum(tl.load(positions + row, mask=real, other=0).to(tl.int32) - window + 1, 0)
    if HAS_TREE:
        end, open_chunk = _shared_end(end, tl.load(lengths + row, mask=real, other=0).to(tl.int32))
    else:
        open_chunk = _last_chunk(end, nodes, table_width * PAGE)
    last, tile_end = tl.max(open_chunk, 0), tl.minimum(tl.max(end, 0) + nodes, table_width * PAGE)
    words = _words_of(ancestors, row, real, num_words, tl.load(tree_base + sequence).to(tl.int32), MASKED)
    tile_begin = tl.min(tl.where(real, begin, 1 << 30), 0) // _BLOCK * _BLOCK
    first, pages = tl.minimum(tile_begin // _CHUNK, last), table + sequence.to(tl.int64) * table_width
    keys, values, splits = keys + head * num_slots * DIM, values + head * num_slots * DIM, tl.num_programs(2)
    own = first + (tl.program_id(2) + splits - first % splits) % splits  # the first chunk of this program
    if own > last:  # others have all there is, and need the room
        return
    _ask_for_chunk(keys, values, pages, own, tile_end, DIM, PAGE)
    wait_for_predecessors()  # all before is known since the batch was laid out; only now come queries and new keys
    if row_begin >= row_end:
        return
    q = _load_queries(query, line, real, DIM, DIM_PADDED)
    sink = None if sinks is None else tl.load(sinks + head * GROUP + member, mask=real, other=0.0).to(tl.float32)
    if SPLIT:
        _take_chunks(
            q, own, first, last, splits, tile_begin, begin, end, tile_end, pages, keys, values, scale, words, real,
            out, states, sums, line, num_states, sink, DIM, DIM_PADDED, PAGE, LINES, MASKED, HAS_TREE, CAP,
        )  # fmt: skip
        if not HAS_TREE:
            arrived += tl.program_id(0) * KV_HEADS + head
            _join_chunks(
                arrived, splits, out, states, sums, line, real, num_states, first, last, sink, DIM, DIM_PADDED, LINES
            )
    elif MASKED:  # no bits are asked for: no chunks
        highest, total, acc = _blocks(
            q, tile_begin, tile_end, begin, end, tile_end, pages, keys, values,
            scale, words, real, DIM, DIM_PADDED, PAGE, LINES, MASKED, CAP,
        )  # fmt: skip
        store_rows(out, line, real, highest, total, acc, sink, DIM, DIM_PADDED)
    else:
        _walk(
            q, first, last, tile_begin, begin, end, tile_end, pages, keys, values, scale, words, real,
            out, states, sums, line, num_states, sink, DIM, DIM_PADDED, PAGE, LINES, HAS_TREE, CAP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window", "num_slots", "num_states", "tail_width"])
def finish_rows(
    query, keys, values, positions, visible, lengths, tails, out, states, sums, sinks,
    scale, window, num_slots, num_states, tail_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLIT: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Combine the states of one row and key head, and go on with the keys only this draft node has."""
    make_way()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, _ROW_LINES)
    real = i < GROUP
    line = row * (KV_HEADS * GROUP) + head * GROUP + i
    seen_linear, length = tl.load(visible + row).to(tl.int32), tl.load(lengths + row).to(tl.int32)
    begin = tl.maximum(tl.load(positions + row).to(tl.int32) - window + 1, 0)
    first, opened = 0, 1
    if SPLIT:
        opened = tl.where(length > seen_linear, seen_linear, tl.maximum(seen_linear - 1, 0)) // _CHUNK
        first = tl.minimum(begin // _CHUNK, opened)
    wait_for_predecessors()
    all_highest, all_total, all_acc = combined(
        states, sums, line, real, num_states, first, opened, DIM, DIM_PADDED, _ROW_LINES
    )
    highest, total, acc = load_state(states, sums, line, real, num_states, opened, DIM, DIM_PADDED)
    if length > seen_linear:
        q = _load_queries(query, line, real, DIM, DIM_PADDED)
        keys += head.to(tl.int64) * num_slots * DIM
        values += head.to(tl.int64) * num_slots * DIM
        tail_begin = seen_linear // _BLOCK * _BLOCK
        slots = tails + row * tail_width - tail_begin
        for block in range(tl.cdiv(length - tail_begin, _BLOCK)):
            start = tail_begin + block * _BLOCK
            if start % _CHUNK == 0:
                all_highest, all_total, all_acc = combine(all_highest, all_total, all_acc, highest, total, acc)
                highest, total, acc = nothing(_ROW_LINES, DIM_PADDED)
            key = start + tl.arange(0, _BLOCK)
            there = key < length
            slot = tl.load(slots + key, mask=there, other=0).to(tl.int64)
            k, v = _load_slots(keys, values, slot, there, DIM, DIM_PADDED)
            seen = tl.broadcast_to(((key >= begin) & there)[None, :], (_ROW_LINES, _BLOCK))
            highest, wide, acc = attend(q, k, v, seen, highest, widened(total, _ROW_LINES), acc, scale, CAP)
            total = tl.max(wide, 1)
    all_highest, all_total, all_acc = combine(all_highest, all_total, all_acc, highest, total, acc)
    sink = None if sinks is None else tl.load(sinks + head * GROUP + i, mask=real, other=0.0).to(tl.float32)
    store_rows(out, line, real, all_highest, all_total, all_acc, sink, DIM, DIM_PADDED)
