"""Requests and connections made to harm: none of them may silence the server or reach into another's answer."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from draftwood import LLM
from draftwood.errors import InvalidRequest
from draftwood.server.bodies import MAX_ELEMENTS
from draftwood.server.connections import RESERVED
from serving import Serving, http_request, serving, soon

SILENCE = 0.5  # seconds that /health may be silent
MANY = 500_000  # values in a list, which count with what separates them: just below what is refused unread

BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "prompts that are tables": ("/v1/completions", lambda: b'{"prompt":[' + b"{}," * MANY + b"{}]}"),
    "prompts that are lists": ("/v1/completions", lambda: b'{"prompt":[' + b"[]," * MANY + b"[]]}"),
    "prompts that are null": ("/v1/completions", lambda: b'{"prompt":[' + b"null," * MANY + b"null]}"),
    "prompts that are texts": ("/v1/completions", lambda: b'{"prompt":[' + b'"a",' * MANY + b'"a"]}'),
    "messages without a role": ("/v1/chat/completions", lambda: b'{"messages":[' + b"{}," * MANY + b"{}]}"),
    "messages": (
        "/v1/chat/completions",
        lambda: b'{"messages":[' + b'{"role":"user","content":"a"},' * 200_000 + b'{"role":"user"}]}',
    ),
    "parts of a message": (
        "/v1/chat/completions",
        lambda: (
            b'{"messages":[{"role":"user","content":['
            + b'{"type":"text","text":"a"},' * 250_000
            + b'{"type":"text"}]}]}'
        ),
    ),
    "biases": ("/v1/completions", lambda: _table("logit_bias", b"{}")),
    "wishes": ("/v1/completions", lambda: _table("speculation", b"1")),
    "tools": ("/v1/chat/completions", lambda: b'{"messages":[{"role":"user"}],"tools":[' + b"{}," * MANY + b"{}]}"),
    "items of a response": ("/v1/responses", lambda: b'{"input":[' + b"{}," * MANY + b"{}]}"),
    "calls in a response": (
        "/v1/responses",
        lambda: json.dumps(
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}] * 16_384}
        ).encode(),
    ),
    "metadata": ("/v1/responses", lambda: _table("metadata", b"1").replace(b'"prompt"', b'"input"')),
    "stop strings": ("/v1/completions", lambda: b'{"prompt":"a","stop":[' + b"1," * MANY + b"1]}"),
    "tokens that are texts": ("/detokenize", lambda: b'{"tokens":[' + b'"",' * MANY + b'""]}'),
    "echo": ("/v1/completions", lambda: json.dumps({"prompt": [5] * 300_000, "echo": True, "n": 128}).encode()),
    "echo of ids outside the vocabulary": (
        "/v1/completions",
        lambda: json.dumps({"prompt": list(range(10**6, 10**6 + 300_000)), "echo": True}).encode(),
    ),
    "a long text": ("/v1/completions", lambda: json.dumps({"prompt": "all work and no play " * 340_000}).encode()),
    "a long message": (
        "/v1/chat/completions",
        lambda: json.dumps({"messages": [{"role": "user", "content": "word " * 1_400_000}]}).encode(),
    ),
    "a long prediction": (
        "/v1/chat/completions",
        lambda: json.dumps(
            {
                "messages": [{"role": "user", "content": "a"}],
                "prediction": {"type": "content", "content": "ab " * 2_000_000},
            }
        ).encode(),
    ),
    "a long text to tokenize": ("/tokenize", lambda: json.dumps({"prompt": "x y " * 1_900_000}).encode()),
}


def _table(name: str, value: bytes) -> bytes:
    pairs = b",".join(b'"%d":%s' % (i, value) for i in range(MANY // 2))
    return b'{"prompt":"a","%s":{%s}}' % (name.encode(), pairs)


def _longest_silence(served: Serving, path: str, body: bytes) -> tuple[float, httpx.Response]:
    """The slowest answer of /health while a request is being dealt with, and that request's answer."""
    answer: list[httpx.Response] = []

    def attack() -> None:
        with served.http() as http:
            answer.append(http.post(path, content=body, headers={"Content-Type": "application/json"}))

    attacking = threading.Thread(target=attack)
    worst = 0.0
    with served.http() as http:
        http.get("/health")
        attacking.start()
        while attacking.is_alive():
            began = time.perf_counter()
            assert http.get("/health").status_code == 200
            worst = max(worst, time.perf_counter() - began)
            time.sleep(0.01)
    return worst, answer[0]


