"""Before a model runs on code that was not written for it: rows, pages, chunks and trees against its own forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, ForwardOutput, Pages, Source
from draftwood.cache.kv import KVCache
from draftwood.protocols import Span

NODES = 8
LENGTHS = (9, 14)
PAGE = 4
SEQUENCES = len(LENGTHS)
Forward = Callable[[ForwardBatch, Pages], ForwardOutput]
Reference = Callable[[Tensor, Source | None], Tensor]  # tokens [n] -> logits [n, V]


@dataclass(frozen=True)
class Trial:
    """A text whose second part is pending, and a random tree behind it."""

    text: list[int]
    tokens: list[int]  # of the nodes
    paths: list[list[int]]  # nodes from the first behind the text to each, by numbers from 1
    source: Source | None = None  # whose tokens the text begins with

    @property
    def start(self) -> int:
        """Tokens of the source."""
        return 0 if self.source is None else len(self.source)

    @property
    def half(self) -> int:
        """Tokens that an earlier forward has run."""
        return (self.start + len(self.text)) // 2

    def span(self, i: int, end: int) -> Span:
        """Its first tokens."""
        return Span(i, self.text, 0, end, self.source)

    @property
    def leaves(self) -> list[list[int]]:
        """Paths that no other goes on from."""
        inner = {path[-2] for path in self.paths if len(path) > 1}
        return [path for path in self.paths if path[-1] not in inner]


def worst_difference(
    forward: Forward,
    reference: Reference,
    cache: KVCache,
    vocab_size: int,
    sources: tuple[Source | None, ...] = (None,) * SEQUENCES,
) -> float:
    """The largest difference of any logit of any row from the reference's, as a share of the logits' own spread."""
    rng = random.Random(0)
    trials = [_trial(rng, length, vocab_size, source) for length, source in zip(LENGTHS, sources, strict=True)]
    for i, trial in enumerate(trials):
        cache.tables.open(i, ())
        cache.tables.reserve(i, len(trial.text) + NODES)
    first = [trial.span(i, trial.half) for i, trial in enumerate(trials)]
    wanted = torch.cat([torch.arange(trial.half) >= trial.start for trial in trials]).nonzero()[:, 0]
    early = forward(cache.stage_text(first, wanted), cache.memory).logits.split([t.half - t.start for t in trials])
    late = forward(_batch(cache, trials), cache.memory).logits
    late = late.split([len(trial.text) - trial.half + NODES for trial in trials])
    return max(_difference(t, torch.cat([a, b]), reference) for t, a, b in zip(trials, early, late, strict=True))


def _trial(rng: random.Random, length: int, vocab_size: int, source: Source | None) -> Trial:
    paths: list[list[int]] = []
    for node in range(1, NODES + 1):
        parent = rng.randrange(node)
        paths.append([*(paths[parent - 1] if parent else []), node])
    text, tokens = ([rng.randrange(vocab_size) for _ in range(count)] for count in (length, NODES))
    return Trial(text if source is None else [*source.tokens, *text], tokens, paths, source)


def _batch(cache: KVCache, trials: list[Trial]) -> ForwardBatch:
    """What is pending of each text, and the nodes behind it."""
    tokens, positions, index, visible, ancestors, owner = [], [], [], [], [], []
    offsets = [0]
    for i, trial in enumerate(trials):
        length, pending = len(trial.text), range(trial.half, len(trial.text))
        tokens += trial.text[trial.half :] + trial.tokens
        positions += [*pending, *(length - 1 + len(path) for path in trial.paths)]
        index += [*pending, *(length - 1 + path[-1] for path in trial.paths)]
        visible += [*(at + 1 for at in pending), *(length for _ in trial.paths)]
        ancestors += [*(0 for _ in pending), *(sum(1 << (node - 1) for node in path) for path in trial.paths)]
        owner += [i] * (len(pending) + NODES)
        offsets.append(len(tokens))
    spans = [trial.span(i, len(trial.text)) for i, trial in enumerate(trials)]
    table, lengths = cache.block_table(spans), torch.tensor([len(trial.text) for trial in trials])
    return ForwardBatch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slots=cache.slots(table, torch.tensor(owner), torch.tensor(index)),
        visible=torch.tensor(visible),
        ancestors=torch.tensor(ancestors)[:, None],
        row_offsets=torch.tensor(offsets),
        tree_base=lengths,
        num_keys=lengths + NODES,
        block_table=table,
        logit_rows=torch.arange(len(tokens)),
        source_lengths=torch.tensor([trial.start for trial in trials]),
    )


def _difference(trial: Trial, logits: Tensor, reference: Reference) -> float:
    """Of one text's rows and its nodes'."""
    text = trial.text[trial.start :]
    length, worst = len(text), 0.0
    for path in trial.leaves:
        want = reference(torch.tensor(text + [trial.tokens[node - 1] for node in path]), trial.source)
        got = logits[[*range(length), *(length + node - 1 for node in path)]]
        worst = max(worst, float(((got - want).abs().max() / want.std()).nan_to_num(nan=float("inf"))))
    return worst
