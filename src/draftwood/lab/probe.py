"""Asks parts of a model what they would draft at many places of real answers at once, and how long they take.

At a place the whole model has read the text before it; a part drafts from there, token by token. All places of all
texts are rows of the same forwards: a row sees its own text before its place, and its own drafts, which lie behind.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, GivenRows
from draftwood.cache.kv import Places, stage_behind
from draftwood.engine.captured import Graphs
from draftwood.errors import InvalidRequest
from draftwood.model.runner import Model, ModelRunner, Sliceable
from draftwood.model.spec import Sublayers, apart
from draftwood.protocols import Span
from draftwood.shape import num_words, own_bits

ROUNDS = 8  # in which everything that is compared is timed in turn; the best of each counts


@dataclass(frozen=True)
class Answer:
    """A text of the model's own, and where its answer begins."""

    tokens: Sequence[int]
    begins: int


@dataclass(frozen=True)
class Costs:
    """Seconds of a forward here: of the whole model by its rows, and of what each item adds to a single one."""

    rows: tuple[float, ...]  # of 1, 2, … rows
    items: tuple[float, ...]

    @property
    def plain(self) -> float:
        """A step of plain decoding."""
        return self.rows[0]

    def draft(self, skipped: Sequence[int]) -> float:
        """A single row without these items."""
        return max(self.plain - sum(self.items[i] for i in skipped), self.plain / 100)

    def ratio(self, survival: Sequence[float], draft: float) -> tuple[float, int]:
        """The best rate of chains over plain decoding's, and how deep they are then. `survival[k]`: the chance that k +
        1 drafts are accepted; `draft`: seconds of one.
        """
        gained, best = 1.0, (0.0, 1)
        for depth, chance in enumerate(survival, 1):
            gained += chance
            best = max(best, (self.plain * gained / (depth * draft + self.rows[depth]), depth))
        return best


