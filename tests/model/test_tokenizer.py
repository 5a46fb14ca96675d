from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from draftwood.errors import TokenizerError
from draftwood.model import store
from draftwood.model.gguf_vocabulary import COMPOSED, PRE_TOKENIZERS
from draftwood.model.tokenizer import Detokenizer, Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "It's 12345 apples; they'd cost $3.14 in 2024.",
    "  leading, trailing  \n\n\ttabs\r\n and   runs   ",
    "def f(x):\n    return x**2 # naïve café e\u0301",
    "日本語のテキスト、混ぜる English。",
    "👩‍👩‍👧‍👦 flags 🇫🇷 and zero\u0000byte \u200b",
    "CamelCaseWords HTTPServer i18n ǅ ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
]
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train(pre_tokenizer: pre_tokenizers.PreTokenizer) -> tuple[list[str], list[str]]:
    """A small byte-level vocabulary, markers first as in SmolLM2."""
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(TEXTS * 3 + [str(n) for n in range(1990, 2030)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [" ".join(pair) for pair in model["merges"]]


def byte_level_fields(rule: str, **changes: Any) -> dict[str, Any]:
    tokens, merges = train(PRE_TOKENIZERS[rule]())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in MARKERS else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}


def sentencepiece_fields() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [
        "▁t",
        "he",
        "▁the",
        "er",
        "in",
        "▁a",
        "▁▁",
        "▁▁▁",
        "ing",
        "th",
        "lo",
        "llo",
        "ello",
        "Hello",
        "▁Hello",
    ]
    words += ["▁w", "or", "wor", "ld", "world", "▁world", "12", "34", "st", "▁s", "ar", "ri", "rin", "ring"]
    letters = sorted({"▁", *"abcdefghijklmnopqrstuvwxyzHT.,!?'0123456789é"})
    tokens = [*pieces, *words, *letters]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-float(i) for i in range(len(words) + len(letters))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


SPM_TEXTS = ["", " ", "Hello world", "the thing,  the string", " er  12345", "naïve 日本 é", "a\n\tb"]


def encode_by_definition(fields: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's own rule: join the neighbours whose union scores best, leftmost first."""
    index = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    scores = fields["tokenizer.ggml.scores"]
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [(scores[index[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in index]
        if not unions:
            break
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = [[index[p]] if p in index else [index[f"<0x{b:02X}>"] for b in p.encode()] for p in parts]
    return [i for group in known for i in group]


@pytest.mark.parametrize("rule", ["qwen2", "gpt-2"])
def test_ids_are_those_of_transformers(rule: str) -> None:
    fields = byte_level_fields(rule)
    theirs_class = Qwen2Tokenizer if rule == "qwen2" else GPT2Tokenizer
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    theirs = theirs_class(vocab=vocabulary, merges=merges, extra_special_tokens=MARKERS[1:])
    ours = Tokenizer.from_gguf(fields)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        ("smollm", "a 123 it's", ["a", "Ġ", "1", "2", "3", "Ġit", "'s"]),
        ("qwen2", "a 123 it's", ["a", "Ġ", "1", "2", "3", "Ġit", "'s"]),
        ("gpt-4o", "HelloWorld it's 1234", ["Hello", "World", "Ġit's", "Ġ", "123", "4"]),
        ("command-r", "a 12", ["a", "Ġ", "1", "2"]),
        ("llama-bpe", "a 12345 IT'S", ["a", "Ġ", "123", "45", "ĠIT", "'S"]),
        ("gpt-2", "a 12345 IT'S", ["a", "Ġ12345", "ĠIT", "'", "S"]),
        ("tekken", "CamelCase a/b 12", ["Camel", "Case", "Ġa", "/b", "Ġ", "1", "2"]),
    ],
)
def test_each_rule_cuts_words_its_own_way(rule: str, text: str, words: list[str]) -> None:
    assert [word for word, _ in PRE_TOKENIZERS[rule]().pre_tokenize_str(text)] == words


@pytest.mark.parametrize("rule", sorted(PRE_TOKENIZERS))
def test_every_text_survives_the_way_there_and_back(rule: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields(rule))
    for text in TEXTS:
        ids = tokenizer.encode(text, special=False)
        plain = normalizers.NFC().normalize_str(text) if rule in COMPOSED else text
        assert tokenizer.decode(ids, skip_special=False) == plain


def test_markers_in_text_are_single_tokens_and_skipped_on_request() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields("smollm"))
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.eos_ids == {0, 2}


def test_bos_is_added_when_the_file_wants_it() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields("smollm", ggml__add_bos_token=True))
    assert tokenizer.encode("hi")[0] == 1
    assert tokenizer.encode("hi", special=False)[0] != 1


def test_sentencepiece_ids_follow_its_definition() -> None:
    fields = sentencepiece_fields()
    tokenizer = Tokenizer.from_gguf(fields)
    for text in SPM_TEXTS:
        assert tokenizer.encode(text) == [1, *encode_by_definition(fields, text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_ids_are_those_of_transformers() -> None:
    fields = sentencepiece_fields()
    ours = Tokenizer.from_gguf(fields)
    model = json.loads(ours._backend.to_str())["model"]
    theirs = LlamaTokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    for text in SPM_TEXTS:
        if text.startswith(" "):  # transformers spares the prefix there; SentencePiece and llama.cpp do not
            continue
        assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), text


def test_sentencepiece_without_space_prefix_keeps_the_text_as_it_is() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields() | {"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def splits(ids: list[int], rng: random.Random) -> Iterable[list[int]]:
    while ids:
        size = rng.randint(1, 3)
        yield ids[:size]
        ids = ids[size:]


@pytest.mark.parametrize("fields", [byte_level_fields("smollm"), sentencepiece_fields()], ids=["bytes", "spm"])
def test_streaming_equals_decoding_however_it_is_split(fields: dict[str, Any]) -> None:
    """Random ids: broken UTF-8, markers, a leading space and ids past the vocabulary included."""
    tokenizer = Tokenizer.from_gguf(fields)
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            stream = Detokenizer(tokenizer, skip_special=skip)
            text = "".join(stream.push(part) for part in splits(ids, rng)) + stream.flush()
            assert text == tokenizer.decode(ids, skip_special=skip)


def test_decoding_is_that_of_the_tokenizers_library() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields("smollm"))
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(8)]
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_half_a_character_waits_for_its_other_half() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    stream = Detokenizer(tokenizer)
    first, *rest = (3 + byte for byte in "é".encode())
    assert stream.push([first]) == ""
    assert stream.push(rest) == "é"
    assert stream.push([first]) == ""
    assert stream.flush() == "\ufffd"


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(TokenizerError, match="surrogate at character 2"):
        Tokenizer.from_gguf(sentencepiece_fields()).encode("ab\ud800")


def test_fingerprint_tells_vocabularies_apart_and_ignores_padding() -> None:
    fields = byte_level_fields("smollm")
    same = Tokenizer.from_gguf(fields).fingerprint
    padded = dict(fields)
    padded["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "[PAD1]"]
    padded["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 5]
    assert Tokenizer.from_gguf(padded).fingerprint == same
    swapped = dict(fields)
    tokens = list(fields["tokenizer.ggml.tokens"])
    tokens[10], tokens[11] = tokens[11], tokens[10]
    swapped["tokenizer.ggml.tokens"] = tokens
    assert Tokenizer.from_gguf(swapped).fingerprint != same


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, "rule 'klingon'"),
        ({"tokenizer.ggml.pre": None}, "rule None"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit"),
    ],
)
def test_a_vocabulary_we_cannot_rebuild_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        Tokenizer.from_gguf(byte_level_fields("smollm") | changes)


MESSAGES = [{"role": "user", "content": 'say "é" <b>'}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'bad' %}{{ raise_exception('no bad role') }}{% endif %}\n"
    "{% generation %}{{ message.role }}: {{ message.content | tojson }}{% endgeneration %}\n"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def chat(template: str | None) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_fields("smollm", chat_template=template))


