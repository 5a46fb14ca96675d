"""The vocabulary inside a GGUF file, rebuilt as a `tokenizers` pipeline.

GGUF keeps tokens and merges but only the *name* of the rule that cuts text into words (`tokenizer.ggml.pre`).
A wrong rule gives plausible tokens the model has never seen in that place: a name we do not know is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import TokenizerError
from .config import GGUF_CONTROL

_UNKNOWN, _USER_DEFINED, _UNUSED = 2, 4, 5
_LONGEST_PIECE = 512  # characters; SentencePiece makes up to 16, unless it is told otherwise
_SPACE = "▁"  # SentencePiece's visible space

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "olmo": _gpt2,
    "phi-2": _gpt2,
    "qwen2": _words(_QWEN2_WORDS),
    "deepseek-r1-qwen": _words(_QWEN2_WORDS),
    "llama-bpe": _words(_LLAMA3_WORDS),
    "llama3": _words(_LLAMA3_WORDS),
    "llama-v3": _words(_LLAMA3_WORDS),
    "smaug-bpe": _words(_LLAMA3_WORDS),
    "dbrx": _words(_LLAMA3_WORDS),
    "glm4": _words(_LLAMA3_WORDS),
    "chatglm-bpe": _words(_LLAMA3_WORDS),
    "stablelm2": _words(_QWEN2_WORDS),
    "gpt-4o": _words(_GPT4O_WORDS),
    "tekken": _words(_TEKKEN_WORDS),
}
COMPOSED = ("qwen2", "deepseek-r1-qwen", "command-r")  # normalise to NFC first
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")  # tiktoken vocabularies


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The pipeline for a GGUF file's metadata; markers such as <|im_start|> become added tokens."""
    kind = fields.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise TokenizerError(
            f"The GGUF file's tokenizer is of kind {kind!r}; supported are {', '.join(map(repr, _BUILDERS))}."
        )
    tokens = fields.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise TokenizerError("The GGUF file has no vocabulary; convert the model again with its tokenizer.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = _BUILDERS[kind](fields, vocabulary)
    tokenizer.add_tokens(_added_tokens(tokens, fields.get("tokenizer.ggml.token_type") or []))
    return tokenizer


def adds_bos(fields: Mapping[str, Any]) -> bool:
    """Whether the model wants its BOS token before a text; a silent file means what its kind is used to."""
    usual = fields.get("tokenizer.ggml.model") == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    wanted = fields.get("tokenizer.ggml.add_bos_token", usual)
    return bool(wanted) and fields.get("tokenizer.ggml.bos_token_id") is not None


def unused_ids(fields: Mapping[str, Any]) -> frozenset[int]:
    """Ids that only pad the embedding; they tell nothing about whether two vocabularies agree."""
    kinds = fields.get("tokenizer.ggml.token_type") or []
    return frozenset(index for index, kind in enumerate(kinds) if kind == _UNUSED)


def _added_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> list[AddedToken]:
    special = {GGUF_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    return [
        AddedToken(token, special=special[kind], normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in special and token
    ]


def _byte_level(fields: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    rule = fields.get("tokenizer.ggml.pre")
    if rule not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"The GGUF file cuts text by the rule {rule!r} (tokenizer.ggml.pre), which is not known here; "
            f"known are {', '.join(PRE_TOKENIZERS)}. Use the model's safetensors checkpoint with its "
            "tokenizer.json, or convert the file again with a current converter."
        )
    merges = [_pair(merge) for merge in fields.get("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=rule in _WHOLE_WORDS_FIRST))
    if rule in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    merges = [_pair(merge) for merge in fields.get("tokenizer.ggml.merges") or []]
    unknown = fields["tokenizer.ggml.tokens"][fields.get("tokenizer.ggml.unknown_token_id", 0)]
    model = _bpe(
        vocabulary,
        merges or _merges_by_score(vocabulary, fields.get("tokenizer.ggml.scores") or []),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception for a merge outside the vocabulary
        raise TokenizerError(f"The GGUF file's merges do not fit its vocabulary: {error}.") from error


def _merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins two neighbours whose union is a token, best score first: here, as merges."""
    if len(scores) < len(vocabulary):
        raise TokenizerError("The GGUF file has neither merges nor a score for each token; convert it again.")
    if max(map(len, vocabulary)) > _LONGEST_PIECE:  # each is cut everywhere
        raise TokenizerError(f"The GGUF file has a token of more than {_LONGEST_PIECE} characters; convert it again.")
    ranked = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [entry[4:] for entry in ranked]
