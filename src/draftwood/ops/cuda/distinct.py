"""Repeated draws as draws without replacement on CUDA: `TokenTree.distinct` without waiting for the host."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportUnreachable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.tree import Draw, TokenTree

BLOCK = 4096


@triton.jit
def _removed(tries, tokens, above, node, j, W: tl.constexpr):
    """The token of draw j behind `above`, if it came before `node`; -1 otherwise."""
    before = above >= 0
    for i in tl.static_range(W):
        if i <= j:
            before = before & (tl.load(tries + tl.maximum(above, 0) * W + i) != node)
    child = tl.load(tries + tl.maximum(above, 0) * W + j)
    return tl.where(before & (child >= 0), tl.load(tokens + tl.maximum(child, 0)), -1)


@triton.jit
def _distinct_rows(
    q, sums, tries, tokens, parents, q_row, merged, out,
    W: tl.constexpr, VOCABULARY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The law of one node once its earlier siblings cannot come again, a block a program."""
    node = tl.program_id(0).to(tl.int64)
    row, above = tl.load(q_row + node), tl.load(parents + node)
    above = tl.where(tl.load(merged + node) != 0, above, -1)
    x = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (x < VOCABULARY) & (row >= 0)
    law = tl.load(q + row * VOCABULARY + x, mask=inside, other=0.0)
    total = tl.load(sums + tl.maximum(row, 0))
    for j in tl.static_range(W):
        token = _removed(tries, tokens, above, node, j, W)
        law = tl.where(x == token, 0.0, law)
        gone = (token >= 0) & (row >= 0)
        total -= tl.load(q + row * VOCABULARY + token, mask=gone, other=0.0).to(tl.float64)
    tl.store(out + node * VOCABULARY + x, (law / tl.maximum(total, 1e-37)).to(tl.float32), mask=x < VOCABULARY)


def distinct(tree: TokenTree, q: Tensor) -> TokenTree:
    """Every node tried once; what is known of the structure stays known."""
    again = (tree.tries[:, :, None] == tree.tries[:, None, :]).tril(-1).any(-1)
    tries = tree.tries.masked_fill(again, -1)  # not packed: what lies between is no draw
    merged = _merged(tree, tries)
    rows = torch.empty(tree.num_nodes, q.shape[1], device=q.device)
    grid = (tree.num_nodes, triton.cdiv(q.shape[1], BLOCK))
    _distinct_rows[grid](
        q.contiguous(), q.sum(1, dtype=torch.float64), tries, tree.tokens.contiguous(), tree.parents.contiguous(),
        tree.q_row.contiguous(), merged, rows, tries.shape[1], q.shape[1], BLOCK,
    )  # fmt: skip
    draw = torch.where(merged, int(Draw.WITHOUT_REPLACEMENT), tree.draw)
    own = torch.arange(tree.num_nodes, device=q.device)
    shape = replace(tree.shape.linked(tries, tree.parents), repeats=False)
    return TokenTree(tree.tokens, shape, draw, torch.where(tree.q_row >= 0, own, -1), rows)


def _merged(tree: TokenTree, tries: Tensor) -> Tensor:
    """Independently drawn nodes no sibling of which holds their token. [M] bool."""
    tokens = torch.where(tries >= 0, tree.tokens[tries.clamp(min=0)], -1)
    twins = (tokens[:, :, None] == tokens[:, None, :]).tril(-1) & (tries >= 0)[:, :, None]
    siblings = (tree.draw == Draw.IID) & ~twins.any(-1).any(-1)[tree.parents.clamp(min=0)]
    return siblings if tree.shape.merged is None else siblings & tree.shape.merged[tree.owner]
