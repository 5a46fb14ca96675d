"""What the readers of all layouts share: tensors under our names, and the checks against the target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.errors import CheckpointError, IncompatibleParts
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.rope import shown
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.layouts.files import DrafterFiles
from draftwood.nets.parts import DraftHead, LowRankHead

EMBEDDING_ROUNDING = 0.02  # a stored copy of the target's embedding may differ by so much of it and still be a copy
_OF_THE_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")
_LARGEST = 1 << 14  # number of guesses, heads or layers that is believed
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def refused(files: DrafterFiles, reason: str) -> CheckpointError:
    """The files themselves are at fault."""
    return CheckpointError(f"The drafter {files.name} cannot be loaded: {reason}.")


def misfit(files: DrafterFiles, reason: str) -> IncompatibleParts:
    """The files may be sound, but not for this target."""
    return IncompatibleParts(f"The drafter {files.name} does not fit this target: {reason}.")


@contextmanager
def misfit_explained(files: DrafterFiles, target: Checkpoint) -> Iterator[None]:
    """Say first which model a drafter was trained for, if it says so and does not fit this one."""
    try:
        yield
    except IncompatibleParts as error:
        if files.target_name is None:
            raise
        size = files.target_hidden_size
        known = f" (hidden size {size})" if size else ""
        raise IncompatibleParts(
            f"This drafter was trained for {files.target_name}{known}; the target is {target.name} (hidden size "
            f"{target.config.hidden_size}). {error} Train one for this target (`draftwood train`), or take one "
            "that needs no training, such as ngram."
        ) from error


class Tensors:
    """A drafter's tensors under the names of our networks; those that are never asked for are refused at the end."""

    def __init__(self, files: DrafterFiles, rename: Callable[[str], str | None]) -> None:
        """`rename` gives our name for theirs, None where a tensor is not the drafter's to load."""
        self.files = files
        self._theirs: dict[str, str] = {}
        for name in files.shapes:
            ours = None if name.endswith("rotary_emb.inv_freq") or name in _OF_THE_TARGET else rename(name)
            if ours is None:
                continue
            if ours in self._theirs:
                raise refused(files, f"{name} and {self._theirs[ours]} are both {ours}")
            self._theirs[ours] = name
        self._left = set(self._theirs)

    def __contains__(self, name: str) -> bool:
        return name in self._theirs

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return self.files.shapes[self._theirs[name]]

    def names(self) -> Collection[str]:
        """All of them."""
        return self._theirs.keys()

    def raw(self, name: str) -> Tensor:
        """As it is stored."""
        self.require([name])
        self._left.discard(name)
        return self.files.read(self._theirs[name])

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """In float32, checked."""
        value = self.raw(name)
        theirs = self._theirs[name]
        if tuple(value.shape) != tuple(shape):
            raise refused(
                self.files,
                f"{theirs} has shape {tuple(value.shape)} where configuration and target ask for {tuple(shape)}",
            )
        if value.dtype not in _FLOATS:
            raise refused(
                self.files, f"{theirs} is stored as {value.dtype}, a quantised form; use the unquantised drafter"
            )
        value = value.float()
        if not bool(value.isfinite().all()):
            broken = int((~value.isfinite()).sum())
            raise refused(self.files, f"{theirs} holds {broken} numbers that are NaN or infinite; it is damaged")
        return value

    def require(self, names: Sequence[str]) -> None:
        """Refuse at once, with everything that is missing."""
        missing = [name for name in names if name not in self]
        if missing:
            raise refused(self.files, f"{len(missing)} tensors are missing: {_listed(missing)}")

    def stored(self, name: str) -> bool:
        """Whether the tensor is there and says something: speculators writes NaN for "take the target's"."""
        if name not in self:
            return False
        if not bool(self.files.read(self._theirs[name]).isnan().all()):
            return True
        self._left.discard(name)
        return False

    def fill(self, module: nn.Module, prefix: str = "", skip: tuple[str, ...] = ()) -> None:
        """Set a module's parameters to the tensors of the same names, behind a prefix."""
        wanted = {prefix + name: p for name, p in module.named_parameters() if not (prefix + name).startswith(skip)}
        self.require(list(wanted))
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.copy_(self.take(name, parameter.shape))

    def finish(self) -> None:
        """Refuse what was not asked for: it would have changed the network's outputs."""
        if self._left:
            raise refused(
                self.files,
                f"{len(self._left)} of its tensors are unknown to this layout: "
                f"{_listed(sorted(self._theirs[name] for name in self._left))}",
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def stripped(name: str, prefixes: Mapping[str, str]) -> str:
    """A name with the first prefix that fits replaced."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def draft_config(files: DrafterFiles, given: Mapping[str, Any], target: ModelConfig, tensors: Tensors) -> ModelConfig:
    """The drafter's own layers by its configuration; norms and biases are believed where a tensor proves them.

    Its rotary embedding is its own where the configuration states one, and otherwise the target's.
    """
    raw = {key: value for key, value in given.items() if key != "architectures" and value is not None}
    nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    stated = "rope_theta" in raw or "rope_theta" in nested
    raw.setdefault("rope_theta", nested.get("rope_theta", target.rope.theta))
    raw.setdefault("max_position_embeddings", target.max_positions)
    check_equal(files, "hidden size", raw.get("hidden_size"), target.hidden_size)
    check_equal(files, "vocabulary", raw.get("vocab_size"), target.vocab_size)
    try:
        config = ModelConfig.from_hf(raw)
    except CheckpointError as error:
        raise refused(files, str(error).removeprefix("This model cannot be run: ").rstrip(".")) from error
    if not stated and not nested:
        config = dataclasses.replace(config, rope=target.rope)
    if any(window is not None for window in config.windows):
        raise refused(files, "its layers attend through a sliding window, which drafters do not do here yet")
    _check_stored(files, config)
    return _with_proven_parts(config, tensors)


def _check_stored(files: DrafterFiles, config: ModelConfig) -> None:
    """Refuse layers larger than all that the files hold, before memory is taken for them."""
    heads = config.num_heads + config.num_kv_heads
    layer = 2 * config.hidden_size * heads * config.head_dim
    if any("mlp." in name for name in files.shapes):
        layer += 3 * config.hidden_size * config.intermediate_size
    stored = sum(math.prod(shape) for shape in files.shapes.values())
    if config.num_layers * layer > stored:
        raise refused(
            files,
            f"its configuration (num_hidden_layers, intermediate_size, heads) asks for {config.num_layers * layer:,} "
            f"weights, and its files hold {stored:,} numbers",
        )


def _with_proven_parts(config: ModelConfig, tensors: Tensors) -> ModelConfig:
    def proven(part: str) -> bool:
        return f"layers.0.{part}" in tensors

    return dataclasses.replace(
        config,
        qk_norm=config.qk_norm or proven("self_attn.q_norm.weight"),
        qkv_bias=config.qkv_bias or proven("self_attn.q_proj.bias"),
        output_bias=config.output_bias or proven("self_attn.o_proj.bias"),
        mlp_bias=config.mlp_bias or proven("mlp.down_proj.bias"),
    )


def check_equal(files: DrafterFiles, what: str, found: object, expected: int) -> None:
    """Refuse another number than the target's."""
    if found != expected:
        raise misfit(files, f"its {what} is {found}, the target's {expected}")


def whole_number(files: DrafterFiles, given: Mapping[str, Any], key: str) -> int:
    """A positive number that the configuration must state."""
    value = given.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refused(files, f"its configuration has {key} = {shown(value)} where a positive whole number is needed")
    if value > _LARGEST:
        raise refused(files, f"its configuration has {key} = {shown(value)}, and {_LARGEST} is the largest supported")
    return value


def mask_token(files: DrafterFiles, given: Mapping[str, Any], target: ModelConfig) -> int:
    """The target's token that stands for what is to be guessed."""
    token = given.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool):
        raise refused(files, f"its mask_token_id is {token!r}, which is no token")
    if not 0 <= token < target.vocab_size:
        raise misfit(files, f"its mask_token_id is {token}, and the target has {target.vocab_size} tokens")
    return token


