"""Compile a model's GPU kernels while its weights are still being read.

Kernels are compiled for the shapes of a model, not for its weights: running one layer of zeros once is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from draftwood.assembly import build_grower, build_lookup, is_lookup
from draftwood.config import EngineConfig
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.self_drafts import is_self_draft
from draftwood.drafters.trained import DEFAULT_TREE, usual_tree
from draftwood.drafting import Drafter, Front, Grower, Proposal, Silent, State, Vocabulary
from draftwood.engine.decode_step import Parts
from draftwood.engine.graph_runner import GraphRunner, batch_state_for
from draftwood.engine.shapes import ShapePlan
from draftwood.model.checkpoint import expected_shape
from draftwood.model.config import ModelConfig
from draftwood.model.runner import ModelRunner
from draftwood.model.universal_folder import UniversalConfig
from draftwood.nets.eagle import Eagle3
from draftwood.protocols import BatchView, Randomness
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS

VOCABULARY = 16384  # tokens: a larger one is cut up alike
THREADS = 8
PAGES = 16  # enough for several programs to share a sequence's keys, as they will


class _Blank:
    """A checkpoint of the first layer, with whatever lies in memory as weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        small = min(config.vocab_size, VOCABULARY)
        self.config = replace(config.part([0]), vocab_size=small)
        self.name = "blank"
        self._dtype, self._device = dtype, device

    def tensor(self, name: str) -> Tensor:
        shape = expected_shape(name, self.config)
        assert shape is not None, name
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def matrix(self, name: str) -> Tensor:
        return self.tensor(name)

    def forget(self) -> None:
        pass


class _Undecided(Silent):
    """A network that finds all tokens alike, with a tree of its own: kernels that grow and score trees are compiled."""

    def __init__(self, grower: Grower, vocabulary: int, dtype: torch.dtype) -> None:
        self.grower, self._size, self._dtype = grower, vocabulary, dtype
        self.law, self.max_nodes, self.sizes = grower.law, grower.max_nodes, grower.sizes

    def depth(self, nodes: int) -> int:
        return self.grower.depth_of(nodes)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        return self.grower.grow(self, view, nodes, rng)

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        return self._alike(view, 1), ()

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        return self._alike(view, front.tokens.shape[1]), ()

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        return None

    def _alike(self, view: BatchView, nodes: int) -> Tensor:
        return torch.zeros(view.size, nodes, self._size, dtype=self._dtype, device=view.roots.device)


def warm_up(target: ModelConfig, config: EngineConfig, drafter: str | Drafter, tree: str | None) -> None:
    """Run prefills and the usual steps in several threads: compiling waits for child processes half of the time."""
    if isinstance(target, UniversalConfig):  # whose layers are not known before they are loaded
        return
    device, dtype = config.torch_device(), config.torch_dtype()
    with _apart(device):
        blank = _Blank(target, dtype, device)
        weights = config.weight_format()
        sizes = PAGES, config.page_size, weights
        runner = ModelRunner.load(blank, dtype, device, *sizes, strict=config.strict, num_states=1)  # type: ignore[arg-type]
        known = _known_already(drafter, tree, target.vocab_size, config)
        known.attach(runner)
        running = config.max_running
        state = batch_state_for(runner, running, known.max_nodes)
        shapes = ShapePlan.for_trees(known.sizes, running, config.max_rows, state.num_pages, config.page_size)
        steps = GraphRunner(Parts(runner, known, LAWS["match"](), KeyedRng()), state, shapes, captures=False)
    parts = steps.warm_ups()

    def run(part: Callable[[], object]) -> None:
        with _apart(device):
            part()

    with ThreadPoolExecutor(THREADS, "draftwood-warmup") as pool:
        list(pool.map(run, parts))


def _known_already(drafter: str | Drafter, tree: str | None, vocabulary: int, config: EngineConfig) -> Drafter:
    """What drafts before weights are there: a lookup itself; for a network, one that grows the same tree. The network's
    own kernels are compiled when it has been loaded.
    """
    device = config.torch_device()
    if not isinstance(drafter, str):
        return NoDrafter()
    if is_lookup(drafter):
        return build_lookup(drafter, device)
    of_model = drafter.partition(":")[0] in ("model", "cascade") or is_self_draft(drafter)
    usual = DEFAULT_TREE if of_model else usual_tree(Eagle3, device)
    return _Undecided(build_grower(tree or usual), vocabulary, config.torch_dtype())


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """On a separate stream, synchronised at the end."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.inference_mode():
        yield
    stream.synchronize()


@contextmanager
def warming_up(
    target: ModelConfig, config: EngineConfig, drafter: str | Drafter, tree: str | None = None
) -> Iterator[None]:
    """Warm up in the background of the block."""

    def run() -> None:
        try:
            warm_up(target, config, drafter, tree)
        except Exception:  # only a head start: the engine itself will report what is wrong
            return

    thread = threading.Thread(target=run, name="draftwood-warmup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
