"""Model folders written by an attacker: nothing in them runs, and whatever is wrong is one kind of error, soon."""

from __future__ import annotations

import ast
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
from vocabularies import byte_level

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
    **{name: {"speculators_model_type": name} for name in ("eagle3", "peagle", "eagle", "dflash", "dspark", "mtp")},
    "modelopt": {"eagle_config": {}},
    "z-lab": {"dflash_config": {}},
    "deepspec": {"block_size": 4, "target_layer_ids": [1]},
    "pard": {"pard_token": 3},
    "medusa": {"medusa_num_heads": 2},
    "hydra": {"hydra_num_heads": 2},
    "official eagle3": {"architectures": ["LlamaForCausalLMEagle3"]},
    "student": {"draftwood": {"student": True}},
    "masked student": {"draftwood": {"student": True}, "pard_token": 3},
    "language model": {},
}  # fmt: skip


class WithTexts(TinyCheckpoint):
    """Draft models of another vocabulary are asked what they have in common with it."""

    def tokenizer(self) -> Tokenizer:
        return byte_level()


@pytest.mark.parametrize("pickles", [False, True], ids=["safetensors", "pickles"])
@pytest.mark.parametrize("config", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_a_drafter_folder_runs_nothing(tmp_path: Path, marker: Path, config: dict[str, Any], pickles: bool) -> None:
    folder = poison(tiny_folder(tmp_path / "drafter"), marker)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    engine = EngineConfig(device="cpu", cache_tokens=256)
    if pickles:
        for file in folder.glob("*.safetensors"):
            file.unlink()
    for allowed in (False, True):
        try:
            build_drafter(str(folder), None, WithTexts(tiny_config()), engine, allow_pickle=allowed)
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


def test_every_call_into_transformers_forbids_remote_code() -> None:
    root = Path(__file__).parents[2]
    calls = [
        (path.name, call)
        for folder in ("src", "benchmarks", "examples", "tests")
        for path in (root / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
    ]
    models = [(name, call) for name, call in calls if not ast.unparse(call.func).endswith("Embedding.from_pretrained")]
    assert models
    for name, call in models:
        assert any(key.arg == "trust_remote_code" and ast.unparse(key.value) == "False" for key in call.keywords), name


# --- malformed files: one kind of error, before memory is taken

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
WRONG: list[Any] = [-1, 10**9 * 8, 10**12, 10**400, 1.5, math.nan, math.inf, "8", [8], {"a": 1}, True]


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_is_none_is_refused_by_name(key: str) -> None:
    ours = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
    }
    names = {key, ours.get(key, key)}
    for value in [0, *WRONG] if key != "head_dim" else WRONG:
        with pytest.raises(CheckpointError) as caught:
            ModelConfig.from_hf(HF_CONFIG | {key: value})
        assert any(name in str(caught.value) for name in names)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_is_none_is_refused_by_name(key: str) -> None:
    for value in (-1, 0, 10**400, math.nan, math.inf, "8", [8], True):
        with pytest.raises(CheckpointError, match=f"{key}|norm_eps|rope theta"):
            ModelConfig.from_hf(HF_CONFIG | {key: value})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 0},
        {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": math.nan, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1, "mscale_all_dim": -1e9},
        {"rope_type": "longrope", "original_max_position_embeddings": 1, "short_factor": [1.0] * 8},
        {"rope_type": "longrope", "long_factor": [1.0] * 1_000_000, "short_factor": [1.0] * 8},
        {"rope_type": "longrope", "original_max_position_embeddings": 32, "long_factor": ["x"] * 8},
        {"rope_type": "longrope", "original_max_position_embeddings": 32, "long_factor": [0.0] * 8},
        {"rope_type": "linear", "factor": "4"},
        {"rope_type": ["linear"], "factor": 4},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": math.inf, "original_max_position_embeddings": 64},
        "linear",
        ["linear"],
    ],
)
def test_a_rope_that_is_none_is_refused(rope: Any) -> None:
    with pytest.raises(CheckpointError, match="This model cannot be run"):
        ModelConfig.from_hf(HF_CONFIG | {"rope_scaling": rope})


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, "1" * 100_000, "{", '"', "\x00", "nul", "{} {}"],
    ids=["deep list", "deep table", "list", "long number", "half", "quote", "zero", "null", "two"],
)
def test_json_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    for name in ("config.json", "generation_config.json"):
        whole = (folder / name).read_text() if (folder / name).exists() else "{}"
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError, match=name):
            open_checkpoint(folder)
        (folder / name).write_text(whole)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        with path.open("wb") as file:
            file.truncate(1 << 40)  # takes no room on the disk
        with pytest.raises(DraftwoodError, match=f"{name} has more than"):
            open_checkpoint(folder).tokenizer()
        path.unlink() if before is None else path.write_bytes(before)
    os.mkfifo(folder / "generation_config.json")  # reading it would wait for ever
    with pytest.raises(CheckpointError, match="no regular file"):
        open_checkpoint(folder)
    assert files.MAX_JSON < 1 << 30


