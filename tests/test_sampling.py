"""Processors on single rows, and the ways they could differ between a tree node and plain decoding.

That the whole stack is right along every path is shown end to end in laws/test_end_to_end.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from draftwood.protocols import BatchView
from draftwood.request import SamplingParams
from draftwood.sampling import draft_distribution, target_distribution, token_logprobs
from draftwood.tree import TokenTree, Verdict


def view_of(*params: SamplingParams, tokens: list[list[int]] | None = None, prompt: int = 1) -> BatchView:
    count = len(params)
    return BatchView(
        seq_ids=tuple(range(count)),
        tokens=tokens or [[0]] * count,
        prompt_lengths=(prompt,) * count,
        params=params,
        bad_words=tuple(tuple(tuple(ord(c) - ord("a") for c in w) for w in p.bad_words) for p in params),
        lengths=torch.ones(count, dtype=torch.int64),
        seeds=torch.zeros(count, dtype=torch.int64),
        temperature=torch.tensor([p.temperature for p in params]),
        max_nodes=torch.zeros(count, dtype=torch.int64),
        max_depth=torch.zeros(count, dtype=torch.int64),
    )


def distribution(logits: list[list[float]], *params: SamplingParams, **view: object) -> list[list[float]]:
    roots = TokenTree.roots(torch.zeros(len(params), dtype=torch.int64))
    rows = torch.tensor(logits, dtype=torch.float64)
    return target_distribution(rows, roots, view_of(*params, **view)).tolist()  # type: ignore[arg-type]


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
    asked, silent = token_logprobs(logits, tree, verdict, view_of(SamplingParams(logprobs=2), SamplingParams()))
    assert [t.token for t in asked] == [2, 1]
    assert [t.logprob for t in asked] == pytest.approx([math.log(0.7), math.log(0.3)], rel=1e-5)
    assert [t.top[0][0] for t in asked] == [2, 0]
    assert [len(t.top) for t in asked] == [2, 2]
    assert silent == []
