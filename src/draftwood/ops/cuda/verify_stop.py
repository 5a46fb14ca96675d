"""Where accepted paths end, on CUDA: kernels of one program a tree, over numbers of nodes and no rows.

No sum here depends on how many trees there are or how large the others in the batch are: nodes are always added up
`LANES` at a time, in order.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.kseq import chance_at_bar
from draftwood.ops.cuda.pdl import wait_and_make_way
from draftwood.ops.cuda.random import aim_at, fold, uniform
from draftwood.ops.cuda.rejection import fair_chance
from draftwood.rng import Purpose

ROUND = tl.constexpr(int(Purpose.ROUND))
ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
PIECE = tl.constexpr(32)  # of a path written together


@triton.jit
def _nothing_behind(path, depth, steps):
    """A path that ends after `depth` steps has no node there."""
    at = depth + 1
    while at <= steps:
        x = at + tl.arange(0, PIECE)
        tl.store(path + x, tl.full((PIECE,), -1, tl.int64), mask=x <= steps)
        at += PIECE


@triton.jit(do_not_specialize=["steps"])
def follow_choices(tokens, tries, offsets, choices, path, length, bonus, steps, W: tl.constexpr, PADDED: tl.constexpr):
    """Down one tree along what was chosen after each of its nodes; trees may be much deeper than that goes."""
    wait_and_make_way()
    b = tl.program_id(0)
    own, place = path + b * (steps + 1), tl.arange(0, PADDED)
    node = tl.load(offsets + b)
    tl.store(own, node)
    chosen, accepted = tl.load(choices + node), node * 0
    walks = steps > 0
    while walks:
        child = tl.load(tries + node * W + place, mask=place < W, other=-1)
        token = tl.load(tokens + child, mask=child >= 0, other=-1)
        first = tl.min(tl.where((child >= 0) & (token == chosen), place, PADDED), 0)
        hit = first < PADDED
        if hit:
            node = tl.sum(tl.where(place == first, child, 0), 0)
            chosen = tl.load(choices + node)
            accepted += 1
            tl.store(own + accepted, node)
        walks = hit & (accepted < steps)
    _nothing_behind(own, accepted, steps)
    tl.store(length + b, accepted)
    tl.store(bonus + b, chosen)


@triton.jit
def round_key(seeds, lengths, b, PURPOSE: tl.constexpr):
    """`rng.round_keys` of tree b."""
    seed = tl.load(seeds + b)
    key = fold(fold(seed, seed * 0 + ROUND), tl.load(lengths + b))
    return fold(key, key * 0 + PURPOSE)


@triton.jit
def pick_node(stop, begin, size, u, LANES: tl.constexpr):
    """A node of one tree in proportion to `stop`, summed in the same pieces whatever the size of other trees."""
    total = u * 0.0
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        total += tl.sum(tl.load(stop + begin + x, mask=x < size, other=0.0), 0)
        at += LANES
    aim = aim_at(u, total)
    before = u * 0.0
    chosen, last = size, size * 0
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        w = tl.load(stop + begin + x, mask=x < size, other=0.0)
        beyond = tl.min(tl.where((before + tl.cumsum(w, 0) > aim) & (w > 0), x, size), 0)
        chosen = tl.minimum(chosen, beyond)
        last = tl.maximum(last, tl.max(tl.where(w > 0, x, 0), 0))
        before += tl.sum(w, 0)
        at += LANES
    return begin + tl.where(chosen < size, chosen, last)


@triton.jit
def write_path(parents, node, path, length, steps):
    """The way to `node`, and how many draft nodes are on it."""
    depth = node * 0
    up = tl.load(parents + node)
    while up >= 0:
        depth += 1
        up = tl.load(parents + up)
    tl.store(length, depth)
    _nothing_behind(path, depth, steps)
    here, at = node, depth
    while here >= 0:
        tl.store(path + at, here)
        here = tl.load(parents + here)
        at -= 1


@triton.jit
def pick_end(parents, stop, begin, size, seeds, lengths, end, path, length, steps, b, LANES: tl.constexpr):
    """Draw the node tree b's path ends at, in proportion to `stop`, and write it and the way to it down."""
    chosen = pick_node(stop, begin, size, uniform(round_key(seeds, lengths, b, ACCEPT)), LANES)
    tl.store(end + b, chosen)
    write_path(parents, chosen, path + b * (steps + 1), length + b, steps)


