"""Traced answers, over the wire: the same words, and what became of every guess."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from draftwood import LLM, SamplingParams
from serving import NAME, SMALL, Serving, serving

MESSAGES = [{"role": "user", "content": "the cat sat on the mat, the cat sat on"}]
PRINTABLE = dict.fromkeys(range(64, 90), 60)  # one character a token, so that texts can be counted
WISHES = [
    {},
    {"enabled": False},
    {"drafter": "none"},
    {"drafter": "ngram:nodes=8,branches=2"},
    {"drafter": "ngram:nodes=8,branches=2", "law": "traversal"},
    {"law": "walk", "max_nodes": 2},
    {"law": "block", "depth": 1},
]


@dataclass(frozen=True)
class Told:
    """A traced stream, put together."""

    text: str
    steps: list[dict[str, Any]]
    metrics: dict[str, Any] | None
    finish: str | None

    @property
    def emitted(self) -> list[dict[str, Any]]:
        return [token for step in self.steps for token in step["emitted"]]

    @property
    def tokens(self) -> list[int]:
        return [token["token"] for token in self.emitted]


def settings_of(wishes: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "model": NAME,
        "messages": MESSAGES,
        "max_tokens": 40,
        "extra_body": {"speculation": {"report": "trace"} | wishes},
    } | more


def ask(client: openai.OpenAI, wishes: dict[str, object], choice: int = 0, **more: object) -> Told:
    stream = client.chat.completions.create(stream=True, **settings_of(wishes, **more))  # type: ignore[call-overload]
    text, steps, metrics, finish = "", [], None, None
    for chunk in stream:
        extra = chunk.model_extra or {}
        metrics = extra.get("metrics", metrics)
        steps += [step for step in extra.get("trace", []) if step["choice"] == choice]
        for said in chunk.choices:
            if said.index == choice:
                text += said.delta.content or ""
                finish = said.finish_reason or finish
    return Told(text, steps, metrics, finish)


def check(told: Told) -> None:
    assert "".join(token["text"] for token in told.emitted) == told.text
    assert [step["step"] for step in told.steps] == list(range(1, len(told.steps) + 1))
    for step in told.steps:
        assert step["seconds"] >= 0
        assert 1 <= step["batch"] <= step["rows"]
        check_step(step)


def check_step(step: dict[str, Any]) -> None:
    *before, last = step["emitted"]
    assert all(token["kind"] == "accepted" for token in before)
    assert [token["depth"] for token in step["emitted"]] == list(range(1, len(before) + 2))
    tree = step["tree"]
    if tree is None:
        assert ([*before], last["kind"], last["node"]) == ([], "plain", None)
        return
    assert len({len(column) for column in tree.values()}) == 1
    path = [i for i, accepted in enumerate(tree["accepted"]) if accepted]
    assert [tree["parents"][i] for i in path] == [-1, *path[:-1]]
    for token, node in zip(before, path[1:], strict=False):
        assert (token["node"], token["token"]) == (node, tree["tokens"][node])
        assert (token["p"], token["q"]) == (tree["p"][node], tree["q"][node])
    assert tree["p"][0] is None
    assert all(0 <= p <= 1 for p in tree["p"][1:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_traced_answer_is_the_same_answer(client: openai.OpenAI, temperature: float) -> None:
    """Whatever drafts, by whatever law, and whoever else is in the batch."""
    more = {"temperature": temperature, "seed": 6}

    def both(wishes: dict[str, object]) -> tuple[Told, Any]:
        untraced = client.chat.completions.create(**settings_of(wishes | {"report": "detailed"}, **more))  # type: ignore[call-overload]
        return ask(client, wishes, **more), untraced

    with ThreadPoolExecutor(len(WISHES)) as pool:
        answers = list(pool.map(both, WISHES))
    for told, untraced in answers:
        check(told)
        assert told.text == untraced.choices[0].message.content
        assert len(told.tokens) == untraced.usage.completion_tokens == 40
    drafters = [{step["drafter"] for step in told.steps} for told, _ in answers]
    assert drafters[:4] == [{"ngram:shortest=1"}, {"none"}, {"none"}, {"ngram:nodes=8,branches=2"}]
    assert [told.steps[0]["law"] for told, _ in answers[4:]] == ["traversal", "walk", "block"]
    assert all(step["tree"] is None for told, _ in answers[1:3] for step in told.steps)
    assert any(step["tree"] is not None for step in answers[0][0].steps)


def test_tokens_are_the_offline_tokens(client: openai.OpenAI, llm: LLM) -> None:
    wanted = llm.chat(MESSAGES, SamplingParams(temperature=1.0, seed=8, max_tokens=40))
    told = ask(client, {}, temperature=1.0, seed=8)
    assert tuple(told.tokens) == wanted.token_ids
    assert told.finish == "length"
    assert told.metrics["speculative_decoding"]["num_draft_tokens"] == sum(
        len(step["tree"]["tokens"]) - 1 for step in told.steps if step["tree"]
    )
    assert "trace" not in told.metrics, "a stream has told everything already"


def test_whole_answers_carry_their_steps_in_the_metrics(client: openai.OpenAI) -> None:
    settings = settings_of({}, temperature=1.0, seed=3, n=2, max_tokens=12)
    whole = client.chat.completions.create(**settings)  # type: ignore[call-overload]
    steps = whole.model_extra["metrics"]["trace"]
    for choice in whole.choices:
        own = [step for step in steps if step["choice"] == choice.index]
        check(Told(choice.message.content, own, None, None))
        streamed = ask(client, {}, choice.index, temperature=1.0, seed=3, n=2, max_tokens=12)
        assert streamed.tokens == [token["token"] for step in own for token in step["emitted"]]
    texts = client.completions.create(
        model=NAME, prompt=["abab", "cdcd"], max_tokens=6, temperature=0, echo=True, extra_body=settings["extra_body"]
    )
    steps = texts.model_extra["metrics"]["trace"]
    for choice, prompt in zip(texts.choices, ("abab", "cdcd"), strict=True):
        own = [token["text"] for step in steps if step["choice"] == choice.index for token in step["emitted"]]
        assert prompt + "".join(own) == choice.text


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_characters_of_several_tokens(client: openai.OpenAI, max_tokens: int) -> None:
    """Every token of the tiny model is a byte: characters break off inside steps, between them and at the end."""
    for seed in range(12):
        told = ask(client, {}, temperature=1.5, seed=seed, max_tokens=max_tokens)
        check(told)
        assert len(told.tokens) == max_tokens or told.finish == "stop"
    euro = "€uro" * 4
    bias = {"logit_bias": {str(k): v for k, v in _spelling(client, euro).items()}}
    told = ask(client, {}, temperature=1.0, seed=1, max_tokens=24, **bias)
    check(told)
    assert "" in [token["text"] for token in told.emitted]


def _spelling(client: openai.OpenAI, text: str) -> dict[int, int]:
    response = client.post(str(client.base_url).replace("/v1/", "/tokenize"), body={"prompt": text}, cast_to=object)
    return dict.fromkeys(response["tokens"], 50)  # type: ignore[index]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_what_a_stop_string_takes_back_is_not_told(client: openai.OpenAI, llm: LLM, length: int) -> None:
    """The prediction makes runs long; stop strings begin and end inside them, and span steps."""
    whole = llm.chat(MESSAGES, SamplingParams(max_tokens=40, logit_bias=PRINTABLE)).text
    places = [i for i in range(1, 38) if whole.find(whole[i : i + length]) == i]
    assert len(places) > 3
    for at in places:
        told = ask(
            client,
            {},
            temperature=0,
            stop=[whole[at : at + length]],
            logit_bias=PRINTABLE,
            prediction={"type": "content", "content": whole},
        )
        assert told.text == whole[:at]
        assert told.finish == "stop"
        assert "".join(token["text"] for token in told.emitted) == told.text
        assert len(told.tokens) == at
        assert {step["drafter"] for step in told.steps} <= {"ngram:shortest=1 + prediction"}
    assert any(len(step["emitted"]) > 2 for step in told.steps), "no run was accepted, so nothing was tested"


def test_the_end_of_text_is_told_without_a_text(client: openai.OpenAI, llm: LLM) -> None:
    (end,) = llm.tokenizer.eos_ids
    told = ask(client, {}, temperature=0, logit_bias={str(end): 100})
    check(told)
    assert (told.text, told.finish) == ("", "stop")
    assert [(token["token"], token["text"]) for token in told.emitted] == [(end, "")]


def test_tools_and_logprobs_do_not_disturb_it(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    called = client.chat.completions.create(
        **settings_of({}, temperature=0, tools=tools, tool_choice="required", max_tokens=80)
    )  # type: ignore[call-overload]
    said = [t["text"] for step in called.model_extra["metrics"]["trace"] for t in step["emitted"]]
    assert called.choices[0].message.tool_calls[0].function.name == "add"
    assert "add" in "".join(said)
    told = ask(client, {}, temperature=1.0, seed=4, logprobs=True, top_logprobs=2)
    check(told)


def test_nobody_else_is_told(served: Serving) -> None:
    with served.http() as http:
        body = {"messages": MESSAGES, "max_tokens": 4, "stream": True}
        for wishes in ({}, {"speculation": {"report": "detailed"}}):
            assert '"trace"' not in http.post("/v1/chat/completions", json=body | wishes).text
        wrong = http.post("/v1/chat/completions", json=body | {"speculation": {"report": "everything"}})
    assert wrong.status_code == 400
    assert "speculation.report" in wrong.json()["error"]["message"]


def test_drawn_tokens_carry_the_drafters_probability(folder: Path) -> None:
    name = f"model:{folder}"
    with (
        LLM(folder, drafter=name, tree="sampled:widths=2x2", offers=["ngram"], config=SMALL) as llm,
        serving(llm, name, ("ngram",)) as served,
        served.client() as client,
    ):
        told = ask(client, {"law": "layer"}, temperature=1.0, seed=2)  # a seed alone would mean `match`
        check(told)
        trees = [step["tree"] for step in told.steps if step["tree"] is not None]
        assert all(0 < q <= 1 for tree in trees for q in tree["q"][1:])
        kinds = {token["kind"] for token in told.emitted}
        assert {"accepted", "bonus"} <= kinds
        for step in told.steps:  # a drafter that is the target itself finds every token as likely as it is
            tree = step["tree"] or {"p": [], "q": []}
            assert tree["p"][1:] == pytest.approx(tree["q"][1:], abs=1e-4)
        named = ask(client, {"drafter": name, "law": "layer"}, temperature=1.0, seed=2)
        assert (named.tokens, named.steps[0]["drafter"]) == (told.tokens, name)
        assert json.dumps(named.steps, allow_nan=False)
