"""Text to tokens and back, on the `tokenizers` library alone: importing transformers would take seconds.

Decoding is ours: every id stands for a fixed run of bytes, and text is their UTF-8 reading. That makes
streaming exact by construction: `decode` is one `Detokenizer` fed with everything at once.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import DraftwoodError, TokenizerError
from . import chat, gguf_vocabulary
from .config import gguf_eos_ids, token_ids
from .files import check_size, read_object, read_text
from .text_bound import BYTE_ALPHABET, TextBound, text_bound

MAX_VOCABULARY_FILE = 1 << 27  # bytes of a tokenizer.json; the largest published ones have a quarter of it
_LONG_TEXT = 10_000  # characters; a long text is encoded without the GIL, so that other threads go on
_LARGEST_VOCABULARY = 1 << 24  # far above any published one
_LARGEST_ID = 2**32 - 1  # that the library can be asked for


@dataclass(frozen=True, slots=True)
class Conventions:
    """How a model uses its vocabulary, beyond the vocabulary itself."""

    eos_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()  # put before an encoded text, where the pipeline does not do it itself
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token": "<s>", for chat templates
    chat_template: str | None = None
    unused_ids: frozenset[int] = frozenset()  # padding of the embedding, left out of the fingerprint


class Tokenizer:
    """A model's vocabulary with its conventions.

    >>> tokenizer = Tokenizer.from_folder("path/to/model")        # doctest: +SKIP
    >>> tokenizer.decode(tokenizer.encode("Hello"))               # doctest: +SKIP
    'Hello'
    """

    def __init__(self, backend: tokenizers.Tokenizer, conventions: Conventions) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._conventions = conventions
        self._spelling = _spelling(backend)
        self._added = backend.get_added_tokens_decoder()
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}  # by whether special tokens are left out
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True) - 1, *self._added]) + 1
        if self.vocab_size > _LARGEST_VOCABULARY:
            raise TokenizerError(
                f"The tokenizer has ids up to {self.vocab_size - 1}, and {_LARGEST_VOCABULARY} tokens are the most."
            )
        self.eos_ids = conventions.eos_ids

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer files of a Hugging Face checkpoint."""
        with _explained(f"The tokenizer in {path} cannot be used"):
            return cls._from_folder(Path(path))

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        settings = {
            **read_object(folder / "special_tokens_map.json"),
            **read_object(folder / "tokenizer_config.json"),
        }
        backend = _folder_backend(folder, settings)
        special = _special_tokens(settings)
        eos = {*folder_eos_ids(folder), backend.token_to_id(special.get("eos_token", ""))}
        conventions = Conventions(
            eos_ids=frozenset(index for index in eos if index is not None),
            special_tokens=special,
            chat_template=_folder_template(folder, settings),
        )
        return cls(backend, conventions)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer stated in a GGUF file's metadata."""
        with _explained("The tokenizer in the GGUF file cannot be used"):
            return cls._from_gguf(fields)

    @classmethod
    def _from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        backend = gguf_vocabulary.build_tokenizer(fields)
        tokens = fields["tokenizer.ggml.tokens"]
        ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIAL.items()}
        special = {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}
        prefix = token_ids(ids["bos_token"]) if gguf_vocabulary.adds_bos(fields) else ()
        conventions = Conventions(
            eos_ids=frozenset(gguf_eos_ids(fields)),
            prefix_ids=prefix,
            special_tokens=special,
            chat_template=_as_template(fields.get("tokenizer.chat_template")),
            unused_ids=gguf_vocabulary.unused_ids(fields),
        )
        return cls(backend, conventions)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of ids, tokens and merges: equal when a draft model's tokens mean what the target's do."""
        model = json.loads(self._backend.to_str())["model"]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        unused = self._conventions.unused_ids
        entries = sorted((index, token) for token, index in vocabulary.items() if index not in unused)
        return hashlib.sha256(json.dumps([entries, merges]).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, which other libraries read too."""
        self._backend.save(str(folder / "tokenizer.json"))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is written down."""
        return self._conventions.chat_template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of `text`, after the model's BOS if `special` and the model wants one.

        Markers such as `<|im_start|>` in the text are recognised either way: a rendered chat is encoded with
        `special=False`, since its template has already written what belongs before it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"The text has a lone surrogate at character {error.start}, which no encoding can express; "
                "decode its source with errors='replace' before passing it."
            ) from None
        prefix = self._conventions.prefix_ids if special else ()
        return [*prefix, *self._encode(text, special)]

    def _encode(self, text: str, special: bool) -> list[int]:
        with _explained("The text cannot be encoded", "Shorten it, or download the model's tokenizer again."):
            if len(text) <= _LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=special).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def max_bytes(self, tokens: int) -> int | None:
        """The longest text, in bytes of UTF-8, that can have this many tokens or fewer; None if there is no longest.

        There is none where the pipeline drops any amount of text: it strips spaces, or has no token for some bytes.
        """
        return None if self._bound is None else self._bound.max_bytes(tokens)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly has, found from its bytes without encoding it; 0 if none is certain.

        Unlike `max_bytes`, this also says something where a few bytes have no token: those of the text are not counted.
        """
        return 0 if self._bound is None else self._bound.fewest_tokens(text)

    @cached_property
    def _bound(self) -> TextBound | None:
        return text_bound(self._backend)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`: exactly what a `Detokenizer` streams for them, however they are split."""
        stream = Detokenizer(self, skip_special=skip_special)
        return stream.push(ids) + stream.flush()

    @property
    def knows_tools(self) -> bool:
        """Whether the model says how tools are described to it."""
        return "tools" in (self._conventions.chat_template or "")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for a conversation, by the model's own template."""
        template = self._conventions.chat_template
        if template is None:
            raise TokenizerError(
                "This model has no chat template: it is probably a base model. Pass a plain prompt, or use "
                "the model's instruction-tuned version."
            )
        special = self._conventions.special_tokens
        return chat.render(template, messages, special, add_generation_prompt=add_generation_prompt, tools=tools)

    def piece(self, token: int, *, skip_special: bool = True) -> bytes:
        """The bytes one id stands for; none for ids that only pad the embedding."""
        if not 0 <= token < self.vocab_size:  # any number of these can be asked for: they are not kept
            return self._piece(token, skip_special)
        pieces = self._pieces[skip_special]
        if token not in pieces:
            pieces[token] = self._piece(token, skip_special)
        return pieces[token]

    def _piece(self, token: int, skip_special: bool) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special and skip_special else added.content.encode()
        spelled = self._backend.id_to_token(token) if 0 <= token <= _LARGEST_ID else None
        return b"" if spelled is None else self._spelling.bytes_of(spelled)

    @property
    def drops_first_space(self) -> bool:
        """Whether encoding put a space before the text, which decoding takes away again."""
        return self._spelling.drops_first_space


class Detokenizer:
    """Text of one growing sequence, token by token, never half a character; O(1) per token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._start()

    def _start(self) -> None:
        self._unfinished = b""  # the bytes of a character so far
        self._at_start = self._tokenizer.drops_first_space

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` completes; bytes of an unfinished character wait for the next call."""
        data = b"".join([self._tokenizer.piece(token, skip_special=self._skip_special) for token in ids])
        if data and self._at_start:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._read(data, final=False)

    def flush(self) -> str:
        """What an unfinished character at the very end reads as; the stream then starts over."""
        rest = self._read(b"", final=True)
        self._start()
        return rest

    def _read(self, data: bytes, *, final: bool) -> str:
        data = self._unfinished + data
        text, length = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[length:]
        return text


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a vocabulary writes bytes as printable text."""

    byte_level: bool
    byte_fallback: bool = False
    drops_first_space: bool = False

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            return _from_byte_level(token)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_ALPHABET[character] for character in token)
    except KeyError:  # a token outside the alphabet was added as plain text
        return token.encode()