@pytest.mark.parametrize("name", BOMBS)
def test_no_request_silences_the_server(served: Serving, name: str) -> None:
    path, make = BOMBS[name]
    body = make()
    assert len(body) < served.service.config.max_body
    silences: list[float] = []
    while not silences or (min(silences) > SILENCE and len(silences) < 3):  # something else may keep the machine busy
        silence, answer = _longest_silence(served, path, body)
        silences.append(silence)
        assert answer.status_code == 400, answer.text[:200]
        assert len(answer.content) < 2000
    assert min(silences) <= SILENCE
    assert served.llm.tokenizer._pieces[True].keys() <= set(range(served.llm.tokenizer.vocab_size))


def test_what_has_too_many_elements_is_not_even_parsed(served: Serving) -> None:
    body = b'{"prompt":[' + b"0," * MAX_ELEMENTS + b"0]}"
    with served.http() as http:
        answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "elements" in answer.json()["error"]["message"]


def test_all_bodies_together_have_a_limit(llm: LLM) -> None:
    body = json.dumps({"prompt": "a" * 60_000}).encode()
    head = http_request("/tokenize", body)[: -len(body)]
    with serving(llm, max_bodies=100_000) as served, closing(_connect(served)) as first, served.http() as http:
        first.sendall(head + body[:-1])
        assert soon(lambda: http.post("/tokenize", json={"prompt": "a" * 60_000}).status_code == 503)
        first.sendall(body[-1:])
        assert first.recv(12) == b"HTTP/1.1 400"  # longer than the tiny model's context
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200


SURROGATES = [
    ("/v1/completions", b'{"prompt": "a", "model": "\\ud800"}'),
    ("/v1/completions", b'{"prompt": "\\udfff"}'),
    ("/v1/completions", b'{"prompt": "a", "\\ud800": 1}'),
    ("/v1/completions", b'{"prompt": "a", "model": "\xed\xa0\x80"}'),
    (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {"name": "\\ud800"}}]}',
    ),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "\\ud800"}]}]}'),
    ("/v1/completions", b'{"prompt": "a", "seed": NaN}'),
    ("/v1/completions", b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}"),
    ("/v1/completions", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("/v1/completions", b'{"prompt": "a"'),
    ("/v1/completions", b"\xff\xfe"),
]


@pytest.mark.parametrize(("path", "body"), SURROGATES, ids=range(len(SURROGATES)))
def test_what_is_not_json_is_refused(served: Serving, path: str, body: bytes) -> None:
    with served.http() as http:
        answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_pairs_of_surrogates_are_characters(served: Serving) -> None:
    with served.http() as http:
        body = b'{"prompt": "\\ud83d\\ude00 \\\\ud800", "model": "tiny", "max_tokens": 1}'
        answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


# Connections ----------------------------------------------------------------------------------------------------

HASTE = {"header_timeout": 0.4, "body_timeout": 0.6, "max_header": 4096, "keep_alive": 1}


@pytest.fixture(scope="module")
def hasty(llm: LLM) -> Iterator[Serving]:
    with serving(llm, **HASTE) as running:
        yield running


def _connect(served: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), timeout=10)


