"""`echo` in /v1/completions: the prompt's text and, with `logprobs`, how likely the model finds it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from draftwood import LLM, SamplingParams
from draftwood.model.tokenizer import Tokenizer
from draftwood.server import echo as echoing
from serving import NAME, Serving

PROMPT = "Hé said: "
FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Json = dict[str, Any]


def ask(served: Serving, prompt: object = PROMPT, **settings: object) -> Json:
    body = {"model": NAME, "prompt": prompt, "echo": True, "temperature": 0, "max_tokens": 4} | settings
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(served: Serving, prompt: object = PROMPT, **settings: object) -> list[Json]:
    body = {"prompt": prompt, "echo": True, "temperature": 0, "max_tokens": 4, "stream": True} | settings
    lines = served.post("/v1/completions", body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(chunks: list[Json], index: int) -> Json:
    """The choice that a stream's chunks add up to."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    margins = [choice["logprobs"] for choice in own if choice["logprobs"]]
    return {
        "index": index,
        "text": "".join(choice["text"] for choice in own),
        "logprobs": {name: [entry for margin in margins for entry in margin[name]] for name in FIELDS},
        "finish_reason": own[-1]["finish_reason"],
    }


def check(choice: Json, llm: LLM, tokens: list[int], text: str, k: int = 2) -> None:
    """Against the engine asked directly."""
    wanted = llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=k))[0].prompt_logprobs
    margin = choice["logprobs"]
    count = len(tokens)
    assert {len(margin[name]) for name in FIELDS} == {len(margin["tokens"])}
    assert (margin["token_logprobs"][0], margin["top_logprobs"][0]) == (None, None)
    assert choice["text"].startswith(text)
    for i, entry in enumerate(wanted[1:], 1):
        assert entry is not None
        assert margin["token_logprobs"][i] == pytest.approx(entry.logprob, abs=1e-6)
        assert max(margin["top_logprobs"][i].values()) == pytest.approx(entry.top[0][1], abs=1e-6)
        assert len(margin["top_logprobs"][i]) <= k
    pieces = [llm.tokenizer.piece(token, skip_special=False) for token in tokens]
    for piece, read, start in zip(pieces, margin["tokens"], margin["text_offset"][:count], strict=False):
        if piece.isascii():
            assert read == piece.decode()
            assert choice["text"][start : start + 1] == read
        else:
            assert read == "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def test_log_probabilities_cover_the_prompt_and_the_answer(served: Serving, llm: LLM) -> None:
    tokens = llm.tokenizer.encode(PROMPT)
    answer = ask(served, logprobs=2)
    (choice,) = answer["choices"]
    check(choice, llm, tokens, PROMPT)
    plain = ask(served, logprobs=2, echo=False)["choices"][0]
    assert choice["text"] == PROMPT + plain["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert choice["logprobs"][name][len(tokens) :] == plain["logprobs"][name]
    assert choice["logprobs"]["text_offset"][len(tokens) :] == [
        len(PROMPT) + start for start in plain["logprobs"]["text_offset"]
    ]
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("most", [0, 3])
def test_texts_tokens_lists_and_several_answers(served: Serving, llm: LLM, most: int) -> None:
    texts = ["one two", "three", "x"]
    tokens = [llm.tokenizer.encode(text) for text in texts]
    settings = {"temperature": 1, "seed": 3, "n": 2, "logprobs": 2, "max_tokens": most}
    answers = [ask(served, texts, **settings), ask(served, tokens, **settings)]
    streams = [streamed(served, texts, **settings), streamed(served, tokens, **settings)]
    for answer, chunks in zip(answers, streams, strict=True):
        assert len(answer["choices"]) == 6
        for i, choice in enumerate(answer["choices"]):
            check(choice, llm, tokens[i // 2], texts[i // 2])
            assert joined(chunks, i) == choice
            first = next(c for chunk in chunks for c in chunk["choices"] if c["index"] == i)
            assert first["text"].startswith(texts[i // 2])
            assert first["logprobs"]["tokens"][: len(tokens[i // 2])] == list(texts[i // 2])
            assert choice["finish_reason"] in ("length", "stop")
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert served.idle()


def test_a_prompt_can_be_scored_without_an_answer(served: Serving, llm: LLM) -> None:
    answer = ask(served, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    check(choice, llm, llm.tokenizer.encode(PROMPT), PROMPT, k=1)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(llm.tokenizer.encode(PROMPT))
    assert answer["usage"]["completion_tokens"] == 0


def test_a_prompt_is_repeated_without_running_the_model(served: Serving, llm: LLM) -> None:
    steps = llm.pulse.steps
    answer = ask(served, [list(b"abc"), list(b"de")], max_tokens=0, n=2, temperature=1)
    assert [choice["text"] for choice in answer["choices"]] == [llm.tokenizer.decode(list(b"abc"))] * 2 + [
        llm.tokenizer.decode(list(b"de"))
    ] * 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == 5
    chunks = streamed(served, max_tokens=0)
    assert [(c["text"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]] == [
        (PROMPT, None),
        ("", "length"),
    ]
    assert llm.pulse.steps == steps
    refused = served.post("/v1/completions", {"prompt": [9999], "echo": True, "max_tokens": 0})
    assert (refused.status_code, "vocabulary" in refused.text) == (400, True)


def test_no_tokens_and_no_echo_is_refused_with_the_reason(served: Serving) -> None:
    refused = served.post("/v1/completions", {"prompt": "x", "max_tokens": 0})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "max_tokens")
    assert "set echo" in error["message"]
    chat = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0})
    assert chat.status_code == 400


def test_the_end_of_text_is_told_so_that_counts_are_right(served: Serving, llm: LLM) -> None:
    end = next(iter(llm.tokenizer.eos_ids))
    (choice,) = ask(served, "abc", logprobs=1, max_tokens=1, logit_bias={str(end): 100})["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "<|end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """How many tokens were turned into text outside answers, and on which thread."""
    made: list[tuple[int, str]] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int], **settings: bool) -> str:
        made.append((len(ids), threading.current_thread().name))
        return decode(self, ids, **settings)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    return made


def test_checks_come_before_decoding(served: Serving, decoded: list[tuple[int, str]]) -> None:
    for prompt in ([5] * 30_000, [5, 5, 1 << 30]):
        body = {"prompt": prompt, "echo": True, "n": 128, "temperature": 1}
        refused = served.post("/v1/completions", body)
        assert refused.status_code == 400, refused.text
    assert decoded == []


def test_a_prompt_is_decoded_once_and_off_the_event_loop(served: Serving, decoded: list[tuple[int, str]]) -> None:
    ask(served, [list(b"abcd"), list(b"efg")], n=5, temperature=1)
    assert [count for count, _ in decoded] == [4, 3]
    assert all(name.startswith("draftwood-prompts") for _, name in decoded), "decoded on the event loop"


def test_a_short_request_cannot_ask_for_a_huge_response(
    served: Serving, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echoing, "MOST_ENTRIES", 60)
    body = {"prompt": "x" * 10, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 1}
    assert served.post("/v1/completions", body | {"n": 2}).status_code == 200
    refused = served.post("/v1/completions", body | {"n": 3})
    assert refused.status_code == 400
    assert "would return 90 log-probabilities" in refused.json()["error"]["message"]
    assert served.idle()
