"""JSON and tools by grammar: valid whatever the model would rather say, and the same with and without guesses."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.engine.images import ImageReader
from draftwood.errors import GrammarError
from draftwood.model.grammar import LONGEST, Grammars, json_grammar
from draftwood.model.tokenizer import Tokenizer
from draftwood.server.calls import Call, CallReader, Words, calls_of
from draftwood.server.parsing import chat_text
from draftwood.server.schemas import ChatRequest
from draftwood.server.tools import ToolBox, write_call
from serving import NAME, Serving
from tiny import tiny_folder

MESSAGES = [{"role": "user", "content": "the cat sat on the mat"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 200}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
        },
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {**PERSON}}}


def chat(client: openai.OpenAI, **settings: object):
    given_ = {"model": NAME, "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 1} | settings
    return client.chat.completions.create(**given_)  # type: ignore[call-overload]


def schema_format(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@pytest.mark.parametrize("seed", range(4))
def test_answers_follow_their_schema_with_and_without_guesses(client: openai.OpenAI, seed: int) -> None:
    """The prediction is a draft that the grammar forbids at some node and allows before: masks are each node's own."""
    answers = []
    for wishes in ({"enabled": False}, {}, {"drafter": "ngram:nodes=8,branches=2"}):
        more = {"prediction": {"type": "content", "content": '{"name": "Bob", "age": 3, "no": 1}'}} if wishes else {}
        got = chat(client, response_format=schema_format(PERSON), seed=seed, extra_body={"speculation": wishes}, **more)
        assert got.choices[0].finish_reason == "stop"
        answers.append(got.choices[0].message.content)
    assert len(set(answers)) == 1
    said = json.loads(answers[0])
    assert set(said) == {"name", "age"}
    assert isinstance(said["age"], int)


def test_greedy_several_and_streamed_answers_follow_it_too(client: openai.OpenAI) -> None:
    short = schema_format({"enum": ["yes", "no", "maybe"]})
    assert json.loads(chat(client, response_format=short, temperature=0).choices[0].message.content) in (
        "yes",
        "no",
        "maybe",
    )
    several = [json.loads(c.message.content) for c in chat(client, response_format=short, n=8).choices]
    assert set(several) <= {"yes", "no", "maybe"}
    assert len(set(several)) > 1
    text = "".join(c.choices[0].delta.content or "" for c in chat(client, response_format=short, stream=True))
    assert json.loads(text) == several[0]


def test_any_json_object(client: openai.OpenAI) -> None:
    brief = dict.fromkeys(range(256), 0) | {ord("}") - 33: 100}  # close it soon: the model's own taste is endless
    got = chat(client, response_format={"type": "json_object"}, temperature=0, logit_bias=brief)
    assert json.loads(got.choices[0].message.content) == {}


IMPOSSIBLE = [
    {"type": "nonsense"},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "string", "pattern": "a(?=b)"},
    {"$ref": "#/nowhere"},
    {"type": "string", "pattern": "(" * 200},
]


@pytest.mark.parametrize("schema", IMPOSSIBLE)
def test_schemas_nobody_can_follow_are_refused(client: openai.OpenAI, schema: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, response_format=schema_format(schema))


def test_lossy_laws_do_not_go_with_grammars(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="lossless"):
        chat(client, response_format={"type": "json_object"}, extra_body={"speculation": {"law": "typical"}})


@pytest.mark.parametrize("stream", [False, True])
def test_required_tools_are_called_with_what_they_want(client: openai.OpenAI, stream: bool) -> None:
    settings = {"tools": [WEATHER, ADD], "tool_choice": "required", "parallel_tool_calls": False}
    got = chat(client, **settings).choices[0]
    (call,) = got.message.tool_calls
    assert got.finish_reason == "tool_calls"
    assert got.message.content is None
    arguments = json.loads(call.function.arguments)
    assert (
        arguments["city"] in ("Rome", "Oslo") if call.function.name == "weather" else set(arguments) == {"name", "age"}
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **settings)]
        first, *more = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        arguments = first.function.arguments + "".join(told.function.arguments for told in more)
        assert {told.index for told in (first, *more)} == {0}
        assert (first.function.name, arguments) == (call.function.name, call.function.arguments)
        assert chunks[-1].finish_reason == "tool_calls"


def test_a_named_tool_is_the_one_that_is_called(client: openai.OpenAI) -> None:
    for name in ("weather", "add"):
        choice = {"type": "function", "function": {"name": name}}
        got = chat(client, tools=[WEATHER, ADD], tool_choice=choice)
        assert [call.function.name for call in got.choices[0].message.tool_calls] == [name]
    with pytest.raises(openai.BadRequestError, match="not among"):
        chat(client, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "other"}})


def test_optional_tools_leave_words_alone_and_results_are_read(client: openai.OpenAI, served: Serving) -> None:
    letters = {str(token): 60 for token in range(64, 90)}
    got = chat(client, tools=[WEATHER], max_tokens=10, logit_bias=letters).choices[0]
    assert got.finish_reason == "length"
    assert len(got.message.content) == 10
    none = chat(client, tools=[WEATHER], tool_choice="none", max_tokens=10, logit_bias=letters)
    assert none.choices[0].message.tool_calls is None
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    talk = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    with served.http() as http:
        tokens = http.post("/tokenize", json={"messages": talk}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text


def test_a_template_that_knows_tools_is_told_about_them(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tools")
    template = (
        "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
        "{% endfor %}"
    )
    settings = {"chat_template": template, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(folder)
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    request = ChatRequest.model_validate({"messages": talk, "tools": [WEATHER]})
    text, _ = chat_text(tokenizer, request.messages, ToolBox.of(request), ImageReader(None))
    tokens = tokenizer.encode(text, special=False)
    assert tokenizer.decode(tokens) == "[weather ]user:hiassistant:(weather Rome)tool:sunny"


TEXTS = [
    "",
    "words",
    "a <tool",
    " \n",
    write_call("f", '{"x": 1}'),
    write_call("g", "{}"),
    "<tool_call>nonsense</tool_call>",
]


@given(st.lists(st.sampled_from(TEXTS), max_size=5), st.data())
def test_calls_are_read_the_same_however_the_text_is_cut(parts: list[str], data: st.DataObject) -> None:
    """Accepted runs come as one piece, plain decoding token by token: both must read alike."""
    text = "".join(parts)

    def read(pieces: list[str]) -> tuple[str, list[Call]]:
        reader = CallReader()
        parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
        return "".join(part.text for part in parts if isinstance(part, Words)), calls_of(parts)

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])
    assert len(read([text])[1]) == sum(part in TEXTS[4:6] for part in parts)


def test_a_grammar_that_cannot_go_on_says_so(llm) -> None:
    grammars = Grammars(llm.tokenizer, llm.checkpoint.config.vocab_size)
    state = grammars.start(json_grammar({"const": "ab"}))
    tokens = llm.tokenizer.encode('"ab"')
    rows = state.allowed([], [0, *tokens], [-1, 0, 1, 2, 3])
    for row, token in zip(rows, tokens, strict=False):
        assert row.nonzero().view(-1).tolist() == [token]
    assert state.error is None
    state.allowed(tokens[:2], [0], [-1])
    state.allowed([*tokens[:2], tokens[0]], [0], [-1])
    assert "left its grammar" in (state.error or "")
    with pytest.raises(GrammarError, match="limit"):
        grammars.start("x" * (LONGEST + 1))
    for i in range(80):  # more than are kept
        grammars.start(json_grammar({"const": i}))
    assert len(grammars._compiled) == 64