ODD: list[Any] = [
    None,
    0,
    -1,
    1.5,
    math.nan,
    10**12,
    10**400,
    "",
    "x" * 5000,
    [],
    [[]],
    {},
    {"a": {}},
    True,
    ["default"],
]


def mutated(value: Any, rng: random.Random) -> Any:
    """The same table with one value somewhere in it replaced, removed or doubled."""
    if rng.random() < 0.2 or not value or not isinstance(value, dict | list):
        return rng.choice(ODD)
    if isinstance(value, list):
        at = rng.randrange(min(len(value), 50))
        return [*value[:at], mutated(value[at], rng), *value[at + rng.randrange(2) :]]
    key = rng.choice(sorted(value)[:200])
    action = rng.random()
    if action < 0.1:
        return {name: entry for name, entry in value.items() if name != key}
    return {**value, (rng.choice(["", "type", key * 2]) if action < 0.2 else key): mutated(value[key], rng)}


def test_mutated_configurations_fail_in_one_way_only() -> None:
    rng, read = random.Random(0), 0
    scalings = [{"rope_scaling": scaling} for scaling in SCALINGS]
    families = [{"model_type": "mistral", "sliding_window": 8}, {"model_type": "qwen2", "use_sliding_window": True}]
    started = time.thread_time()
    for _ in range(1500):
        config = HF_CONFIG | rng.choice([{}, *scalings, *families])
        for _ in range(rng.randrange(1, 4)):
            config = mutated(config, rng)
            config = config if isinstance(config, dict) else {}
        try:
            read += ModelConfig.from_hf(config).num_layers > 0
        except CheckpointError:
            continue
    assert read > 100
    assert time.thread_time() - started < 10


def test_mutated_tokenizers_fail_in_one_way_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng, read = random.Random(1), 0
    save_folder(tmp_path)
    byte_level = json.loads((tmp_path / "tokenizer.json").read_text())
    sentencepiece = json.loads(Tokenizer.from_gguf(sentencepiece_fields())._backend.to_str())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": [{"name": "default"}]}
    for turn in range(400):
        whole = mutated(rng.choice([byte_level, sentencepiece]), rng) if turn % 3 else byte_level
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings if turn % 3 else mutated(settings, rng)))
        (tmp_path / "generation_config.json").write_text(
            json.dumps(mutated({"eos_token_id": [1]}, rng) if turn % 5 else {})
        )
        try:
            tokenizer = Tokenizer.from_folder(tmp_path)
            tokenizer.decode(tokenizer.encode("Hello <|im_start|> world é " * 20))
            tokenizer.max_bytes(4)
            read += 1
        except (TokenizerError, CheckpointError):
            continue
    capfd.readouterr()  # the library writes about its panics
    assert read > 40


def test_mutated_gguf_tables_fail_in_one_way_only() -> None:
    rng, read = random.Random(2), 0
    for _ in range(300):
        fields = mutated(rng.choice([byte_level_fields, sentencepiece_fields_of])("smollm"), rng)
        try:
            tokenizer = Tokenizer.from_gguf(fields if isinstance(fields, dict) else {})
            read += bool(tokenizer.encode("Hello world")) or True
        except (TokenizerError, CheckpointError):
            continue
    assert read > 20


def sentencepiece_fields_of(rule: str) -> dict[str, Any]:
    return sentencepiece_fields() | {"tokenizer.ggml.pre": rule}


@pytest.mark.parametrize(
    ("pattern", "reason"), [("(a+)+$", "retry-limit"), ("(", r"tokenizer\.json cannot be read"), ("a" * 10**6, "")]
)
def test_a_regular_expression_of_a_tokenizer_does_not_run_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], pattern: str, reason: str
) -> None:
    content = json.loads((save_folder(tmp_path) / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    started = time.thread_time()
    if reason:
        with pytest.raises(TokenizerError, match=reason):
            Tokenizer.from_folder(tmp_path).encode("a" * 500 + "b")
    else:
        assert Tokenizer.from_folder(tmp_path).encode("a" * 500 + "b")
    assert time.thread_time() - started < 4
    capfd.readouterr()  # the library writes about its panics


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"dflash_config": {"target_layer_ids": [1]}, "num_hidden_layers": 4000, "intermediate_size": 1 << 20},
            "num_hidden_layers, intermediate_size",
        ),
        ({"dflash_config": 5}, "malformed"),
        ({"dflash_config": {"target_layer_ids": [1]}, "block_size": 10**9}, "block_size"),
        ({"dflash_config": {"target_layer_ids": 10**9}, "block_size": 4}, "list of target layers"),
        ({"speculators_model_type": ["eagle3"]}, "malformed|recognised"),
        (
            {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": [1],
                "eagle_aux_hidden_state_layer_ids": [1],
            },
            "malformed|transformer_layer_config",
        ),
        ({"architectures": [5]}, "malformed|architectures"),
        ({"draftwood": {"student": True}, "num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_a_malformed_drafter_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    folder = tiny_folder(tmp_path / "drafter")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    target = open_checkpoint(tiny_folder(tmp_path / "target"))
    with pytest.raises(DraftwoodError, match=reason):
        build_drafter(str(folder), None, target, EngineConfig(device="cpu"))
