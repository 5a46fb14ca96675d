"""OpenAI's own client against a real server: everything it asks for, and the tokens are the engine's own."""

from __future__ import annotations

import math
import re

import openai
import pytest

import draftwood
from draftwood import LLM, SamplingParams
from serving import NAME, Serving

MESSAGES = [{"role": "user", "content": "the cat sat on the mat, the cat sat on"}]
PROMPT = "abcabcabcabc"


def chat(client: openai.OpenAI, **settings: object):
    return client.chat.completions.create(model=NAME, messages=MESSAGES, **settings)  # type: ignore[call-overload]


def complete(client: openai.OpenAI, **settings: object):
    return client.completions.create(**{"model": NAME, "prompt": PROMPT} | settings)  # type: ignore[call-overload]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_served_text_is_the_offline_text(client: openai.OpenAI, llm: LLM, temperature: float) -> None:
    wanted = llm.chat(MESSAGES, SamplingParams(temperature=temperature, seed=3, max_tokens=24))
    got = chat(client, temperature=temperature, seed=3, max_tokens=24)
    assert got.choices[0].message.content == wanted.text
    assert got.choices[0].finish_reason == wanted.finish_reason == "length"
    assert got.usage.completion_tokens == len(wanted.token_ids) == 24
    assert got.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + 24
    assert (got.object, got.model, got.choices[0].message.role) == ("chat.completion", NAME, "assistant")


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
    whole = chat(client, **settings)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **settings))
    *spoken, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in spoken) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in spoken if c.choices[0].finish_reason] == ["length"]
    assert all(c.usage is None for c in spoken)
    assert (last.choices, last.usage.completion_tokens) == ([], 24)
    assert len({c.id for c in chunks}) == 1


def test_server_sent_events_are_framed_as_they_should_be(served: Serving) -> None:
    with served.http() as http:
        body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
        response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")[:-1]
    assert end == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    assert "usage" not in response.text


