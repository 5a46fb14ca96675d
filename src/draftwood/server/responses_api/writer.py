"""Answers as the Responses API writes them: one object, or typed events that build it up."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftwood.model.tokenizer import Tokenizer
from draftwood.request import TokenLogprob
from draftwood.server.calls import Arguments, CallEnd, CallStart, Part, Words, joined
from draftwood.server.choice_state import Choice, Delta
from draftwood.server.formatters import logprob_entry, sse
from draftwood.server.logprob_buffer import Spoken
from draftwood.server.responses_api.parsing import settings_of
from draftwood.server.responses_api.schemas import ResponsesRequest

Json = dict[str, Any]
Event = tuple[str, Json]  # its type without "response.", and its fields
Status = Literal["in_progress", "completed", "incomplete"]


@dataclass
class MessageItem:
    """Words, with the log-probabilities of their tokens."""

    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def json(self, status: Status) -> Json:
        """The content is not there yet while the message is in progress."""
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def opening(self) -> list[Event]:
        """The one part of its content."""
        return [("content_part.added", {"content_index": 0, "part": self._part()})]

    def add(self, text: str, logprobs: list[Json]) -> Event:
        """More words."""
        self.pieces.append(text)
        self.logprobs += logprobs
        return "output_text.delta", {"content_index": 0, "delta": text, "logprobs": logprobs}

    def closing(self) -> list[Event]:
        """All of its text."""
        part = self._part()
        text = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        return [("output_text.done", text), ("content_part.done", {"content_index": 0, "part": part})]

    def _part(self) -> Json:
        return {"type": "output_text", "text": "".join(self.pieces), "annotations": [], "logprobs": [*self.logprobs]}


@dataclass
class CallItem:
    """A call of a function."""

    name: str
    id: str = field(default_factory=lambda: f"fc_{secrets.token_hex(12)}")
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    pieces: list[str] = field(default_factory=list)

    def json(self, status: Status) -> Json:
        """The arguments as far as they came."""
        told = {"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id}
        return told | {"name": self.name, "arguments": "".join(self.pieces)}

    def opening(self) -> list[Event]:
        """Its name was told already."""
        return []

    def add(self, text: str) -> Event:
        """More of its arguments."""
        self.pieces.append(text)
        return "function_call_arguments.delta", {"delta": text}

    def closing(self) -> list[Event]:
        """All of its arguments."""
        return [("function_call_arguments.done", {"name": self.name, "arguments": "".join(self.pieces)})]


class Output:
    """The items of an answer, put together from its parts; gives the events that say so."""

    def __init__(self) -> None:
        self.done: list[Json] = []
        self._item: MessageItem | CallItem | None = None  # the one that is being written

    def words(self, text: str, logprobs: list[Json]) -> list[Event]:
        """More of a message."""
        events: list[Event] = []
        item = self._item
        if not isinstance(item, MessageItem):
            item = MessageItem()
            events = self._open(item)
        return [*events, self._of(item, item.add(text, logprobs))]

    def add(self, part: Part) -> list[Event]:
        """The next part of the answer."""
        match part:
            case Words(text):
                return self.words(text, [])
            case CallStart(name):
                return self._open(CallItem(name))
            case Arguments(text) if isinstance(self._item, CallItem):
                return [self._of(self._item, self._item.add(text))]
            case CallEnd():
                return self.close("completed")
        return []

    def finish(self, status: Status) -> list[Event]:
        """No more parts: a call that is still open was cut off, and an answer without items is an empty message."""
        events = [] if self.done or self._item is not None else self._open(MessageItem())
        return events + self._leave(status)

    def close(self, status: Status) -> list[Event]:
        """The end of the item that is being written."""
        item = self._item
        if item is None:
            return []
        told = item.json(status)
        events = [self._of(item, event) for event in item.closing()]
        events.append(("output_item.done", {"output_index": len(self.done), "item": told}))
        self.done.append(told)
        self._item = None
        return events

    def _leave(self, status: Status) -> list[Event]:
        """Close what is open; a call that is open did not end."""
        return self.close("incomplete" if isinstance(self._item, CallItem) else status)

    def _open(self, item: MessageItem | CallItem) -> list[Event]:
        events = self._leave("completed")
        self._item = item
        added = ("output_item.added", {"output_index": len(self.done), "item": item.json("in_progress")})
        return [*events, added, *(self._of(item, event) for event in item.opening())]

    def _of(self, item: MessageItem | CallItem, event: Event) -> Event:
        name, fields = event
        return name, {"item_id": item.id, "output_index": len(self.done)} | fields


class ResponseWriter:
    """Writes the one answer of a request to `/v1/responses`."""

    end = b""  # the last event says that it is the last
    tells_end = False

    def __init__(self, body: ResponsesRequest, model: str, tokenizer: Tokenizer) -> None:
        self.id = f"resp_{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings_of(body)
        self._output = Output()
        self._trace: list[Json] = []
        self._number = 0  # of the next event

    def openings(self, choices: Sequence[Choice]) -> list[Json]:
        """The response, with nothing in it yet."""
        response = {"response": self._response("in_progress")}
        return self._events([("created", response), ("in_progress", response)])

    def chunks(self, choice: Choice, delta: Delta) -> list[Json]:
        """What the answer's new parts and tokens add to the output. The trace is told at the end."""
        self._trace += delta.steps
        return self._events(self._take(delta.parts, delta.tokens))

    def _take(self, parts: Sequence[Part], tokens: Sequence[Spoken[TokenLogprob]]) -> list[Event]:
        if tokens:  # there are no tools beside log-probabilities, so the parts are words
            logprobs = [logprob_entry(self._tokenizer, spoken.entry) for spoken in tokens]
            return self._output.words("".join(part.text for part in parts if isinstance(part, Words)), logprobs)
        return [event for part in parts for event in self._output.add(part)]

    def endings(self, choices: Sequence[Choice], usage: Json, metrics: Json | None) -> list[Json]:
        """The end of the last item, and the whole response."""
        events = self._output.finish(_status(choices[0]))
        if metrics is not None and self._trace:
            metrics = metrics | {"trace": self._trace}
        response = self._finished(choices[0], usage, metrics)
        return self._events([*events, (response["status"], {"response": response})])

    def failings(self, error: Json) -> list[Json]:
        """The response as far as it came, and why it goes no further."""
        told = {"code": error["error"]["code"] or "server_error", "message": error["error"]["message"]}
        self._output.close("incomplete")
        return self._events([("failed", {"response": self._response("failed") | {"error": told}})])

    def whole(self, choices: Sequence[Choice], usage: Json, metrics: Json | None) -> Json:
        """The same response as at the end of a stream."""
        self._take(joined(choices[0].parts), choices[0].tokens)
        self._output.finish(_status(choices[0]))
        return self._finished(choices[0], usage, metrics)

    def frame(self, event: Json) -> bytes:
        """An event with its type as its name."""
        return sse(event, event["type"])

    def _events(self, events: Sequence[Event]) -> list[Json]:
        first = self._number
        self._number += len(events)
        return [
            {"type": f"response.{name}", "sequence_number": first + i} | fields
            for i, (name, fields) in enumerate(events)
        ]

    def _finished(self, choice: Choice, usage: Json, metrics: Json | None) -> Json:
        status = _status(choice)
        response = self._response(status) | {"usage": _usage(usage)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        return response if metrics is None else response | {"metrics": metrics}

    def _response(self, status: str) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [*self._output.done],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "background": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            **self._settings,
        }


def _status(choice: Choice) -> Literal["completed", "incomplete"]:
    return "incomplete" if choice.finish == "length" else "completed"


def _usage(usage: Json) -> Json:
    """A chat completion's usage in the words of the Responses API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        "reproducible": usage["reproducible"],
    }
