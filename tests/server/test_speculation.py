"""Speculation as a request wants it: other drafters, laws and limits in one batch, predictions, and figures."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters.predicted import Alignment
from draftwood.errors import IncompatibleParts, InvalidRequest
from draftwood.request import Event, FinishReason, SpeculationStats
from draftwood.server.metrics import Metrics
from serving import NAME, SMALL, Serving

MESSAGES = [{"role": "user", "content": "the cat sat on the mat, the cat sat on"}]
WISHES = [
    {},
    {"enabled": False},
    {"drafter": "none"},
    {"drafter": "ngram:nodes=8,branches=2"},
    {"drafter": "ngram:nodes=8,branches=2", "max_nodes": 3, "depth": 2},
    {"law": "match", "depth": 1},
    {"drafter": "ngram:shortest=1", "max_nodes": 2},
]


def chat(client: openai.OpenAI, wishes: dict[str, object], **more: object):
    body = {"speculation": {"report": "detailed"} | wishes}
    return client.chat.completions.create(  # type: ignore[call-overload]
        **{"model": NAME, "messages": MESSAGES, "max_tokens": 40, "extra_body": body} | more
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_different_wishes_share_a_batch_and_change_no_tokens(
    client: openai.OpenAI, llm: LLM, temperature: float
) -> None:
    wanted = llm.chat(MESSAGES, SamplingParams(temperature=temperature, seed=1, max_tokens=40)).text
    with ThreadPoolExecutor(len(WISHES)) as pool:
        got = list(pool.map(lambda wishes: chat(client, wishes, temperature=temperature, seed=1), WISHES))
    assert [answer.choices[0].message.content for answer in got] == [wanted] * len(WISHES)
    figures = [answer.model_extra["metrics"]["speculative_decoding"] for answer in got]
    assert figures[1]["num_draft_tokens"] == figures[2]["num_draft_tokens"] == 0
    assert figures[0]["num_draft_tokens"] > 0
    assert figures[4]["num_spec_tokens"] <= 3
    assert max(figures[4]["per_step_accepted"]) <= 2
    assert max(figures[5]["per_step_accepted"]) <= 1


REFUSED = [
    ({"drafter": "eagle9"}, "There is no drafter 'eagle9'"),
    ({"drafter": "../../etc"}, "There is no drafter"),
    ({"law": "faith"}, "faith"),
    ({"law": "rrs"}, "would not be exact"),
    ({"max_nodes": 1000}, "never proposes more than"),
    ({"max_nodes": -1}, "max_nodes"),
    ({"depth": 0}, "depth"),
    ({"dept": 2}, "dept"),
    ({"drafter": "ngram:nodes=8,branches=2", "law": "block"}, "one path"),
]


@pytest.mark.parametrize(("wishes", "reason"), REFUSED)
def test_wishes_that_cannot_be_are_refused_with_the_reason(
    client: openai.OpenAI, wishes: dict[str, object], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        chat(client, wishes)


def test_figures_only_on_demand_and_nobodys_for_several_answers(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=3)  # type: ignore[arg-type]
    assert "metrics" not in (plain.model_extra or {})
    several = chat(client, {}, n=2)
    assert several.model_extra["metrics"] == {"speculative_decoding": None}
    *_, last = chat(client, {"report": "summary"}, stream=True, temperature=0)
    block = last.model_extra["metrics"]["speculative_decoding"]
    assert block["num_accepted_draft_tokens"] == sum(i * n for i, n in enumerate(block["acceptance_histogram"]))
    assert sum(block["acceptance_histogram"]) == block["num_spec_steps"]
    assert "per_step_accepted" not in block


def predicted(client: openai.OpenAI, content: str, **more: object):
    return chat(client, {"drafter": "none"}, temperature=0, prediction={"type": "content", "content": content}, **more)


def test_predictions_are_accepted_where_they_are_right(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, logit_bias=dict.fromkeys(range(64, 90), 60))
    whole = llm.chat(MESSAGES, params).text
    settings = {"max_tokens": 60, "logit_bias": params.logit_bias}
    right = predicted(client, whole, **settings)
    assert right.choices[0].message.content == whole
    steps = len(right.model_extra["metrics"]["speculative_decoding"]["per_step_accepted"])
    assert steps < 60 / 4
    details = right.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (60, 0)
    assert right.usage.completion_tokens == 60


def test_a_prediction_is_picked_up_again_behind_an_edit(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, logit_bias=dict.fromkeys(range(64, 90), 60))
    whole = llm.chat(MESSAGES, params).text
    edited = whole[:15] + "!!!" + whole[17:40] + "?" + whole[40:]
    got = predicted(client, edited, max_tokens=60, logit_bias=params.logit_bias)
    assert got.choices[0].message.content == whole
    details = got.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == len(edited)
    assert details.accepted_prediction_tokens > 40
    assert len(got.model_extra["metrics"]["speculative_decoding"]["per_step_accepted"]) < 30
    wrong = predicted(client, "~" * 50, max_tokens=60, logit_bias=params.logit_bias)
    assert wrong.choices[0].message.content == whole
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens == 50
    assert wrong.usage.completion_tokens == 60, "what was guessed wrong is no token of the answer"


def test_predictions_stream_and_go_with_completions(client: openai.OpenAI) -> None:
    prediction = {"type": "content", "content": [{"type": "text", "text": "abc"}]}
    settings = {"model": NAME, "prompt": "abcabc", "temperature": 0, "max_tokens": 12}
    plain = client.completions.create(**settings)  # type: ignore[call-overload]
    got = client.completions.create(**settings, extra_body={"prediction": prediction})  # type: ignore[call-overload]
    assert got.choices[0].text == plain.choices[0].text
    stream = predicted(client, "abc", stream=True, stream_options={"include_usage": True})
    *_, last = stream
    assert last.usage.completion_tokens_details.rejected_prediction_tokens >= 0


def test_an_engine_without_offers_takes_no_predictions(folder) -> None:
    with LLM(folder) as llm, pytest.raises(InvalidRequest, match="offers"):
        llm.generate("a", SamplingParams(prediction="b"))


def test_an_automatic_law_suits_itself_to_other_guesses(folder) -> None:
    """Drawn drafts are judged by `block`, which is not made for the trees that predictions make."""
    settings_ = {"drafter": f"model:{folder}", "tree": "sampled-chain", "offers": ["ngram:branches=2"]}
    with LLM(folder, config=SMALL, **settings_) as llm:
        prompts = ["abcabc", "the cat"]
        ways = [{}, {"prediction": "abc"}, {"drafter": "ngram:branches=2"}, {"drafter": "none"}]
        results = [llm.generate(prompts, SamplingParams(max_tokens=9, **way)) for way in ways]
        assert [found[0].stats.law for found in results] == ["block", "match", "match", "block"]
        assert len({tuple(r.token_ids for r in found) for found in results}) == 1
        with pytest.raises(IncompatibleParts, match="one path"):
            llm.generate("a", SamplingParams(prediction="b", law="block"))


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_usage_says_whether_a_seed_gives_the_same_answer_again(client: openai.OpenAI, route: str) -> None:
    def ask(law: str | None) -> Any:
        body = {"seed": 3, "speculation": {"law": law, "report": "summary"}}
        if route == "chat":
            return client.chat.completions.create(
                model=NAME, messages=MESSAGES, max_tokens=8, temperature=1, extra_body=body
            )
        return client.responses.create(model=NAME, input="abc", max_output_tokens=16, temperature=1, extra_body=body)

    for law, holds in ((None, True), ("match", True), ("walk", False)):
        answer = ask(law)
        assert answer.usage.model_extra["reproducible"] is holds
        block = answer.model_extra["metrics"]["speculative_decoding"]
        assert (block["reproducible"], block["lossless"], block["law"]) == (holds, True, law or "match")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=30), st.lists(st.integers(0, 4), max_size=30), st.data())
def test_an_alignment_does_not_depend_on_how_tokens_arrive(
    expected: list[int], said: list[int], data: st.DataObject
) -> None:
    whole, piecewise = Alignment(expected), Alignment(expected)
    whole.follow(said)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=5)))
    for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
        piecewise.follow(said[start:end])
    assert (whole.at, whole.matched) == (piecewise.at, piecewise.matched)
    assert 0 <= whole.at <= len(expected)


def test_metrics_count_what_happened(served: Serving, client: openai.OpenAI) -> None:
    def figure(name: str) -> float:
        with served.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"draftwood:{name}{{"))

    names = ("generation_tokens_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    before = [figure(name) for name in names]
    positions = figure("spec_decode_num_accepted_tokens_per_pos_total")
    got = chat(client, {}, temperature=0)
    block = got.model_extra["metrics"]["speculative_decoding"]
    gained = [figure(name) - old for name, old in zip(names, before, strict=True)]
    assert gained == [40, block["num_draft_tokens"], block["num_accepted_draft_tokens"]]
    assert figure("spec_decode_num_accepted_tokens_per_pos_total") - positions == block["num_accepted_draft_tokens"]
    assert served.idle()
    assert figure("num_requests_running") == figure("kv_cache_usage_perc") == 0


def test_drafters_of_a_combination_are_counted_apart(llm: LLM) -> None:
    metrics = Metrics(llm, NAME, vllm_names=False)
    for drafted, accepted, end in ((4, 1, None), (9, 3, FinishReason.STOP)):
        stats = SpeculationStats(drafted=drafted, members={"suffix": (drafted, accepted), "recycling": (1, 0)})
        metrics.heard(None, (0, Event(7, 0, (1,), (False,), "", end, stats)))  # type: ignore[arg-type]
        for name, figure in (("draft", drafted), ("accepted", accepted)):
            line = f'spec_decode_num_{name}_tokens_per_member_total{{drafter="suffix",model_name="{NAME}"}} {figure}.0'
            assert line in metrics.page().decode()


def test_decisions_are_counted_by_their_reasons(served: Serving, client: openai.OpenAI) -> None:
    def lines() -> dict[str, float]:
        with served.http() as http:
            page = http.get("/metrics").text.splitlines()
        told = (line.rsplit(" ", 1) for line in page if line.startswith("draftwood:controller_"))
        return {name: float(value) for name, value in told}

    decided = f'draftwood:controller_decisions_total{{model_name="{NAME}",reason="rule"}}'
    before = lines().get(decided, 0.0)
    chat(client, {}, temperature=0)
    after = lines()
    assert after[decided] > before
    assert after[f'draftwood:controller_nodes{{model_name="{NAME}"}}'] > 0
    assert math.isnan(after[f'draftwood:controller_expected_gain{{model_name="{NAME}"}}']), (
        "a fixed size expects nothing"
    )


def test_promises_are_counted_and_priorities_accepted(served: Serving, client: openai.OpenAI) -> None:
    """A promise of an hour is kept, one of a nanosecond is not; neither changes an answer."""

    def figures() -> dict[str, float]:
        with served.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return {line.split(" ")[0]: float(line.split()[-1]) for line in lines if line.startswith("draftwood:slo_")}

    before = figures()
    texts = set()
    for slo in ({}, {"ttft_ms": 3.6e6, "tpot_ms": 1e-6}):
        body = {"slo": slo, "priority": -3}
        got = client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=20, temperature=0, extra_body=body
        )
        texts.add(got.choices[0].message.content)
    assert len(texts) == 1
    gained = {name: value - before.get(name, 0.0) for name, value in figures().items() if "_total" in name}
    counted = sorted((name.partition("{")[0], name.partition('promise="')[2][:4]) for name, n in gained.items() if n)
    assert counted == [("draftwood:slo_kept_total", "ttft"), ("draftwood:slo_violated_total", "tpot")]
    for wrong in ({"slo": {"tpot_ms": 0}}, {"slo": {"tpot": 5}}, {"priority": 101}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=4, extra_body=wrong)
