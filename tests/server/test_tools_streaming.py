"""Tool calls while they are written: the stream adds up to the whole answer, however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import LLM
from draftwood.request import Event, FinishReason, SpeculationStats
from draftwood.server.calls import Arguments, Call, CallEnd, CallReader, CallStart, Part, Words, calls_of, joined
from draftwood.server.choice_state import Choice
from draftwood.server.formatters import ChatWriter
from draftwood.server.tools import write_call
from serving import NAME, Serving

MESSAGES = [{"role": "user", "content": "the cat sat on the mat"}]
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 12, "maxLength": 40}, "mood": {"enum": ["a", "b"]}},
            "required": ["text", "mood"],
            "additionalProperties": False,
        },
    },
}


def read(*pieces: str) -> list[Part]:
    reader = CallReader()
    return joined([part for piece in pieces for part in reader.feed(piece)] + reader.finish())


def call(name: str, arguments: str) -> list[Part]:
    return [CallStart(name), Arguments(arguments), CallEnd()]


TRICKY = '{"a": "}{][ \\" \\\\", "b": [{"c": "<tool_call></tool_call>"}, []], "d": "\\ud83d"}'
READ: list[tuple[str, list[Part]]] = [
    ("", []),
    (" \n", [Words(" \n")]),
    ("words <tool", [Words("words <tool")]),
    (write_call("f", "{}"), call("f", "{}")),
    (write_call("f", '{ "x" :1 }'), call("f", '{ "x" :1 }')),  # the model's own spaces
    (write_call("f", TRICKY), call("f", TRICKY)),
    (f"\n{write_call('f', '{}')}\n{write_call('g', '{}')}\n", [*call("f", "{}"), *call("g", "{}")]),
    (f"a {write_call('f', '{}')} b ", [Words("a "), *call("f", "{}"), Words("b ")]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', call("f", '{"x": 1}')),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', call("f", "[1]")),
    ('<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>x', [*call("f", "{}"), Words("x")]),
    (" <tool_call>nonsense</tool_call> b", [Words(" <tool_call>nonsense</tool_call> b")]),
    (
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        [Words('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>')],
    ),
    (
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        [Words('<tool_call>{"name": 3, "arguments": {}}</tool_call>')],
    ),
    ('<tool_call>{"name": "f", "argum', [Words('<tool_call>{"name": "f", "argum')]),
    ('<tool_call>{"name": "f", "arguments": {"x": "y', [CallStart("f"), Arguments('{"x": "y')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool', call("f", '{"x": 1}')),
    ('<tool_call>{"name": "f", "arguments": {"x": </tool_call>b', [CallStart("f"), Arguments('{"x": '), Words("b")]),
]


@pytest.mark.parametrize(("text", "parts"), READ)
def test_words_and_calls_are_told_apart_at_every_cut(text: str, parts: list[Part]) -> None:
    assert read(text) == parts
    assert read(*text) == parts
    for cut in range(1, len(text)):
        assert read(text[:cut], text[cut:]) == parts


ALPHABET = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {',
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    "x",
    " ",
    "\n",
    "<",
]


@given(st.lists(st.sampled_from([*ALPHABET, *(text for text, _ in READ)]), max_size=8), st.data())
def test_any_text_reads_the_same_however_it_is_cut(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert read(*(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))) == read(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=3), st.booleans())
def test_arguments_are_the_text_the_model_wrote(calls: list[dict[str, Any]], ascii: bool) -> None:
    written = [json.dumps(arguments, ensure_ascii=ascii) for arguments in calls]
    parts = read(*"\n".join(write_call("f", text) for text in written))
    assert calls_of(parts) == [Call("f", text) for text in written]


def chunks_of(pieces: list[str], reason: FinishReason, llm: LLM) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The chunks of a streamed answer, and the choice of the whole one."""
    writer = ChatWriter(NAME, llm.tokenizer, tells_usage=False, logprobs=False)
    streamed = Choice(0, llm.tokenizer, reads_calls=True)
    chunks = []
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        event = Event(
            0,
            0,
            token_ids=(1,),
            accepted=(False,),
            text=piece,
            finish_reason=reason if last else None,
            stats=SpeculationStats(),
        )
        delta = streamed.add(event)
        chunks += [] if delta.empty else [chunk["choices"][0] for chunk in writer.chunks(streamed, delta)]
    return chunks, writer.choice(streamed)