def read_layers(files: DrafterFiles, ids: object, shift: int, target: ModelConfig) -> tuple[int, ...]:
    """Layers whose outputs are read, from ids that count `shift` higher than ours."""
    listed = list(ids) if isinstance(ids, Sequence) else []
    if not listed or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise refused(files, f"its list of target layers is {ids!r} where whole numbers are needed")
    layers = tuple(i - shift for i in listed)
    outside = [i for i in listed if not 0 <= i - shift < target.num_layers]
    if outside:
        raise misfit(
            files,
            f"it reads layer {outside[0]} of its list {listed}, but this target's ids go "
            f"from {shift} to {target.num_layers - 1 + shift}",
        )
    if len(set(layers)) != len(layers):
        raise refused(files, f"its list of target layers {listed} names one twice")
    return layers


@dataclass(frozen=True)
class DraftVocabulary:
    """The target's tokens that can be guessed, ascending, and which row of the file each is; None: all, as stored."""

    tokens: Tensor | None
    order: Tensor | None = None

    def rows(self, stored: Tensor) -> Tensor:
        """A stored table in the order of the tokens. [R, ...] -> [R, ...]."""
        return stored if self.order is None else stored[self.order]

    @classmethod
    def of(cls, tokens: Tensor) -> DraftVocabulary:
        """Tokens in the order the file has them."""
        ordered, order = tokens.sort()
        return cls(ordered, None if torch.equal(ordered, tokens) else order)


