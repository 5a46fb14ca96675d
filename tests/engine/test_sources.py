"""Encoder inputs through Python, the command line and the server: what they may be, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from draftwood import LLM, DraftwoodError, EngineConfig, SamplingParams
from draftwood.cli.about import about_table
from draftwood.cli.app import app
from draftwood.errors import ContextLengthExceeded, IncompatibleParts, InvalidRequest
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.encoders import check_reads_as_much
from seq2seq import BINS, STATES, seq2seq_folder, seq2seq_texts
from serving import serving
from tiny import tiny_folder

SMALL = EngineConfig(dtype="float64", cache_tokens=1024, page_size=16, threads=1)
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seq2seq_texts(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, drafter="ngram:shortest=1", config=SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("whisper")
    with LLM(seq2seq_texts(path, "whisper"), config=SMALL) as llm:
        yield llm


def test_one_or_several(llm: LLM) -> None:
    """Texts, token ids, lists of either; prompts are optional, and one goes with all."""
    text, ids = "one two one two", llm.tokenizer.encode("one two one two")
    one = llm.generate(encoder_input=text, params=PARAMS)
    assert one.prompt_token_ids == (llm.checkpoint.config.encoder.start,)  # type: ignore[union-attr]
    assert len(one.token_ids) == 8
    assert one.stats.prompt_tokens == len(ids) + 1
    assert llm.generate(encoder_input=ids, params=PARAMS).token_ids == one.token_ids
    assert llm.generate("", PARAMS, encoder_input=text).token_ids == one.token_ids
    several = llm.generate(params=PARAMS, encoder_input=[text, ids, "another"])
    assert [r.token_ids == one.token_ids for r in several] == [True, True, False]
    begun = llm.generate("ab", PARAMS, encoder_input=text)
    assert begun.prompt_token_ids[1:] == tuple(llm.tokenizer.encode("ab", special=False))
    assert begun.prompt == "ab"
    for prompts, inputs in ((["ab", ""], text), (["ab", ""], [text, text]), ([list(begun.prompt_token_ids), ""], text)):
        pair = llm.generate(prompts, PARAMS, encoder_input=inputs)
        assert [r.token_ids for r in pair] == [begun.token_ids, one.token_ids]
    with pytest.raises(InvalidRequest, match="2 prompts came with 3 encoder inputs"):
        llm.generate(["a", "b"], encoder_input=["a", "b", "c"])


def test_streamed_and_awaited(llm: LLM) -> None:
    want = llm.generate(encoder_input="one two", params=PARAMS)
    assert "".join(event.text for event in llm.stream(None, PARAMS, encoder_input="one two")) == want.text
    assert asyncio.run(llm.agenerate("", PARAMS, encoder_input="one two")).text == want.text

    async def collected() -> str:
        return "".join([event.text async for event in llm.astream(None, PARAMS, encoder_input="one two")])

    assert asyncio.run(collected()) == want.text


def test_several_answers_and_log_probabilities_of_the_prompt(llm: LLM) -> None:
    """Of what the decoder begins with; the encoder gives none of what it reads."""
    params = SamplingParams(max_tokens=4, temperature=1.0, n=3, seed=1, prompt_logprobs=1, logprobs=1)
    result = llm.generate("abc", params, encoder_input="one two")
    assert len({c.token_ids for c in result.completions}) == 3
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids) == 4
    assert result.prompt_logprobs[0] is None
    scored = [entry.token for entry in result.prompt_logprobs[1:] if entry is not None]
    assert scored == list(result.prompt_token_ids[1:])
    again = llm.generate("abc", params, encoder_input="one two")
    assert again.prompt_logprobs == result.prompt_logprobs
    assert again.stats.cached_prompt_tokens == 0, "one page is not full"


WRONG: dict[str, tuple[Any, str]] = {
    "an empty text": ("", "at least one token"),
    "no tokens": ([], "at least one token"),
    "too long": ("ab " * 60, r"at most 128.*Shorten"),
    "numbers": ([0.5, 1.0], "a text or a list of token ids here, not a list|2 encoder inputs|not a float"),
    "truth": ([True, False], "not a list"),
    "a table": ({"a": 1}, "not a dict"),
    "an array": (np.zeros((BINS, 2 * STATES)), "not a ndarray"),
    "another vocabulary": ([5, 10_000], r"Token 10000 in encoder_input .*\(0 to 257\)"),
    "nothing": (None, "has an encoder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_an_encoder_of_texts_cannot_read(llm: LLM, name: str) -> None:
    given, reason = WRONG[name]
    with pytest.raises(DraftwoodError, match=reason):
        next(llm.stream("a", PARAMS, encoder_input=given))


def test_a_wrong_one_leaves_its_neighbours_alone(llm: LLM) -> None:
    good, bad = llm.generate(params=PARAMS, encoder_input=["one two", "ab " * 60])
    assert good.token_ids == llm.generate(encoder_input="one two", params=PARAMS).token_ids
    assert bad.finish_reason == "error"
    assert "at most 128" in (bad.completions[0].error or "")


def test_texts_have_the_decoders_length(llm: LLM) -> None:
    long = llm.generate(encoder_input="one", params=SamplingParams(max_tokens=1000, ignore_eos=True))
    assert len(long.prompt_token_ids) + len(long.token_ids) == 128
    assert long.finish_reason == "length"
    with pytest.raises(ContextLengthExceeded, match="limit is 127"):
        llm.generate("a" * 200, encoder_input="one")


def test_sources_take_room_in_the_cache(folder: Path) -> None:
    with LLM(folder, config=EngineConfig(dtype="float64", cache_tokens=64, page_size=16)) as llm:
        with pytest.raises(ContextLengthExceeded, match=r"takes 100 places.*raise cache_tokens"):
            llm.generate(encoder_input="a" * 100)
        assert llm.generate(encoder_input="a" * 40, params=PARAMS).token_ids


def test_features(whisper: LLM) -> None:
    """Arrays of NumPy and torch, with or without a batch of one."""
    features = np.random.default_rng(0).normal(size=(BINS, 2 * STATES)).astype(np.float32)
    want = whisper.generate(encoder_input=features, params=PARAMS)
    assert want.stats.prompt_tokens == STATES + 1
    for same in (torch.from_numpy(features), features[None], features.astype(np.float64)):
        assert whisper.generate(encoder_input=same, params=PARAMS).token_ids == want.token_ids
    others = whisper.generate(params=PARAMS, encoder_input=[features, features + 1.0])
    assert [r.token_ids == want.token_ids for r in others] == [True, False]
    for wrong, reason in (
        ("a text", "array of 8 bins by 40 frames"),
        (features[:, :-1], r"shape \(8, 39\).*feature extractor"),
        (features * np.nan, "not finite"),
        (np.array([["a"]]), "no array of numbers"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            whisper.generate(encoder_input=wrong)


def test_a_decoder_alone_reads_nothing_else(tmp_path: Path) -> None:
    with LLM(tiny_folder(tmp_path), config=SMALL) as llm:
        with pytest.raises(InvalidRequest, match=r"no encoder.*put it into the prompt"):
            llm.generate("a", encoder_input="b")
        with pytest.raises(InvalidRequest, match="There is no prompt"):
            llm.generate()


def test_who_drafts_for_whom(folder: Path, tmp_path: Path) -> None:
    spec = open_checkpoint(folder).config.encoder
    check_reads_as_much("a decoder", None, "the model", spec)
    with pytest.raises(IncompatibleParts, match="it has an encoder and the target has none"):
        check_reads_as_much("the model", spec, "a decoder", None)
    short = seq2seq_texts(tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(IncompatibleParts, match="does not read all that the target's reads"):
        LLM(folder, drafter=f"model:{short}", config=SMALL)
    with LLM(folder, drafter=f"model:{folder}", config=SMALL) as llm:
        result = llm.generate(encoder_input="one two", params=SamplingParams(max_tokens=8))
        assert result.stats.acceptance > 0.6


def test_what_a_folder_is(folder: Path) -> None:
    console = Console(record=True, width=160)
    console.print(about_table(str(folder)))
    text = console.export_text()
    assert "bart" in text
    assert "128 tokens of text, behind an encoder that reads up to 128 tokens" in text


def test_how_answers_begin_by_their_files(tmp_path: Path) -> None:
    """generation_config.json may force a first token; a start has to be known."""
    seq2seq_folder(tmp_path, "bart")
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"decoder_start_token_id": 3, "forced_bos_token_id": 5})
    )
    assert open_checkpoint(tmp_path).config.encoder.opening == (3, 5)  # type: ignore[union-attr]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "generation_config.json").unlink()
    for start, reason in ((None, "names no decoder_start_token_id"), (99, "not in the vocabulary")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "decoder_start_token_id": start}))
        with pytest.raises(DraftwoodError, match=reason):
            open_checkpoint(tmp_path)


def test_the_command_line(folder: Path) -> None:
    flags = ["--model", str(folder), "--dtype", "float64", "-n", "6", "--json"]
    said = CliRunner().invoke(app, ["generate", "--encoder-input", "one two one two", *flags])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["num_tokens"] == 6
    piped = CliRunner().invoke(app, ["generate", "--encoder-input", "-", *flags], input="one two one two")
    assert json.loads(piped.stdout)["text"] == json.loads(said.stdout)["text"]
    without = CliRunner().invoke(app, ["generate", "one two", *flags])
    assert without.exit_code == 1
    assert "--encoder-input" in without.output
    talk = CliRunner().invoke(app, ["chat", "--model", str(folder)], input="Hello")
    assert talk.exit_code == 1
    assert "--encoder-input" in talk.output
    nothing = CliRunner().invoke(app, ["generate", *flags])
    assert nothing.exit_code == 2
    assert "--encoder-input" in nothing.output


def test_the_server(llm: LLM) -> None:
    with serving(llm) as served:
        client = served.client()
        ask = {"model": "tiny", "max_tokens": 6, "temperature": 0}
        want = llm.generate(encoder_input="one two", params=SamplingParams(max_tokens=6)).text
        for prompt in ("", None):
            made = client.completions.create(**ask, prompt=prompt, extra_body={"encoder_input": "one two"})  # type: ignore[call-overload]
            assert made.choices[0].text == want
        assert made.usage.prompt_tokens == 8
        body = {**ask, "encoder_input": ["one two", "three"]}
        both = served.post("/v1/completions", body).json()["choices"]
        assert [choice["text"] == want for choice in both] == [True, False]
        ids = {
            **ask,
            "encoder_input": llm.tokenizer.encode("one two"),
            "prompt": ["", "ab"],
            "echo": True,
            "logprobs": 1,
        }
        choices = served.post("/v1/completions", ids).json()["choices"]
        assert [choice["text"][:2] for choice in choices][1] == "ab"
        for path, wrong, reason in (
            ("/v1/completions", {"prompt": "a"}, "has an encoder"),
            ("/v1/completions", {}, "There is no prompt"),
            ("/v1/completions", {"prompt": "a", "encoder_input": 5}, "encoder_input"),
            ("/v1/completions", {"prompt": "a", "encoder_input": "ab " * 60}, "at most 128"),
            ("/v1/chat/completions", {"messages": [], "encoder_input": "a"}, "messages"),
        ):
            refused = served.post(path, {**ask, **wrong})
            assert refused.status_code == 400
            assert reason in refused.text
        assert served.idle()
