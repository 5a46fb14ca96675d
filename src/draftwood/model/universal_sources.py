"""Sources in transformers' modules: an encoder's states, and the rows that attend to them (`universal_rows.py`).

A source takes the first slots of its sequence, one for each state of the encoder. There lie the keys and values that
every decoder layer makes of the states: the modules hand them to their cache when they run for the first time, and
that cache writes them to our pages. From then on they are read from there, as the text's own are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from draftwood.batch import ForwardBatch, Pages, Source
from draftwood.errors import CheckpointError
from draftwood.model.universal_rows import LayerShape, Layout, RowsCache, Step, as_run, current, require_order


@dataclass(frozen=True)
class Layouts:
    """Where a text's keys and values lie in its slots, and where a source's lie in those before."""

    text: Layout
    source: Layout

    @classmethod
    def of(cls, text: tuple[LayerShape, ...], source: tuple[LayerShape, ...]) -> Layouts:
        """Both in planes of one width."""
        width = Layout.of((*text, *source)).plane
        return cls(Layout.of(text, width), Layout.of(source, width))

    @property
    def total(self) -> int:
        """Planes that any slot needs."""
        return max(self.text.total, self.source.total)


@dataclass
class SourcedStep(Step):
    """A forward of text rows, some keys of which lie behind a source's; a layer's second question is for the source's.

    The batch knows the text alone: positions, lengths and numbers of keys are without the source.
    """

    source_lengths: Sequence[int] = ()
    sources: Layout | None = None
    source_calls: int = 0

    @classmethod
    def over(cls, batch: ForwardBatch, pages: Pages, layouts: Layouts, max_text: int) -> SourcedStep:
        """The text rows of a batch."""
        before = batch.source_lengths
        assert before is not None
        owner = torch.arange(len(before)).repeat_interleave(batch.row_offsets.diff(), output_size=len(batch.tokens))
        skipped = before[owner]
        text = replace(
            batch,
            positions=(batch.positions - skipped).clamp(max=max_text - 1),
            visible=batch.visible - skipped,
            tree_base=batch.tree_base - before,
            num_keys=batch.num_keys - before,
        )
        return cls(text, pages, layouts.text, source_lengths=before.tolist(), sources=layouts.source)

    @cached_property
    def all_slots(self) -> list[Tensor]:
        """Of each sequence, source and text. S x [keys]."""
        assert self.pages is not None
        within = torch.arange(self.pages.page_size)
        ends = [before + own for before, own in zip(self.source_lengths, self.num_keys, strict=True)]
        tables = self.batch.block_table.clamp(min=0)
        slots = [(table[:, None] * self.pages.page_size + within).view(-1) for table in tables]
        return [own[:end] for own, end in zip(slots, ends, strict=True)]

    @cached_property
    def slots(self) -> list[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where each text's keys lie, in order. S x [keys]."""
        return [own[before:] for own, before in zip(self.all_slots, self.source_lengths, strict=True)]

    @cached_property
    def source_runs(self) -> list[slice | Tensor]:
        """Where each source's lie."""
        return [as_run(own[:before]) for own, before in zip(self.all_slots, self.source_lengths, strict=True)]

    @cached_property
    def source_keys(self) -> Step:
        """The pages as sources use them."""
        return Step(self.batch, self.pages, self.sources)

    @cached_property
    def marker(self) -> Tensor:
        """What stands for all keys of all sources: layers pass it on, and are known to ask for those by it."""
        return self.batch.tokens.new_zeros(1, 1, 1, 1)

    def beside(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        """Attention over the sources, by rows that see all of their own."""
        if key is not self.marker:
            return None
        assert self.sources is not None
        call, self.source_calls = self.source_calls, self.source_calls + 1
        if call >= len(self.sources.shapes) or self.sources.shapes[call].module is not module:
            raise CheckpointError("The model's layers attend to sources in another order than when it was loaded.")
        rows = [self._attend_one(call, i, query[0], scale) for i in range(len(self.source_lengths))]
        return torch.cat(rows, 1).transpose(0, 1)[None].contiguous()

    def _attend_one(self, call: int, i: int, query: Tensor, scale: float) -> Tensor:
        """The rows of one sequence. [H, n, Dv]."""
        low, high = self.offsets[i], self.offsets[i + 1]
        keys, values = self.source_keys.read(call, self.source_runs[i])
        grouped = query[:, low:high].unflatten(0, (len(keys), -1))
        weights = (grouped @ keys[:, None].transpose(2, 3) * scale).softmax(-1)
        return (weights @ values[:, None]).flatten(0, 1)


@dataclass
class ReadingStep(Step):
    """A forward of one row for each source, which is thrown away: what counts are keys and values of the states."""

    targets: Sequence[tuple[Tensor, Tensor]] = ()  # of each source, which states are wanted, and their slots
    shapes: list[LayerShape] = field(default_factory=list)  # of sources, where there are no pages
    calls_of: list[nn.Module] = field(default_factory=list)
    markers: dict[int, Tensor] = field(default_factory=dict)  # what was given to layers instead of keys, by id

    def take(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write what a layer made of all states, [b, K, states, D] twice; markers for it."""
        require_order(layer, len(self.markers))
        if self.pages is None:
            self.shapes.append(LayerShape(key.shape[1], key.shape[-1], value.shape[-1]))
        for b, (states, slots) in enumerate(self.targets):
            own = Step(replace(self.batch, slots=slots), self.pages, self.layout)
            own.write(layer, key[b].index_select(1, states), value[b].index_select(1, states))
        marker = key[:, :, :1]
        self.markers[id(marker)] = marker  # which stays, and so does its id
        return marker, value[:, :, :1]

    def beside(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        """Nothing, of the right shape; without pages, shapes of texts' keys are asked for as well."""
        if id(key) in self.markers:
            self.calls_of.append(module)
        elif self.pages is None:
            self.found.append(LayerShape(key.shape[1], key.shape[-1], value.shape[-1], module))
        return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1])

    @property
    def layouts(self) -> Layouts:
        """What was found without pages."""
        if not self.found or len(self.calls_of) != len(self.shapes) or not self.shapes:
            raise CheckpointError("its layers do not ask for attention to text and source")
        known = (replace(shape, module=module) for shape, module in zip(self.shapes, self.calls_of, strict=True))
        return Layouts.of(tuple(self.found), tuple(known))


