"""What crosses a border comes out as it went in, and nothing else comes in."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftwood.batch import Images, Source
from draftwood.engine.client import DrafterCard, DrafterState, EngineCard, LastStep, Pulse
from draftwood.engine.requests import EngineRequest
from draftwood.errors import WireError
from draftwood.request import (
    Event,
    FinishReason,
    GuessedTree,
    SamplingParams,
    SpeculationStats,
    StepTrace,
    TokenKind,
    TokenLogprob,
    TracedToken,
)
from draftwood.tree import POINT_TREE
from draftwood.wire import Frames, packer, unpacker

PARAMS = SamplingParams(
    temperature=0.1, logit_bias={3: -1e30, 7: 0.1}, stop=("\ud800", "é"), stop_token_ids=(4,), seed=-5, n=2, grammar="x"
)
LOGPROB = TokenLogprob(3, -math.inf, ((3, -0.1), (4, -1.5e-300)))
TREE = GuessedTree((1, 2), (-1, 0), (None, 0.25), (None, None), (True, False))
STEP = StepTrace(TREE, (TracedToken(2, TokenKind.BONUS, 1, None, 0.5, None),), 3, 9)
STATS = SpeculationStats(drift=None, seed=1 << 62, members={"a": (2, 1)})
EVENT = Event(
    1, 0, (2, 3), (True, False), "é", FinishReason.STOP, STATS, (("é", True),), (LOGPROB,),
    "sorry", "code", STEP, (None, LOGPROB),
)  # fmt: skip
CARD = EngineCard(9, 8, 7, 6, "cpu", "auto", True, "float32", DrafterCard(None, POINT_TREE, 5, True), None, 4)
VALUES = [
    EngineRequest(7, (1, 2, 3), PARAMS, 1 << 62, "alice", (4,), ((5,), (6, 7))),
    EVENT,
    replace(EVENT, step=None, finish_reason=None, logprobs=(), prompt_logprobs=()),
    CARD,
    replace(CARD, offers=(CARD.drafter, replace(CARD.drafter, name="ngram"))),
    Pulse(
        3,
        1,
        "x",
        0.5,
        1,
        2,
        3,
        0.25,
        4,
        0.1,
        "why",
        "none",
        (("none", 3),),
        1.5,
        None,
        "M",
        LastStep(1, 2, 0.5, None),
        (DrafterState("a", 1, True),),
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_data_come_out_as_they_went_in(value: object) -> None:
    pack = packer(type(value))
    assert pack is not None
    assert unpacker(type(value))(json.loads(json.dumps(pack(value)))) == value


def test_tensors_cross() -> None:
    source = Source((1, 2), torch.tensor([[0.5, -1e-30, torch.inf]]))
    images = Images(torch.tensor([1, 2]), torch.randn(2, 3).bfloat16(), None, -3, "key")
    request = replace(VALUES[0], source=source, images=images)  # type: ignore[type-var]
    pack = packer(EngineRequest)
    assert pack is not None
    got = unpacker(EngineRequest)(json.loads(json.dumps(pack(request))))
    assert got.prompt_length == 5
    assert got.source.key == source.key
    assert torch.equal(got.images.rows, images.rows)
    assert torch.equal(got.images.embeds, images.embeds)
    for wrong in (["int64", [3], "AAAA"], ["object", [0], ""], ["int64", [1], "?"], 7):
        with pytest.raises(WireError):
            unpacker(torch.Tensor)(wrong)


def spoiled(change: Callable[[list], object]) -> object:
    pack = packer(EngineRequest)
    assert pack is not None
    packed = json.loads(json.dumps(pack(VALUES[0])))
    return change(packed) or packed


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop(),
        lambda r: r.append(1),
        lambda r: r.__setitem__(0, "7"),
        lambda r: r.__setitem__(0, True),
        lambda r: r.__setitem__(1, [1, None]),
        lambda r: r.__setitem__(1, {"1": 2}),
        lambda r: r[2].__setitem__(0, -1.0),
        lambda r: r[2].__setitem__(7, [[1]]),
        lambda r: {"id": 1},
    ],
)
def test_nothing_else_comes_in(change: Callable[[list], object]) -> None:
    with pytest.raises(WireError):
        unpacker(EngineRequest)(spoiled(change))


def test_frames_arrive_whole_and_bounded() -> None:
    one, other = socket.socketpair()
    sender, receiver = Frames(one, 1 << 20), Frames(other, 1 << 16)
    big = ["x" * 40_000, [1.5, None]]
    sending = threading.Thread(target=lambda: [sender.send(big) for _ in range(20)])
    sending.start()
    assert all(receiver.receive() == big for _ in range(20))
    sending.join()
    one.sendall(b"\0\0\0\2{]")
    with pytest.raises(WireError, match="JSON"):
        receiver.receive()
    one.sendall(b"\x7f\0\0\0")
    with pytest.raises(WireError, match="limit"):
        receiver.receive()
    one.sendall(b"\0\0\1\0half")
    sender.close()
    assert receiver.receive() is None
    receiver.close()
