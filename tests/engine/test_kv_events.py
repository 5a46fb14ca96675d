"""Routers are told what the prefix cache holds: full pages of committed tokens, each with all before it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.engine.kv_events import KvEvents, block_hash
from draftwood.errors import InvalidRequest
from tiny import tiny_folder

zmq = pytest.importorskip("zmq", reason="KV events need pyzmq and msgpack")
msgpack = pytest.importorskip("msgpack")
PAGE = 16


class Router:
    """A subscriber that keeps an index, as a router does."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._socket.connect(endpoint)
        self.numbers: list[int] = []
        self.kinds: list[str] = []
        self.blocks: dict[int, dict[str, Any]] = {}

    def read(self, wait: int = 300) -> None:
        while self._socket.poll(wait):
            topic, number, body = self._socket.recv_multipart()
            assert topic == b"kv@here@tiny"
            self.numbers.append(int.from_bytes(number, "big"))
            _, events, rank = msgpack.unpackb(body)
            assert rank == 0
            for event in events:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        self.kinds.append(event["type"])
        if event["type"] == "BlockStored":
            (name,) = event["block_hashes"]
            assert event["parent_block_hash"] is None or event["parent_block_hash"] in self.blocks
            self.blocks[name] = event
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                del self.blocks[name]  # an event for what was never stored would raise
        else:
            self.blocks.clear()

    def cached(self, tokens: tuple[int, ...], salt: str = "") -> int:
        """Leading tokens that it would expect to find."""
        parent, found = None, 0
        for start in range(0, len(tokens) - PAGE + 1, PAGE):
            parent = block_hash(parent, tokens[start : start + PAGE], salt)
            if parent not in self.blocks:
                break
            found += PAGE
        return found

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    folder = tiny_folder(tmp_path / "tiny", max_position_embeddings=512)
    with LLM(folder, drafter="ngram", config=EngineConfig(cache_tokens=256, page_size=PAGE, threads=1)) as made:
        yield made


def test_a_router_knows_what_the_cache_holds(llm: LLM, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    events = KvEvents.of(llm.engine, endpoint, "kv@here@tiny")
    router = Router(endpoint)
    time.sleep(0.2)  # subscriptions take a moment
    pool = llm.engine.scheduler.tables.pool
    first = llm.generate([list(range(5, 45))], SamplingParams(max_tokens=60, ignore_eos=True))[0]
    router.read()
    whole = first.prompt_token_ids + first.token_ids
    assert first.stats.drafted > 0, "nothing was guessed, so nothing shows that guesses are not told of"
    # The last token's keys and values are not there yet: it is the root of the step that never came.
    assert router.cached(whole) == (len(whole) - 1) // PAGE * PAGE
    assert len(router.blocks) == len(pool._content)
    assert router.cached(whole, "other tenant") == 0
    for seed in range(12):  # more than fits: pages are evicted
        prompt = [(7 * seed + i) % 60 for i in range(70)]
        llm.generate([prompt], SamplingParams(max_tokens=20, cache_salt=str(seed % 2), ignore_eos=True))
    router.read()
    assert "BlockRemoved" in router.kinds
    assert {tuple(block["token_ids"]) for block in router.blocks.values()} == {tokens for _, tokens in pool._content}
    assert {key for block in router.blocks.values() for (key,) in block.get("extra_keys", [])} <= {"0", "1"}
    assert router.numbers == list(range(router.numbers[0], router.numbers[-1] + 1))
    events.close()
    router.read()
    assert router.kinds[-1] == "AllBlocksCleared"
    router.close()


def test_an_endpoint_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tcp://"):
        KvEvents(PAGE, "nonsense")


def test_a_page_behind_one_that_is_gone_is_not_told_of(tmp_path: Path) -> None:
    """By hand, as the pool calls it."""
    endpoint = f"ipc://{tmp_path}/kv"
    events = KvEvents(2, endpoint, "kv@here@tiny")
    router = Router(endpoint)
    time.sleep(0.2)  # subscriptions take a moment
    events.stored(1, "tenant", (5, 6))
    events.stored(2, 1, (7, 8))
    router.read()
    names = [block_hash(None, (5, 6), "tenant")]
    names.append(block_hash(names[0], (7, 8), ""))
    assert list(router.blocks) == names
    assert router.blocks[names[0]]["extra_keys"] == [["tenant"]]
    events.removed(2)
    events.removed(1)
    events.stored(3, 2, (9, 9))  # what was before it cannot be found any more
    events.removed(3)
    router.read()
    assert router.kinds[-2:] == ["BlockRemoved", "BlockRemoved"]
    assert not router.blocks
    events.close()
    router.close()
