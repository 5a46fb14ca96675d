"""Who comes in, and with how much."""

from __future__ import annotations

import openai
import pytest

from draftwood import LLM
from draftwood.errors import InvalidRequest
from draftwood.server.config import ServerConfig
from draftwood.server.middleware import _is_here
from serving import NAME, Serving, serving


@pytest.fixture(scope="module")
def guarded(llm: LLM):
    with serving(llm, api_keys=("first", "second"), max_body=20_000) as running:
        yield running


def test_a_key_opens_every_route_and_probes_need_none(guarded: Serving) -> None:
    with guarded.http() as http:
        document = http.get("/openapi.json", headers={"Authorization": "Bearer second"}).json()
        assert http.get("/health").json() == {"status": "ok", "reason": None}
        for path, operations in [*document["paths"].items(), ("/openapi.json", {"get": {}}), ("/nothing", {"get": {}})]:
            for method in operations:
                if path not in ("/health", "/ready"):
                    response = http.request(method, path, json={})
                    assert response.status_code == 401, (method, path)
                    assert response.json()["error"]["code"] == "invalid_api_key"
    for key in ("first", "second"):
        with guarded.client(api_key=key) as client:
            assert client.models.list().data[0].id == NAME
    for key in ("firs", "firstsecond", "third"):
        with guarded.client(api_key=key) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_bodies_have_a_limit_whatever_the_header_says(guarded: Serving) -> None:
    headers = {"Authorization": "Bearer first", "content-type": "application/json"}
    with guarded.http(headers=headers) as http:
        announced = http.post("/tokenize", content=b'{"prompt": "' + b"x" * 30_000 + b'"}')
        streamed = http.post("/tokenize", content=iter([b'{"prompt": "', *[b"x" * 1000] * 30, b'"}']))
        small = http.post("/tokenize", content=b'{"prompt": "x"}')
    assert (announced.status_code, streamed.status_code, small.status_code) == (413, 413, 200)
    assert streamed.json()["error"]["code"] == "too_large"


def test_vllm_names_are_an_alias(guarded: Serving) -> None:
    with guarded.http(headers={"Authorization": "Bearer first"}) as http:
        page = http.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert f'\nvllm:{name}{{model_name="tiny"}}' in page
        assert f'\ndraftwood:{name}{{model_name="tiny"}}' in page
    assert "vllm:vllm" not in page


def test_management_is_for_people_on_the_machine(served: Serving) -> None:
    elsewhere = [
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"Host": "example.com"},
        {"Origin": "http://example.com"},
        {"Host": "127.0.0.1.example.com"},
    ]
    with served.http() as http:
        assert http.get("/manage/requests").json() == []
        for headers in elsewhere:
            for method, path in (("GET", "/manage/requests"), ("POST", "/manage/drain")):
                assert http.request(method, path, headers=headers).status_code == 403
        assert http.get("/ready").status_code == 200
        assert http.post("/manage/drain").json()["status"] == "draining"
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == 200
        closed = http.post("/v1/completions", json={"prompt": "a"})
        assert (closed.status_code, closed.json()["error"]["code"]) == (503, "draining")
        assert http.post("/manage/resume").json()["status"] == "ready"
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert http.post("/manage/requests/nobody/cancel").status_code == 404


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:80", "[::1]:80", "[::1]"])
def test_names_of_this_machine(host: str) -> None:
    assert _is_here(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost.evil.com", "", "127.0.0.1.evil.com:80"])
def test_names_of_other_machines(host: str) -> None:
    assert not _is_here(host)


def test_request_ids_are_taken_over_if_they_are_harmless(served: Serving) -> None:
    with served.http() as http:
        assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        assert len(http.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"]) == 16


@pytest.mark.parametrize(
    "wrong", [{"max_queue": 0}, {"deadline": 0}, {"api_keys": ("",)}, {"api_keys": ("é",)}, {"drain_seconds": -1}]
)
def test_settings_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        ServerConfig(NAME, **wrong)  # type: ignore[arg-type]


def test_what_routers_read_is_there_by_default(guarded: Serving) -> None:
    """The gauges that the Gateway API's endpoint picker and llm-d look for."""
    with guarded.http(headers={"Authorization": "Bearer first"}) as http:
        page = http.get("/metrics").text
    pages = guarded.llm.engine.scheduler.tables.pool.num_pages
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="tiny"}} 0.0' in page
    assert f'vllm:cache_config_info{{block_size="16",model_name="tiny",num_gpu_blocks="{pages}"}} 1.0' in page
