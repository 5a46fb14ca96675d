"""A remote drafter may be slow, gone, or lie: the tokens are those of plain decoding, and the wait is bounded."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from pathlib import Path

import pytest
import torch

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.drafters import remote_link
from draftwood.drafters.remote import RemoteDrafter
from draftwood.drafters.remote_link import LIES, MISSES, Followed
from draftwood.drafters.remote_protocol import (
    KEY_VARIABLE,
    LONGEST,
    TO_DRAFTER,
    TO_TARGET,
    Draft,
    DraftCommit,
    DraftSync,
    Guess,
    welcome_drafter,
)
from draftwood.engine.controller import FixedBudget
from draftwood.engine.drafter_host import Cancel, DraftSession, EngineSpeaker, Hear
from draftwood.engine.sequence import Sequence
from draftwood.errors import InvalidRequest, WireError
from draftwood.verifiers import Match
from draftwood.wire import HEADER, Line
from remote_drafters import KEY, VOCAB_SIZE, Behaviour, PeriodicSpeaker, hosted, link_to, messages, peer
from serving import soon
from tiny import Ask, Harness, generated, no_drafter, tiny_folder, tiny_runner

ASKS = [
    Ask((1, 2, 3, 1, 2), SamplingParams(temperature=t, seed=i, max_tokens=24)) for i, t in enumerate((0.0, 1.0, 0.0))
]
PLAIN = generated(Harness(tiny_runner(), no_drafter(torch.float64), Match()).run(ASKS))


def drafted_by(address: str, wait: float = 2000.0) -> tuple[Harness, list[Sequence]]:
    harness = Harness(tiny_runner(), RemoteDrafter(link_to(address), 5, wait), Match())
    return harness, harness.run(ASKS)


class OneSided:
    """A line of whose messages only some arrive."""

    def __init__(self, line: Line, arriving: Iterator[DraftSync | DraftCommit]) -> None:
        self.send = line.send
        self._arriving = arriving

    def messages(self) -> Iterator[tuple[str, DraftSync | DraftCommit]]:
        return (("", message) for message in self._arriving)


def lies(end: socket.socket) -> None:
    """Drafts at once, for every length, what never comes."""
    length: dict[int, int] = {}
    for branch, (line, message) in enumerate(messages(end), 1):
        if isinstance(message, DraftSync):
            length[message.sequence] = len(message.tokens)
        elif isinstance(message, DraftCommit):
            length[message.sequence] += len(message.tokens)
        else:
            continue
        own, now = message.sequence, length[message.sequence]
        guesses = tuple(Guess(((now + i) % VOCAB_SIZE, i % VOCAB_SIZE)) for i in range(40))
        line.send("draft", Draft(own, branch, now, guesses, True))
        line.send("draft", Draft(own, branch - 1, 3, guesses, True))
        line.send("draft", Draft(own, branch + 1, 999, guesses, True))
        line.send("draft", Draft(999, branch, 1, guesses, True))


def stalls(end: socket.socket) -> None:
    for _ in messages(end):
        pass


def never_reads(end: socket.socket) -> None:
    time.sleep(1)


def hangs_up(end: socket.socket) -> None:
    for number, _ in enumerate(messages(end)):
        if number == 3:
            return


def _sends(data: bytes) -> Behaviour:
    def behave(end: socket.socket) -> None:
        end.recv(1)
        end.sendall(data)
        while end.recv(1 << 16):
            pass

    return behave


def framed(text: bytes) -> bytes:
    return HEADER.pack(len(text)) + text


BAD: dict[str, Behaviour] = {
    "lies": lies,
    "stalls": stalls,
    "never reads": never_reads,
    "hangs up": hangs_up,
    "no frame": _sends(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "no JSON": _sends(framed(b"\xff\xfe")),
    "no list": _sends(framed(b"7")),
    "no verb": _sends(framed(b'[["explode",1]]')),
    "no draft": _sends(framed(b'[["draft",[0,1,5,[[[1],[]]]]]]')),
    "tokens outside": _sends(framed(b'[["draft",[0,1,5,[[[13],[]]],true]]]')),
    "negative tokens": _sends(framed(b'[["draft",[0,1,5,[[[-2],[]]],true]]]')),
    "rows outside": _sends(framed(b'[["draft",[0,1,5,[[[1],[[1,0.5],[13,0.5]]]],true]]]')),
    "not of its row": _sends(framed(b'[["draft",[0,1,5,[[[1],[[2,0.5],[3,0.5]]]],true]]]')),
    "no chances": _sends(framed(b'[["draft",[0,1,5,[[[1],[[1,NaN]]]],true]]]')),
    "no guess": _sends(framed(b'[["draft",[0,1,5,[[[],[]]],true]]]')),
    "behind nothing": _sends(framed(b'[["draft",[0,1,-4,[[[1],[]]],true]]]')),
    "too deep": _sends(framed(b"[" * 10_000)),
    "too many": _sends(framed(json.dumps([["draft", [0, 1, 5, [[[1], []]] * 5000, True]]]).encode())),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_drafter_changes_no_answer(name: str) -> None:
    with peer(BAD[name]) as address:
        began = time.monotonic()
        harness, answers = drafted_by(address, wait=100)
        assert generated(answers) == PLAIN
        assert time.monotonic() - began < 5
        assert harness.engine.health[0].failures == 0
        if name == "lies":
            assert sum(answer.drafted for answer in answers) > 40, "the lies were never looked at"


def test_one_that_stalls_is_waited_for_a_few_times_only() -> None:
    with peer(stalls) as address:
        began = time.monotonic()
        assert generated(drafted_by(address, wait=200)[1]) == PLAIN
        assert MISSES * 0.2 <= time.monotonic() - began < (MISSES + 2) * 0.2 + 2


def test_a_text_that_is_not_drafted_for_holds_up_no_others() -> None:
    """Of three texts it drafts for two: steps wait for the third a few times, and then no more."""

    def choosy(end: socket.socket) -> None:
        line = Line(end, TO_DRAFTER, LONGEST)
        others = (message for _, message in line.messages() if not isinstance(message, int) and message.sequence != 1)
        DraftSession(PeriodicSpeaker(), OneSided(line, others)).run()
        line.close(0)

    with peer(choosy) as address:
        began = time.monotonic()
        _, answers = drafted_by(address, wait=200)
        assert generated(answers) == PLAIN
        assert time.monotonic() - began < (MISSES + 2) * 0.2 + 2
        assert [answer.drafted > 0 for answer in answers] == [True, False, True]


def test_one_that_comes_back_drafts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "RETRY", (0.02, 0.05))
    visits: list[int] = []

    def behave(end: socket.socket) -> None:
        visits.append(1)
        if len(visits) > 1:
            DraftSession(PeriodicSpeaker(), Line(end, TO_DRAFTER, LONGEST)).run()

    with peer(behave) as address:
        drafter = RemoteDrafter(link_to(address), 5, 2000)
        assert soon(lambda: len(visits) >= 2)
        assert soon(lambda: drafter._arrivals.link._line is not None)
        harness = Harness(tiny_runner(), drafter, Match())
        answers = harness.run(ASKS)
        assert generated(answers) == PLAIN
        assert sum(answer.accepted for answer in answers) > 0


def test_one_that_lies_about_the_protocol_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "RETRY", (0.01, 0.01))
    with peer(_sends(framed(b"7"))) as address:
        link = link_to(address)
        for number in range(400):
            link.follow(DraftSync(number, (1, 2), 3, ""))
            if not link._reader.is_alive():
                break
            time.sleep(0.01)
        assert not link._reader.is_alive()
        link.close()
    assert LIES > 1


@pytest.mark.parametrize("wait", [2.0, 2000.0])
def test_acceptance_survives_that_both_sides_work_at_once(wait: float) -> None:
    """A drafter that is always right and never quick: the first tokens of a path are verified before the others are
    there, and it goes on meanwhile. No guess is lost or looked at twice."""
    asks = [Ask((i, 2, 3), SamplingParams(max_tokens=24)) for i in range(3)]
    said = generated(Harness(tiny_runner(), no_drafter(torch.float64), Match()).run(asks))
    texts = [(*ask.prompt, *tokens) for ask, tokens in zip(asks, said, strict=True)]

    class Slow:
        def speak(self, tokens: Tokens[int], wish: DraftSync, count: int, hear: Hear) -> Cancel:
            whole = next(text for text in texts if text[: len(tokens)] == tuple(tokens))

            def say() -> None:
                for token in whole[len(tokens) : len(tokens) + count]:
                    time.sleep(0.002)
                    hear([Guess((token,))], False)
                hear([], True)

            threading.Thread(target=say).start()
            return lambda: None

    harness = Harness(tiny_runner(), RemoteDrafter(link_to(hosted(Slow())), 5, wait), Match())
    answers = harness.run(asks)
    assert generated(answers) == said
    assert [answer.accepted for answer in answers] == [answer.drafted for answer in answers]
    if wait == 2000.0:
        assert all(answer.steps == 4 for answer in answers), "every step but the last has six tokens"


def test_drafts_are_used() -> None:
    _, answers = drafted_by(hosted(PeriodicSpeaker()))
    assert generated(answers) == PLAIN
    assert sum(answer.accepted for answer in answers) > 5
    assert max(answer.drafted / answer.steps for answer in answers) > 2


@pytest.mark.parametrize(
    ("key", "vocabulary", "reason"),
    [(b"other", "tiny", "keys"), (KEY, "else", "vocabulary"), (b"", "tiny", "keys")],
)
def test_strangers_are_refused(key: bytes, vocabulary: str, reason: str) -> None:
    host, port = hosted(PeriodicSpeaker()).rsplit(":", 1)
    with socket.create_connection((host, int(port))) as end, pytest.raises(InvalidRequest, match=reason):
        welcome_drafter(end, key, vocabulary)


def test_prompts_are_not_sent_to_one_that_does_not_know_the_key() -> None:
    def claims(end: socket.socket) -> None:
        with end:
            end.sendall(framed(b'[2,"00"]'))
            end.recv(1 << 12)
            end.sendall(framed(b'["00",null]'))

    listener = socket.create_server(("127.0.0.1", 0))
    serving = threading.Thread(target=lambda: claims(listener.accept()[0]))
    serving.start()
    with pytest.raises(InvalidRequest, match="does not know the key"):
        link_to(f"127.0.0.1:{listener.getsockname()[1]}")
    serving.join()
    listener.close()


def test_what_cannot_be_reached_is_said_at_once(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    for drafter, words in (
        ("remote:127.0.0.1:1", "cannot be reached"),
        ("remote:nowhere", "HOST:PORT"),
        ("remote:127.0.0.1:1,breadth=3", "no setting 'breadth'"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            LLM(folder, drafter=drafter)


class CountingSpeaker:
    """Counts upwards, a token at a time, when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], str, int]] = []
        self.hear: list[Hear] = []
        self.cancelled = 0

    def speak(self, tokens: Tokens[int], wish: DraftSync, count: int, hear: Hear) -> Cancel:
        self.asked.append((tuple(tokens), wish.salt, count))
        self.hear.append(hear)

        def cancel() -> None:
            self.cancelled += 1

        return cancel

    def say(self, *tokens: int, last: bool = False) -> None:
        self.hear[-1]([Guess((token, token + 5)) for token in tokens], last)


