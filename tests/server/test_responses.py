"""OpenAI's Responses API with its own client: the same tokens as chat, in events that add up to the whole response."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from draftwood import LLM, SamplingParams
from draftwood.request import Event, FinishReason, SpeculationStats
from draftwood.server.choice_state import Choice, usage
from draftwood.server.responses_api.parsing import as_chat
from draftwood.server.responses_api.schemas import ResponsesRequest
from draftwood.server.responses_api.writer import ResponseWriter
from draftwood.server.tools import write_call
from serving import NAME, Serving, serving

TEXT = "the cat sat on the mat, the cat sat on"
LOGPROBS = "message.output_text.logprobs"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


END = 256  # the tiny model's token that ends a text


def respond(client: openai.OpenAI, **settings: object):
    asked = {"model": NAME, "input": TEXT, "max_output_tokens": 24, "temperature": 1, "extra_body": {"seed": 3}}
    return client.responses.create(**asked | settings)  # type: ignore[call-overload]


def events_of(served: Serving, **body: object) -> list[dict[str, Any]]:
    """A stream's events, each with its name checked against its type."""
    text = served.post("/v1/responses", {"input": TEXT, "stream": True, "seed": 3} | body).text
    events = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """What is the same when the same is asked again."""
    response = json.loads(json.dumps(response))
    for name in ("id", "created_at", "completed_at"):
        response.pop(name, None)
    response["usage"].pop("input_tokens_details")
    for item in response["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return response


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_engines_own(client: openai.OpenAI, llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
    wanted = llm.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}], params)
    got = respond(client, instructions="Be brief.", temperature=temperature, metadata={"a": "b"}, user="me")
    assert got.output_text == wanted.text
    assert (got.usage.input_tokens, got.usage.output_tokens) == (len(wanted.prompt_token_ids), 24)
    assert got.usage.total_tokens == got.usage.input_tokens + 24
    assert (got.object, got.model, got.status, got.store) == ("response", NAME, "incomplete", False)
    assert got.incomplete_details.reason == "max_output_tokens"
    assert (got.instructions, got.metadata, got.temperature, got.user) == ("Be brief.", {"a": "b"}, temperature, "me")