def read_vocabulary(tensors: Tensors, given: Mapping[str, Any], target: ModelConfig) -> DraftVocabulary:
    """By `d2t`, whose numbers are offsets: row i is the target's token i + d2t[i]."""
    files, whole = tensors.files, target.vocab_size
    stated = given.get("draft_vocab_size")
    mask = _read_mask(tensors, whole)
    if "d2t" in tensors:
        offsets = tensors.raw("d2t")
        if offsets.dim() != 1 or offsets.is_floating_point() or offsets.dtype == torch.bool:
            raise refused(
                files, f"d2t should be one row of whole numbers, and is {offsets.dtype} {tuple(offsets.shape)}"
            )
        tokens = offsets.long() + torch.arange(len(offsets))
    elif mask is not None:
        tokens = mask.nonzero().flatten()
    elif stated in (None, whole):
        return DraftVocabulary(None)
    else:
        raise refused(files, f"it guesses {stated} of {whole} tokens, but has no d2t to say which")
    check_tokens(files, tokens, whole)
    if stated is not None and stated != len(tokens):
        raise refused(files, f"d2t lists {len(tokens)} tokens where draft_vocab_size is {stated}")
    if mask is not None and (int(mask.sum()) != len(tokens) or not bool(mask[tokens].all())):
        raise refused(files, "t2d and d2t name different tokens")
    return DraftVocabulary(None) if torch.equal(tokens, torch.arange(whole)) else DraftVocabulary.of(tokens)


def _read_mask(tensors: Tensors, whole: int) -> Tensor | None:
    if "t2d" not in tensors:
        return None
    mask = tensors.raw("t2d")
    if tuple(mask.shape) != (whole,):
        raise misfit(tensors.files, f"its t2d covers {tuple(mask.shape)} tokens, the target's vocabulary is {whole}")
    return mask.bool()


def check_tokens(files: DrafterFiles, tokens: Tensor, whole: int) -> None:
    """Refuse tokens outside the vocabulary, and the same one twice."""
    outside = tokens[(tokens < 0) | (tokens >= whole)]
    if len(outside):
        raise misfit(
            files, f"it guesses token {int(outside[0])}, and the target's tokens go from 0 to {whole - 1} (see its d2t)"
        )
    if len(tokens.unique()) != len(tokens):
        raise refused(files, "two rows of its draft vocabulary are the same token")


def shared_head(words: TargetEmbeddings, tokens: Tensor | None) -> DraftHead:
    """Rows of the target's own."""
    rows = words.head(tokens).detach().to("cpu", torch.float32)
    return DraftHead(rows, tokens, words.config.vocab_size, own=False)


def read_head(
    tensors: Tensors, words: TargetEmbeddings, vocabulary: DraftVocabulary, name: str = "lm_head"
) -> DraftHead | LowRankHead:
    """The drafter's own head if it is stored, else the target's rows."""
    hidden, whole = words.config.hidden_size, words.config.vocab_size
    if f"{name}.down.weight" in tensors:
        narrow = LowRankHead(hidden, tensors.shape(f"{name}.down.weight")[0], whole)
        tensors.fill(narrow, f"{name}.")
        return narrow
    tokens = vocabulary.tokens
    if not tensors.stored(f"{name}.weight"):
        return shared_head(words, tokens)
    size = whole if tokens is None else len(tokens)
    weight = vocabulary.rows(tensors.take(f"{name}.weight", (size, hidden)))
    bias = vocabulary.rows(tensors.take(f"{name}.bias", (size,))) if f"{name}.bias" in tensors else None
    return DraftHead(weight, tokens, whole, own=True, bias=bias)


def check_embedding(
    tensors: Tensors, words: TargetEmbeddings, name: str = "embed_tokens.weight", but: int | None = None
) -> None:
    """Nothing is taken from a stored embedding (`but` one token's row), so it must be the target's."""
    if not tensors.stored(name):
        return
    size = words.config.vocab_size
    stored = tensors.take(name, (size, words.config.hidden_size))
    if but is not None:
        stored[but] = words.embed(torch.tensor([but], device=words.device))[0].to("cpu", torch.float32)
    gap = norm = 0.0
    for rows in torch.arange(size).split(8192):  # a whole vocabulary in float32 would be gigabytes
        theirs = words.embed(rows.to(words.device)).to("cpu", torch.float32)
        gap += float((stored[rows] - theirs).square().sum())
        norm += float(theirs.square().sum())
    if gap > EMBEDDING_ROUNDING**2 * norm:
        difference = (gap / norm) ** 0.5 if norm else float("inf")
        raise misfit(
            tensors.files,
            f"it brings an embedding of its own, which differs from the target's by {difference:.1%}; drafters here "
            f"read the target's, so only copies of it are taken (up to {EMBEDDING_ROUNDING:.0%} of rounding)",
        )