@pytest.fixture
def session():  # type: ignore[no-untyped-def]
    """A session with a speaker, and the target's end of its line."""
    ours, theirs = socket.socketpair()
    speaker, line = CountingSpeaker(), Line(ours, TO_TARGET, LONGEST)
    drafts: list[Draft] = []
    hosting = threading.Thread(target=DraftSession(speaker, Line(theirs, TO_DRAFTER, LONGEST)).run)
    hosting.start()

    def listen() -> None:
        for _, draft in line.messages():
            drafts.append(draft)

    listening = threading.Thread(target=listen)
    listening.start()
    yield speaker, line, drafts
    line.close()
    hosting.join(5)
    listening.join(5)
    assert not hosting.is_alive()


def test_drafting_goes_on_while_the_target_verifies(session) -> None:  # type: ignore[no-untyped-def]
    speaker, line, drafts = session
    line.send("sync", DraftSync(4, (1, 2), 3, "salt"))
    assert soon(lambda: speaker.asked == [((1, 2), "salt", 9)])
    speaker.say(3)
    speaker.say(4, 5)
    assert soon(lambda: len(drafts) == 2)
    assert drafts[0] == Draft(4, 1, 2, (Guess((3, 8)),), False), (
        "what is there can be verified before the rest has come"
    )
    assert drafts[1] == Draft(4, 1, 3, (Guess((4, 9)), Guess((5, 10))), False)
    line.send("commit", DraftCommit(4, 2, (3, 4)))  # as it was guessed: nothing is thrown away
    speaker.say(6, 7, 8, 9, 10, 11, last=True)
    assert soon(lambda: len(drafts) == 3)
    assert (drafts[2].branch, drafts[2].base, len(drafts[2].guesses)) == (1, 5, 6)
    assert (len(speaker.asked), speaker.cancelled) == (1, 0)
    line.send("commit", DraftCommit(4, 4, (5, 6, 7, 8)))
    assert soon(lambda: len(speaker.asked) == 2), "there are too few guesses left for the steps to come"
    assert speaker.asked[1] == ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), "salt", 6)
    line.send("commit", DraftCommit(4, 8, (0,)))  # otherwise: it begins anew
    assert soon(lambda: len(speaker.asked) == 3)
    assert (speaker.asked[2], speaker.cancelled) == (((1, 2, 3, 4, 5, 6, 7, 8, 0), "salt", 9), 1)
    speaker.hear[1]([Guess((77,))], False)  # too late
    speaker.say(1)
    assert soon(lambda: drafts[-1] == Draft(4, 2, 9, (Guess((1, 6)),), False))
    line.send("close", 4)
    assert soon(lambda: speaker.cancelled == 2)
    assert all(guess.tokens[0] != 77 for draft in drafts for guess in draft.guesses)