def test_a_call_is_streamed_as_openai_streams_it(llm: LLM) -> None:
    text = f"Let me see. {write_call('f', TRICKY)}\n{write_call('g', '{}')}"
    chunks, whole = chunks_of([text[i : i + 3] for i in range(0, len(text), 3)], FinishReason.STOP, llm)
    deltas = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    firsts = [delta for delta in deltas if "id" in delta]
    assert [(d["index"], d["type"], d["function"]) for d in firsts] == [
        (0, "function", {"name": "f", "arguments": ""}),
        (1, "function", {"name": "g", "arguments": ""}),
    ]
    assert all(set(delta) == {"index", "function"} for delta in deltas if "id" not in delta)
    for i, call_ in enumerate(whole["message"]["tool_calls"]):
        pieces = [delta["function"]["arguments"] for delta in deltas if delta["index"] == i]
        assert "".join(pieces) == call_["function"]["arguments"]
        assert i or len(pieces) > 10, "the arguments came in one piece"
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_an_answer_that_ends_inside_a_call_is_not_finished_by_it(llm: LLM, reason: FinishReason) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "y'
    chunks, whole = chunks_of([text[:9], text[9:]], reason, llm)
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "y'}
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == str(reason)


def chat(client: openai.OpenAI, **settings: object):
    given_ = {"model": NAME, "messages": MESSAGES, "max_tokens": 400, "temperature": 1, "seed": 3, "tools": [NOTE]}
    return client.chat.completions.create(**given_ | {"tool_choice": "required"} | settings)  # type: ignore[call-overload]


def test_the_official_client_puts_a_streamed_call_together(client: openai.OpenAI) -> None:
    (wanted,) = chat(client, parallel_tool_calls=False).choices[0].message.tool_calls
    settings = {"tools": [NOTE], "tool_choice": "required", "parallel_tool_calls": False}
    settings |= {"max_tokens": 400, "temperature": 1, "seed": 3}
    with client.chat.completions.stream(model=NAME, messages=MESSAGES, **settings) as stream:  # type: ignore[arg-type]
        events = list(stream)
        (got,) = stream.get_final_completion().choices[0].message.tool_calls
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(list(filter(None, pieces))) > 5, "the arguments came in one piece"
    assert (done.name, done.arguments) == (got.function.name, got.function.arguments)
    assert (got.function.name, got.function.arguments) == (wanted.function.name, wanted.function.arguments)
    assert json.loads(got.function.arguments)["mood"] in ("a", "b")


def test_parallel_calls_are_streamed_by_their_index(client: openai.OpenAI, llm: LLM) -> None:
    """Each call is followed by another one, up to the limit: the model may not end its answer."""
    endless = {"logit_bias": {str(token): -100 for token in llm.tokenizer.eos_ids}}
    whole = chat(client, **endless).choices[0]
    streamed = chat(client, stream=True, **endless)
    told = [call for chunk in streamed for call in chunk.choices[0].delta.tool_calls or []]
    assert len(whole.message.tool_calls) > 2
    for i, call_ in enumerate(whole.message.tool_calls):
        first, *more = [delta for delta in told if delta.index == i]
        assert (first.type, first.function.name, first.function.arguments) == ("function", "note", "")
        assert "".join(delta.function.arguments for delta in more) == call_.function.arguments
    assert len({delta.id for delta in told if delta.id}) == len(whole.message.tool_calls)


def test_a_call_cut_by_the_limit_is_told_as_far_as_it_came(client: openai.OpenAI, served: Serving) -> None:
    settings = {
        "parallel_tool_calls": False,
        "max_tokens": len('<tool_call>\n{"name": "note", "arguments": {"text": "abc'),
    }
    whole = chat(client, **settings).choices[0]
    (cut,) = whole.message.tool_calls
    assert whole.finish_reason == "length"
    assert cut.function.name == "note"
    assert cut.function.arguments.startswith('{"text": "')
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **settings)]
    told = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert "".join(call.function.arguments for call in told) == cut.function.arguments
    assert chunks[-1].finish_reason == "length"
    assert served.idle()