SHAPES = [
    {"max_output_tokens": 20},
    {"max_output_tokens": 20, "include": [LOGPROBS], "top_logprobs": 2},
    {"max_output_tokens": 200, "text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}}}},
    {"max_output_tokens": 200, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    {"max_output_tokens": 200, "tools": [WEATHER], "tool_choice": "required"},
    {"max_output_tokens": 50, "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
    {"max_output_tokens": 20, "tools": [WEATHER], "logit_bias": {str(token): 60 for token in range(64, 90)}},
    {"max_output_tokens": 20, "temperature": 0, "logit_bias": {str(END): 100}},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_streams_events_add_up_to_the_whole_response(served: Serving, shape: dict[str, object]) -> None:
    whole = served.post("/v1/responses", {"input": TEXT, "seed": 3} | shape).json()
    events = events_of(served, **shape)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[1]["response"]["output"] == []
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_names(events[-1]["response"]) == without_names(whole)
    assert [rebuilt(events, i) for i in range(len(whole["output"]))] == events[-1]["response"]["output"]
    assert served.idle()


def rebuilt(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """An item of the output from its own events, in the order OpenAI sends them."""
    mine = [event for event in events if event.get("output_index") == index]
    added, done = mine[0], mine[-1]
    assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
    assert {event["item_id"] for event in mine[1:-1]} == {added["item"]["id"]}
    item = added["item"] | {"status": done["item"]["status"]}
    if item["type"] == "function_call":
        *deltas, last = mine[1:-1]
        assert last["type"] == "response.function_call_arguments.done"
        assert "".join(event["delta"] for event in deltas) == last["arguments"]
        return item | {"arguments": last["arguments"]}
    begun, *deltas, last, finished = mine[1:-1]
    names = (begun["type"], last["type"], finished["type"])
    assert names == ("response.content_part.added", "response.output_text.done", "response.content_part.done")
    assert "".join(event["delta"] for event in deltas) == last["text"] == finished["part"]["text"]
    assert [entry for event in deltas for entry in event["logprobs"]] == last["logprobs"]
    return item | {"content": [begun["part"] | {"text": last["text"], "logprobs": last["logprobs"]}]}


WRITTEN = [
    "words ",
    "<tool_call>",
    "</tool",
    "\n",
    write_call("f", '{"x": "}"}'),
    '<tool_call>{"name": "g", "arguments": {"y": [',
]


@given(st.lists(st.sampled_from(WRITTEN), max_size=5), st.sampled_from(FinishReason), st.data())
def test_any_text_gives_the_same_items_however_it_is_cut(
    llm: LLM, texts: list[str], reason: FinishReason, data: st.DataObject
) -> None:
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    writer = ResponseWriter(ResponsesRequest(input="x"), NAME, llm.tokenizer)
    choice = Choice(0, llm.tokenizer, reads_calls=True)
    events = writer.openings([choice])
    for i, piece in enumerate(pieces):
        end = reason if i == len(pieces) - 1 else None
        delta = choice.add(Event(0, 0, (1,), (False,), piece, end, SpeculationStats()))
        events += [] if delta.empty else writer.chunks(choice, delta)
    taken = usage([choice], 1, 3)
    events += writer.endings([choice], taken, None)
    whole = ResponseWriter(ResponsesRequest(input="x"), NAME, llm.tokenizer).whole([choice], taken, None)
    final = events[-1]["response"]
    assert [rebuilt(events, i) for i in range(len(final["output"]))] == final["output"]
    assert without_names(final) == without_names(whole)
    calls = [item for item in final["output"] if item["type"] == "function_call"]
    assert [item["status"] == "completed" for item in calls] == [item["name"] == "f" for item in calls]


def test_the_shapes_hold_what_they_are_meant_to_hold(served: Serving) -> None:
    answers = [served.post("/v1/responses", {"input": TEXT, "seed": 3} | shape).json() for shape in SHAPES]
    logprobs, schema, call, _, cut, words, empty = answers[1:]
    entries = logprobs["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 20
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert json.loads(schema["output"][0]["content"][0]["text"]) == "yes"
    assert schema["status"] == "completed"
    assert json.loads(call["output"][0]["arguments"])["city"] in ("Rome", "Oslo")
    assert [item["type"] for item in call["output"]] == ["function_call"]
    assert cut["output"][0]["status"] == cut["status"] == "incomplete"
    assert cut["output"][0]["name"] == "weather"
    assert len(words["output"][0]["content"][0]["text"]) == 20
    assert [item["content"][0]["text"] for item in empty["output"]] == [""]


def test_the_clients_stream_helper(client: openai.OpenAI) -> None:
    settings = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(model=NAME, input=TEXT, temperature=1, extra_body={"seed": 3}, **settings) as stream:  # type: ignore[arg-type]
        events = list(stream)
        final = stream.get_final_response()
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(snapshots) > 2, "the arguments came in one piece"
    (call,) = final.output
    assert call.arguments == snapshots[-1]
    assert call.status == final.status == "completed"


class Person(BaseModel):
    name: str
    age: int


def test_the_clients_structured_output(client: openai.OpenAI) -> None:
    brief = {"seed": 2, "logit_bias": {str(ord('"') - 33): 8, str(ord("}") - 33): 20}}  # close strings and objects soon
    asked = {"model": NAME, "input": TEXT, "text_format": Person, "temperature": 1, "extra_body": brief}
    got = client.responses.parse(**asked)  # type: ignore[arg-type]
    assert isinstance(got.output_parsed, Person)
    with client.responses.stream(**asked) as stream:  # type: ignore[call-overload]
        assert stream.get_final_response().output_parsed == got.output_parsed


def test_a_conversation_is_carried_on_by_sending_it(client: openai.OpenAI, served: Serving) -> None:
    """What a client gets back can be sent again as it is, with the output of the calls."""
    first = respond(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_output_tokens=99)
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    talk: list[Any] = [{"role": "user", "content": TEXT}, call.to_dict(), output]
    second = respond(client, input=talk, tools=[WEATHER], tool_choice="none")
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    assert second.usage.input_tokens == served.post("/tokenize", {"messages": messages}).json()["count"]
    third = respond(
        client, input=[*talk, *(item.to_dict() for item in second.output), {"role": "user", "content": "x"}]
    )
    messages += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "x"}]
    assert third.usage.input_tokens == served.post("/tokenize", {"messages": messages}).json()["count"]


def test_items_become_the_messages_of_a_chat() -> None:
    talk = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ]
    asked = {
        "input": talk,
        "not_a_field": 1,
        "instructions": "Be kind.",
        "max_output_tokens": 3,
        "deadline": 7,
        "speculation": {"depth": 2},
    }
    chat = as_chat(ResponsesRequest.model_validate(asked))
    said = [(m.role, m.content, [c.function.name for c in m.tool_calls or ()], m.tool_call_id) for m in chat.messages]
    assert said == [
        ("system", "Be kind.", [], None),
        ("developer", "Be brief.", [], None),
        ("user", "ab", [], None),
        ("assistant", "c", ["f", "g"], None),
        ("tool", "x", [], "1"),
        ("tool", "y", [], "2"),
        ("assistant", None, ["f"], None),
    ]
    assert (chat.max_completion_tokens, chat.deadline, chat.speculation.depth) == (3, 7, 2)


REFUSALS = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored here; send the whole conversation"),
    ({"conversation": "conv_1"}, "conversation", "not stored"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "not stored"),
    ({"background": True}, "background", "background"),
    ({"truncation": "auto"}, "truncation", "never shortened"),
    ({"messages": []}, "messages", "here it is input"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
    ({"max_completion_tokens": 9}, "max_completion_tokens", "max_output_tokens"),
    ({"logprobs": True}, "logprobs", "include"),
    ({"n": 2}, "n", "one answer"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
    ({"tools": [{"type": "function"}]}, "tools", "name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.function.name", "pattern"),
    ({"tools": [WEATHER], "include": [LOGPROBS]}, "include", "beside tools"),
    ({"tools": [WEATHER], "text": {"format": {"type": "json_object"}}}, "text.format", "cannot both"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not among"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
    ({"input": []}, "input.items", "at least 1"),
    ({"input": 3}, "input.items", "list"),
    ({"input": [{"type": "reasoning"}]}, "input", "no message"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.items.0.message.role", "user"),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": ""}]},
        "input.items.0.function_call.call_id",
        "required",
    ),
    ({"input": [{"type": "computer_call_output", "output": {}}]}, "input", "'computer_call_output'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "stored"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "sees no images"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input", "'input_file'"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input", "'input_file'"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
    ({"metadata": {"x": "y" * 600}}, "metadata.x", "512"),
]


@pytest.mark.parametrize(("wrong", "param", "reason"), REFUSALS)
def test_refusals_say_which_field_and_why(
    client: openai.OpenAI, wrong: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.post("/responses", cast_to=object, body={"model": NAME, "input": TEXT, "max_output_tokens": 2} | wrong)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_what_changes_nothing_is_accepted(client: openai.OpenAI) -> None:
    got = respond(
        client,
        max_output_tokens=2,
        store=True,
        background=False,
        truncation="disabled",
        reasoning={"effort": "low"},
        include=["reasoning.encrypted_content"],
        text={"verbosity": "low"},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
    )
    assert got.usage.output_tokens == 2
    assert got.store is False, "nothing is stored, and the answer says so"


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    made = respond(client, max_output_tokens=2)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not stored here") as caught:
            ask(made.id)
        assert caught.value.code == "not_stored"
    with pytest.raises(openai.NotFoundError, match="not here"):
        respond(client, model="gpt-9")


def test_long_lists_of_nonsense_are_refused_at_the_first(served: Serving) -> None:
    table = {f"{'x' * 70}{i}": 1 for i in range(20_000)}
    bodies = ({"input": [{}] * 20_000}, {"input": [{"role": "user", "content": [{}] * 20_000}]})
    for body in (*bodies, {"input": "x", "metadata": table}, {"input": "x", "tools": [{}] * 20_000}):
        began = time.monotonic()
        response = served.post("/v1/responses", body)
        assert response.status_code == 400
        assert len(response.content) < 300
        assert time.monotonic() - began < 5
    assert served.post("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 20_000}).status_code == 400


def test_figures_of_speculation_and_traces(served: Serving) -> None:
    wishes = {"max_output_tokens": 16, "temperature": 0, "speculation": {"report": "trace"}}
    whole = served.post("/v1/responses", {"input": TEXT} | wishes).json()
    streamed = events_of(served, **wishes)[-1]["response"]
    for response in (whole, streamed):
        assert response["metrics"]["speculative_decoding"]["num_spec_steps"] >= 0
        steps = response["metrics"]["trace"]
        assert (
            "".join(t["text"] for step in steps for t in step["emitted"]) == response["output"][0]["content"][0]["text"]
        )


def test_a_response_that_fails_says_so_in_its_last_event(served: Serving) -> None:
    """The deadline passes while the answer is under way, in a stream and without one."""
    slow = {"input": TEXT, "max_output_tokens": 2000, "deadline": 0.05, "ignore_eos": True}
    events = events_of(served, **slow)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "deadline_exceeded"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    late = served.post("/v1/responses", slow)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert served.idle()


def test_hanging_up_ends_the_answer(served: Serving) -> None:
    body = {"input": TEXT, "max_output_tokens": 2000, "stream": True, "ignore_eos": True}
    with served.http() as http, http.stream("POST", "/v1/responses", json=body) as response:
        assert next(response.iter_lines()) == "event: response.created"
    assert served.idle()


def test_draining_refuses_and_the_log_knows_the_tokens(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "draftwood.access"), serving(llm) as running:
        assert running.post("/v1/responses", {"input": TEXT, "max_output_tokens": 3}).status_code == 200
        assert running.post("/manage/drain", {}).status_code == 200
        refused = running.post("/v1/responses", {"input": TEXT})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    lines = [json.loads(record.message) for record in caplog.records if record.name == "draftwood.access"]
    (line,) = [line for line in lines if line["path"] == "/v1/responses" and line["status"] == 200]
    assert line["completion_tokens"] == 3