class Probe:
    """Places in answers of a model; use it inside `reading`.

    What can be left out are items: the attention and the MLP of each layer in turn, or, of models where these cannot be
    told apart, whole layers.
    """

    def __init__(self, target: ModelRunner, answers: Sequence[Answer], places: int, depth: int) -> None:
        """`places` of each answer, as far apart as they can be, for chains of `depth` drafts."""
        if not isinstance(target.model, Sliceable):
            raise InvalidRequest("The model runs on transformers' own modules, of which no part can draft.")
        long = [answer for answer in answers if len(answer.tokens) - answer.begins > depth + 1]
        if not long:
            raise InvalidRequest(
                f"No answer has more than {depth + 1} tokens: give other prompts, or a longer --tokens."
            )
        self.target, self.model, self.depth, self._answers = target, target.model, depth, long
        spots = [torch.linspace(a.begins, len(a.tokens) - depth - 1, places).long() for a in long]
        device = target.device
        self.places = torch.stack(spots).to(device)  # [S, R] of the last token that is known
        self.num_layers, specs = self.model.config.num_layers, self.model.config.layer_specs
        self._each = 2 if apart(specs) else 1  # items of a layer
        self.num_items = self._each * self.num_layers
        widest = max(len(answer.tokens) for answer in long)
        text = torch.tensor([[*a.tokens, *[0] * (widest - len(a.tokens))] for a in long], device=device)
        ahead = self.places[..., None] + torch.arange(depth + 1, device=device)
        self._text = text.gather(1, ahead.flatten(1)).view(ahead.shape)  # [S, R, 1 + depth]
        self._lengths = torch.tensor([len(a.tokens) for a in long], device=device)

    @contextmanager
    def reading(self) -> Iterator[Probe]:
        """The model has read all texts; their pages are free afterwards."""
        tables, cache = self.target.cache.tables, self.target.cache
        spans = [Span(-1 - i, a.tokens, 0, len(a.tokens)) for i, a in enumerate(self._answers)]
        try:
            for span in spans:
                tables.open(span.seq_id, [])
                if not tables.reserve(span.seq_id, span.end + self.places.shape[1] * self.depth):
                    raise InvalidRequest(
                        "The cache is too small for so many answers: raise --cache-tokens, or ask less."
                    )
            with torch.inference_mode():
                for span in spans:
                    self.target.forward(cache.stage_text([span]))
                self._table = cache.block_table(spans).clamp(min=0)
                yield self
        finally:
            for span in spans:
                if span.seq_id in tables:
                    tables.close(span.seq_id)

    def survival(self, skipped: Sequence[int], depth: int | None = None) -> list[float]:
        """Of greedy chains without these items, how many are right for 1, 2, … tokens."""
        model = self._without(skipped)
        tokens = self._text[..., 0]
        right = torch.ones_like(tokens, dtype=torch.bool)
        found = []
        for step in range(depth or self.depth):
            logits = model.forward(self._rows(tokens, step), self.target.cache.memory).logits
            tokens = logits.argmax(-1).view_as(tokens)
            right &= tokens == self._text[..., step + 1]
            found.append(float(right.float().mean()))
        return found

    def divergence(self, skipped: Sequence[int]) -> float:
        """How far the first draft's distribution is from the whole model's without these items, on average."""
        batch, memory = self._rows(self._text[..., 0], 0), self.target.cache.memory
        models = self.model, self._without(skipped)
        p, q = (model.forward(batch, memory).logits.double().log_softmax(-1) for model in models)
        return float((p.exp() * (p - q)).sum(-1).mean())

    def sets(self, skipped: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Of items: whole layers, layers of which the attention alone is left out, and those of which the MLP is."""
        parts = [{i // self._each for i in skipped if i % self._each == part} for part in (0, self._each - 1)]
        whole = parts[0] & parts[1]
        return tuple(tuple(sorted(own)) for own in (whole, parts[0] - whole, parts[1] - whole))

    def streams(self) -> list[Tensor]:
        """The residual stream at all places behind each item. [S * R, hidden] each."""
        batch = self._unheard(self._rows(self._text[..., 0], 0))
        every = frozenset(range(self.num_layers))
        made = self.model.forward(batch, self.target.cache.memory, every).features
        ends = [made[i].clone() for i in range(self.num_layers)]
        if self._each == 1:
            return ends
        halves = [self.item(2 * i, ends[i - 1] if i else None) for i in range(self.num_layers)]
        return [stream for both in zip(halves, ends, strict=True) for stream in both]

    def item(self, i: int, stream: Tensor | None) -> Tensor:
        """The stream behind an item, if this one comes in; None: the text. [S * R, hidden]."""
        batch, layer = self._unheard(self._rows(self._text[..., 0], 0)), i // self._each
        others = [j for j in range(layer * self._each, (layer + 1) * self._each) if j != i]
        part = self.model.part([layer], self._sublayers(others))
        given = None if stream is None else GivenRows(stream.clone())
        return part.forward(batch, self.target.cache.memory, frozenset({0}), given).features[0].clone()

    def costs(self) -> Costs:
        """Measured here and now, at the end of the first text."""
        specs, kinds = self.model.config.layer_specs, {}
        every = [(specs[i // self._each], i % self._each) for i in range(self.num_items)]
        for i, kind in enumerate(every):
            kinds.setdefault(kind, []).append(i)
        removed = [own[: max(1, len(own) // 2)] for own in kinds.values()]
        parts = [(self._without(items), 1) for items in removed]
        sizes = [(self.model, 1 + count) for count in range(self.depth + 1)]
        seconds = self._seconds([*sizes, *parts])
        # Rows make no step faster: one that is slower than one with more rows was disturbed.
        rows = list(itertools.accumulate(reversed(seconds[: len(sizes)]), min))[::-1]
        least = rows[0] / (100 * len(every))
        saved = [max((rows[0] - s) / len(own), least) for s, own in zip(seconds[len(sizes) :], removed, strict=True)]
        added = dict(zip(kinds, saved, strict=True))
        return Costs(tuple(rows), tuple(added[kind] for kind in every))

    def draft_share(self, skipped: Sequence[int]) -> float:
        """The time of a single row without these items, as a share of the whole model's; timed in turn."""
        whole, part = self._seconds([(self.model, 1), (self._without(skipped), 1)])
        return part / whole

    def _without(self, skipped: Sequence[int]) -> Model:
        whole = self.sets(skipped)[0]
        return self.model.part([i for i in range(self.num_layers) if i not in whole], self._sublayers(skipped))

    def _sublayers(self, items: Sequence[int]) -> Sublayers:
        """Those of them that are half a layer."""
        _, attention, mlp = self.sets(items)
        return Sublayers(frozenset(attention), frozenset(mlp))

    def _rows(self, tokens: Tensor, step: int) -> ForwardBatch:
        """Draft number `step` of every place's chain: the rows before it lie behind the text, step by step."""
        (texts, count), cache = tokens.shape, self.target.cache
        index = torch.arange(count, device=tokens.device).expand(texts, -1)
        words = num_words(1 + count * self.depth)
        bits = sum(own_bits(1 + index + count * earlier, words) for earlier in range(step + 1))
        assert isinstance(bits, Tensor)
        places = Places(index + count * step, self.places + step, bits.flatten(0, 1), step + 1, count * self.depth)
        highest = self.target.model.config.max_positions
        batch = stage_behind(self._lengths, self._table, tokens, places, cache.page_size, highest)
        seen = self.places.reshape(-1)  # keys before the place; its own token is the first of its chain
        return replace(batch, visible=seen, positions=seen + step)

    @staticmethod
    def _unheard(batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, logit_rows=batch.logit_rows[:0])

    def _seconds(self, asked: Sequence[tuple[Model, int]]) -> list[float]:
        """Of forwards of some models with so many rows; as graphs on a GPU, as steps run there."""
        on_gpu = self.target.device.type == "cuda"
        runs = [self._last_rows(model, rows) for model, rows in asked]
        runs = [Graphs().capture(run) if on_gpu else run for run in runs]
        rounds = [[_timed(run, on_gpu) for run in runs] for _ in range(1 + ROUNDS)]
        return [min(times) for times in zip(*rounds[1:], strict=True)]

    def _last_rows(self, model: Model, rows: int) -> Callable[[], None]:
        """A forward of the first text's last rows."""
        index = torch.arange(-rows, 0, device=self.target.device)[None]
        tokens, cache = torch.full_like(index, int(self._text[0, 0, 0])), self.target.cache
        places = Places(index, index)
        highest = self.target.model.config.max_positions
        batch = stage_behind(self._lengths[:1], self._table[:1], tokens, places, cache.page_size, highest)

        def run() -> None:
            model.forward(batch, cache.memory)

        return run


def _timed(run: Callable[[], None], on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start
