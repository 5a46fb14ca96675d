"""A draft model of another vocabulary, by text: it reads and writes its own tokens; what it writes is encoded again.

Committed tokens are never encoded again, only read. The model has a cache of its own, in which a sequence lies in the
model's own tokens; the host drives it. Its drafts are chosen tokens, so every law is exact for them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftwood.drafters.encoder import Encoder
from draftwood.drafters.points import HostDrafter, HostTrees, PointTree
from draftwood.errors import IncompatibleParts
from draftwood.model.runner import ModelRunner
from draftwood.model.tokenizer import Tokenizer
from draftwood.protocols import HostView, Span
from draftwood.tree import POINT_CHAIN

LOOSE = 16  # tokens at the end of a text that may be written otherwise once it goes on
READ = 512  # rows that are read in one step; longer prompts take several, and are drafted for when they are read


@dataclass
class _Text:
    """One sequence as the draft model reads it."""

    ids: list[int] = field(default_factory=list)
    settled: int = 0  # of them, those that stay
    before: str = ""  # the end of what is settled
    loose: str = ""  # the text of the others
    read: int = 0  # of the target's tokens
    ran: list[int] = field(default_factory=list)  # what the cache holds, drafts included
    alike: int = 0  # leading tokens of `ids` and `ran` that are known to be the same
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def go_on(self, data: bytes, encoder: Encoder) -> None:
        """The text goes on."""
        self.loose += self.decoder.decode(data)
        written = encoder.behind(self.before, self.loose) if self.settled else encoder.whole(self.loose)
        self.ids[self.settled :] = written
        if len(self.ids) - self.settled <= 2 * LOOSE:
            return
        last = b"".join(map(encoder.bytes_of, self.ids[-LOOSE:]))
        text = last.decode("utf-8", "ignore")
        if len(text.encode()) == len(last) and self.loose.endswith(text):  # not in the middle of a character
            self.settled = len(self.ids) - LOOSE
            settled = self.before + self.loose.removesuffix(text)
            self.before, self.loose = settled[-4 * LOOSE :], text

    @property
    def whole(self) -> bool:
        """Whether the text does not end in the middle of a character."""
        return not self.decoder.getstate()[0]

    def cached(self) -> int:
        """Tokens that need no forward any more; the last one does: its logits are wanted."""
        limit = max(min(len(self.ids) - 1, len(self.ran)), 0)
        count = min(self.alike, limit)
        while count < limit and self.ids[count] == self.ran[count]:
            count += 1
        self.alike = min(count, self.settled)
        return count


class ReencodingDrafter(HostDrafter):
    """The likeliest continuation that a small model of another vocabulary writes, in the target's tokens.

    It stops before a token that would make the whole less likely than `least`.
    """

    law = POINT_CHAIN
    surplus = 1
    scores = True

    def __init__(
        self, runner: ModelRunner, tokenizer: Tokenizer, target: Tokenizer, size: int, depth: int, least: float = 0.2
    ) -> None:
        """`size`: tokens that the target has logits for."""
        if depth < 1 or not 0 <= least < 1:
            raise ValueError("drafts by text need at least one token and 0 <= least < 1")
        if runner.model.config.recurrent:
            raise IncompatibleParts("Drafts by text take words back, which a model with recurrent layers cannot.")
        self.runner, self.max_nodes, self.least = runner, depth, least
        self._own = Encoder(tokenizer, runner.model.config.vocab_size)
        self._theirs = Encoder(target, size)
        self._ends = tokenizer.eos_ids
        self._texts: dict[int, _Text] = {}

    def scored(self, view: HostView, nodes: int) -> HostTrees:
        """Read what is new, write on, and encode that."""
        asked = [b for b, room in enumerate(view.max_nodes) if room > 0 and nodes > 0 and view.max_depth[b] > 0]
        texts = {view.seq_ids[b]: self._text(view.seq_ids[b], view.tokens[b]) for b in asked}
        written = self._write(texts, nodes)
        grown = []
        for b, tokens in enumerate(view.tokens):
            tree = PointTree(tokens[-1], min(view.max_nodes[b], nodes), view.max_depth[b])
            drafts = written.get(view.seq_ids[b], [])
            if drafts and b in asked:
                self._fill(tree, texts[view.seq_ids[b]], drafts)
            grown.append(tree)
        return HostTrees.of(grown)

    def release(self, seq_id: int) -> None:
        """Forget it, and give its pages back."""
        self._texts.pop(seq_id, None)
        self.runner.cache.tables.close(seq_id)

    def _text(self, seq_id: int, tokens: Sequence[int]) -> _Text:
        text = self._texts.setdefault(seq_id, _Text())
        text.go_on(b"".join(map(self._theirs.bytes_of, tokens[text.read :])), self._own)
        text.read = len(tokens)
        return text

    def _write(self, texts: dict[int, _Text], count: int) -> dict[int, list[tuple[int, float]]]:
        """Tokens of its own that it writes behind each text, with the chance of all up to each."""
        logits = self._read(texts)
        written: dict[int, list[tuple[int, float]]] = {seq_id: [] for seq_id in logits}
        while logits:
            best = torch.stack(list(logits.values())).float().softmax(-1).max(-1)
            spans = []
            for seq_id, token, chance in zip(logits, best.indices.tolist(), best.values.tolist(), strict=True):
                own, text = written[seq_id], texts[seq_id]
                whole = chance * (own[-1][1] if own else 1.0)
                if token in self._ends or whole < self.least:
                    continue
                own.append((token, whole))
                if len(own) < count and self._has_room(seq_id, len(text.ids) + len(own)):
                    text.ran = [*text.ids, *(draft for draft, _ in own)]
                    spans.append(Span(seq_id, text.ran, len(text.ran) - 1, len(text.ran)))
            logits = self._run(spans, [True] * len(spans))
        return written

    def _read(self, texts: dict[int, _Text]) -> dict[int, torch.Tensor]:
        """Run what is new of texts; the logits behind those that are read to their end."""
        spans, ends, left = [], [], READ
        for seq_id, text in texts.items():
            start = text.cached()
            end = min(len(text.ids), start + left)
            if start < end and self._has_room(seq_id, end):
                spans.append(Span(seq_id, text.ids, start, end))
                ends.append(end == len(text.ids) and text.whole)
                text.ran = text.ids[:end]
                left -= end - start
        return self._run(spans, ends)

    def _has_room(self, seq_id: int, length: int) -> bool:
        """Whether the cache and the model have room for a text of so many tokens."""
        tables = self.runner.cache.tables
        if length > self.runner.model.config.max_positions:
            return False
        if seq_id not in tables:
            tables.open(seq_id, [])
        return tables.reserve(seq_id, length)

    def _run(self, spans: Sequence[Span], wanted: Sequence[bool]) -> dict[int, torch.Tensor]:
        """One forward; logits behind the last token of each span where they are wanted."""
        if not spans:
            return {}
        ends = torch.tensor([span.end - span.start for span in spans]).cumsum(0) - 1
        rows = ends[torch.tensor(wanted)].to(self.runner.device)
        logits = self.runner.forward(self.runner.cache.stage_text(spans, rows)).logits
        asked = [span.seq_id for span, want in zip(spans, wanted, strict=True) if want]
        return dict(zip(asked, logits, strict=True))

    def _fill(self, tree: PointTree, text: _Text, drafts: Sequence[tuple[int, float]]) -> None:
        """What was written, in the target's tokens. The last may be the beginning of a longer one: it stays out."""
        data = [self._own.bytes_of(token) for token, _ in drafts]
        said = b"".join(data).decode("utf-8", "ignore")
        tokens = self._theirs.behind((text.before + text.loose)[-4 * LOOSE :], said)
        node: int | None = 0
        end, at, done = 0, 0, len(data[0])
        for token in tokens if len(tokens) == 1 else tokens[:-1]:
            end += len(self._theirs.bytes_of(token))
            while done < end and at + 1 < len(data):
                at += 1
                done += len(data[at])
            node = None if node is None else tree.add(node, token, drafts[at][1])
            if node is None:
                return
