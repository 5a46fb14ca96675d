"""Answers in OpenAI's words: the whole object, or chunks of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from draftwood.model.tokenizer import Tokenizer
from draftwood.request import TokenLogprob
from draftwood.server.choices import Choice, Delta
from draftwood.server.echo import Echo
from draftwood.server.margin import Spoken
from draftwood.server.tools import Call

Json = dict[str, Any]


class Writer(Protocol):
    """Writes one response."""

    id: str
    tells_end: bool  # log-probabilities also of tokens that read as nothing

    def opening(self, choice: Choice) -> Json | None:
        """The first chunk of an answer, if there is one before its first words."""
        ...

    def chunk(self, choice: Choice, delta: Delta) -> Json:
        """News of an answer."""
        ...

    def closing(self, usage: Json, metrics: Json | None) -> Json:
        """The chunk behind all answers that says what they took."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Json, metrics: Json | None) -> Json:
        """Everything at once."""
        ...


class _Envelope:
    """What is the same around every response."""

    prefix: str
    kind: str
    chunk_kind: str
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

    def closing(self, usage: Json, metrics: Json | None) -> Json:
        """No answer, but what the answers took."""
        return self._wrapped(self.chunk_kind, []) | {"usage": usage} | _if_there(metrics)

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
        """More words, or calls."""
        said: Json = {"content": delta.text} if delta.text or delta.tokens else {}
        if delta.calls:
            first = len(choice.calls) - len(delta.calls)
            said["tool_calls"] = [{"index": first + i} | _call(call) for i, call in enumerate(delta.calls)]
        return self._as_chunk(self._delta(choice, said, delta.finish, delta.tokens))

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
        return {"content": [self._entry(spoken) for spoken in tokens], "refusal": None} if tokens else None

    def _entry(self, spoken: Spoken[TokenLogprob]) -> Json:
        top = [self._named(token, logprob) for token, logprob in spoken.entry.top]
        return self._named(spoken.entry.token, spoken.entry.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> Json:
        spelled = self._spelled(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelled)}


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


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what never happens."""
    return max(logprob, -9999.0)
