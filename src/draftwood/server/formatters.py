"""Answers in OpenAI's words: the whole object, or chunks of it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from draftwood.model.tokenizer import Tokenizer
from draftwood.request import TokenLogprob
from draftwood.server.calls import Arguments, Call, CallStart
from draftwood.server.choice_state import Choice, Delta
from draftwood.server.echo import Echo
from draftwood.server.logprob_buffer import Spoken

Json = dict[str, Any]


class Writer(Protocol):
    """Writes one response: as a whole, or as the events of a stream."""

    id: str
    end: bytes  # what a stream ends with, whether it failed or not
    tells_end: bool  # log-probabilities also of tokens that read as nothing

    def openings(self, choices: Sequence[Choice]) -> list[Json]:
        """The events before the first words."""
        ...

    def chunks(self, choice: Choice, delta: Delta) -> list[Json]:
        """The events that say what was added to an answer."""
        ...

    def endings(self, choices: Sequence[Choice], usage: Json, metrics: Json | None) -> list[Json]:
        """The events behind all answers."""
        ...

    def failings(self, error: Json) -> list[Json]:
        """The events that end a stream that has failed; `error` is OpenAI's error object."""
        ...

    def frame(self, event: Json) -> bytes:
        """One server-sent event."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Json, metrics: Json | None) -> Json:
        """Everything at once."""
        ...


class _Envelope:
    """What is the same around every response."""

    prefix: str
    kind: str
    chunk_kind: str
    end = b"data: [DONE]\n\n"
    tells_end = False

    def __init__(self, model: str, tokenizer: Tokenizer, *, tells_usage: bool, logprobs: bool) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._tells_usage = tells_usage
        self._logprobs = logprobs

    def _wrapped(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _as_chunk(self, *choices: Json) -> Json:
        chunk = self._wrapped(self.chunk_kind, list(choices))
        return chunk | {"usage": None} if self._tells_usage else chunk

    def frame(self, event: Json) -> bytes:
        """An event without a name."""
        return sse(event)

    def opening(self, choice: Choice) -> Json | None:
        """The first chunk of an answer, if there is one before its first words."""
        raise NotImplementedError

    def openings(self, choices: Sequence[Choice]) -> list[Json]:
        """One chunk an answer."""
        return [opening for choice in choices if (opening := self.opening(choice)) is not None]

    def chunk(self, choice: Choice, delta: Delta) -> Json:
        """News of an answer in one chunk."""
        raise NotImplementedError

    def chunks(self, choice: Choice, delta: Delta) -> list[Json]:
        """One chunk, with the trace of the steps if there is one."""
        chunk = self.chunk(choice, delta)
        return [chunk | {"trace": delta.steps} if delta.steps else chunk]

    def endings(self, choices: Sequence[Choice], usage: Json, metrics: Json | None) -> list[Json]:
        """What the answers took, if that was asked for."""
        if not self._tells_usage and metrics is None:
            return []
        return [self._wrapped(self.chunk_kind, []) | {"usage": usage} | _if_there(metrics)]

    def failings(self, error: Json) -> list[Json]:
        """The error itself."""
        return [error]

    def whole(self, choices: Sequence[Choice], usage: Json, metrics: Json | None) -> Json:
        """Everything at once."""
        return self._wrapped(self.kind, [self.choice(c) for c in choices]) | {"usage": usage} | _if_there(metrics)

    def choice(self, choice: Choice) -> Json:
        """A finished answer."""
        raise NotImplementedError

    def _spelled(self, token: int) -> bytes:
        return self._tokenizer.piece(token, skip_special=False)


def _if_there(metrics: Json | None) -> Json:
    return {} if metrics is None else {"metrics": metrics}


class ChatWriter(_Envelope):
    """Messages."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, choice: Choice) -> Json | None:
        """Who speaks."""
        return self._as_chunk(self._delta(choice, {"role": "assistant", "content": ""}, None, []))

    def chunk(self, choice: Choice, delta: Delta) -> Json:
        """More words."""
        said: Json = {"content": delta.text} if delta.text or delta.tokens else {}
        return self._as_chunk(self._delta(choice, said, delta.finish, delta.tokens))

    def chunks(self, choice: Choice, delta: Delta) -> list[Json]:
        """A chunk with the words, then one for every step of a call: its name, and its arguments as they arrive."""
        calls = self._call_deltas(choice, delta)
        if not calls:
            return super().chunks(choice, delta)
        beside = delta.text or delta.tokens or delta.steps
        before = super().chunks(choice, replace(delta, finish=None)) if beside else []
        finishes = [None] * (len(calls) - 1) + [delta.finish]
        said = [self._delta(choice, {"tool_calls": [call]}, end, []) for call, end in zip(calls, finishes, strict=True)]
        return before + [self._as_chunk(each) for each in said]

    def _call_deltas(self, choice: Choice, delta: Delta) -> list[Json]:
        index = choice.num_calls - sum(isinstance(part, CallStart) for part in delta.parts) - 1
        told: list[Json] = []
        for part in delta.parts:
            if isinstance(part, CallStart):
                index += 1
                told.append({"index": index} | _call(Call(part.name, "")))
            elif isinstance(part, Arguments):
                told.append({"index": index, "function": {"arguments": part.text}})
        return told

    def _delta(self, choice: Choice, said: Json, finish: str | None, tokens: Sequence[Spoken[TokenLogprob]]) -> Json:
        return {"index": choice.index, "delta": said, "logprobs": self._margin(tokens), "finish_reason": finish}

    def choice(self, choice: Choice) -> Json:
        """A message."""
        text = "".join(choice.text)
        message: Json = {"role": "assistant", "content": text if text or not choice.calls else None, "refusal": None}
        if choice.calls:
            message["tool_calls"] = [_call(call) for call in choice.calls]
        logprobs = self._margin(choice.tokens) or ({"content": [], "refusal": None} if self._logprobs else None)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def _margin(self, tokens: Sequence[Spoken[TokenLogprob]]) -> Json | None:
        entries = [logprob_entry(self._tokenizer, spoken.entry) for spoken in tokens]
        return {"content": entries, "refusal": None} if tokens else None


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class CompletionWriter(_Envelope):
    """Continued texts."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"
    tells_end = True

    def __init__(
        self, model: str, tokenizer: Tokenizer, echoes: Sequence[Echo], n: int, *, tells_usage: bool, logprobs: bool
    ) -> None:
        super().__init__(model, tokenizer, tells_usage=tells_usage, logprobs=logprobs)
        self._echoes = echoes  # what is repeated before the answers to each prompt; empty: nothing
        self._n = n  # answers a prompt
        self._scored: dict[int, Json] = {}  # log-probabilities of each prompt, once they are known
        self._begun: set[int] = set()  # answers of a stream before which the prompt has been repeated

    def _echo(self, choice: Choice) -> Echo:
        return self._echoes[choice.index // self._n] if self._echoes else Echo("")

    def opening(self, choice: Choice) -> Json | None:
        """The prompt, if it is to be repeated and there is nothing to be known about it first."""
        echo = self._echo(choice)
        return self._as_chunk(_text(choice, echo.text, None, None)) if echo.text and not echo.tokens else None

    def chunk(self, choice: Choice, delta: Delta) -> Json:
        """More text. The first chunk of an answer also has the prompt, where its log-probabilities are told."""
        text, margin = delta.text, self._margin(delta.tokens, choice)
        if self._echo(choice).tokens and choice.index not in self._begun:
            self._begun.add(choice.index)
            text, margin = self._echo(choice).text + text, _joined(self._prompt_margin(choice), margin)
        return self._as_chunk(_text(choice, text, margin, delta.finish))

    def choice(self, choice: Choice) -> Json:
        """A text."""
        margin = self._margin(choice.tokens, choice)
        if self._echo(choice).tokens:
            margin = _joined(self._prompt_margin(choice), margin)
        return _text(choice, self._echo(choice).text + "".join(choice.text), margin, choice.finish)

    def _margin(self, tokens: Sequence[Spoken[TokenLogprob]], choice: Choice) -> Json | None:
        if not self._logprobs:
            return None
        before = len(self._echo(choice).text)
        return {
            "tokens": [self._read(spoken.entry.token) for spoken in tokens],
            "token_logprobs": [finite(spoken.entry.logprob) for spoken in tokens],
            "top_logprobs": [self._best(spoken.entry) for spoken in tokens],
            "text_offset": [before + spoken.start for spoken in tokens],
        }

    def _prompt_margin(self, choice: Choice) -> Json:
        """The same of the prompt, which answers of one request share; the engine tells it with the first of them."""
        prompt, echo = choice.index // self._n, self._echo(choice)
        if choice.prompt:
            self._scored[prompt] = {
                "tokens": [self._read(token) for token in echo.tokens],
                "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in choice.prompt],
                "top_logprobs": [None if entry is None else self._best(entry) for entry in choice.prompt],
                "text_offset": list(echo.starts),
            }
        return self._scored[prompt]

    def _best(self, entry: TokenLogprob) -> Json:
        """By what tokens read as; of those that read alike, the likeliest."""
        return {self._read(token): finite(logprob) for token, logprob in reversed(entry.top)}

    def _read(self, token: int) -> str:
        """Its text; as OpenAI writes it, where it is a part of a character."""
        spelled = self._spelled(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _joined(first: Json, second: Json | None) -> Json:
    return first if second is None else {name: first[name] + second[name] for name in first}


def _text(choice: Choice, text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def logprob_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> Json:
    """A token's log-probability with those of the likeliest tokens in its place."""

    def named(token: int, logprob: float) -> Json:
        spelled = tokenizer.piece(token, skip_special=False)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelled)}

    return named(entry.token, entry.logprob) | {"top_logprobs": [named(*likely) for likely in entry.top]}


def sse(data: Json, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what never happens."""
    return max(logprob, -9999.0)
