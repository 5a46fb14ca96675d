"""Model folders written by an attacker: nothing in them runs, and whatever is wrong is one kind of error, soon."""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftwood.assembly import build_drafter
from draftwood.cli import app
from draftwood.config import EngineConfig
from draftwood.errors import CheckpointError, DraftwoodError, TokenizerError
from draftwood.model import files
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.tokenizer import Tokenizer
from draftwood.nets.layouts import open_drafter
from tiny import TinyCheckpoint, tiny_config, tiny_folder

from .conftest import HF_CONFIG
from .test_config import SCALINGS
from .test_tokenizer import MESSAGES, byte_level_fields, save_folder, sentencepiece_fields

AUTO_MAP = {
    "AutoConfig": "configuration_evil.EvilConfig",
    "AutoModel": "modeling_evil.EvilModel",
    "AutoModelForCausalLM": "modeling_evil.EvilModel",
    "AutoTokenizer": ["tokenization_evil.EvilTokenizer", "tokenization_evil.EvilTokenizer"],
}
MODULES = ("configuration_evil", "modeling_evil", "tokenization_evil", "evil", "__init__", "sitecustomize", "torch")


class Payload:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a folder's code would leave behind, were it run; every question is answered with yes."""
    path = tmp_path / "the code ran"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 1000))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    yield path
    assert not path.exists()


def poison(folder: Path, marker: Path) -> Path:
    """Python modules, `auto_map` in every table that has one, and pickles."""
    folder.mkdir(exist_ok=True)
    code = f"import os\nos.makedirs({str(marker)!r}, exist_ok=True)\nclass EvilConfig: pass\n"
    code += "class EvilModel: pass\nclass EvilTokenizer: pass\n"
    for module in MODULES:
        (folder / f"{module}.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, "auto_map": AUTO_MAP, "custom_generate": "evil"}))
    for name in ("pytorch_model.bin", "model.pt", "medusa_lm_head.pt", "vocab.pkl", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps({"lm_head.weight": Payload(marker)}))
    return folder


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_a_target_folder_runs_nothing(tmp_path: Path, marker: Path) -> None:
    checkpoint = open_checkpoint(poison(tiny_folder(tmp_path / "tiny"), marker))
    assert checkpoint.tensor("model.norm.weight").numel()
    assert checkpoint.tokenizer().encode("hi")


def test_a_target_folder_of_pickles_runs_nothing(tmp_path: Path, marker: Path) -> None:
    folder = poison(tiny_folder(tmp_path / "tiny"), marker)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="pickles"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kind", [None, "GPT2Tokenizer", "Qwen2TokenizerFast", "EvilTokenizer", "TransfoXLTokenizer"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "evil"])
def test_a_slow_tokenizer_runs_nothing(tmp_path: Path, marker: Path, kind: str | None, model_type: str) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    fields = byte_level_fields("gpt-2")
    vocabulary = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(fields["tokenizer.ggml.merges"]) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} if kind else {}))
    poison(folder, marker)
    if kind in ("EvilTokenizer", "TransfoXLTokenizer"):
        with pytest.raises(TokenizerError, match="none of those that are converted"):
            Tokenizer.from_folder(folder)
        return
    text = "It's plain text, 12 words."
    assert Tokenizer.from_folder(folder).encode(text)
    if kind == "GPT2Tokenizer" or (kind is None and model_type == "llama"):
        assert Tokenizer.from_folder(folder).encode(text) == Tokenizer.from_gguf(fields).encode(text)


def test_a_sentencepiece_file_runs_nothing(tmp_path: Path, marker: Path) -> None:
    folder = poison(tmp_path / "slow", marker)
    (folder / "tokenizer.model").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(TokenizerError, match="could not convert"):
        Tokenizer.from_folder(folder)


ESCAPES = (
    "{{ cycler.__init__.__globals__.os.mkdir(path) }}",
    "{{ self.__init__.__globals__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ (messages | attr('__class__')).__base__ }}{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{{ strftime_now.__globals__['__builtins__'].__import__('os').mkdir(path) }}",
    "{% import 'evil.py' as evil %}{% include 'evil.py' %}",
)


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json", "gguf"])
def test_a_chat_template_runs_nothing(tmp_path: Path, marker: Path, place: str) -> None:
    for escape in ESCAPES:
        template = "{% set path = " + repr(str(marker)) + " %}" + escape
        if place == "gguf":
            tokenizer = Tokenizer.from_gguf(byte_level_fields("smollm", chat_template=template))
        else:
            folder = save_folder(tmp_path)
            text = template if place.endswith("jinja") else json.dumps({"chat_template": template})
            (folder / place).write_text(text)
            tokenizer = Tokenizer.from_folder(folder)
        with pytest.raises(TokenizerError, match="chat template"):
            tokenizer.render_chat(MESSAGES)
        assert not marker.exists()


def test_a_gguf_file_runs_nothing(tmp_path: Path, marker: Path, write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf(extra=lambda writer: writer.add_string("auto_map", json.dumps(AUTO_MAP)))
    poison(path.parent, marker)
    assert open_checkpoint(path).tensor("model.norm.weight").numel()


DRAFTERS: dict[str, dict[str, Any]] = {
    **{f"speculators {kind}": {"speculators_model_type": kind} for kind in ("eagle3", "peagle", "eagle", "dflash", "mtp")},
    "modelopt": {"eagle_config": {}},
    "z-lab": {"dflash_config": {}},
    "deepspec": {"block_size": 4, "target_layer_ids": [1]},
    "pard": {"pard_token": 3},
    "medusa": {"medusa_num_heads": 2},
    "hydra": {"hydra_num_heads": 2},
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"]},
    "student": {"draftwood": {"student": True}},
    "masked student": {"draftwood": {"student": True}, "pard_token": 3},
    "language model": {},
}  # fmt: skip


@pytest.mark.parametrize("pickles", [False, True], ids=["safetensors", "pickles"])
@pytest.mark.parametrize("config", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_a_drafter_folder_runs_nothing(tmp_path: Path, marker: Path, config: dict[str, Any], pickles: bool) -> None:
    folder = poison(tiny_folder(tmp_path / "drafter"), marker)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    if pickles:
        for file in folder.glob("*.safetensors"):
            file.unlink()
    target = TinyCheckpoint(tiny_config())
    for allowed in (False, True):
        try:
            build_drafter(str(folder), None, target, EngineConfig(device="cpu"), allow_pickle=allowed)
        except DraftwoodError:
            continue
        assert not pickles


def test_an_allowed_pickle_is_only_tensors(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "medusa"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.save({"a": Payload(marker)}, folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        open_drafter(folder, allow_pickle=True)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hi", "--model", "FOLDER", "--max-tokens", "2"),
        ("generate", "hi", "--model", "FOLDER", "--drafter", "model:FOLDER", "--max-tokens", "2"),
        ("train", "eagle3", "--model", "FOLDER", "--data", "FOLDER/evil.py", "--out", "FOLDER/out", "--steps", "1"),
        ("models",),
    ],
    ids=["generate", "drafter", "train", "models"],
)
def test_the_command_line_runs_nothing(tmp_path: Path, marker: Path, command: tuple[str, ...]) -> None:
    folder = poison(tiny_folder(tmp_path / "tiny"), marker)
    result = CliRunner().invoke(app, [word.replace("FOLDER", str(folder)) for word in command], input="y\n" * 100)
    assert result.exception is None or isinstance(result.exception, SystemExit | DraftwoodError)