def _rest(line: socket.socket) -> bytes:
    """Everything that comes until the other side hangs up."""
    parts = []
    with suppress(ConnectionResetError):
        while part := line.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_headers_that_do_not_come_end_the_connection(hasty: Serving, sent: bytes) -> None:
    with closing(_connect(hasty)) as line:
        line.sendall(sent)
        answer = _rest(line)
    assert answer.startswith(b"HTTP/1.1 408") if sent else answer == b""


def test_a_slow_drip_of_headers_has_no_more_time(hasty: Serving) -> None:
    began = time.monotonic()
    with closing(_connect(hasty)) as line, suppress(BrokenPipeError, ConnectionResetError):
        line.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(100):
            line.sendall(b"X-A: b\r\n")
            time.sleep(0.05)
    assert time.monotonic() - began < 4


def test_a_body_that_does_not_come_ends_the_request(hasty: Serving) -> None:
    with closing(_connect(hasty)) as line:
        line.sendall(http_request("/tokenize", b'{"prompt": "a"}')[:-4])
        answer = _rest(line)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"too_slow"' in answer


def test_large_headers_are_refused_whether_they_end_or_not(hasty: Serving) -> None:
    with hasty.http() as http:
        assert http.get("/health", headers={"X-Large": "x" * 5000}).status_code == 431
        assert http.get("/health", headers={"X-Large": "x" * 3000}).status_code == 200
    with closing(_connect(hasty)) as line:
        with suppress(BrokenPipeError, ConnectionResetError):
            line.sendall(b"GET /health HTTP/1.1\r\nX-Endless: ")
            for _ in range(64):
                line.sendall(b"x" * (1 << 20))
        with suppress(ConnectionResetError):
            assert _rest(line)[:12] in (b"HTTP/1.1 431", b"")


def test_large_bodies_are_not_taken_for_large_headers(hasty: Serving) -> None:
    """Also where several requests come in one piece."""
    one = http_request("/tokenize", json.dumps({"prompt": "a", "more": "x" * 30_000}).encode())
    with closing(_connect(hasty)) as line:
        line.sendall(one * 3)
        assert _rest(line).count(b"HTTP/1.1 200") == 3


def test_an_idle_connection_is_closed_and_a_busy_one_is_not(hasty: Serving) -> None:
    with closing(_connect(hasty)) as line:
        line.sendall(b"GET /live?every=0.1&count=16 HTTP/1.1\r\nHost: localhost\r\n\r\n")  # longer than any timeout
        answer = _rest(line)
    assert answer.count(b"data: ") == 16


def test_connections_have_a_limit_and_health_a_reserve(llm: LLM) -> None:
    with serving(llm, max_connections=8) as served:
        idle = [_connect(served) for _ in range(8)]
        connections = served.server.server_state.connections
        assert soon(lambda: len(connections) == 8)
        with served.http() as http:
            assert http.get("/health").status_code == 200
            refused = http.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
            assert refused.headers["retry-after"] == "1"
        more = [_connect(served) for _ in range(RESERVED + 20)]
        assert soon(lambda: len(connections) <= 8 + RESERVED)
        for line in (*idle, *more):
            line.close()
        assert soon(lambda: len(connections) == 0)
        with served.http() as http:
            assert http.get("/v1/models").status_code == 200


def test_an_answer_that_is_not_read_is_given_up(llm: LLM) -> None:
    with serving(llm, write_timeout=0.5) as served, closing(_connect(served)) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = b"GET /page/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            line.settimeout(2)
            line.sendall(request * 5000)
        assert soon(lambda: not served.server.server_state.connections)


# Names and places -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/live?count=1", "/", "/metrics", "/openapi.json"])
def test_foreign_names_get_nothing(served: Serving, path: str) -> None:
    with served.http() as http:
        for name in ("example.com", "localhost.example.com", "127.0.0.1.example.com:80", "a"):
            refused = http.get(path, headers={"Host": name})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed"), name
        for name in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "192.0.2.7:8000", socket.gethostname()):
            assert http.get(path, headers={"Host": name}).status_code == 200, name
        assert http.get("/health", headers={"Host": "example.com"}).status_code == 200


