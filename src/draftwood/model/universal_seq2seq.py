"""An encoder-decoder of transformers as a model: the encoder once for each source, the decoder over our rows and pages.

As `universal.py` does for decoders: how the modules compute is theirs, and held against their own forward when loaded.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, ForwardOutput, Pages, Source
from draftwood.cache.kv import KVCache
from draftwood.errors import CheckpointError, InvalidRequest
from draftwood.model.encoders import modules_of
from draftwood.model.self_check import LENGTHS, NODES, PAGE, SEQUENCES, worst_difference
from draftwood.model.spec import EncoderSpec
from draftwood.model.universal import TOLERANCE, attending, bytes_of, loaded, said, set_attention
from draftwood.model.universal_attention import CALLED
from draftwood.model.universal_folder import UniversalCheckpoint, UniversalConfig, hf_config
from draftwood.model.universal_rows import Step, running
from draftwood.model.universal_sources import (
    BothCaches,
    Encoder,
    Layouts,
    ReadingStep,
    SourceCache,
    SourcedStep,
    with_distances,
)
from draftwood.model.weights import FORMATS

_PARTS = ("window", "local", "block", "chunk", "attention_type")
SOURCES = (5, 7)  # lengths that it is checked with: read together, one of them padded


class Seq2SeqModel:
    """Modules of transformers that read sources and run our rows; on a CPU."""

    implementation = "transformers-seq2seq-1"
    strict = False  # torch's products choose their order of summation by the number of rows

    def __init__(self, checkpoint: UniversalCheckpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.weights = dtype, device, FORMATS["stored"]
        assert checkpoint.config.encoder is not None
        self._spec: EncoderSpec = checkpoint.config.encoder
        self._words = checkpoint.config.vocab_size
        self._modules = loaded(modules_of(hf_config(checkpoint.stated)), checkpoint, dtype, device)
        self._decoder = self._modules.get_decoder()
        self._padding = None if _sees_parts(hf_config(checkpoint.stated).to_dict()) else self._padding_token()
        self.encoder = Encoder(self._encoder_apart(), self._padding)
        with_distances(self._decoder)
        set_attention(self._decoder, CALLED)
        self.config, self._layouts = self._checked(checkpoint)

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        return bytes_of(self._modules)

    def share_encoder(self, other: object) -> bool:
        """Read with the encoder of `other` from now on, if it is the same one; whether it is."""
        if not isinstance(other, Seq2SeqModel):
            return False
        own, theirs = (dict(model.encoder.modules.state_dict()) for model in (self, other))
        same = type(self.encoder.modules) is type(other.encoder.modules) and own.keys() == theirs.keys()
        if not same or not all(own[n].dtype == theirs[n].dtype and torch.equal(own[n], theirs[n]) for n in own):
            return False
        trial = [self._trial_sources()[0]]  # what weights do not show, as the number of heads
        if not torch.equal(self.encoder.states(trial)[0], other.encoder.states(trial)[0]):
            return False
        for mine, its in zip(self.encoder.modules.parameters(), other.encoder.modules.parameters(), strict=True):
            mine.data = its.data  # one copy in memory
        self.encoder = other.encoder
        return True

    def forward(self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset()) -> ForwardOutput:
        """Read the sources that have rows in `batch`, then run its rows of text."""
        if needs:
            raise InvalidRequest("Models that run on transformers' own modules give no features of their layers.")
        return ForwardOutput(self._forward(batch, cache, self._layouts), {})

    def _forward(self, batch: ForwardBatch, cache: Pages, layouts: Layouts) -> Tensor:
        if batch.unread:
            self._read(batch, cache, layouts)
            batch = _without_sources(batch)
        if batch.source_lengths is None:  # no sequence has a source
            batch = replace(batch, source_lengths=torch.zeros_like(batch.tree_base))
        if not len(batch.tokens):
            return torch.zeros(0, self._words, dtype=self.dtype)
        step = SourcedStep.over(batch, cache, layouts, self._spec.max_text)
        cross = SourceCache(step, step.marker, len(layouts.source.shapes))
        nothing = torch.zeros(1, 1, 1, dtype=self.dtype)  # keys are there already
        return self._run(step, cross, nothing, batch.tokens[None])[0, batch.logit_rows]

    def _run(self, step: Step, cross: SourceCache, states: Tensor, tokens: Tensor) -> Tensor:
        with running(step), torch.inference_mode():
            return self._modules(
                encoder_outputs=(states,), decoder_input_ids=tokens, decoder_attention_mask=torch.ones_like(tokens),
                past_key_values=BothCaches(step, cross), use_cache=True,
            ).logits  # fmt: skip

    def _read(self, batch: ForwardBatch, cache: Pages | None, layouts: Layouts | None) -> ReadingStep:
        """Write keys and values of the sources' rows; of all states, but only for rows that the batch has."""
        offsets, targets = batch.row_offsets.tolist(), []
        for i, source in batch.unread:
            rows = slice(offsets[i], offsets[i + 1])
            states = batch.positions[rows]
            own = states < len(source)
            targets.append((states[own], batch.slots[rows][own]))
        states = torch.nn.utils.rnn.pad_sequence(self.encoder.states([s for _, s in batch.unread]), batch_first=True)
        zero = torch.zeros(1, dtype=torch.int64)
        one, offset = zero + 1, torch.tensor([0, 1])
        row = ForwardBatch(zero, zero, zero, one, zero[None], offset, one, one, zero[None], zero)
        layout = None if layouts is None else layouts.source
        step = ReadingStep(row, cache, layout, targets=targets if cache is not None else ())
        starts = torch.full((len(states), 1), self._spec.start)
        words = self._run(step, SourceCache(step, None, 0), states, starts).shape[-1]
        if words != self._words:
            raise CheckpointError(f"it gives logits of {words} tokens, and its configuration says {self._words}")
        return step

    def _checked(self, checkpoint: UniversalCheckpoint) -> tuple[UniversalConfig, Layouts]:
        """Shapes of the pages, once texts behind sources were computed as the model itself does; else a refusal."""
        try:
            layouts = self._probed()
            config = replace(checkpoint.config, planes=layouts.total, plane=layouts.text.plane)
            worst = self._worst_difference(config, layouts)
            if worst <= TOLERANCE:
                return config, layouts
            reason = f"logits differ by {worst:.1g} of their spread"
        except Exception as error:  # whatever modules that were not written for this do
            reason = said(error)
        raise CheckpointError(
            f"{checkpoint.name} ({checkpoint.config.model_type}) cannot be run: with our pages and masks, "
            "transformers' modules do not compute what they compute by themselves, so answers would be wrong "
            f"({reason}). Use another model; docs/models.md lists those that were tried."
        )

    def _probed(self) -> Layouts:
        """From one row behind one source, of which nothing is kept."""
        source, zero = self._trial_sources()[0], torch.zeros(1, dtype=torch.int64)
        batch = ForwardBatch(zero, zero, zero, zero, zero[None], torch.tensor([0, 1]), zero, zero, zero[None], zero)
        return self._read(replace(batch, unread=((0, source),)), None, None).layouts

    def _worst_difference(self, config: UniversalConfig, layouts: Layouts) -> float:
        sources = self._trial_sources()
        longest = max(map(len, sources)) + max(LENGTHS) + NODES
        cache = KVCache(config, SEQUENCES * -(-longest // PAGE), PAGE, self.dtype, self.device)
        alone = {source.key: self.encoder.states([source])[0] for source in sources}

        def forward(batch: ForwardBatch, memory: Pages) -> ForwardOutput:
            return ForwardOutput(self._forward(batch, memory, layouts), {})

        def reference(tokens: Tensor, source: Source | None) -> Tensor:
            assert source is not None
            states = (alone[source.key][None],)
            with attending(self._decoder, "eager", CALLED), torch.inference_mode():
                return self._modules(encoder_outputs=states, decoder_input_ids=tokens[None], use_cache=False).logits[0]

        self.encoder = Encoder(self.encoder.modules, self._padding)  # which knows none of them yet
        return worst_difference(forward, reference, cache, config.vocab_size, sources)

    def _trial_sources(self) -> tuple[Source, ...]:
        rng, spec = random.Random(1), self._spec
        if spec.features is not None:
            generator = torch.Generator().manual_seed(1)
            shape = (spec.features.bins, spec.features.frames)
            return tuple(
                Source((spec.start,) * spec.max_source, torch.randn(shape, generator=generator)) for _ in SOURCES
            )
        texts = ([rng.randrange(spec.vocab_size) for _ in range(count)] for count in SOURCES)
        return tuple(Source((spec.start,) * len(ids), torch.tensor(ids)) for ids in texts)

    def _encoder_apart(self) -> Any:
        """The encoder, which attends in its own way: with a configuration of its own."""
        encoder = self._modules.get_encoder()
        own = copy.deepcopy(encoder.config)
        for part in encoder.modules():
            if "config" in vars(part):
                part.config = own
        set_attention(encoder, "eager")
        return encoder

    def _padding_token(self) -> int:
        padding = getattr(self._modules.config, "pad_token_id", None)
        return padding if isinstance(padding, int) and 0 <= padding < self._spec.vocab_size else 0


def _sees_parts(stated: Mapping[str, Any]) -> bool:
    """Whether an encoder may look at long sources in parts, where padding may matter; the check has short ones."""
    return any(value for key, value in stated.items() if any(word in key for word in _PARTS))


def _without_sources(batch: ForwardBatch) -> ForwardBatch:
    """The rows of text alone."""
    assert batch.source_lengths is not None
    counts = batch.row_offsets.diff()
    owner = torch.arange(len(counts)).repeat_interleave(counts, output_size=len(batch.tokens))
    is_text = batch.positions >= batch.source_lengths[owner]
    number = is_text.cumsum(0) - 1
    if not bool(is_text[batch.logit_rows].all()):
        raise ValueError("an encoder gives no logits of what it reads")
    kept = {name: getattr(batch, name)[is_text] for name in ("tokens", "positions", "slots", "visible", "ancestors")}
    offsets = torch.nn.functional.pad(is_text.cumsum(0), (1, 0))[batch.row_offsets]
    return replace(batch, **kept, row_offsets=offsets, logit_rows=number[batch.logit_rows], parts=(), unread=())