@triton.jit
def _outcome(tokens, tries, chance, values, mass, node, wanted, inside, W: tl.constexpr):
    """At `node`: the chance to go on to its child `wanted`, and to end there, when it is offered the whole of p."""
    missed = tl.full(node.shape, 1.0, tl.float64)
    given, hits, hit_here = missed * 0.0, missed * 0.0, missed * 0.0
    for j in tl.static_range(W):
        child = tl.load(tries + node * W + j, mask=inside, other=-1)
        token = tl.load(tokens + child, mask=child >= 0, other=-1)
        first = child >= 0
        for i in tl.static_range(j):
            earlier = tl.load(tries + node * W + i, mask=inside, other=-1)
            first = first & (tl.load(tokens + earlier, mask=earlier >= 0, other=-1) != token)
        fair = tl.load(chance + node * W + j, mask=inside, other=0.0)
        hit = tl.where(first, tl.load(values + node * W + j, mask=inside, other=0.0), 0.0)
        given += tl.where(child == wanted, fair * missed, 0.0)
        hit_here += tl.where(child == wanted, hit, 0.0)
        hits += hit
        missed = missed * (1.0 - fair)
    left = tl.load(mass + node, mask=inside, other=0.0)
    # What is left is drawn from only after all draws were rejected; landing on a child is going there all the same.
    share = tl.where(left > 0, missed / tl.where(left > 0, left, 1.0), 0.0)
    ends = tl.maximum(tl.where(left > 0, share * (left - hits), missed), 0.0)
    return given + hit_here * share, ends


@triton.jit
def along_path(parents, factors, node, inside, steps):
    """The product of the factors of `node` and all nodes above it but the root."""
    product = tl.full(node.shape, 1.0, tl.float64)
    here = node
    step = 0
    while step < steps:
        up = tl.load(parents + here, mask=inside, other=-1)
        product = product * tl.load(factors + here, mask=inside & (up >= 0), other=1.0)
        here = tl.where(up >= 0, up, here)
        step += 1
    return product


