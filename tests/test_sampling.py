"""Processors on single rows, and the ways they could differ between a tree node and plain decoding.

That the whole stack is right along every path is shown end to end in laws/test_end_to_end.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from draftwood.cache.batch_state import BatchState, StepInputs, input_numbers
from draftwood.cache.row_settings import RowSettings, edits_on_device
from draftwood.protocols import BatchView, HostView, LogitEdits, NodeMasks, StepMode
from draftwood.request import SamplingParams
from draftwood.sampling import (
    draft_distribution,
    edited_logits,
    host_masks,
    path_logprobs,
    target_distribution,
    usable,
)
from draftwood.tree import TokenTree, Verdict
from no_sync import no_looking
from trees import padded


def view_of(
    *params: SamplingParams, tokens: list[list[int]] | None = None, prompt: int = 1, stops: tuple[int, ...] = ()
) -> BatchView:
    """The view of a step, as the batch state gives it."""
    texts, count = tokens or [[0]] * len(params), len(params)
    state = BatchState(count, 40, 16, 0, torch.device("cpu"))
    for b, (own, text) in enumerate(zip(params, texts, strict=True)):
        state.add(b, text, RowSettings(own, 0, prompt, 40, 10, frozenset(stops)))
    edited = [b for b, own in enumerate(params) if edits_on_device(own)]
    rows = [(row, 0, 0, 0) for row in state.rows(range(count))]
    numbers = input_numbers(rows, edited, [], (count, len(edited), 0), state.padding_row)
    mode = StepMode(greedy=all(p.greedy for p in params), truncates=any(p.truncates for p in params))
    return state.view(StepInputs.over(torch.tensor(numbers), count, len(edited)), mode, 1)


def host_view_of(*params: SamplingParams, tokens: list[list[int]] | None = None, prompt: int = 1) -> HostView:
    count = len(params)
    return HostView(
        seq_ids=tuple(range(count)),
        tokens=tokens or [[0]] * count,
        prompt_lengths=(prompt,) * count,
        params=params,
        max_nodes=(0,) * count,
        max_depth=(0,) * count,
        bad_words=tuple(tuple(tuple(ord(c) - ord("a") for c in w) for w in p.bad_words) for p in params),
    )


def masks_of(tree: TokenTree, host: HostView, vocabulary: int) -> NodeMasks | None:
    which = [b for b, words in enumerate(host.bad_words) if words]
    return host_masks(tree, host, which, vocabulary) if which else None


def of_tree(
    rows: Tensor, tree: TokenTree, *params: SamplingParams, stops: tuple[int, ...] = (), **text: object
) -> Tensor:
    masks = masks_of(tree, host_view_of(*params, **text), rows.shape[1])  # type: ignore[arg-type]
    view = view_of(*params, stops=stops, **text)  # type: ignore[arg-type]
    return target_distribution(edited_logits(rows, tree, view, masks), tree, view)


def distribution(logits: list[list[float]], *params: SamplingParams, **text: object) -> list[list[float]]:
    roots = TokenTree.roots(torch.zeros(len(params), dtype=torch.int64))
    return of_tree(torch.tensor(logits, dtype=torch.float64), roots, *params, **text).tolist()  # type: ignore[arg-type]


LOGITS = [math.log(x) for x in (0.1, 0.4, 0.2, 0.3)]


def test_greedy_is_one_hot() -> None:
    assert distribution([LOGITS], SamplingParams()) == [[0, 1, 0, 0]]


def test_temperature() -> None:
    want = torch.softmax(torch.tensor(LOGITS, dtype=torch.float64) / 0.5, -1).tolist()
    assert distribution([LOGITS], SamplingParams(temperature=0.5)) == [pytest.approx(want)]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    greedy, sampled = distribution([LOGITS, LOGITS], SamplingParams(), SamplingParams(temperature=1.0))
    assert greedy == [0, 1, 0, 0]
    assert sampled == pytest.approx([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.8}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 1, "min_p": 0.01}, [0, 1, 0, 0]),
    ],
)
def test_truncation(params: dict, want: list[float]) -> None:
    assert distribution([LOGITS], SamplingParams(temperature=1.0, **params)) == [pytest.approx(want)]


def test_truncation_beyond_the_fast_path_sorts_the_whole_row() -> None:
    """A flat row of 2,000 tokens: neither the nucleus nor k fits into the first look."""
    logits = torch.linspace(0, 0.1, 2000).double().tolist()
    rows = distribution(
        [logits, logits, logits],
        SamplingParams(temperature=1.0, top_p=0.75),
        SamplingParams(temperature=1.0, top_k=1500),
        SamplingParams(temperature=1.0, top_p=0.001),
    )
    p = torch.softmax(torch.tensor(logits, dtype=torch.float64), -1).sort(descending=True).values
    nucleus = int((p.cumsum(0) - p < 0.75).sum())
    assert [sum(x > 0 for x in row) for row in rows] == [nucleus, 1500, int((p.cumsum(0) - p < 0.001).sum())]
    assert all(sum(row) == pytest.approx(1) for row in rows)


def test_equal_probabilities_at_the_edge_all_stay() -> None:
    rows = distribution([[1.0, 1.0, 1.0, 0.0]], SamplingParams(temperature=1.0, top_k=2))
    assert rows == [pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])]


def test_penalties_count_the_answer_and_repetition_the_prompt_too() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = [2.0, -2.0, 1.0, 3.0]
    rows = distribution([logits], params, tokens=[[0, 1, 3, 3]], prompt=1)
    want = torch.softmax(torch.tensor([1.0, -4.0 - 0.75, 1.0, 1.5 - 1.0], dtype=torch.float64), -1).tolist()
    assert rows == [pytest.approx(want)]


def test_bias_and_bad_words_act_on_greedy_rows() -> None:
    assert distribution([LOGITS], SamplingParams(logit_bias={0: 5.0})) == [[1, 0, 0, 0]]
    assert distribution([LOGITS], SamplingParams(bad_words=("b",))) == [[0, 0, 0, 1]]
    two = SamplingParams(bad_words=("db",))
    assert distribution([LOGITS], two, tokens=[[0, 3]], prompt=1) == [[0, 0, 0, 1]]
    assert distribution([LOGITS], two, tokens=[[0, 2]], prompt=1) == [[0, 1, 0, 0]]
    assert distribution([LOGITS], two, tokens=[[3]], prompt=1) == [[0, 1, 0, 0]], "the prompt is not the answer"


def test_one_sequences_edits_do_not_touch_its_neighbour() -> None:
    rows = distribution([LOGITS, LOGITS], SamplingParams(bad_words=("b",)), SamplingParams())
    assert rows == [[0, 0, 0, 1], [0, 1, 0, 0]]


def test_half_precision_logits_become_float32() -> None:
    roots = TokenTree.roots(torch.zeros(1, dtype=torch.int64))
    p = target_distribution(torch.tensor([LOGITS]).bfloat16(), roots, view_of(SamplingParams(temperature=1.0)))
    assert p.dtype == torch.float32


def test_draft_law_has_the_temperature_and_nothing_else() -> None:
    q = draft_distribution(torch.tensor([LOGITS, LOGITS]).half(), torch.tensor([0.0, 1.0]))
    assert q[0].tolist() == [0, 1, 0, 0]
    assert q[1].tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3], rel=1e-2)


def test_logprobs_are_the_models_own_along_the_accepted_path() -> None:
    tree = TokenTree.of_points([([0, 2, 1], [-1, 0, 1]), ([0], [-1])])
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [1.0, 1.0, 1.0]]))
    verdict = Verdict(torch.tensor([[0, 1, -1], [3, -1, -1]]), torch.tensor([1, 0]), torch.tensor([1, 0]))
    asked = path_logprobs(logits, tree, verdict, torch.tensor([0]), 2).to_host(0, [2, 1], 2)
    assert [t.token for t in asked] == [2, 1]
    assert [t.logprob for t in asked] == pytest.approx([math.log(0.7), math.log(0.3)], rel=1e-5)
    assert [t.top[0][0] for t in asked] == [2, 0]
    assert [len(t.top) for t in asked] == [2, 2]
    silent = path_logprobs(logits, tree, verdict, torch.tensor([], dtype=torch.int64), 2)
    assert silent.own.numel() == 0
    twice = torch.tensor([0, 0])
    with no_looking():
        unseen = path_logprobs(logits, tree, verdict, twice, 2)
    assert unseen.to_host(1, [2, 1], 2) == asked


# --- trees


def test_stops_are_deferred_along_each_nodes_own_path() -> None:
    """Where the text behind a node is shorter than its minimum, and anything else is left."""
    tree = TokenTree.of_points([([0, 1, 2, 1], [-1, 0, 1, 0])])
    rows = torch.tensor([LOGITS, LOGITS, LOGITS, [-math.inf, 0.0, -math.inf, -math.inf]], dtype=torch.float64)
    got = of_tree(rows, tree, SamplingParams(min_tokens=2), stops=(1, 99))
    assert got.argmax(-1).tolist() == [3, 3, 1, 1], "the root has no answer yet, its grandchild has two tokens"
    done = of_tree(rows, tree, SamplingParams(min_tokens=2), stops=(1,), tokens=[[0, 3, 3]])
    assert done.argmax(-1).tolist() == [1, 1, 1, 1]


def by_hand(rows: Tensor, tree: TokenTree, params: tuple[SamplingParams, ...], texts: list[list[int]]) -> Tensor:
    """Edited logits, node by node and token by token; the prompt is the first two tokens, the stop token 5."""
    edited = rows.clone()
    for node, path in enumerate(tree.paths.tolist()):
        own, text = params[int(tree.owner[node])], texts[int(tree.owner[node])]
        answer = text[2:] + [int(tree.tokens[up]) for up in path[1:] if up >= 0]
        for token in range(rows.shape[1]):
            value = float(rows[node, token]) + own.logit_bias.get(token, 0.0)
            said = answer.count(token)
            if said or token in text[:2]:
                value = value / own.repetition_penalty if value > 0 else value * own.repetition_penalty
            value -= own.frequency_penalty * said + own.presence_penalty * (said > 0)
            words = [[ord(c) - ord("a") for c in word] for word in own.bad_words]
            if any(word[-1] == token and [*answer, token][-len(word) :] == word for word in words):
                value = -math.inf
            if token == 5 and len(answer) < own.min_tokens:
                value = -math.inf
            edited[node, token] = value
    return edited


EDITED = (
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(),
    SamplingParams(presence_penalty=0.4, frequency_penalty=0.2, bad_words=("b", "ca")),
    SamplingParams(logit_bias={0: 1.5, 4: -2.0}),
    SamplingParams(logit_bias={3: 2.5}, min_tokens=3),
    SamplingParams(min_tokens=1),
)
TEXTS = [[3, 1, 4, 1], [0, 1], [2, 2, 2], [5, 0, 1], [1, 1, 0], [4, 4, 2]]
TREES = [
    ([1, 4, 2, 4], [-1, 0, 1, 1]),
    ([1], [-1]),
    ([2, 0, 2, 2, 0], [-1, 0, 0, 2, 3]),
    ([1, 0], [-1, 0]),
    ([0, 3, 3, 5], [-1, 0, 1, 2]),
    ([2, 1], [-1, 0]),
]


@pytest.mark.parametrize("extra", [0, 3], ids=["ragged", "padded"])
@pytest.mark.parametrize("looks", [True, False])
def test_edits_are_those_of_every_nodes_own_path(extra: int, looks: bool) -> None:
    """Whatever is asked for, by sequences that share a batch, in trees of any sizes."""
    torch.manual_seed(3)
    tree, places = TokenTree.of_points(TREES), None
    params, texts = EDITED, TEXTS
    rows = torch.randn(tree.num_nodes, 6, dtype=torch.float64)
    want = by_hand(rows, tree, params, texts)
    view = view_of(*params, tokens=texts, prompt=2, stops=(5,))
    assert view.edits is not None
    if extra:
        tree, places = padded(tree, 5 + extra)
        rows = torch.randn(tree.num_nodes, 6, dtype=torch.float64).index_copy_(0, places, rows)
    masks = masks_of(tree, host_view_of(*params, tokens=texts, prompt=2), 6)
    before = rows.clone()
    if looks:
        got = edited_logits(rows, tree, view, masks)
    elif extra:
        with no_looking():
            got = edited_logits(rows, tree, view, masks)
    else:  # trees of different sizes only come in steps that are not captured
        with mock.patch("draftwood.links.LOOKED_AT", frozenset()):
            got = edited_logits(rows, tree, view, masks)
    torch.testing.assert_close(got if places is None else got[places], want, rtol=1e-12, atol=1e-12)
    assert torch.equal(rows, before), "log-probabilities are of the model's own logits"


def test_a_sequence_named_twice_is_edited_once() -> None:
    """A captured step fills its list of edited sequences up with one that is in it already."""
    params = SamplingParams(logit_bias={2: 1.0}, repetition_penalty=1.5, min_tokens=4)
    tree = TokenTree.of_points([([0, 1], [-1, 0]), ([0, 2], [-1, 0])])
    rows = torch.randn(4, 6, dtype=torch.float64)
    view = view_of(params, params, tokens=[[0, 2], [0, 1]], stops=(3,))
    want = edited_logits(rows, tree, view)
    edits = view.edits
    assert edits is not None
    again = torch.tensor([0, 1, 0, 0])
    repeated = replace(view, edits=LogitEdits(**{name: part[again] for name, part in vars(edits).items()}))
    with no_looking():
        got = edited_logits(rows, tree, repeated)
    assert torch.equal(got, want)


def test_logits_that_nothing_edits_are_not_copied() -> None:
    tree, rows = TokenTree.roots(torch.zeros(2, dtype=torch.int64)), torch.randn(2, 6)
    assert edited_logits(rows, tree, view_of(SamplingParams(), SamplingParams(temperature=1.0))) is rows
    long_enough = view_of(SamplingParams(min_tokens=1), SamplingParams(), tokens=[[0, 1], [0]], stops=(3,))
    assert long_enough.edits is not None
    assert edited_logits(rows, tree, long_enough) is rows


def test_distributions_need_no_look_at_values() -> None:
    torch.manual_seed(4)
    params = (
        SamplingParams(temperature=0.7, top_k=9, top_p=0.9),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.3, min_p=0.2, top_k=600),
    )
    tree, _ = padded(TokenTree.of_points(TREES[:4]), 6)
    rows, view = torch.randn(tree.num_nodes, 1000), view_of(*params)
    want = target_distribution(rows, tree, view)
    verdict = Verdict(tree.offsets[:-1, None], torch.zeros(4, dtype=torch.int64), torch.arange(4))
    rows[tree.offsets[2], 7] = math.nan
    with no_looking():
        got = target_distribution(rows, tree, view)
        told = usable(rows, got, tree, verdict)
    spoilt = int(tree.offsets[2])
    others = torch.arange(tree.num_nodes) != spoilt
    torch.testing.assert_close(got[others], want[others])
    assert told.tolist() == [True, True, False, True]
    assert usable(rows, None, tree, verdict).tolist() == [True, True, True, True], "greedy: the token's own logit tells"
