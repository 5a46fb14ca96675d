"""Recorded rows: a draft tree, the law of every draw in it, and the target's distribution after every node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwood.cache.kv import stage_trees
from draftwood.drafters.model import ModelDrafter
from draftwood.drafting import Grower
from draftwood.errors import InvalidRequest
from draftwood.links import may_look
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Span
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.sampling import target_distribution
from draftwood.shape import TreeShape
from draftwood.tree import TokenTree

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
        tensors |= {"drawn": tree.tries[tree.tries >= 0]} if tree.shape.repeats else {}
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
            shape = TreeShape.of(tensors.pop("parents"), tensors.pop("offsets"), tensors.pop("drawn", None))
            tree = TokenTree(shape=shape, **tensors)
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
        behind = max(grower.max_nodes, grower.staged(grower.max_nodes))
        self._read(tokens, behind)
        view = self._view(tokens, params)
        self.drafter.grower = grower
        tree = self.drafter.propose(view, grower.max_nodes, KeyedRng()).tree.packed()[0]
        p = target_distribution(self._logits(tree, view), tree, view)
        return Rows(context, params.temperature, family, tree, p)

    def forget(self) -> None:
        """The text is done with."""
        self.target.cache.tables.close(SEQUENCE)
        self._reading = False

    def _read(self, tokens: Sequence[int], behind: int) -> None:
        """Run all but the root, which is run again with every tree, and make room for so many places behind it."""
        tables = self.target.cache.tables
        if not self._reading:
            tables.open(SEQUENCE, tokens if tables.states is None else [])
        if not tables.reserve(SEQUENCE, len(tokens) + behind):
            raise InvalidRequest("A context and its tree do not fit into the cache; raise --cache-tokens.")
        # What others have left in the cache, the drafter need not have read.
        known, end = tables.num_cached(SEQUENCE), len(tokens) - 1
        for start in range(known if self._reading else 0, end, self.max_rows):
            text = self.target.cache.stage_text([Span(SEQUENCE, tokens, start, min(end, start + self.max_rows))])
            if start + self.max_rows > known:
                self.target.forward(text)
            self.drafter.ingest(text, None)
        tables.advance(SEQUENCE, max(known, end), tokens)
        self._reading = True

    def _logits(self, tree: TokenTree, view: BatchView) -> Tensor:
        page_size, limit = self.target.cache.page_size, self.target.model.config.max_positions
        batch = stage_trees(view, tree, page_size, limit, chain=tree.tries.shape[1] == 1)
        return self.target.forward(batch).logits

    def _view(self, tokens: Sequence[int], params: SamplingParams) -> BatchView:
        device = self.target.device
        history = torch.tensor([list(tokens)], device=device)
        return BatchView(
            lengths=torch.tensor([len(tokens)], device=device),
            seeds=torch.tensor([params.seed or 0], device=device),
            roots=history[:, -1],
            temperature=torch.tensor([params.temperature], device=device),
            rows=torch.zeros(1, dtype=torch.int64, device=device),
            history=history,
            block_table=torch.tensor([self.target.cache.tables.pages(SEQUENCE)], device=device),
            states=self.target.cache.state_places([Span(SEQUENCE, tokens, 0, len(tokens))], device),
            may_look=may_look(history),
        )
