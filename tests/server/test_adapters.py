"""Adapters as a user meets them: named as the model or in `lora`, merged with `--lora`, recognised as folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapters import adapter_tensors, llama_modules, write_adapter
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.cli import app
from draftwood.cli.serve import ServeFlags
from draftwood.engine.adapters import take_adapters
from draftwood.errors import CheckpointError, InvalidRequest
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.runner import load_model
from serving import SMALL, Serving, serving
from tiny import CPU, TinyCheckpoint, tiny_config

PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "poet", adapter_tensors(llama_modules()))


@pytest.fixture(scope="module")
def adapted(folder: Path, adapter: Path) -> Iterator[Serving]:
    with (
        LLM(folder, drafter="ngram:shortest=1", config=SMALL, adapters={"poet": adapter}) as llm,
        serving(llm, "ngram:shortest=1") as running,
    ):
        yield running


def tokens_of(folder: Path, **settings: object) -> tuple[int, ...]:
    with LLM(folder, config=SMALL, **settings) as llm:  # type: ignore[arg-type]
        return llm.generate(PROMPT, SamplingParams(max_tokens=16)).token_ids


def text_of(served: Serving, **body: object) -> tuple[str, str]:
    usual = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    answer = served.post("/v1/completions", usual | body).json()
    return answer["choices"][0]["text"], answer["model"]


def test_a_request_names_its_adapter(folder: Path, adapter: Path, adapted: Serving) -> None:
    with LLM(folder, lora=adapter, config=SMALL) as merged:
        poem = merged.generate(PROMPT, SamplingParams(max_tokens=16)).text
    plain, name = text_of(adapted)
    assert name == adapted.service.config.model_name
    assert poem != plain
    for body in ({"model": "poet"}, {"lora": "poet"}, {"model": "poet", "lora": "poet"}):
        assert text_of(adapted, **body) == (poem, "poet")
    assert text_of(adapted)[0] == plain, "its prefix is cached under the adapter alone"
    chat = adapted.post(
        "/v1/chat/completions", {"model": "poet", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    )
    assert chat.json()["model"] == "poet"
    response = adapted.post("/v1/responses", {"model": "poet", "input": "hi", "max_output_tokens": 4})
    assert response.json()["model"] == "poet"


def test_adapters_are_listed_as_models(adapted: Serving) -> None:
    with adapted.http() as http:
        base, poet = http.get("/v1/models").json()["data"]
        assert (poet["id"], poet["parent"], base["parent"]) == ("poet", base["id"], None)
        assert http.get("/v1/models/poet").json()["id"] == "poet"
        assert http.get("/v1/models/pirate").status_code == 404


def test_other_names_are_refused(adapted: Serving, llm: LLM) -> None:
    for body, field in (({"model": "pirate"}, "model"), ({"lora": "pirate"}, "lora")):
        reply = adapted.post("/v1/completions", {"prompt": "x", **body})
        assert reply.status_code == 404
        assert reply.json()["error"]["param"] == field
        assert "'poet'" in reply.json()["error"]["message"]
    with pytest.raises(InvalidRequest, match="there are none"):
        llm.generate("x", SamplingParams(adapter="poet"))


def test_the_command_line(folder: Path, adapter: Path) -> None:
    told = CliRunner().invoke(app, ["models", str(adapter)])
    assert told.exit_code == 0
    assert "is an adapter (LORA of rank 3 for org/base)" in told.stdout
    with pytest.raises(CheckpointError, match="is an adapter"):
        open_checkpoint(adapter)
    command = ["generate", PROMPT, "--raw", "-n", "16", "--model", str(folder), "--lora", str(adapter), "--json"]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.stderr
    assert list(tokens_of(folder, lora=adapter)) == json.loads(answer.stdout)["token_ids"]
    for wrong in (["poet"], ["=x"], ["a=x", "a=y"], ["tiny=x"]):
        with pytest.raises(InvalidRequest):
            ServeFlags(adapters=wrong).adapter_paths("tiny")
    assert ServeFlags(adapters=["a=x=y"]).adapter_paths("tiny") == {"a": "x=y"}


def test_a_model_that_cannot_tell_rows_apart_says_so(folder: Path, adapter: Path) -> None:
    model = load_model(TinyCheckpoint(tiny_config()), EngineConfig().torch_dtype(), CPU)
    take_adapters(model, TinyCheckpoint(tiny_config()), {})
    with pytest.raises(InvalidRequest, match="run on a CPU only"):
        take_adapters(_OnGpu(), TinyCheckpoint(tiny_config()), {"poet": adapter})  # type: ignore[arg-type]


class _OnGpu:
    class device:
        type = "cuda"