def test_several_answers_are_the_engines_several_answers(client: openai.OpenAI, llm: LLM) -> None:
    wanted = llm.chat(MESSAGES, SamplingParams(temperature=1.3, n=3, seed=9, max_tokens=8))
    got = chat(client, temperature=1.3, n=3, seed=9, max_tokens=8)
    assert [c.message.content for c in got.choices] == [c.text for c in wanted.completions]
    assert [c.index for c in got.choices] == [0, 1, 2]
    assert got.usage.completion_tokens == 24
    streamed = {0: "", 1: "", 2: ""}
    for chunk in chat(client, temperature=1.3, n=3, seed=9, max_tokens=8, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == [c.text for c in wanted.completions]


def test_several_prompts_are_answered_in_order(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["abab", "the cat", "zzz"]
    params = SamplingParams(temperature=1.0, n=2, seed=4, max_tokens=6)
    wanted = [c.text for result in llm.generate(prompts, params) for c in result.completions]
    got = complete(client, prompt=prompts, n=2, seed=4, max_tokens=6)
    assert [c.text for c in got.choices] == wanted
    assert [c.index for c in got.choices] == list(range(6))
    tokens = [llm.tokenizer.encode(prompt) for prompt in prompts]
    assert [c.text for c in complete(client, prompt=tokens, n=2, seed=4, max_tokens=6).choices] == wanted
    assert complete(client, prompt=tokens[0], seed=4, max_tokens=6).choices[0].text == wanted[0]
    assert complete(client, temperature=0).usage.completion_tokens == 16, "OpenAI's limit where none is given"


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    plain = complete(client, temperature=0, max_tokens=5).choices[0].text
    assert complete(client, temperature=0, max_tokens=5, echo=True).choices[0].text == PROMPT + plain
    chunks = complete(client, temperature=0, max_tokens=5, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + plain


def test_a_stop_inside_an_accepted_run(client: openai.OpenAI, llm: LLM) -> None:
    """The prediction makes runs long; the stop lies in the middle of one, and nothing behind it is told or counted."""
    whole = llm.chat(MESSAGES, SamplingParams(max_tokens=40, logit_bias=PRINTABLE))
    at = next(i for i in range(9, 36) if whole.text.find(whole.text[i : i + 2]) == i)
    stop = whole.text[at : at + 2]
    settings = {"temperature": 0, "max_tokens": 40, "stop": [stop], "logprobs": True, "logit_bias": PRINTABLE}
    guessed = {
        "prediction": {"type": "content", "content": whole.text},
        "extra_body": {"speculation": {"report": "detailed"}},
    }
    got = chat(client, **settings, **guessed)
    choice, figures = got.choices[0], got.model_extra["metrics"]["speculative_decoding"]
    assert max(figures["per_step_accepted"]) > 2, "no run was accepted, so nothing was tested"
    assert choice.message.content == whole.text[:at]
    assert choice.finish_reason == "stop"
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert got.usage.completion_tokens == at + 2
    plain = chat(client, **settings, extra_body={"speculation": {"enabled": False}})
    assert plain.choices[0].message.content == choice.message.content
    assert plain.usage.completion_tokens == got.usage.completion_tokens
    for one, other in zip(plain.choices[0].logprobs.content, choice.logprobs.content, strict=True):
        assert one.token == other.token
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-4)
    entries = [
        entry
        for chunk in chat(client, **settings, **guessed, stream=True)
        for entry in (chunk.choices and chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    ]
    assert [e.token for e in entries] == [e.token for e in choice.logprobs.content]


PRINTABLE = dict.fromkeys(range(64, 90), 60)  # one character a token, so that texts can be counted


def test_logprobs_are_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    wanted = llm.chat(MESSAGES, SamplingParams(max_tokens=8, logprobs=3)).completions[0].logprobs
    got = chat(client, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [entry.logprob for entry in got] == [entry.logprob for entry in wanted]
    assert [[t.logprob for t in entry.top_logprobs] for entry in got] == [[p for _, p in e.top] for e in wanted]
    assert bytes(b for entry in got for b in entry.bytes) == b"".join(llm.tokenizer.piece(e.token) for e in wanted)
    old = complete(
        client, temperature=0, max_tokens=8, logprobs=2, logit_bias={str(k): v for k, v in PRINTABLE.items()}
    )
    assert old.choices[0].logprobs.text_offset == list(range(8))
    assert "".join(old.choices[0].logprobs.tokens) == old.choices[0].text
    assert all(len(top) <= 2 for top in old.choices[0].logprobs.top_logprobs)


def test_biases_and_penalties_reach_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    letter = llm.tokenizer.encode("q")[0]
    assert chat(client, temperature=0, max_tokens=4, logit_bias={letter: 100}).choices[0].message.content == "qqqq"
    params = SamplingParams(
        temperature=1, seed=2, max_tokens=20, presence_penalty=1.5, frequency_penalty=-0.5, top_p=0.8
    )
    got = chat(client, temperature=1, seed=2, max_tokens=20, presence_penalty=1.5, frequency_penalty=-0.5, top_p=0.8)
    assert got.choices[0].message.content == llm.chat(MESSAGES, params).text
    more = {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.2, "bad_words": ["a"]}
    params = SamplingParams(temperature=1, seed=2, max_tokens=20, **more)
    got = chat(client, temperature=1, seed=2, max_tokens=20, extra_body=more)
    assert got.choices[0].message.content == llm.chat(MESSAGES, params).text


def test_the_newer_name_of_the_limit_wins(client: openai.OpenAI) -> None:
    assert chat(client, max_completion_tokens=3, max_tokens=9, temperature=0).usage.completion_tokens == 3


def test_unknown_fields_and_users_are_accepted(client: openai.OpenAI) -> None:
    got = chat(
        client,
        max_tokens=2,
        temperature=0,
        user="somebody",
        metadata={"a": "b"},
        extra_body={"never_heard_of": [1, {"x": 2}]},
    )
    assert got.usage.completion_tokens == 2


def test_parts_of_messages_and_developers(client: openai.OpenAI, llm: LLM) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    got = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=8)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat"}]
    assert got.choices[0].message.content == llm.chat(said, SamplingParams(max_tokens=8)).text


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == NAME == client.models.retrieve(NAME).id
    assert card.model_extra["drafters"] == ["ngram:shortest=1", "none", "ngram:nodes=8,branches=2"]
    assert card.model_extra["branching"] == ["ngram:nodes=8,branches=2"]
    assert (card.model_extra["drafter"], card.model_extra["law"]) == ("ngram:shortest=1", "match")
    laws = {law.pop("name"): law for law in card.model_extra["laws"]}
    assert laws["match"] == {"lossless": True, "exact_for": "every tree"}
    assert laws["block"] == {"lossless": True, "exact_for": "one path"}
    assert not laws["typical"]["lossless"]
    assert (card.model_extra["max_model_len"], card.model_extra["max_nodes"]) == (2048, 8)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_tokens_and_back(served: Serving) -> None:
    with served.http() as http:
        told = http.post("/tokenize", json={"prompt": "Hé <|end|>"}).json()
        assert told["count"] == len(told["tokens"]) == 5
        assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "Hé <|end|>"}
        chat_tokens = http.post("/tokenize", json={"messages": MESSAGES}).json()
        text = http.post("/detokenize", json={"tokens": chat_tokens["tokens"]}).json()["prompt"]
        assert text == f"user: {MESSAGES[0]['content']}\nassistant:"
        assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


REFUSALS = [
    ({"temperature": -1}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 2, "temperature": 0}, "same answer"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logit_bias": {"1000000": 1}}, "vocabulary"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": 1 << 70}, "seed"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"response_format": {"type": "json_schema"}}, "schema"),
    ({"tool_choice": "required"}, "no tools"),
]


