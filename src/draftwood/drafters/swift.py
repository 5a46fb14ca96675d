"""What a draft leaves out of its target, found while answers are generated (SWIFT).

Now and then another set is tried on the last tokens of a text: in one forward behind the text, of rows that see what
came before each of these tokens, in the target's own keys. The set whose likeliest tokens agree with the text more
often, for the time that drafts take, is drafted with from then on. There are so many trials, then the search is over.
Captured steps hold one part of a model, so nothing is tried where values may not be looked at.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import torch

from draftwood.cache.kv import Places, stage_behind
from draftwood.model.config import ModelConfig
from draftwood.model.runner import ModelRunner, Sliceable
from draftwood.model.spec import ExpertsSpec, Sublayers
from draftwood.protocols import BatchView
from draftwood.shape import num_words, own_bits

WINDOW = 8  # tokens that a set is tried on
EVERY = 24  # steps between trials
DEPTH = 4  # tokens of the chains that sets are compared by


class SkipSearch:
    """A set of items: attention (2 i) and MLP (2 i + 1) of the layers i. Those of the first layer always run."""

    def __init__(self, trials: int, seed: int = 0) -> None:
        self._left, self._chance, self._steps = trials, random.Random(seed), 0
        self._shares: list[float] = []
        self.skipped: frozenset[int] = frozenset()

    def attach(self, config: ModelConfig) -> None:
        """Begin with a third of the items, spread out."""
        self._shares = _shares(config)
        self.skipped = frozenset(range(2, len(self._shares), 3))

    @property
    def without(self) -> Sublayers:
        """The set, by layers."""
        return _sublayers(self.skipped)

    def changed(self, view: BatchView, target: ModelRunner) -> bool:
        """Try another set, if it is time for that and the first text is long enough; whether it is better."""
        self._steps += 1
        if not self._left or self._steps % EVERY or int(view.lengths[0]) < WINDOW + 2:
            return False
        self._left -= 1
        count = len(self._shares)
        other = self.skipped ^ set(self._chance.sample(range(2, count), min(self._chance.choice((1, 1, 2)), count - 2)))
        if self._worth(view, target, other) <= self._worth(view, target, self.skipped):
            return False
        self.skipped = frozenset(other)
        return True

    def _worth(self, view: BatchView, target: ModelRunner, skipped: Iterable[int]) -> float:
        """Expected tokens of a step, by its time in forwards of the whole model."""
        right, share = self._agreement(view, target, skipped), 1 - sum(self._shares[i] for i in skipped)
        return sum(right**k for k in range(DEPTH + 1)) / (1 + DEPTH * share)

    def _agreement(self, view: BatchView, target: ModelRunner, skipped: Iterable[int]) -> float:
        """How many of the first text's last tokens the target without these items would have drafted."""
        assert isinstance(target.model, Sliceable)
        own, device, config = view.take(torch.zeros(1, dtype=torch.int64)), view.roots.device, target.model.config
        index = torch.arange(WINDOW, device=device)[None]
        at = own.lengths[:, None] - 1 - WINDOW + index  # [1, W] of the tokens that are known
        history = own.history[own.rows]
        places = Places(index, at, own_bits(1 + index, num_words(1 + WINDOW)).flatten(0, 1), 1, WINDOW)
        cache, tokens = target.cache, history.gather(1, at)
        table = torch.nn.functional.pad(own.block_table, (0, WINDOW // cache.page_size + 2), value=cache.scratch_page)
        batch = stage_behind(own.lengths, table, tokens, places, cache.page_size, config.max_positions)
        seen = at.reshape(-1)  # keys before the place; its own lies behind the text
        batch = replace(batch, visible=seen, positions=seen)
        part = target.model.part(range(config.num_layers), _sublayers(skipped))
        said = part.forward(batch, cache.memory).logits.argmax(-1)
        return float((said == history.gather(1, at + 1).view(-1)).float().mean())


def _sublayers(items: Iterable[int]) -> Sublayers:
    """Of which layers the attention, and of which the MLP."""
    every = list(items)
    return Sublayers(frozenset(i // 2 for i in every if i % 2 == 0), frozenset(i // 2 for i in every if i % 2))


def _shares(config: ModelConfig) -> list[float]:
    """Of the weights that a forward reads, those of each item."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    sizes = []
    for layer in config.layer_specs:
        mlp = layer.only_mlp
        one, times = (mlp.expert, mlp.top_k) if isinstance(mlp, ExpertsSpec) else (mlp, 1)
        sizes += [config.hidden_size * heads, config.hidden_size * times * one.width * (3 if one.gated else 2)]
    whole = sum(sizes) + config.hidden_size * config.vocab_size
    return [size / whole for size in sizes]