def test_guesses_are_used_as_far_as_the_text_went_on_as_they_say() -> None:
    known, guesses = Followed(3), tuple(Guess((token,)) for token in (4, 5, 6))
    assert not known.reached([1, 2, 3])
    assert known.take(Draft(0, 1, 3, guesses, False))
    assert known.reached([1, 2, 3, 4])
    assert known.guesses == list(guesses[1:])
    assert not known.reached([1, 2, 3, 4, 5, 6, 7]), "the text has overtaken them"
    assert known.take(Draft(0, 1, 6, (Guess((7,)), Guess((8,))), False))
    assert known.reached([1, 2, 3, 4, 5, 6, 7])
    assert not known.reached([1, 2, 3, 4, 5, 6, 7, 9])
    assert not known.take(Draft(0, 1, 8, guesses, False)), "of a branch that the text has left"
    known.length = 8
    assert known.take(Draft(0, 2, 8, guesses, True))
    with pytest.raises(WireError, match="where the last ones ended"):
        known.take(Draft(0, 2, 9, guesses, True))


def test_what_was_looked_at_is_drawn_no_more() -> None:
    """A law has seen two of three draws and kept none, yet its own next token is the first: the second is chosen now,
    and the third, which no law has seen, is still a fair draw."""
    row = ((4, 0.0), (5, 0.0), (6, 0.0))
    with peer(stalls) as address:
        link = link_to(address)
        link.follow(DraftSync(0, (1, 2, 3), 3, "", 1.0, 3))
        link._take(Draft(0, 1, 3, tuple(Guess((token,), row) for token in (4, 5, 6)), False))
        for final in (False, True):
            assert link.guesses(0, (1, 2, 3), 2, final=final)[0] == [Guess((4,), row), Guess((5,), row)]
        assert link.guesses(0, (1, 2, 3, 4), 2, final=True)[0] == [Guess((5,)), Guess((6,), row)]
        link.close()