def test_configured_names_are_allowed(llm: LLM) -> None:
    with serving(llm, allowed_hosts=("models.example.com",)) as served, served.http() as http:
        assert http.get("/v1/models", headers={"Host": "Models.example.com:80"}).status_code == 200
        assert http.get("/v1/models", headers={"Host": "example.com"}).status_code == 403
    with serving(llm, allowed_hosts=("*",)) as served, served.http() as http:
        assert http.get("/v1/models", headers={"Host": "example.com"}).status_code == 200


@pytest.mark.parametrize("header", ["X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via", "Forwarded"])
def test_management_refuses_whatever_came_through_a_proxy(served: Serving, header: str) -> None:
    with served.http() as http:
        assert http.get("/manage/requests", headers={header: "localhost"}).status_code == 403


def _clients(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == "draftwood.access"]
    return [json.loads(line)["client"] for line in lines]


def test_forwarded_addresses_are_believed_from_trusted_proxies_only(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for proxies, client in (((), "127.0.0.1"), (("10.0.0.0/8",), "127.0.0.1"), (("127.0.0.1",), "203.0.113.9")):
        caplog.clear()
        with serving(llm, trusted_proxies=proxies) as served, served.http() as http:
            http.get("/v1/models", headers={"X-Forwarded-For": "203.0.113.9"})
            assert http.get("/manage/requests", headers={"X-Forwarded-For": "127.0.0.1"}).status_code == 403
        assert _clients(caplog)[0] == client


def test_management_has_a_port_of_its_own(llm: LLM) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as spare:
        port = spare.getsockname()[1]
    with serving(llm, manage_port=port) as served, served.http() as http:
        assert http.get("/manage/requests").status_code == 404
        assert http.get(f"http://127.0.0.1:{port}/manage/requests").json() == []


def test_browsers_of_other_origins_are_told_whether_they_may(llm: LLM, served: Serving) -> None:
    preflight = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization,content-type"
    with serving(llm, api_keys=("secret",), cors_origins=("https://app.example.com",)) as asked, asked.http() as http:
        leave = http.options("/v1/chat/completions", headers=preflight)
        assert leave.status_code == 200
        assert leave.headers["access-control-allow-origin"] == "https://app.example.com"
        models = http.get("/v1/models", headers={"Origin": "https://app.example.com", "Authorization": "Bearer secret"})
        assert models.headers["access-control-allow-origin"] == "https://app.example.com"
        other = http.options("/v1/models", headers=preflight | {"Origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in other.headers
    with served.http() as http:
        assert "access-control-allow-origin" not in http.options("/v1/models", headers=preflight).headers


def test_a_port_in_use_is_noticed_before_a_model_is_loaded(tmp_path: Path) -> None:
    from draftwood.cli.flags import EngineFlags
    from draftwood.cli.serve import ServeFlags, run_serve

    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"127.0.0.1:{port}.*--port"):
            run_serve(EngineFlags(model=str(tmp_path / "no such model")), ServeFlags(port=port))


def test_requests_that_take_long_to_prepare_hold_up_no_others(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars that take long to compile, and long texts, wait for one another only."""
    release = threading.Event()
    grammars = served.llm.intake.grammars
    start = grammars.start
    monkeypatch.setattr(grammars, "start", lambda grammar: (release.wait(20), start(grammar))[1])
    question = {"prompt": "a", "max_tokens": 2, "guided_choice": ["yes", "no"]}
    slow = [threading.Thread(target=served.post, args=("/v1/completions", question)) for _ in range(12)]
    for thread in slow:
        thread.start()
    try:
        assert soon(lambda: served.service.admission.open_answers >= 12)
        assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert not release.is_set()
    finally:
        release.set()
        for thread in slow:
            thread.join()