@pytest.mark.parametrize(("wrong", "reason"), REFUSALS)
def test_refusals_say_why(client: openai.OpenAI, wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, "temperature": 1} | wrong)  # type: ignore[call-overload]
    assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]


def test_prompts_that_cannot_run_are_refused(client: openai.OpenAI) -> None:
    for prompt in ("", [], [[]], [1 << 20], "x" * 5000):
        with pytest.raises(openai.BadRequestError):
            complete(client, prompt=prompt)
    with pytest.raises(openai.NotFoundError, match="not here"):
        complete(client, model="gpt-9")
    with pytest.raises(openai.BadRequestError, match="fill gaps"):
        complete(client, suffix="end")
    content = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(openai.BadRequestError, match="image"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}])  # type: ignore[arg-type]


def test_what_is_not_offered_is_not_found(client: openai.OpenAI, served: Serving) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=NAME, input="x")
    assert caught.value.code == "unknown_url"
    with served.http() as http:
        missing, wrong = http.get("/nothing/here"), http.get("/v1/completions")
        malformed = http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (missing.status_code, wrong.status_code, malformed.status_code) == (404, 405, 400)
    for response in (missing, wrong, malformed):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "functions", [{"name": "f"}]),
        ("/v1/chat/completions", "function_call", {"name": "f"}),
        ("/v1/chat/completions", "modalities", ["text", "audio"]),
        ("/v1/chat/completions", "chat_template", "{{ messages }}"),
        ("/v1/completions", "use_beam_search", True),
        ("/v1/completions", "allowed_token_ids", [1, 2]),
        ("/v1/completions", "truncate_prompt_tokens", 5),
        ("/v1/completions", "prompt_logprobs", 1),
        ("/v1/completions", "response_format", {"type": "json_object"}),
        ("/v1/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
        ("/v1/completions", "max_completion_tokens", 5),
        ("/v1/completions", "top_logprobs", 2),
        ("/v1/chat/completions", "echo", True),
        ("/v1/completions", "suffix", "the end"),
        ("/v1/completions", "best_of", 3),
    ],
)
def test_fields_that_would_change_an_answer_are_refused_by_name(
    served: Serving, path: str, field: str, value: object
) -> None:
    question = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    refused = served.post(path, question | {"max_tokens": 1, field: value})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == field
    assert field in refused.json()["error"]["message"]
    assert served.post(path, question | {"max_tokens": 1, field: None}).status_code == 200


def test_fields_that_ask_for_nothing_are_accepted(served: Serving) -> None:
    nothing = {"functions": [], "modalities": ["text"], "length_penalty": 1.0, "metadata": {"a": "b"}, "store": False}
    question = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert served.post("/v1/chat/completions", question | nothing).status_code == 200


GUIDES: dict[str, tuple[dict[str, object], str]] = {
    "guided_choice": ({"guided_choice": ["yes", 'no "really"']}, r'yes|no "really"'),
    "guided_regex": ({"guided_regex": "[ab]{3}c"}, "[ab]{3}c"),
    "guided_json": ({"guided_json": {"type": "boolean"}}, "true|false"),
    "guided_json as text": ({"guided_json": '{"enum": [1, 2]}'}, "1|2"),
    "guided_grammar": ({"guided_grammar": 'start: "x" | "yy"'}, "x|yy"),
    "structured_outputs": ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
    "structured_outputs json": ({"structured_outputs": {"json": {"const": 7}}}, "7"),
}


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guides_of_vllm_are_grammars(served: Serving, path: str, name: str) -> None:
    guide, pattern = GUIDES[name]
    question = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    answer = served.post(path, question | guide | {"max_tokens": 40, "temperature": 1, "seed": 3}).json()
    choice = answer["choices"][0]
    assert re.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("guide", "field"),
    [
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "nonsense"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": {"type": "nothing"}}, None),
        ({"guided_regex": "("}, None),
        ({"guided_grammar": "start: missing"}, None),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_guides_that_cannot_be_followed(served: Serving, guide: dict[str, object], field: str | None) -> None:
    question = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    refused = served.post("/v1/chat/completions", question | guide)
    assert refused.status_code == 400, refused.text
    assert field is None or refused.json()["error"]["param"].startswith(field)


def test_a_prompt_that_is_too_long_is_named_so(served: Serving) -> None:
    limit = served.llm.max_length
    for body in ({"prompt": [5] * limit}, {"prompt": "abc " * limit * 9}):
        refused = served.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc " * limit}]})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_the_version_is_told(served: Serving) -> None:
    with served.http() as http:
        assert http.get("/version").json() == {"version": draftwood.__version__}
        missing = http.post("/v1/embeddings", json={"input": "a"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
