"""A layer of a tree at a time, all its draws against one common target, on CUDA: see `verifiers/layer.py`.

Each draw needs to know what all draws before it left, so they come one launch after the other; in each, many programs
share a row. What is left of a node's row is kept as one sum a slice, in two copies: a launch reads one and writes the
other, and how many draws a node has seen says which is which.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.ends import pick_end


@triton.jit
def _masses(tries, partial, nodes, slices, node, here, tried, W: tl.constexpr, PADDED: tl.constexpr):
    """What is left at nodes that have seen `tried` draws; those with -1 all of theirs."""
    count = tl.zeros(node.shape, tl.int64)
    for j in tl.static_range(W):
        count += (tl.load(tries + node * W + j, mask=here, other=-1) >= 0).to(tl.int64)
    seen = tl.where(tried < 0, count, tried)
    c = tl.arange(0, PADDED)
    at = ((seen % 2) * nodes + node)[:, None] * slices + c[None, :]
    return tl.sum(tl.load(partial + at, mask=here[:, None] & (c < slices)[None, :], other=0.0), 1)


@triton.jit(do_not_specialize=["layer"])
def start_layer(depth, offsets, weight, partial, reach, dead, slices, layer, LANES: tl.constexpr):
    """Nothing of one tree's layer was tried yet: all of a node's weight is left."""
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    everything = begin.to(tl.float64) * 0.0
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        node = begin + x
        here = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer)
        own = tl.load(weight + node, mask=here, other=0.0)
        tl.store(partial + node * slices, own, mask=here)
        everything += tl.sum(own, 0)
        at += LANES
    tl.store(dead + b, 1.0 - everything)
    tl.store(reach + b, everything * 0.0 + 1.0)


@triton.jit
def _survives(
    tries, depth, offsets, partial, dead, nodes, slices, b, node, place, layer,
    W: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What all draws of the layer before draw `place` of `node` left, the missing part of the target included."""
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    everything = begin.to(tl.float64) * 0.0
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        other = begin + x
        here = (x < size) & (tl.load(depth + other, mask=x < size, other=-1) == layer)
        tried = tl.where(other < node, -1, tl.where(other == node, place, 0))
        everything += tl.sum(_masses(tries, partial, nodes, slices, other, here, tried, W, PADDED), 0)
        at += LANES
    return tl.maximum(everything + tl.load(dead + b), 0.0)


@triton.jit(do_not_specialize=["layer"])
def try_draw(
    p, q, tries, tokens, q_row, depth, offsets, owner, level, rows, places, weight, scales, partial, reach, dead,
    nodes, layer,
    W: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The next draw of each tree that has one, against what is left of its layer; a slice of a row a program."""
    turn, piece, slices = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    node, place = tl.load(level + tl.load(rows + turn)), tl.load(places + turn)
    b = tl.load(owner + node)
    survives = _survives(
        tries, depth, offsets, partial, dead, nodes, slices, b, node, place, layer, W, PADDED, LANES
    )  # fmt: skip
    child = tl.load(tries + node * W + place)
    token, whole = tl.load(tokens + child), tl.load(weight + node)
    x = piece * SIZE + tl.arange(0, SIZE)
    inside = x < VOCABULARY
    left = tl.load(p + node * VOCABULARY + x, mask=inside, other=0.0) * whole.to(tl.float32)
    value = whole * tl.load(p + node * VOCABULARY + token).to(tl.float64)
    for i in tl.static_range(W):
        if i <= place:
            its = tl.load(tries + node * W + i)
            row, point = tl.load(q_row + its), tl.load(tokens + its)
            scale = tl.where(i < place, tl.load(scales + node * W + i), survives)
            law = tl.load(q + row * VOCABULARY + x, mask=inside & (row >= 0), other=0.0)
            law = tl.where(row >= 0, law, (x == point).to(tl.float32))
            left = tl.maximum(left - scale.to(tl.float32) * law, 0.0)
            said = tl.load(q + row * VOCABULARY + token, mask=row >= 0, other=0.0).to(tl.float64)
            said = tl.where(row >= 0, said, (point == token).to(tl.float64))
            value = tl.where(i < place, tl.maximum(value - scale * said, 0.0), value)
    tl.store(partial + (((place + 1) % 2) * nodes + node) * slices + piece, tl.sum(left.to(tl.float64), 0))
    if piece == 0:
        row = tl.load(q_row + child)
        own = tl.load(q + row * VOCABULARY + token, mask=row >= 0, other=1.0).to(tl.float64)
        offered = survives * own
        chance = tl.where(offered > 0, tl.minimum(value / tl.where(offered > 0, offered, 1.0), 1.0), 1.0)
        so_far = tl.load(reach + b)
        tl.store(scales + node * W + place, survives)
        tl.store(weight + child, tl.load(weight + child) + so_far * chance)
        tl.store(reach + b, so_far * (1.0 - chance))


@triton.jit
def _layer_sums(
    tries, depth, offsets, weight, partial, nodes, slices, b, layer,
    W: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What is left of a layer, the spare part of the target included."""
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    left, everything = begin.to(tl.float64) * 0.0, begin.to(tl.float64) * 0.0
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        node = begin + x
        here = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer)
        left += tl.sum(_masses(tries, partial, nodes, slices, node, here, node * 0 - 1, W, PADDED), 0)
        everything += tl.sum(tl.load(weight + node, mask=here, other=0.0), 0)
        at += LANES
    return left + tl.maximum(1.0 - everything, 0.0)


@triton.jit(do_not_specialize=["steps"])
def end_of_pooled(
    tries, parents, depth, offsets, weight, partial, nodes, slices, seeds, lengths, stop, end, path, length, steps,
    W: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Where one tree's path ends, from the deepest layer up."""
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    passed = begin.to(tl.float64) * 0.0 + 1.0
    layer = steps
    while layer >= 0:
        whole = _layer_sums(tries, depth, offsets, weight, partial, nodes, slices, b, layer, W, PADDED, LANES)
        everybody = passed * 0.0
        at = 0
        while at < size:
            x = at + tl.arange(0, LANES)
            node = begin + x
            here = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer)
            mass = _masses(tries, partial, nodes, slices, node, here, node * 0 - 1, W, PADDED)
            ending = tl.where(here, tl.where(whole > 0, mass / tl.where(whole > 0, whole, 1.0), 1.0), 0.0)
            tl.store(stop + node, ending * passed, mask=here)
            everybody += tl.sum(ending, 0)
            at += LANES
        passed = passed * tl.maximum(1.0 - everybody, 0.0)
        layer -= 1
    tl.debug_barrier()
    pick_end(parents, stop, begin, size, seeds, lengths, end, path, length, steps, b, LANES)