class SourceCache(RowsCache):
    """Takes what layers make of an encoder's states, or says that it is there."""

    def __init__(self, step: Step, marker: Tensor | None, layers: int) -> None:
        super().__init__(step)
        self.layers: list[Any] = [SimpleNamespace(keys=marker, values=marker)] * layers

    def __bool__(self) -> bool:
        return True

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Of all states."""
        if not isinstance(self.step, ReadingStep):
            raise CheckpointError("a layer makes keys of a source that it has been given")
        return self.step.take(key_states, value_states, layer_idx)


class BothCaches(EncoderDecoderCache):
    """A text's and a source's."""

    def __init__(self, step: Step, source: SourceCache) -> None:
        self.self_attention_cache, self.cross_attention_cache = RowsCache(step), source
        self.layers = []
        self.is_updated = dict.fromkeys(range(len(source.layers)), True)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Of the text."""
        return self.self_attention_cache.get_seq_length(layer_idx)


def with_distances(decoder: nn.Module) -> None:
    """Let biases by distance (T5's) be those between our rows and keys, along each row's own path."""
    for module in decoder.modules():
        original = getattr(module, "compute_bias", None)
        if original is not None and getattr(module, "has_relative_attention_bias", False):
            module.compute_bias = _by_distance(original)  # type: ignore[assignment]


def _by_distance(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def bias(query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Tensor:
        step = current()
        if not isinstance(step, SourcedStep):
            past = 0 if isinstance(step, ReadingStep) else past_seen_tokens
            return original(query_length, key_length, device, past)
        positions = step.batch.positions
        last = int(positions.max())
        table = original(1, last + 1, device, last)[0, :, 0].flip(-1)  # [H, distance]
        distances = (positions[:, None] - step.key_positions).clamp(0, last)
        return table[:, distances][None]

    return bias


class Encoder:
    """An encoder's modules, and what they last gave: a draft model with the same encoder reads it too."""

    def __init__(self, modules: Any, padding: int | None) -> None:
        self.modules = modules
        self._padding = padding  # a token behind shorter sources; None: only sources of one length are read together
        self._last: dict[str, Tensor] = {}

    def states(self, sources: Sequence[Source]) -> list[Tensor]:
        """Of each source [n, hidden]; those of about the same length are read together."""
        known = {source.key: source for source in sources}
        kept = {key: self._last[key] for key in known if key in self._last}
        for group in self._alike([source for key, source in known.items() if key not in kept]):
            kept |= dict(zip([source.key for source in group], self._read(group), strict=True))
        self._last = kept
        return [kept[source.key] for source in sources]

    def _read(self, sources: Sequence[Source]) -> Iterator[Tensor]:
        inputs = [source.inputs for source in sources]
        with torch.inference_mode():
            if inputs[0].dim() > 1:
                dtype = next(self.modules.parameters()).dtype
                found = self.modules(torch.stack(inputs).to(dtype)).last_hidden_state
            else:
                padded = nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=self._padding or 0)
                found = self.modules(input_ids=padded, attention_mask=_there(inputs)).last_hidden_state
        for source, own in zip(sources, found, strict=True):
            if len(own) < len(source):
                raise CheckpointError(f"its encoder makes {len(own)} states where {len(source)} are expected")
            yield own[: len(source)]

    def _alike(self, sources: Sequence[Source]) -> list[list[Source]]:
        """Groups in which the longest is less than twice as long as the shortest, or of one length."""
        groups: dict[int, list[Source]] = {}
        for source in sources:
            length = len(source)
            groups.setdefault(length if self._padding is None else length.bit_length(), []).append(source)
        return list(groups.values())


def _there(inputs: Sequence[Tensor]) -> Tensor:
    """Which of the padded tokens are a source's. [b, longest] int64."""
    lengths = torch.tensor([len(own) for own in inputs])
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()
