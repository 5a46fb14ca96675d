"""Images through Python and the server: what they may be, and what is refused."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.errors import InvalidRequest
from pictures import data_url, image, seeing_folder
from serving import serving
from tiny import tiny_folder

SMALL = EngineConfig(dtype="float32", cache_tokens=1024, page_size=16, threads=1)
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = seeing_folder(tmp_path_factory.mktemp("seeing"), "qwen2_vl")
    with LLM(folder, drafter="ngram:shortest=1", config=SMALL) as llm:
        yield llm


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_an_image_changes_the_answer_and_its_pieces_count(llm: LLM) -> None:
    first, second = (llm.chat(asked(data_url(image(i)), words("what?")), PARAMS) for i in (0, 3))
    assert first.token_ids != second.token_ids
    assert first.token_ids == llm.chat(asked(data_url(image(0)), words("what?")), PARAMS).token_ids
    plain = llm.chat(asked(words("what?")), PARAMS)
    assert first.stats.prompt_tokens == plain.stats.prompt_tokens + 4  # 16 x 16 pixels, merged 8 x 8
    assert llm.chat(asked(data_url(image(0, "JPEG"), "jpeg"), words("what?")), PARAMS).stats.num_tokens == 8


def test_answers_with_images_do_not_depend_on_drafts(llm: LLM) -> None:
    messages = asked(words("see "), data_url(image(1)), words(" and "), data_url(image(2)), words(" abcabcabc"))
    with LLM(llm.checkpoint.name, config=SMALL) as plain:
        assert plain.chat(messages, PARAMS).token_ids == llm.chat(messages, PARAMS).token_ids


def bomb() -> bytes:
    """A small file that says it has 100,000 x 100,000 pixels."""
    body = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + body
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(body)) + chunk + struct.pack(">I", zlib.crc32(chunk))


@pytest.mark.parametrize(
    ("parts", "words_"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "data URL"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,&&&"}}], "not base64"),
        ([data_url(b"no image")], "cannot be read"),
        ([data_url(bomb())], r"100000 x 100000 pixels|cannot be read"),
        ([{"type": "input_audio"}], "text or an image_url"),
        ([data_url(image(0)), {"type": "text", "text": "<image>"}], "places for 2 images and comes with 1"),
    ],
)
def test_what_is_no_image_is_refused(llm: LLM, parts: list[dict[str, Any]], words_: str) -> None:
    with pytest.raises(InvalidRequest, match=words_):
        llm.chat(asked(*parts, words("?")), PARAMS)
    assert llm.chat(asked(words("still here")), PARAMS).stats.num_tokens == 8


def test_an_image_is_framed_as_the_model_knows_it(tmp_path: Path) -> None:
    """Gemma 3: templates write what begins an image; pieces, end and blank lines around it come of themselves."""
    with LLM(seeing_folder(tmp_path, "gemma3"), drafter="ngram:shortest=1", config=SMALL) as llm:
        asking = asked(words("see "), data_url(image(0)), words(" well?"))
        answer = llm.chat(asking, PARAMS)
        assert answer.prompt == "user: see \n\n<begin><image><finish>\n\n well?assistant:"
        plain = llm.chat(asked(words("see "), words(" well?")), PARAMS)
        assert answer.stats.prompt_tokens == plain.stats.prompt_tokens + len("\n\n" * 2) + 2 + 4
        with serving(llm) as running:
            parts = [
                {"type": "input_text", "text": "see "},
                {"type": "input_image", "image_url": data_url(image(0))["image_url"]["url"]},
                {"type": "input_text", "text": " well?"},
            ]
            settings = {"max_output_tokens": 8, "temperature": 0.8, "seed": 3}
            body = {"model": "tiny", "input": [{"role": "user", "content": parts}], **settings}
            said = running.post("/v1/responses", body).json()
            assert said["output"][0]["content"][0]["text"] == answer.text
            parts[1] = {"type": "input_image", "file_id": "file-1"}
            assert "data URL" in running.post("/v1/responses", body).text


def test_text_runs_where_images_cannot_be_read(tmp_path: Path) -> None:
    folder = seeing_folder(tmp_path, "gemma3")
    (folder / "preprocessor_config.json").unlink()
    with LLM(folder, config=SMALL) as llm:
        assert llm.chat(asked(words("hello")), PARAMS).stats.num_tokens == 8
        with pytest.raises(InvalidRequest, match=r"preprocessor_config\.json"):
            llm.chat(asked(data_url(image(0)), words("?")), PARAMS)


def test_a_model_without_eyes_says_so(tmp_path: Path) -> None:
    with LLM(tiny_folder(tmp_path), config=SMALL) as llm:
        with pytest.raises(InvalidRequest, match="sees no images"):
            llm.chat(asked(data_url(image(0))), PARAMS)
        assert llm.chat(asked(words("a"), words("b")), PARAMS).prompt == "user: ab\nassistant:"


def test_the_server_takes_parts_as_openai_has_them(llm: LLM) -> None:
    messages = asked(words("see "), data_url(image(0)))
    with serving(llm) as running:
        client = running.client()
        settings = {"model": "tiny", "max_tokens": 8, "seed": 3, "temperature": 0.8}
        said = client.chat.completions.create(messages=messages, **settings)  # type: ignore[call-overload]
        assert said.choices[0].message.content == llm.chat(messages, PARAMS).text
        refused = running.post("/v1/chat/completions", {"messages": asked(data_url(b"no")), **settings})
        assert refused.status_code == 400
        assert "cannot be read" in refused.text
        assert running.idle()
