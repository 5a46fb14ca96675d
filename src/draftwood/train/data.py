"""What drafters are trained on: prompts, the target's own answers to them, and packed batches of both."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.engine.llm import LLM
from draftwood.errors import InvalidRequest
from draftwood.request import FinishReason, SamplingParams

MOST_ANSWERS = 128  # to one prompt in one request
Texts = list[tuple[tuple[int, ...], tuple[int, ...]]]  # prompts and answers


def read_prompts(paths: Iterable[Path]) -> list[str]:
    """Prompts of text files (a line each) and of JSON lines with `prompt`, `turns` or `text`; `.gz` as well."""
    prompts: list[str] = []
    for path in paths:
        try:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            lines = raw.decode().split("\n")  # not `splitlines`: texts hold other separators too
        except (OSError, UnicodeDecodeError, EOFError) as error:
            raise InvalidRequest(f"The prompts in {path} cannot be read: {error}.") from error
        is_json = ".jsonl" in path.suffixes
        prompts += [_prompt_of(line, path, i) if is_json else line for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidRequest("There are no prompts to learn from.")
    return prompts


def _prompt_of(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
        found = record.get("prompt") or record.get("text") or (record.get("turns") or [None])[0]
    except (json.JSONDecodeError, AttributeError) as error:
        raise InvalidRequest(f"Line {number} of {path} is no JSON object: {error}.") from error
    if not isinstance(found, str):
        raise InvalidRequest(f"Line {number} of {path} has neither a prompt nor turns nor a text.")
    return found


@dataclass(frozen=True)
class Corpus:
    """Texts one behind the other, each a prompt and the target's answer."""

    tokens: Tensor  # [total] int32
    ends: Tensor  # [texts] int64 where each ends
    prompt_lengths: Tensor  # [texts] int64

    def __len__(self) -> int:
        return len(self.ends)

    def text(self, i: int) -> Tensor:
        """Tokens of text i."""
        return self.tokens[int(self.ends[i - 1]) if i else 0 : int(self.ends[i])]

    @property
    def num_answered(self) -> int:
        """Tokens that the target wrote."""
        return len(self.tokens) - int(self.prompt_lengths.sum())

    @property
    def fingerprint(self) -> str:
        """A hash of everything in it."""
        parts = (self.tokens.to(torch.int32), self.ends, self.prompt_lengths)
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]

    def split(self, held_out: int) -> tuple[Corpus, Corpus]:
        """All but the last so many texts, and those."""
        cut = len(self) - held_out
        return self._slice(0, cut), self._slice(cut, len(self))

    def _slice(self, first: int, last: int) -> Corpus:
        begin = int(self.ends[first - 1]) if first else 0
        end = int(self.ends[last - 1]) if last else 0
        return Corpus(self.tokens[begin:end], self.ends[first:last] - begin, self.prompt_lengths[first:last])

    def save(self, path: Path) -> None:
        """To one safetensors file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """What `save` wrote."""
        return cls(**load_file(path))

    @classmethod
    def of(cls, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Corpus:
        """Of (prompt, answer) pairs of tokens."""
        tokens = [token for prompt, answer in texts for token in (*prompt, *answer)]
        lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in texts])
        return cls(
            torch.tensor(tokens, dtype=torch.int32),
            lengths.cumsum(0),
            torch.tensor([len(prompt) for prompt, _ in texts]),
        )


def invent_prompts(llm: LLM, count: int, max_tokens: int = 128, seed: int = 0) -> Iterator[list[str]]:
    """Let the target write what a user might ask it, wave by wave (Magpie, arXiv 2406.08464).

    Its chat template up to where the user's words begin is all it gets. Short and repeated ones are left out, so there
    may be fewer than `count`.
    """
    if not llm.tokenizer.has_chat_template:
        raise InvalidRequest(
            "Only a model that knows conversations can invent what it is asked: give prompts (--data)."
        )
    mark = "\u2042"
    opening = llm.tokenizer.render_chat([{"role": "user", "content": mark}]).partition(mark)[0]
    start = llm.tokenizer.encode(opening, special=False)
    seen: set[str] = set()
    for first in range(0, count, min(MOST_ANSWERS, llm.config.max_running)):
        wave = min(MOST_ANSWERS, llm.config.max_running, count - first)
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed + first, n=wave)
        written = llm.generate([start], params)[0].completions
        fresh = [each.text.strip() for each in written if each.finish_reason == FinishReason.STOP]
        fresh = [text for text in dict.fromkeys(fresh) if len(text) >= 16 and text not in seen]
        seen.update(fresh)
        yield fresh


def regenerate(
    llm: LLM,
    prompts: Sequence[str],
    max_tokens: int,
    temperatures: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    first: int = 0,
) -> Iterator[tuple[int, Texts]]:
    """Let the target answer all prompts but the `first`, in waves; how many are done, and the texts of each wave.

    Prompts take turns at the temperatures, and those that do not fit are left out. As many are handed over as run at
    a time: admitting one by one into a full batch is slow on a GPU.
    """
    chats = llm.tokenizer.has_chat_template
    wave = llm.config.max_running * len(temperatures)
    for start in range(first, len(prompts), wave):
        some = prompts[start : start + wave]
        texts: Texts = []
        for k, temperature in enumerate(temperatures):
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + start)
            asked = [[{"role": "user", "content": text}] if chats else text for text in some[k :: len(temperatures)]]
            results = llm.generate(asked, params)
            texts += [(r.prompt_token_ids, r.token_ids) for r in results if r.finish_reason != "error" and r.token_ids]
        yield start + len(some), texts


@dataclass(frozen=True)
class TextBatch:
    """B rows of T places, each row several texts one behind the other."""

    tokens: Tensor  # [B, T] int64
    text: Tensor  # [B, T] int64 number of the text within its row, -1 behind the last
    positions: Tensor  # [B, T] int64 within the text
    answer: Tensor  # [B, T] bool: written by the target

    def to(self, device: torch.device) -> TextBatch:
        """The same elsewhere."""
        return TextBatch(*(part.to(device, non_blocking=True) for part in vars(self).values()))

    def follows(self, ahead: int) -> Tensor:
        """Whether the place `ahead` behind each one belongs to the same text. [B, T - ahead] bool."""
        return (self.text[:, ahead:] == self.text[:, : self.text.shape[1] - ahead]) & (self.text[:, ahead:] >= 0)


class PackedBatches:
    """Epochs of a corpus in rows of one length, in an order that the seed and the epoch decide."""

    def __init__(self, corpus: Corpus, rows: int, length: int, seed: int = 0) -> None:
        self.corpus, self.rows, self.length, self.seed = corpus, rows, length, seed
        self._count = len(self._packed(0)) // rows
        if self._count < 1:
            raise InvalidRequest(
                f"The texts do not fill one batch of {rows} rows of {length} tokens: give more prompts, or fewer rows."
            )

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int, skip: int) -> Iterator[TextBatch]:
        """All batches of an epoch but the first `skip`."""
        packed = self._packed(number)
        for i in range(skip, self._count):
            yield self._batch(packed[i * self.rows : (i + 1) * self.rows])

    def _packed(self, epoch: int) -> list[list[int]]:
        """Rows of texts, as many as fit; a text that is too long is cut."""
        order = list(range(len(self.corpus)))
        random.Random(self.seed * 1000003 + epoch).shuffle(order)
        ends = self.corpus.ends.tolist()
        lengths = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        rows: list[list[int]] = []
        open_rows: list[tuple[int, list[int]]] = []  # room, texts
        for i in order:
            length = min(lengths[i], self.length)
            at = next((k for k, (room, _) in enumerate(open_rows) if room >= length), None)
            room, texts = (self.length, []) if at is None else open_rows.pop(at)
            texts.append(i)
            open_rows.append((room - length, texts))
            if len(open_rows) > 32:
                rows.append(open_rows.pop(min(range(len(open_rows)), key=lambda k: open_rows[k][0]))[1])
        return rows + [texts for _, texts in open_rows]

    def _batch(self, rows: list[list[int]]) -> TextBatch:
        shape = (len(rows), self.length)
        tokens, text = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
        positions, answer = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        for b, texts in enumerate(rows):
            at = 0
            for number, i in enumerate(texts):
                own = self.corpus.text(i)[: self.length - at]
                end = at + len(own)
                tokens[b, at:end], text[b, at:end] = own.long(), number
                positions[b, at:end] = torch.arange(len(own))
                answer[b, at + int(self.corpus.prompt_lengths[i]) : end] = True
                at = end
        return TextBatch(tokens, text, positions, answer)


def frequent_tokens(corpus: Corpus, count: int, vocabulary: int) -> Tensor:
    """The tokens the target writes most often, in ascending order; those never seen fill up. [count]."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), corpus.ends[:-1]])
    place = torch.arange(len(corpus.tokens))
    owner = torch.bucketize(place, corpus.ends, right=True)
    written = corpus.tokens[place - starts[owner] >= corpus.prompt_lengths[owner]].long()
    counts = torch.bincount(written, minlength=vocabulary)
    return torch.argsort(counts, descending=True, stable=True)[:count].sort().values
