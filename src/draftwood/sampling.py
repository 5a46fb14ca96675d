"""From logits to the target's distribution at every tree node, each along its own path; and log-probabilities.

Losslessness is with respect to what this module returns, so plain and speculative decoding share it. Values are only
looked at where that is allowed (`links.may_look`), or where trees have different sizes: in steps that are not captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftwood.links import may_look
from draftwood.ops.softmax import one_hot, tempered
from draftwood.protocols import BatchView, HostView, LogitEdits, NodeMasks
from draftwood.request import TokenLogprob
from draftwood.tree import TokenTree, Verdict

FAST_TOP_P = 512  # tokens looked at before a whole row is sorted
SCORED_ROWS = 64  # of a prompt that are held in double precision at a time: a vocabulary can have 150,000 entries
FORBIDDEN = float("-inf")


def target_distribution(logits: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    """The distribution each node's next token is drawn from, of edited logits. [M, V] -> [M, V], float32 or wider."""
    logits = _wide(logits)
    if view.mode.greedy:
        return one_hot(logits.max(-1).indices, logits)
    return _drawn_from(logits, view.temperature, tree, view)


def shown_distribution(logits: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    """The same for traces: where the likeliest token is always taken, how likely the model itself finds it, as at
    temperature 1. [M, V] -> [M, V].
    """
    return _drawn_from(_wide(logits), torch.where(view.temperature > 0, view.temperature, 1), tree, view)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _drawn_from(logits: Tensor, temperature: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    p = tempered(logits, temperature[tree.owner])
    return p if view.truncation is None else _truncate(p, tree, view)


def draft_distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """The law a drafter samples from: the request's temperature and nothing else. [K, V], [K] -> [K, V]."""
    return tempered(logits, temperature)


def edited_logits(logits: Tensor, tree: TokenTree, view: BatchView, masks: NodeMasks | None = None) -> Tensor:
    """Logits with what requests ask for on top: bias, penalties, then `masks` (grammars, bad words), then minimum
    lengths; each node along its own path. [M, V] -> [M, V].
    """
    biases, penalties, minimums = (None, None, None) if view.edits is None else _of_each_kind(view.edits)
    if biases is None and penalties is None and minimums is None and masks is None:
        return logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide, copy=True, memory_format=torch.contiguous_format)
    if biases is not None:
        _add_biases(logits, tree, biases)
    if penalties is not None:
        _penalise(logits, tree, penalties)
    if masks is not None:
        forbidden = torch.zeros(masks.allowed.shape, dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, masks.nodes, forbidden.masked_fill_(~masks.allowed, FORBIDDEN))
    if minimums is not None:
        _defer_stops(logits, tree, minimums)
    return logits


def _of_each_kind(edits: LogitEdits) -> tuple[LogitEdits | None, LogitEdits | None, LogitEdits | None]:
    """Edits of those that have biases, penalties, and minimum lengths still ahead; None: nothing has. Where values may
    not be looked at, all of them each time.
    """
    if not may_look(edits.which):
        return edits, edits, edits
    penalised = (edits.penalties[:, 0] != 1) | (edits.penalties[:, 1:] != 0).any(1)
    kinds = (edits.bias != 0).any(1), penalised, edits.lengths < edits.min_lengths
    biases, penalties, minimums = (_some(edits, kind.nonzero()[:, 0]) for kind in kinds)
    return biases, penalties, minimums


def _some(edits: LogitEdits, rows: Tensor) -> LogitEdits | None:
    if not len(rows):
        return None
    every = len(rows) == len(edits.which)
    return edits if every else LogitEdits(**{f.name: getattr(edits, f.name)[rows] for f in fields(edits)})


def _nodes_of(tree: TokenTree, which: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes of the trees `which` [E], and the number of each one's tree among them. [K], [K]. Where values may not
    be looked at, the last node of a tree that is smaller than others comes again.
    """
    number, sizes = torch.arange(len(which), device=which.device), tree.sizes[which]
    if tree.num_nodes == tree.num_trees * tree.widest or not may_look(sizes):
        inside = torch.arange(tree.widest, device=which.device)
        nodes = tree.offsets[which][:, None] + torch.minimum(inside, sizes[:, None] - 1)
        return nodes.view(-1), number[:, None].expand_as(nodes).reshape(-1)
    number = number.repeat_interleave(sizes)
    inside = torch.arange(len(number), device=which.device) - (sizes.cumsum(0) - sizes)[number]
    return tree.offsets[which][number] + inside, number


def _add_biases(logits: Tensor, tree: TokenTree, edits: LogitEdits) -> None:
    nodes, number = _nodes_of(tree, edits.which)
    every = torch.arange(len(nodes), device=nodes.device)
    first = torch.full_like(tree.owner, len(nodes)).scatter_reduce(0, nodes, every, "amin")[nodes] == every
    bias = torch.where(first[:, None], edits.bias.to(logits.dtype)[number], 0)  # nodes that come again have theirs
    place = nodes[:, None] * logits.shape[1] + edits.bias_tokens[number]
    logits.view(-1).scatter_add_(0, place.view(-1), bias.view(-1))


def _penalise(logits: Tensor, tree: TokenTree, edits: LogitEdits) -> None:
    """Repetition over prompt and answer, presence and frequency over the answer."""
    nodes, number = _nodes_of(tree, edits.which)
    rows = logits[nodes]
    history = edits.history[:, : int(edits.lengths.max())] if may_look(edits.lengths) else edits.history
    place = torch.arange(history.shape[1], device=rows.device)
    in_prompt = (place >= edits.source_lengths[:, None]) & (place < edits.prompt_lengths[:, None])
    in_answer = (place >= edits.prompt_lengths[:, None]) & (place < edits.lengths[:, None])
    nothing = torch.zeros(len(edits.which), rows.shape[1], dtype=rows.dtype, device=rows.device)
    prompt = nothing.scatter_add(1, history, in_prompt.to(rows.dtype)) > 0
    answer = nothing.scatter_add(1, history, in_answer.to(rows.dtype))
    paths = tree.paths[nodes, 1:]
    on_path = tree.tokens[paths.clamp(min=0)].clamp(min=0)
    counts = answer[number].scatter_add_(1, on_path, (paths >= 0).to(rows.dtype))
    said = counts > 0
    repetition, presence, frequency = edits.penalties.to(rows.dtype)[number, :, None].unbind(1)
    harsher = torch.where(rows > 0, rows / repetition, rows * repetition)
    rows = torch.where(said | prompt[number], harsher, rows)
    logits.index_copy_(0, nodes, rows - frequency * counts - presence * said)


def _defer_stops(logits: Tensor, tree: TokenTree, edits: LogitEdits) -> None:
    """Forbid stop tokens where the text, along the node's own path, is shorter than its minimum length.

    Where nothing else is left, as at the end of a grammar, they stay.
    """
    nodes, number = _nodes_of(tree, edits.which)
    rows, vocabulary = logits[nodes], logits.shape[1]
    known = (edits.stop_tokens >= 0) & (edits.stop_tokens < vocabulary)
    most = torch.where(known, FORBIDDEN, torch.inf).to(rows.dtype)[number]
    stops = edits.stop_tokens.clamp(0, vocabulary - 1)[number]
    without = rows.scatter_reduce(1, stops, most, "amin")
    early = (edits.lengths[number] + tree.depth[nodes] < edits.min_lengths[number]) & (without.amax(-1) > FORBIDDEN)
    logits.index_copy_(0, nodes, torch.where(early[:, None], without, rows))


def host_masks(tree: TokenTree, view: HostView, which: Sequence[int], vocabulary: int) -> NodeMasks:
    """What grammars and bad words allow after the nodes of the sequences `which`, computed on the host."""
    bounds, tokens, parents = tree.offsets.tolist(), tree.tokens.tolist(), tree.parents.tolist()
    nodes: list[int] = []
    rows: list[Tensor] = []
    for b in which:
        first, end = bounds[b], bounds[b + 1]
        there = [i for i in range(first, end) if tokens[i] >= 0]
        number = {node: i for i, node in enumerate(there)}
        links = [number[parents[node]] if parents[node] >= 0 else -1 for node in there]
        nodes += there
        rows.append(_allowed(view, b, [tokens[node] for node in there], links, vocabulary))
    return NodeMasks(torch.tensor(nodes, dtype=torch.int64), torch.cat(rows))


def _allowed(view: HostView, b: int, tokens: list[int], parents: list[int], vocabulary: int) -> Tensor:
    """What may follow each node of one tree. [n, V]."""
    answer = view.tokens[b][view.prompt_lengths[b] :]
    grammar = view.constraints[b] if view.constraints else None
    everything = torch.ones(len(tokens), vocabulary, dtype=torch.bool)
    rows = everything if grammar is None else grammar.allowed(answer, tokens, parents)
    words = view.bad_words[b] if view.bad_words else ()
    if words:
        reach = max(len(word) for word in words)
        said = [list(answer[-reach:])]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            said.append([*said[parent], token])
        for row, text in enumerate(said):
            rows[row, [w[-1] for w in words if len(w) == 1 or tuple(text[-(len(w) - 1) :]) == w[:-1]]] = False
    return rows


def _truncate(p: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    """Top-k, then top-p, then min-p, row by row with its own limits; what is left is renormalised."""
    limits = view.truncation
    assert limits is not None
    top_k, top_p, min_p = (limit[tree.owner][:, None] for limit in (limits.top_k, limits.top_p, limits.min_p))
    floor = torch.maximum(_smallest_kept(p, top_k, top_p.to(p.dtype)), min_p.to(p.dtype) * p.amax(-1, keepdim=True))
    kept = p.masked_fill(p < floor, 0)
    return kept / kept.sum(-1, keepdim=True)


def _smallest_kept(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability top-k and top-p leave in each row; equal ones all stay. [M, 1]."""
    ranked = _ranked(p, top_k, top_p)
    width = ranked.shape[1]
    rank = torch.arange(width, device=p.device)
    ranked = ranked.masked_fill(rank >= top_k, 0)
    total = torch.where(top_k < p.shape[1], ranked.sum(-1, keepdim=True), 1)
    # A token stays if the ones before it do not reach top_p yet: the likeliest always does.
    before = ranked.cumsum(-1) - ranked
    stays = (ranked > 0) & (before < top_p * total)
    count = stays.sum(-1, keepdim=True).clamp(min=1)
    unlimited = (top_p >= 1) & (top_k >= p.shape[1])
    return torch.where(unlimited, 0, ranked.gather(1, count - 1))


def _ranked(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The largest probabilities of each row, falling: as many as the limits need. [M, n]."""
    if not may_look(p):  # how many that is, only the device knows
        return p.sort(-1, descending=True).values
    width = min(FAST_TOP_P, p.shape[1])
    ranked = p.topk(width, -1).values
    unsettled = (top_k > width) & ((top_p < 1) & (ranked.sum(-1, keepdim=True) < top_p))
    unsettled |= (top_k > width) & (top_k < p.shape[1])
    return p.sort(-1, descending=True).values if bool(unsettled.any()) else ranked


def usable(logits: Tensor, p: Tensor | None, tree: TokenTree, verdict: Verdict) -> Tensor:
    """Whether every token that a sequence gained has a distribution: the logits are numbers, and not all forbidden.
    [B] bool.

    One number for each token tells: a row with a NaN, or without a finite logit, has no other maximum and softmax. That
    a lossy law accepts what is forbidden is no fault of the logits.
    """
    path, after = verdict.path.clamp(min=0), gained_tokens(tree, verdict)
    found = logits[path, after] if p is None else logits[path, after] + p[path, after]
    steps, last = torch.arange(path.shape[1], device=path.device), verdict.length[:, None]
    return (found.isfinite() | (steps > last) | found.isneginf() & (steps < last)).all(1)


def gained_tokens(tree: TokenTree, verdict: Verdict) -> Tensor:
    """The token behind every node of each accepted path: the next of the path, at last the target's own. 0 behind the
    end. [B, D + 1].
    """
    accepted = torch.nn.functional.pad(tree.tokens[verdict.path[:, 1:].clamp(min=0)].clamp(min=0), (0, 1))
    return accepted.scatter(1, verdict.length[:, None], verdict.bonus[:, None])


@dataclass(frozen=True)
class PathLogprobs:
    """Log-probabilities of every token that Q sequences gained, at the D + 1 places of a path."""

    own: Tensor  # [Q, D + 1] float64
    best: Tensor  # [Q, D + 1, k] float64 of the k likeliest tokens
    tokens: Tensor  # [Q, D + 1, k] int64

    def to_host(self, number: int, gained: Sequence[int], k: int) -> list[TokenLogprob]:
        """Of the tokens that the `number`-th of the sequences gained, with k alternatives each."""
        count = len(gained)
        columns = (part[number, :count].tolist() for part in (self.own, self.tokens[..., :k], self.best[..., :k]))
        return [
            TokenLogprob(token, own, tuple(zip(others, values, strict=True)))
            for token, own, others, values in zip(gained, *columns, strict=True)
        ]


def path_logprobs(logits: Tensor, tree: TokenTree, verdict: Verdict, which: Tensor, k: int) -> PathLogprobs:
    """By the model's own logits [M, V], for the sequences `which` [Q]; as deep as needed where values are seen."""
    path, after = verdict.path[which], gained_tokens(tree, verdict)[which]
    if len(which) and may_look(path):
        deepest = 1 + int(verdict.length[which].max())
        path, after = path[:, :deepest], after[:, :deepest]
    rows = torch.log_softmax(logits[path.clamp(min=0)].double(), -1)  # [Q, D + 1, V]
    best, tokens = rows.topk(min(k, rows.shape[-1]), -1)
    return PathLogprobs(rows.gather(2, after[..., None])[..., 0], best, tokens)


def text_logprobs(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of given tokens, each under its own row of logits, and of its k best alternatives. [N, V]."""
    found: list[TokenLogprob] = []
    for start in range(0, len(tokens), SCORED_ROWS):
        part = slice(start, start + SCORED_ROWS)
        found += _logprobs_of(logits[part], tokens[part], k)
    return found


def _logprobs_of(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    rows = torch.log_softmax(logits.double(), -1)
    own = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0]
    best, alternatives = rows.topk(min(k, rows.shape[1]), -1)
    columns = zip(tokens, own.tolist(), alternatives.tolist(), best.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(others, values, strict=True)))
        for token, logprob, others, values in columns
    ]