def _spelling(backend: tokenizers.Tokenizer) -> _Spelling:
    steps = list(_flatten(_decoder_state(backend)))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _Spelling(byte_level=True)
    if not kinds & {"ByteFallback", "Metaspace"}:
        raise TokenizerError(
            f"The tokenizer decodes by {', '.join(sorted(kinds)) or 'no rule'}; supported are byte-level and "
            "SentencePiece vocabularies."
        )
    return _Spelling(
        byte_level=False,
        byte_fallback="ByteFallback" in kinds,
        drops_first_space=any(_drops_space(step) for step in steps),
    )


def _decoder_state(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    return None if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _flatten(decoder: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


def _drops_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return step["content"] == " " and step["start"] > 0
    return step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def folder_eos_ids(folder: Path) -> tuple[int, ...]:
    """Every id that `generation_config.json` or `config.json` says ends a text."""
    files = [read_object(folder / name) for name in ("generation_config.json", "config.json")]
    return tuple(sorted({index for file in files for index in token_ids(file.get("eos_token_id"))}))


def _folder_backend(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        return _converted(folder, settings)
    text = read_text(path, MAX_VOCABULARY_FILE, TokenizerError)
    with _explained(f"{path} cannot be read", "Download it again."):
        return tokenizers.Tokenizer.from_str(text)


@contextmanager
def _explained(what: str, remedy: str = "Download or convert the model again.") -> Iterator[None]:
    """Whatever the library raises, as a `TokenizerError`; its panics derive from `BaseException` alone."""
    try:
        yield
    except (DraftwoodError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = f"{error!s:.300}".rstrip(" .") or type(error).__name__
        raise TokenizerError(f"{what}: {reason}. {remedy}") from error


def _converted(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Slow formats (SentencePiece, vocab.json) have one careful converter, in transformers.

    The class is chosen here among a few of transformers' own; by a folder's `auto_map` it would run the folder's code.
    """
    sources = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).exists()]
    if not sources:
        raise TokenizerError(f"{folder} has no tokenizer.json; copy the model's tokenizer files into it.")
    try:
        from transformers import (
            GPT2TokenizerFast,  # pyright: ignore[reportAttributeAccessIssue]
            LlamaTokenizerFast,
            Qwen2TokenizerFast,  # pyright: ignore[reportAttributeAccessIssue]
        )
    except ImportError:
        raise TokenizerError(
            f"{folder} has {sources[0]} but no tokenizer.json. Install transformers, which can convert it, "
            "or save the tokenizer as tokenizer.json first."
        ) from None
    classes = {"GPT2": GPT2TokenizerFast, "Llama": LlamaTokenizerFast, "Qwen2": Qwen2TokenizerFast}
    kind = _slow_kind(folder, settings, sources[0])
    if kind not in classes:
        raise TokenizerError(
            f"{folder} has {sources[0]} but no tokenizer.json, and its tokenizer_class {kind!r:.100} is none of those "
            f"that are converted here ({', '.join(classes)}). Save the tokenizer as tokenizer.json first."
        )
    check_size(folder / sources[0], MAX_VOCABULARY_FILE, TokenizerError)
    with _explained(f"transformers could not convert {folder / sources[0]}"):
        loaded = classes[kind].from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return loaded.backend_tokenizer


def _slow_kind(folder: Path, settings: Mapping[str, Any], source: str) -> str:
    stated = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if stated not in ("", "PreTrainedTokenizer", "TokenizersBackend"):
        return stated.removesuffix("Tokenizer")
    if source == "tokenizer.model":
        return "Llama"
    family = str(read_object(folder / "config.json").get("model_type"))
    return "Qwen2" if family.startswith("qwen") else "GPT2"


_GGUF_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    given = {name: settings.get(name) for name in _GGUF_SPECIAL}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in given.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path, 4 * chat.MAX_TEMPLATE, TokenizerError)
    template = settings.get("chat_template") or read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named templates; plain chat is "default"
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return _as_template(template)


def _as_template(template: object) -> str | None:
    if template is None or isinstance(template, str):
        return template
    raise TokenizerError(f"The model's chat_template is a {type(template).__name__} where text is needed.")
