"""Reads an answer's text as it grows: words, and tool calls whose arguments are passed on as they arrive.

A call is written as the Hermes and Qwen families write it: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import groupby

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# What comes before the arguments. Once it is there the call is certain, and its arguments can be streamed.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class Words:
    """Text of the answer outside of calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The arguments of the call that began last are complete."""


Part = Words | CallStart | Arguments | CallEnd


@dataclass(frozen=True)
class Call:
    """A call as far as the model wrote it."""

    name: str
    arguments: str  # JSON, unless the answer ended inside it
    complete: bool = True


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts, with neighbouring pieces of words or of arguments as one."""
    result: list[Part] = []
    for kind, run in groupby(parts, type):
        if kind is Words:
            result.append(Words("".join(part.text for part in run if isinstance(part, Words))))
        elif kind is Arguments:
            result.append(Arguments("".join(part.text for part in run if isinstance(part, Arguments))))
        else:
            result += run
    return result


def calls_of(parts: Iterable[Part]) -> list[Call]:
    """The calls in an answer's parts."""
    calls: list[Call] = []
    for part in joined(parts):
        match part:
            case CallStart(name):
                calls.append(Call(name, "", complete=False))
            case Arguments(text):
                calls[-1] = replace(calls[-1], arguments=text)
            case CallEnd():
                calls[-1] = replace(calls[-1], complete=True)
            case Words():
                pass
    return calls


class _Place(Enum):
    """Where in the text the reader is."""

    WORDS = auto()
    HEAD = auto()  # behind an opening tag, before the arguments
    ARGUMENTS = auto()
    TAIL = auto()  # behind the arguments, before the closing tag


@dataclass
class _JsonObject:
    """Finds the end of a JSON object whose text comes in pieces."""

    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False

    def length(self, text: str) -> tuple[int, bool]:
        """How many characters of `text` belong to the object, and whether it is complete with them."""
        for i, character in enumerate(text):
            if self._quoted:
                self._in_string(character)
            elif character == "<":  # never outside of a string: a tag cuts the object off
                return i, False
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    return i + 1, True
        return len(text), False

    def _in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        else:
            self._escaped, self._quoted = character == "\\", character != '"'


@dataclass
class CallReader:
    """Takes an answer's text apart into words and calls; the same however the text is cut into pieces.

    A call with its name first is passed on while it is written. Any other call is passed on when it closes, and what
    cannot be read as a call is words. White space around calls is dropped.
    """

    num_calls: int = 0
    cut_off: bool = False  # the last call is not complete
    _held: str = ""  # not decided yet
    _blanks: str = ""  # white space that is dropped if a call follows
    _spoke: bool = False  # since the last call
    _place: _Place = _Place.WORDS
    _object: _JsonObject = field(default_factory=_JsonObject)
    _parts: list[Part] = field(default_factory=list)

    def feed(self, text: str) -> list[Part]:
        """What is certain with more text."""
        self._held += text
        while self._held and self._advance():
            pass
        return self._taken()

    def finish(self) -> list[Part]:
        """No more text: a call that has not reached its arguments is words."""
        if self._place is _Place.HEAD:
            self._say(OPENING + self._held)
        elif self._place is _Place.WORDS:
            self._say(self._held)
            if not self.num_calls and self._blanks:
                self._parts.append(Words(self._blanks))
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _advance(self) -> bool:
        """Decide about the beginning of what is held; False if that takes more text."""
        match self._place:
            case _Place.WORDS:
                return self._read_words()
            case _Place.HEAD:
                return self._read_head()
            case _Place.ARGUMENTS:
                return self._read_arguments()
            case _Place.TAIL:
                return self._read_tail()

    def _read_words(self) -> bool:
        before, tag, after = self._held.partition(OPENING)
        if tag:
            self._say(before)
            self._place, self._held = _Place.HEAD, after
            return True
        sure = len(before) - _possible_tag(before, OPENING)
        self._say(before[:sure])
        self._held = before[sure:]
        return False

    def _read_head(self) -> bool:
        body, tag, after = self._held.partition(CLOSING)
        head = HEAD.match(body)
        name = None if head is None else _text_of(head[1])
        if head is not None and name is not None:
            self._start(name)
            self._place, self._object, self._held = _Place.ARGUMENTS, _JsonObject(), self._held[head.end() :]
            return True
        if tag:
            self._close(body)
            self._place, self._held = _Place.WORDS, after
        return bool(tag)

    def _read_arguments(self) -> bool:
        size, complete = self._object.length(self._held)
        if size:
            self._parts.append(Arguments(self._held[:size]))
        cut = size < len(self._held) and not complete
        self._held = self._held[size:]
        if complete:
            self._end()
        if complete or cut:
            self._place = _Place.TAIL
        return complete or cut

    def _read_tail(self) -> bool:
        before, tag, after = self._held.partition(CLOSING)
        if tag:
            self._place, self._held = _Place.WORDS, after
        else:
            self._held = before[len(before) - _possible_tag(before, CLOSING) :]
        return bool(tag)

    def _close(self, body: str) -> None:
        """A call that was not written in the usual order, as a whole."""
        try:
            call = json.loads(body)
            name, arguments = call["name"], json.dumps(call["arguments"])
            name.encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._say(f"{OPENING}{body}{CLOSING}")
            return
        self._start(name)
        self._parts.append(Arguments(arguments))
        self._end()

    def _start(self, name: str) -> None:
        self._parts.append(CallStart(name))
        self.num_calls += 1
        self.cut_off = True
        self._spoke, self._blanks = False, ""

    def _end(self) -> None:
        self._parts.append(CallEnd())
        self.cut_off = False

    def _say(self, text: str) -> None:
        self._blanks += text
        if not self._spoke and not self._blanks.strip():
            return
        said = self._blanks.lstrip() if self.num_calls and not self._spoke else self._blanks
        if said:
            self._parts.append(Words(said))
        self._spoke, self._blanks = True, ""


def _text_of(string: str) -> str | None:
    """What a JSON string says; None if it is not one, or says what no encoding can express."""
    try:
        text = json.loads(string)
        text.encode()
    except ValueError:
        return None
    return text


def _possible_tag(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` could begin with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