def test_template_renders_as_transformers_renders_it() -> None:
    theirs = GPT2Tokenizer(vocab={"<|im_start|>": 0}, merges=[], bos_token="<|im_start|>")
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            MESSAGES, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=prompt
        )
        assert chat(TEMPLATE).render_chat(MESSAGES, add_generation_prompt=prompt) == expected


def test_template_knows_the_date() -> None:
    assert chat("{{ strftime_now('%Y') }}").render_chat(MESSAGES).isdigit()


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, MESSAGES, "no chat template"),
        (TEMPLATE, [{"role": "bad", "content": ""}], "no bad role"),
        ("{% if %}", MESSAGES, "refused"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "refused|unsafe"),
        ("{{ messages.append(1) }}", MESSAGES, "refused"),
        ("{{ 1 / 0 }}", MESSAGES, "division by zero"),
        (TEMPLATE, [{"content": "x"}], "Message 0 needs a 'role'"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused(
    template: str | None, messages: list[dict[str, str]], reason: str
) -> None:
    with pytest.raises(TokenizerError, match=reason):
        chat(template).render_chat(messages)


def save_folder(folder: Path, **config: Any) -> Path:
    fields = byte_level_fields("smollm")
    Tokenizer.from_gguf(fields)._backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folder_and_gguf_give_the_same_tokenizer(tmp_path: Path) -> None:
    ours, theirs = Tokenizer.from_folder(save_folder(tmp_path)), chat(None)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.vocab_size == theirs.vocab_size
    assert all(ours.encode(text) == theirs.encode(text) for text in TEXTS)


def test_end_tokens_come_from_every_file_that_names_them(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == {0, 2, 7}


def test_template_file_goes_before_the_settings(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": "{{ bos_token }}settings"},
    ]
    save_folder(tmp_path, chat_template=named)
    assert Tokenizer.from_folder(tmp_path).render_chat(MESSAGES) == "<|im_start|>settings"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).render_chat(MESSAGES) == "file"


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    save_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("a b c d e f g h")) > 4


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_sentencepiece_file_without_transformers_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").touch()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match="Install transformers"):
        Tokenizer.from_folder(tmp_path)


def test_vocabulary_of_another_kind_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decodes by WordPiece"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.slow
def test_embedded_model_splits_digits_one_by_one() -> None:
    """As transformers builds it from the GGUF, the Digits step is lost: one text in ten encodes otherwise."""
    from draftwood.model.gguf import read_gguf

    tokenizer = Tokenizer.from_gguf(read_gguf(store.fetch("smollm2")).fields)
    assert tokenizer.encode("Hello world 12345") == [19556, 905, 216, 33, 34, 35, 36, 37]
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