def test_an_engine_drafts_what_its_model_says(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    with LLM(folder, config=EngineConfig(threads=1, page_size=16, cache_tokens=2048)) as llm:
        prompt = [5, 6, 7, 8]
        wanted = llm.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids
        heard: list[Guess] = []
        ended = threading.Event()

        def hear(guesses, last: bool) -> None:  # type: ignore[no-untyped-def]
            heard.extend(guesses)
            if last:
                ended.set()

        def said(wish: DraftSync, width: int) -> list[Guess]:
            heard.clear()
            ended.clear()
            EngineSpeaker(llm, width).speak(prompt, wish, 6, hear)
            assert ended.wait(10)
            return list(heard)

        chosen = said(DraftSync(0, (), 6, "salt"), 3)
        assert tuple(guess.tokens[0] for guess in chosen) == wanted
        assert all(len(set(guess.tokens)) == 3 and not guess.row for guess in chosen)
        drawn = said(DraftSync(0, (), 6, "salt", 0.7, 4), 3)
        for place, guess in enumerate(drawn):
            before, params = [guess.tokens[0] for guess in drawn[:place]], SamplingParams(max_tokens=1, logprobs=4)
            (entry,) = llm.generate([prompt + before], params)[0].completions[0].logprobs
            assert dict(guess.row) == pytest.approx(dict(entry.top))
            assert guess.tokens[0] in dict(guess.row)
        ended.clear()
        EngineSpeaker(llm).speak([1] * 5000, DraftSync(0, (), 6, ""), 6, hear)
        assert ended.is_set(), "too long a text is nobody's failure"


def test_a_model_in_another_process_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`draftwood drafter serve` and `--drafter remote:…`, with the same model on both sides: all guesses are right."""
    folder = tiny_folder(tmp_path / "tiny")
    monkeypatch.setenv(KEY_VARIABLE, "shared")
    command = [sys.executable, "-m", "draftwood", "drafter", "serve", "--model", str(folder), "--drafter", "none"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--threads", "1"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stderr is not None
        found = next(match for line in process.stderr if (match := re.search(r"drafts at (\S+:\d+)", line)))
        config = EngineConfig(threads=1, cache_tokens=1024)
        asked, params = [[5, 6, 7], [9, 8]], SamplingParams(max_tokens=30, ignore_eos=True)
        with LLM(folder, config=config) as plain:
            wanted = [result.token_ids for result in plain.generate(asked, params)]
        drafter, budget = f"remote:{found[1]},nodes=4,wait=5000", FixedBudget(4)
        with LLM(folder, drafter=drafter, config=config, controller=budget) as llm:
            results = llm.generate(asked, params)
            assert [result.token_ids for result in results] == wanted
            assert all(result.stats.tokens_per_step > 3 for result in results)
            os.kill(process.pid, signal.SIGKILL)
            again = llm.generate(asked, params)
            assert [result.token_ids for result in again] == wanted
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
