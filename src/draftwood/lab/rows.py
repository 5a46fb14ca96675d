"""Recorded rows: a draft tree, the law of every draw in it, and the target's distribution after every node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwood.cache.kv import NodeRows
from draftwood.drafters.model import ModelDrafter
from draftwood.errors import InvalidRequest
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Grower, Span
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.sampling import target_distribution
from draftwood.tree import TokenTree, Verdict

SEQUENCE = -7  # never the number of a request


@dataclass(frozen=True)
class Rows:
    """One context, one tree."""

    context: int
    temperature: float
    family: str  # which grower
    tree: TokenTree
    p: Tensor  # [M, V]

    def save(self, folder: Path) -> None:
        """Write them where `load_rows` finds them."""
        tree = self.tree
        tensors = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "offsets": tree.offsets,
            "draw": tree.draw,
            "q_row": tree.q_row,
            "p": self.p,
        }
        tensors |= {} if tree.q is None else {"q": tree.q}
        tensors |= {} if tree.drawn is None else {"drawn": tree.drawn}
        about = {"context": str(self.context), "temperature": repr(self.temperature), "family": self.family}
        name = f"{self.context:05d}-{self.temperature:g}-{self.family}.safetensors"
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, folder / name, about)


def load_rows(folder: Path) -> Iterator[Rows]:
    """Everything recorded in a folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(f"There are no recorded rows in '{folder}'; record some with --save.")
    for file in files:
        try:
            with safe_open(file, "pt") as f:
                about = f.metadata() or {}
                tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  (not a dict)
            p = tensors.pop("p")
            tree = TokenTree(**tensors)
            tree.validate()
            yield Rows(int(about["context"]), float(about["temperature"]), about["family"], tree, p)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"'{file}' does not hold recorded rows: {error}.") from error


@dataclass
class Recorder:
    """A target and a draft model at one place in a text; nothing they are asked is ever committed."""

    target: ModelRunner
    drafter: ModelDrafter
    max_rows: int = 512
    _reading: bool = False

    def record(self, context: int, tokens: Sequence[int], params: SamplingParams, family: str, grower: Grower) -> Rows:
        """The tree `grower` draws behind `tokens`, and what the target thinks of it."""
        view = _view(tokens, params, grower.max_nodes, self.target.device)
        self.drafter.grower = grower
        tree = self.drafter.propose(view, Budget(grower.max_nodes), KeyedRng())
        p = target_distribution(self._logits(tokens, tree), tree, view)
        self.drafter.observe(view, tree, Verdict.of_roots(tree, tree.tokens[tree.offsets[:-1]]), {})
        self.drafter.runner.cache.tables.rewind(SEQUENCE, len(tokens) - 1)
        return Rows(context, params.temperature, family, tree, p)

    def forget(self) -> None:
        """The text is done with."""
        self.target.cache.tables.close(SEQUENCE)
        self.drafter.release(SEQUENCE)
        self._reading = False

    def _logits(self, tokens: Sequence[int], tree: TokenTree) -> Tensor:
        cache = self.target.cache
        if not self._reading:
            cache.tables.open(SEQUENCE, tokens)
            self._reading = True
        if not cache.tables.reserve(SEQUENCE, len(tokens) + tree.num_nodes):
            raise InvalidRequest("A context and its tree do not fit into the cache; raise --cache-tokens.")
        start = min(cache.tables.num_cached(SEQUENCE), len(tokens) - 1)
        while start < len(tokens) - 1:  # all but the root, which is run again with every tree
            end = min(len(tokens) - 1, start + self.max_rows)
            self.target.forward(cache.stage([Span(SEQUENCE, tokens, start, end)], None))
            cache.tables.advance(SEQUENCE, end, tokens)
            start = end
        nodes = NodeRows.of_tree(tree, torch.zeros(1, dtype=torch.int64, device=self.target.device))
        span = Span(SEQUENCE, tokens, len(tokens) - 1, len(tokens))
        return self.target.forward(cache.stage([span], nodes)).logits


def _view(tokens: Sequence[int], params: SamplingParams, nodes: int, device: torch.device) -> BatchView:
    return BatchView(
        seq_ids=(SEQUENCE,),
        tokens=[tokens],
        prompt_lengths=(0,),
        params=(params,),
        bad_words=((),),
        lengths=torch.tensor([len(tokens)], device=device),
        seeds=torch.tensor([params.seed or 0], device=device),
        temperature=torch.tensor([params.temperature], device=device),
        max_nodes=torch.tensor([nodes], device=device),
        max_depth=torch.tensor([nodes], device=device),
    )
