"""From logits to the target's distribution at every tree node, each along its own path; and log-probabilities.

Losslessness is with respect to what this module returns, so plain and speculative decoding share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.ops.softmax import one_hot, tempered
from draftwood.protocols import BatchView, Constraint
from draftwood.request import TokenLogprob
from draftwood.tree import TokenTree, Verdict

FAST_TOP_P = 512  # tokens looked at before a whole row is sorted
SCORED_ROWS = 64  # of a prompt that are held in double precision at a time: a vocabulary can have 150,000 entries


def target_distribution(logits: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    """The distribution each node's next token is drawn from. [M, V] -> [M, V], float32 or wider."""
    logits = _edit_logits(_wide(logits), tree, view)
    if all(params.greedy for params in view.params):
        return one_hot(logits.max(-1).indices, logits)
    return _drawn_from(logits, view.temperature, tree, view)


def shown_distribution(logits: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    """The same for those who want to look at it: where the likeliest token is always taken, how likely the model itself
    finds it, as at temperature 1. [M, V] -> [M, V].
    """
    logits = _edit_logits(_wide(logits), tree, view)
    return _drawn_from(logits, torch.where(view.temperature > 0, view.temperature, 1), tree, view)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _drawn_from(logits: Tensor, temperature: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    p = tempered(logits, temperature[tree.owner])
    return _truncate(p, tree, view) if any(params.truncates for params in view.params) else p


def draft_distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """The law a drafter samples from: the request's temperature and nothing else. [K, V], [K] -> [K, V]."""
    return tempered(logits, temperature)


def _edit_logits(logits: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    """Logit bias, bad words, penalties, grammars and minimum lengths, for the sequences that ask for them."""
    early = view.early_stop_ids
    edited = [b for b, params in enumerate(view.params) if params.edits_logits or (early and early[b])]
    if not edited:
        return logits
    logits = logits.clone()
    bounds = tree.offsets.tolist()
    for b in edited:
        nodes = slice(bounds[b], bounds[b + 1])
        _apply_bias(logits[nodes], view, b)
        if view.bad_words[b]:
            _ban_words(logits[nodes], _histories(tree, view, b, nodes), view.bad_words[b])
        if view.params[b].penalises:
            logits[nodes] = _penalise(logits[nodes], tree, view, b, nodes)
        grammar = view.constraints[b] if view.constraints else None
        if grammar is not None:
            _constrain(logits[nodes], grammar, tree, view, b, nodes)
        if early and early[b]:
            _defer_stops(logits[nodes], tree, view, b, nodes)
    return logits


def _defer_stops(logits: Tensor, tree: TokenTree, view: BatchView, b: int, nodes: slice) -> None:
    """Forbid stop tokens where the answer, along the node's own path, is shorter than its minimum length.

    Where nothing else is left, as at the end of a grammar, they stay.
    """
    stops = [token for token in view.early_stop_ids[b] if token < logits.shape[1]]
    generated = len(view.tokens[b]) - view.prompt_lengths[b] + tree.depth[nodes]
    without = logits.index_fill(1, torch.tensor(stops, dtype=torch.int64, device=logits.device), float("-inf"))
    early = (generated < view.params[b].min_tokens) & (without.amax(-1) > float("-inf"))
    logits.copy_(torch.where(early[:, None], without, logits))


def _constrain(logits: Tensor, grammar: Constraint, tree: TokenTree, view: BatchView, b: int, nodes: slice) -> None:
    """Forbid what the grammar does not allow after each node, along that node's own path."""
    parents = (tree.parents[nodes] - nodes.start).tolist()
    answer = view.tokens[b][view.prompt_lengths[b] :]
    allowed = grammar.allowed(answer, tree.tokens[nodes].tolist(), parents)
    logits.masked_fill_(~allowed.to(logits.device), float("-inf"))


def _apply_bias(logits: Tensor, view: BatchView, b: int) -> None:
    bias = view.params[b].logit_bias
    if bias:
        tokens = torch.tensor(list(bias), device=logits.device)
        logits[:, tokens] += torch.tensor(list(bias.values()), device=logits.device, dtype=logits.dtype)


def _histories(tree: TokenTree, view: BatchView, b: int, nodes: slice) -> list[list[int]]:
    """The last tokens before each node's next one: enough of the committed text, then the node's own path."""
    reach = max(len(word) for word in view.bad_words[b])
    committed = list(view.tokens[b][max(view.prompt_lengths[b], len(view.tokens[b]) - reach) :])
    paths = tree.paths[nodes, 1:]
    tokens = tree.tokens[paths.clamp(min=0)].tolist()
    return [
        committed + [token for token, node in zip(row, path, strict=True) if node >= 0]
        for row, path in zip(tokens, paths.tolist(), strict=True)
    ]


def _ban_words(logits: Tensor, histories: list[list[int]], words: tuple[tuple[int, ...], ...]) -> None:
    for row, history in enumerate(histories):
        banned = [w[-1] for w in words if len(w) == 1 or tuple(history[-(len(w) - 1) :]) == w[:-1]]
        logits[row, banned] = float("-inf")


def _penalise(logits: Tensor, tree: TokenTree, view: BatchView, b: int, nodes: slice) -> Tensor:
    """Repetition over prompt and answer, presence and frequency over the answer. [n, V] -> [n, V]."""
    params, vocabulary = view.params[b], logits.shape[1]
    committed = torch.tensor(view.tokens[b], device=logits.device)
    answer = torch.bincount(committed[view.prompt_lengths[b] :], minlength=vocabulary).to(logits.dtype)
    prompt = torch.bincount(committed[: view.prompt_lengths[b]], minlength=vocabulary) > 0
    paths = tree.paths[nodes, 1:]
    counts = answer.repeat(logits.shape[0], 1)
    counts.scatter_add_(1, tree.tokens[paths.clamp(min=0)], (paths >= 0).to(logits.dtype))
    if params.repetition_penalty != 1:
        harsher = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where((counts > 0) | prompt, harsher, logits)
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def _truncate(p: Tensor, tree: TokenTree, view: BatchView) -> Tensor:
    """Top-k, then top-p, then min-p, row by row with its own limits; what is left is renormalised."""
    limits = view.truncation
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
    if p.is_cuda:  # how many that is, only the device knows
        return p.sort(-1, descending=True).values
    width = min(FAST_TOP_P, p.shape[1])
    ranked = p.topk(width, -1).values
    unsettled = (top_k > width) & ((top_p < 1) & (ranked.sum(-1, keepdim=True) < top_p))
    unsettled |= (top_k > width) & (top_k < p.shape[1])
    return p.sort(-1, descending=True).values if bool(unsettled.any()) else ranked


def unusable(logits: Tensor, p: Tensor, verdict: Verdict) -> frozenset[int]:
    """Sequences whose next token has no distribution: logits that are not numbers, or forbidden altogether.

    One number a sequence tells: a row with a NaN, or without a finite logit, has no other maximum and no other softmax.
    Looked at is the last row of each accepted path: what is no number stays so for every later token of its sequence.
    """
    last = verdict.path.gather(1, verdict.length[:, None])[:, 0], verdict.bonus
    fine = (logits[last] + p[last]).isfinite()
    return frozenset(b for b, usable in enumerate(fine.tolist()) if not usable)


def token_logprobs(logits: Tensor, tree: TokenTree, verdict: Verdict, view: BatchView) -> list[list[TokenLogprob]]:
    """Log-probabilities of every token the verdict emits, for the sequences that ask for them; others get []."""
    asked = [params.logprobs for params in view.params]
    if all(k is None for k in asked):
        return [[] for _ in asked]
    lengths, paths, bonuses = verdict.length.tolist(), verdict.path.tolist(), verdict.bonus.tolist()
    return [
        [] if k is None else _path_logprobs(logits, tree, paths[b][: lengths[b] + 1], bonuses[b], k)
        for b, k in enumerate(asked)
    ]


def _path_logprobs(logits: Tensor, tree: TokenTree, path: list[int], bonus: int, k: int) -> list[TokenLogprob]:
    return _logprobs_of(logits[path], [*tree.tokens[path[1:]].tolist(), bonus], k)


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