@triton.jit(do_not_specialize=["steps"])
def end_of_walk(
    tokens, parents, tries, offsets, chance, values, mass, seeds, lengths, passes, stop, end, path, length, steps,
    W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Where the walk down one tree ends."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        above = tl.load(parents + node, mask=inside, other=-1)
        onward, _ = _outcome(tokens, tries, chance, values, mass, above, node, inside & (above >= 0), W)
        tl.store(passes + node, onward, mask=inside)
        at += LANES
    tl.debug_barrier()
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        _, ends = _outcome(tokens, tries, chance, values, mass, node, node, inside, W)
        tl.store(stop + node, ends * along_path(parents, passes, node, inside, steps), mask=inside)
        at += LANES
    tl.debug_barrier()
    pick_end(parents, stop, begin, size, seeds, lengths, end, path, length, steps, b, LANES)


@triton.jit
def _children_fail(tries, fails, node, inside, until, W: tl.constexpr):
    """The chance that all children of `node` before the child `until` fail."""
    product = tl.full(node.shape, 1.0, tl.float64)
    before = inside
    for j in tl.static_range(W):
        child = tl.load(tries + node * W + j, mask=inside, other=-1)
        before = before & (child != until)
        product = product * tl.load(fails + child, mask=before & (child >= 0), other=1.0)
    return product


@triton.jit
def _taken(parents, weight, mass, node, inside):
    """The chance that a node is taken if no child is; the root has nothing above it to fall back to."""
    left = tl.load(mass + node, mask=inside, other=0.0)
    survives = left + (1.0 - tl.load(weight + node, mask=inside, other=0.0))
    taken = tl.where(survives > 0, left / tl.where(survives > 0, survives, 1.0), 1.0)
    return tl.where(tl.load(parents + node, mask=inside, other=-1) < 0, 1.0, taken)


@triton.jit(do_not_specialize=["steps"])
def end_of_search(
    parents, tries, offsets, weight, mass, seeds, lengths, fails, before, stop, end, path, length, steps,
    W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The first node taken in a depth-first search of one tree from its leaves up."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    sweep = 0
    while sweep <= steps:  # one more layer is right after each
        at = 0
        while at < size:
            x = at + tl.arange(0, LANES)
            inside, node = x < size, begin + x
            below = tl.full(node.shape, 1.0, tl.float64)
            if sweep > 0:
                below = _children_fail(tries, fails, node, inside, -2, W)
            tl.store(fails + node, (1.0 - _taken(parents, weight, mass, node, inside)) * below, mask=inside)
            at += LANES
        tl.debug_barrier()
        sweep += 1
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        above = tl.load(parents + node, mask=inside, other=-1)
        tl.store(before + node, _children_fail(tries, fails, above, inside & (above >= 0), node, W), mask=inside)
        at += LANES
    tl.debug_barrier()
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        enters = along_path(parents, before, node, inside, steps)
        comes_back = enters * _children_fail(tries, fails, node, inside, -2, W)
        tl.store(stop + node, comes_back * _taken(parents, weight, mass, node, inside), mask=inside)
        at += LANES
    tl.debug_barrier()
    pick_end(parents, stop, begin, size, seeds, lengths, end, path, length, steps, b, LANES)


@triton.jit
def _shares(score, weight, node, inside):
    """A node's part of its layer's mass."""
    whole = tl.load(weight + node, mask=inside, other=0.0)
    return tl.where(whole > 0, tl.load(score + node, mask=inside, other=0.0) / tl.where(whole > 0, whole, 1.0), 0.0)


@triton.jit
def _all_missed(chance, node, inside, W: tl.constexpr):
    """The chance that no draw behind `node` is accepted."""
    missed = tl.full(node.shape, 1.0, tl.float64)
    for j in tl.static_range(W):
        missed = missed * (1.0 - tl.load(chance + node * W + j, mask=inside, other=0.0))
    return missed


@triton.jit
def _given(
    tries, tokens, wanted, said, weight, scales, bars, above, node, inside, width, KSEQ: tl.constexpr, W: tl.constexpr
):
    """That the draws behind `above`, at most `width`, that gave `node` are the first accepted; or are, once tried."""
    missed = tl.full(node.shape, 1.0, tl.float64)
    given, tried = missed * 0.0, missed * 0.0
    for j in tl.static_range(W):
        if j < width:
            place = above * 0 + j
            there = inside & (tl.load(tokens + above * W + j, mask=inside, other=-1) >= 0)
            if KSEQ:
                fair = chance_at_bar(wanted, said, weight, bars, above, place, there, W)
            else:
                fair = fair_chance(wanted, said, weight, scales, above, place, there, W)
            mine = tl.load(tries + above * W + j, mask=there, other=-1) == node
            given += tl.where(mine, fair * missed, 0.0)
            tried += tl.where(mine, fair, 0.0)
            missed = missed * (1.0 - fair)
    return given, tried


@triton.jit(do_not_specialize=["layer", "last", "width"])
def hand_down(
    parents, depth, tries, offsets, tokens, wanted, said, weight, scales, bars, score, layer, last, width,
    SHARED: tl.constexpr, KSEQ: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What the children of a layer of one tree are offered, up to `width` a node, and of the layers after it up to
    `last`, one a node: their draws' chances; SHARED: the whole layer what its draws are given together, and each node
    its part of that.
    """
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    while layer <= last:
        everything = begin.to(tl.float64) * 0.0
        at = 0
        while at < size:
            x = at + tl.arange(0, LANES)
            node = begin + x
            below = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer + 1)
            above = tl.load(parents + node, mask=below, other=0)
            given, tried = _given(
                tries, tokens, wanted, said, weight, scales, bars, above, node, below, width, KSEQ, W
            )  # fmt: skip
            if SHARED:
                scored = tl.where(below, _shares(score, weight, above, below) * given, 0.0)
                tl.store(score + node, scored, mask=below)
                everything += tl.sum(scored, 0)
            else:
                tl.store(weight + node, tried, mask=below)
            at += LANES
        at = 0
        while at < size:
            x = at + tl.arange(0, LANES)
            below = (x < size) & (tl.load(depth + begin + x, mask=x < size, other=-1) == layer + 1)
            if SHARED:
                tl.store(weight + begin + x, tl.minimum(everything, 1.0) + tl.zeros((LANES,), tl.float64), mask=below)
            at += LANES
        tl.debug_barrier()
        layer += 1
        width = width * 0 + 1


@triton.jit
def _layer_mass(depth, chance, weight, score, begin, size, layer, W: tl.constexpr, LANES: tl.constexpr):
    """The chance to come back up to a layer from its draws."""
    whole = begin.to(tl.float64) * 0.0
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        node = begin + x
        here = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer)
        comes = _shares(score, weight, node, here) * _all_missed(chance, node, here, W)
        whole += tl.sum(tl.where(here, comes, 0.0), 0)
        at += LANES
    return whole


@triton.jit(do_not_specialize=["steps"])
def end_of_layers(
    parents, depth, offsets, chance, mass, weight, score, seeds, lengths, stop, end, path, length, steps,
    W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Where one tree's path ends, from the deepest layer up."""
    wait_and_make_way()
    b = tl.program_id(0)
    begin = tl.load(offsets + b)
    size = (tl.load(offsets + b + 1) - begin).to(tl.int32)
    passed = begin.to(tl.float64) * 0.0 + 1.0
    layer = steps
    while layer >= 0:
        whole = _layer_mass(depth, chance, weight, score, begin, size, layer, W, LANES)
        every = passed * 0.0
        at = 0
        while at < size:
            x = at + tl.arange(0, LANES)
            node = begin + x
            level = (x < size) & (tl.load(depth + node, mask=x < size, other=-1) == layer)
            here = level & (tl.load(parents + node, mask=level, other=-1) != node)  # absent nodes are their own parents
            comes = _shares(score, weight, node, here) * _all_missed(chance, node, here, W)
            comes = tl.where(whole > 0, comes / tl.where(whole > 0, whole, 1.0), 1.0)
            left = tl.load(mass + node, mask=here, other=0.0)
            survives = left + (1.0 - tl.load(weight + node, mask=here, other=0.0))
            taken = tl.where(survives > 0, left / tl.where(survives > 0, survives, 1.0), 1.0)
            ending = tl.where(here, comes * taken, 0.0)
            tl.store(stop + node, ending * passed, mask=level)
            every += tl.sum(ending, 0)
            at += LANES
        passed = passed * tl.maximum(1.0 - every, 0.0)
        layer -= 1
    tl.debug_barrier()
    pick_end(parents, stop, begin, size, seeds, lengths, end, path, length, steps, b, LANES)


@triton.jit
def stop_by_layers(
    extent, weight, mass, depth, parents, left, spare, passed, stop, begin, size, steps,
    LEVELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The chances that one tree's path ends at its nodes, from the deepest layer up, in proportion to what is left at
    them; `left` and `spare`: of each layer in all, and what the layer above it did not give away.
    """
    level = tl.arange(0, LEVELS)
    others = tl.load(spare + level, mask=level <= steps, other=1.0)
    whole = others + tl.load(left + level, mask=level <= steps, other=0.0)
    goes_up = tl.where(whole > 0, others / tl.where(whole > 0, whole, 1.0), 0.0)
    comes = tl.cumprod(goes_up, 0, reverse=True)  # to the layer above
    tl.store(passed + level - 1, comes, mask=(level > 0) & (level <= steps))
    tl.store(passed + steps, 1.0)
    tl.debug_barrier()
    at = 0
    while at < size:
        x = at + tl.arange(0, LANES)
        inside, node = x < size, begin + x
        layer = tl.load(depth + node, mask=inside, other=0)
        given, kept = tl.load(weight + node, mask=inside, other=0.0), tl.load(mass + node, mask=inside, other=0.0)
        here = tl.where(tl.load(extent + node, mask=inside, other=0) > 0, kept, given)
        every = tl.load(spare + layer, mask=inside, other=0.0) + tl.load(left + layer, mask=inside, other=0.0)
        ending = tl.where(every > 0, here / tl.where(every > 0, every, 1.0), 1.0)
        ending = tl.where(tl.load(parents + node, mask=inside, other=-1) == node, 0.0, ending)  # absent
        tl.store(stop + node, ending * tl.load(passed + layer, mask=inside, other=0.0), mask=inside)
        at += LANES
    tl.debug_barrier()
