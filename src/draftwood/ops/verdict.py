"""Whole verdicts by a few kernels, where there are any: float32 rows, keyed randomness, one call for a batch of trees.

They decide as the odds of `verifiers/` do with the same random numbers, up to rounding: those say what a law is, the
laboratory and the proofs read them, and wherever there is no kernel they are what is run.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from draftwood.ops.native import Kernels
from draftwood.ops.native.structs import VerdictCall
from draftwood.ops.residual import WIDEST_ON_CUDA, native_for, on_cuda
from draftwood.tree import TokenTree, Verdict

WIDEST_IN_C = 64  # draws behind a node


class Rule(IntEnum):
    """What is accepted; as in verdict.h."""

    REJECTION = 0
    KSEQ = 1
    LENIENT = 2  # from here on nothing is lossless: settings as `verifiers/lossy.py` names them
    LOWERED_BARS = 3
    MIXTURE = 4
    TYPICAL = 5  # from here on all of a path is judged, not the draws behind a node
    RELAXED = 6


def walk(
    tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, tried: int | None = None, lenience: float | None = None
) -> Verdict | None:
    """Top down, at each node one of the first `tried` draws (None: all) or what is left after them. `lenience`: what
    chances are divided by, where the law is not lossless.
    """
    tried = tried or tree.tries.shape[1]
    if _for_cuda(tree, p):
        from draftwood.ops.cuda.verdict import walk as launch

        return launch(tree, p, seeds, lengths, tried, lenience)
    library = _for_c(tree, p)
    if library is None:
        return None
    rule, settings = (Rule.REJECTION, ()) if lenience is None else (Rule.LENIENT, (lenience,))
    return _call(library.dw_verdict_walk, tree, p, seeds, lengths, tried=tried, rule=rule, settings=settings)


def search(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict | None:
    """Depth first from the leaves up: block verification of chains, traversal verification of trees."""
    if _for_cuda(tree, p):
        from draftwood.ops.cuda.verdict import search as launch

        return launch(tree, p, seeds, lengths)
    library = _for_c(tree, p)
    if library is None:
        return None
    return _call(library.dw_verdict_search, tree, p, seeds, lengths, distinct=tree.shape.repeats)


def layers(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict | None:
    """A layer at a time, every node with its share of the layer's mass, its draws rejected one after the other."""
    if _one_path(tree):
        return search(tree, p, seeds, lengths)
    if _for_cuda(tree, p):
        from draftwood.ops.cuda.verdict import layers as launch

        return launch(tree, p, seeds, lengths, kseq=False)
    library = _for_c(tree, p)
    return None if library is None else _call(library.dw_verdict_layers, tree, p, seeds, lengths)


def pooled_layers(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict | None:
    """A layer at a time, all its draws against one common target."""
    if _one_path(tree):
        return search(tree, p, seeds, lengths)
    if _for_cuda(tree, p):
        from draftwood.ops.cuda.verdict import pooled_layers as launch

        return launch(tree, p, seeds, lengths)
    library = _for_c(tree, p)
    return None if library is None else _call(library.dw_verdict_pooled, tree, p, seeds, lengths)


def kseq_walk(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict | None:
    """Top down, all draws behind a node at the same lowered bar."""
    if _one_path(tree):
        return walk(tree, p, seeds, lengths)
    if _for_cuda(tree, p) and tree.q is not None:
        from draftwood.ops.cuda.verdict import kseq_walk as launch

        return launch(tree, p, seeds, lengths)
    library = None if tree.q is None else _for_c(tree, p)
    return None if library is None else _call(library.dw_verdict_walk, tree, p, seeds, lengths, rule=Rule.KSEQ)


def kseq_layers(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict | None:
    """A layer at a time, every node with its share of the layer's mass, its draws all at the same lowered bar."""
    if _one_path(tree):
        return search(tree, p, seeds, lengths)
    if _for_cuda(tree, p) and tree.q is not None:
        from draftwood.ops.cuda.verdict import layers as launch

        return launch(tree, p, seeds, lengths, kseq=True)
    library = None if tree.q is None else _for_c(tree, p)
    return None if library is None else _call(library.dw_verdict_layers, tree, p, seeds, lengths, rule=Rule.KSEQ)


def _one_path(tree: TokenTree) -> bool:
    """One draw behind every node: there a lowered bar is none, and layers are block verification."""
    return tree.tries.shape[1] == 1


def match(tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor) -> Verdict | None:
    """Down along the tokens the target itself draws with the noise of each position; on a CPU."""
    library = _for_c(tree, p)
    return None if library is None else _call(library.dw_verdict_match, tree, p, seeds, lengths)


def loosened(
    tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor, rule: Rule, *settings: float
) -> Verdict | None:
    """By a rule that is not lossless: a walk down, or the longest path of tokens that are good enough; on a CPU."""
    library = _for_c(tree, p)
    if library is None:
        return None
    kernel = library.dw_verdict_longest if rule >= Rule.TYPICAL else library.dw_verdict_walk
    return _call(kernel, tree, p, seeds, lengths, rule=rule, settings=settings)


def _for_cuda(tree: TokenTree, p: Tensor) -> bool:
    return on_cuda(p, tree.q) and tree.tries.shape[1] <= WIDEST_ON_CUDA


def _for_c(tree: TokenTree, p: Tensor) -> Kernels | None:
    return native_for(p, tree.q) if tree.tries.shape[1] <= WIDEST_IN_C else None


def _call(  # type: ignore[no-untyped-def]
    kernel, tree: TokenTree, p: Tensor, seeds: Tensor, lengths: Tensor,
    *, tried=None, rule=Rule.REJECTION, distinct=False, settings=(),
) -> Verdict:  # fmt: skip
    trees, nodes, width, depth = tree.num_trees, tree.num_nodes, tree.tries.shape[1], tree.max_depth
    path = torch.empty(trees, depth + 1, dtype=torch.int64)
    length, bonus = torch.empty(2, trees, dtype=torch.int64)
    drift = torch.empty(trees, dtype=torch.float64) if rule >= Rule.LENIENT else None
    merged = None if tree.shape.merged is None else tree.shape.merged[tree.owner]
    parts = (tree.tokens, tree.parents, tree.offsets, tree.tries, tree.q_row, tree.draw, seeds, lengths)
    kept = [p.contiguous(), None if tree.q is None else tree.q.contiguous(), *(x.contiguous() for x in parts)]
    rows, links = (
        [0 if x is None else x.data_ptr() for x in kept[:2]],
        [x.data_ptr() for x in kept[2:] if x is not None],
    )
    results = (*(x.data_ptr() for x in (path, length, bonus)), 0 if drift is None else drift.data_ptr())
    sizes = (p.shape[1], nodes, trees, width, depth)
    unlike = 0 if merged is None else merged.data_ptr()
    call = VerdictCall(*rows, *sizes, *links, tried or width, rule, distinct, unlike, settings, *results)
    kernel(ctypes.addressof(call))
    return Verdict(path, length, bonus, drift)
