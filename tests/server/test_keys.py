"""Named API keys: what each may ask for, and that none takes from another."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from draftwood import LLM
from draftwood.errors import InvalidRequest
from draftwood.server.config import ServerConfig
from draftwood.server.keys import ApiKey, KeyRing, TokenBucket, read_key_file
from serving import NAME, SMALL, Serving, serving

FILE = """
[alice]
key = "sk-alice"
requests_per_minute = 120
max_concurrent = 8

[bob]
key = "sk-bob"
cache_salt = "shared"
"""


def _key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


def _ask(served: Serving, name: str, **body: object) -> httpx.Response:
    with served.http(headers=_key(name)) as http:
        return http.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 2, "temperature": 0} | body)


def test_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    alice, bob = read_key_file(path)
    assert alice == ApiKey("alice", "sk-alice", requests_per_minute=120, max_concurrent=8)
    assert (alice.salt, bob.salt) == ("alice", "shared")
    assert "sk-" not in repr(alice)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no keys"),
        ("[a]\n", "key ="),
        ("a = 1\n", "key ="),
        ("[a]\nkey = 1\n", "ASCII"),
        ("[a]\nkey = ''\n", "ASCII"),
        ("[a]\nkey = 'x'\nlimit = 3\n", "limit"),
        ("[a]\nkey = 'x'\nmax_concurrent = 0\n", "max_concurrent"),
        ("[a]\nkey = 'x'\nrequests_per_minute = 'many'\n", "requests_per_minute"),
        ("[a]\nkey = 'x'\ncache_salt = 7\n", "cache_salt"),
        ("[a\n", "cannot be read"),
    ],
)
def test_key_files_that_cannot_be_used(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=complaint):
        read_key_file(path)


def test_a_missing_key_file_and_keys_given_twice(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_key_file(tmp_path / "none.toml")
    for twice in (("same", "same"), (ApiKey("a", "x"), ApiKey("a", "y"))):
        with pytest.raises(InvalidRequest, match="same"):
            KeyRing(ServerConfig(NAME, api_keys=twice).keys)


def test_a_bucket_fills_up_again() -> None:
    now = 0.0
    bucket = TokenBucket(60, clock=lambda: now)
    assert [bucket.wait() for _ in range(60)] == [0.0] * 60
    assert bucket.wait() == pytest.approx(1.0)
    now = 2.5
    assert [bucket.wait() for _ in range(2)] == [0.0, 0.0]
    assert bucket.wait() == pytest.approx(0.5)


def test_the_log_names_the_key_and_never_shows_it(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(llm, api_keys=(ApiKey("alice", "sk-alice"), "sk-other")) as served:
        assert _ask(served, "alice").status_code == 200
        assert _ask(served, "other").status_code == 200
        assert _ask(served, "eve").status_code == 401
    lines = [record.getMessage() for record in caplog.records if record.name == "draftwood.access"]
    assert [json.loads(line).get("key") for line in lines] == ["alice", "key-2", None]
    assert not any("sk-" in record.getMessage() for record in caplog.records)


def test_a_key_may_have_a_rate(llm: LLM) -> None:
    with serving(llm, api_keys=(ApiKey("slow", "sk-slow", requests_per_minute=2), "sk-fast")) as served:
        assert [_ask(served, "slow").status_code for _ in range(3)] == [200, 200, 429]
        refused = _ask(served, "slow")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert _ask(served, "fast").status_code == 200


def test_a_key_may_have_few_answers_at_a_time(llm: LLM) -> None:
    with serving(llm, api_keys=(ApiKey("few", "sk-few", max_concurrent=2),)) as served:
        assert _ask(served, "few", n=3, temperature=1).status_code == 400
        assert _ask(served, "few", n=2, temperature=1).status_code == 200
        with (
            served.http(headers=_key("few")) as http,
            http.stream(
                "POST",
                "/v1/completions",
                json={"prompt": "a", "n": 2, "max_tokens": 1500, "stream": True, "ignore_eos": True},
            ) as stream,
        ):
            assert stream.status_code == 200
            refused = _ask(served, "few")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
        assert served.idle()
        assert _ask(served, "few").status_code == 200


def _cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_salts_separate_prefix_caches(served: Serving) -> None:
    prompt = "a secret that is long enough to fill some pages " * 4

    def ask(**body: object) -> int:
        return _cached(served.post("/v1/completions", {"prompt": prompt, "max_tokens": 1} | body))

    assert ask(cache_salt="first") == 0
    assert ask(cache_salt="first") > 0
    assert ask(cache_salt="second") == 0
    assert ask() == 0
    assert ask() > 0
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
    assert _cached(served.post("/v1/chat/completions", chat | {"cache_salt": "first"})) == 0
    assert _cached(served.post("/v1/chat/completions", chat | {"cache_salt": "second"})) == 0
    assert _cached(served.post("/v1/chat/completions", chat | {"cache_salt": "second"})) > 0


def test_keys_separate_prefix_caches_unless_they_share_a_salt(llm: LLM) -> None:
    keys = (
        ApiKey("a", "sk-a"),
        ApiKey("b", "sk-b"),
        ApiKey("c", "sk-c", cache_salt="team"),
        ApiKey("d", "sk-d", cache_salt="team"),
    )
    prompt = "another secret that is long enough to fill pages " * 4
    with serving(llm, api_keys=keys) as served:
        assert [_cached(_ask(served, name, prompt=prompt)) > 0 for name in "aabbcd"] == [
            False,
            True,
            False,
            True,
            False,
            True,
        ]
        # A salt of the request's own separates within a key, and cannot be used to look into another one's.
        for salt in ("b", "b\n", "\nb", "team", "team\n"):
            assert _cached(_ask(served, "a", prompt=prompt, cache_salt=salt)) == 0


def test_a_flood_by_one_key_does_not_starve_another(folder: Path) -> None:
    """The quiet key's requests are answered while the other's wait, and are never turned away for them."""
    keys = ("sk-loud", "sk-quiet")
    long = {"max_tokens": 300, "ignore_eos": True, "temperature": 1}
    ends: dict[str, list[float]] = {"loud": [], "quiet": []}
    refused: list[int] = []

    config = replace(SMALL, max_running=1)
    with LLM(folder, drafter="ngram", config=config) as llm, serving(llm, api_keys=keys, max_queue=14) as served:

        def ask(name: str) -> None:
            answer = _ask(served, name, **long)
            if answer.status_code == 200:
                ends[name].append(time.monotonic())
            else:
                assert (name, answer.status_code) == ("loud", 429)
                refused.append(answer.status_code)

        flood = [threading.Thread(target=ask, args=("loud",)) for _ in range(16)]
        for thread in flood:
            thread.start()
        while len(llm.engine.scheduler.waiting) < 8:
            time.sleep(0.005)
        ask("quiet")
        for thread in flood:
            thread.join()
    assert len(ends["quiet"]) == 1
    assert len(ends["loud"]) == 10, "one key may have two thirds of the places"
    assert len(ends["loud"]) + len(refused) == 16
    waited_for = sum(end < ends["quiet"][0] for end in ends["loud"])
    assert waited_for < len(ends["loud"]) / 2, "the quiet key waited for the loud one's queue"
