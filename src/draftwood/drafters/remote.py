"""Trees of a drafter on another machine. It can be late, gone or wrong: that costs drafts, never answers.

The drafter runs ahead of the text while the target verifies, so what came for a shorter text is used as far as the text
went on as it says. What is missing when a step begins is waited for until the deadline. Chosen tokens need no trust;
drawn ones (`remote_sampler.py`) are verified by what the drafter says they were drawn from.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from draftwood.config import EngineConfig
from draftwood.drafters.points import HostDrafter, HostTree, PointTree
from draftwood.drafters.remote_link import Arrivals, Link
from draftwood.drafters.remote_protocol import Guess, key_from_environment
from draftwood.drafters.remote_sampler import RemoteSampler
from draftwood.drafting import Drafter
from draftwood.entries import Entry, split_spec
from draftwood.errors import InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.protocols import HostView


class RemoteDrafter(HostDrafter):
    """Trees of at most `nodes` tokens that the drafter chose and that come within `wait` milliseconds."""

    def __init__(self, link: Link, nodes: int = 8, wait: float = 50.0) -> None:
        if nodes < 1 or wait < 0:
            raise ValueError("a remote drafter needs at least one node and a wait of at least 0 milliseconds")
        self.max_nodes = nodes
        self._arrivals = Arrivals(link, nodes, wait / 1000)
        weakref.finalize(self, link.close)

    def trees(self, view: HostView, nodes: int) -> list[HostTree]:
        """What has come when the deadline passes, or all that was asked for before."""
        found = zip(view.tokens, view.max_nodes, view.max_depth, self._arrivals.take(view, nodes), strict=True)
        trees = [_tree(PointTree(tokens[-1], min(room, nodes), depth), own) for tokens, room, depth, own in found]
        return [(tree.tokens, tree.parents) for tree in trees]

    def release(self, seq_id: int) -> None:
        """Tell the drafter that it may forget the text."""
        self._arrivals.drop(seq_id)


def _tree(tree: PointTree, guesses: Sequence[Guess]) -> PointTree:
    """A path, and beside it what might stand in its tokens' places."""
    tree.add_path([guess.tokens[0] for guess in guesses])
    for node, guess in zip(range(len(tree.tokens)), guesses, strict=False):
        for token in guess.tokens[1:]:
            tree.add(node, token)
    return tree


REMOTE_DRAFTER = "remote:HOST:PORT"
REMOTE = Entry(
    lambda **settings: settings,
    {"url": "", "nodes": 6, "wait": 50.0, "draws": 0, "width": 1},
    "what `draftwood drafter serve` says on another machine; wait: milliseconds after which a step begins without it; "
    "draws: tokens are drawn from so many of the likeliest (0: the likeliest are chosen), width of them in each place",
    on_gpu={"nodes": 8, "wait": 20.0},
    unnamed="url",
)


def build_remote(spec: str, target: Checkpoint, config: EngineConfig) -> Drafter:
    """A drafter on another machine, once it has shown that it knows the key and the vocabulary."""
    name, settings = split_spec(spec, REMOTE.unnamed)
    values = REMOTE.on(config.torch_device()).build("drafter", name, settings)
    link = Link(values["url"], key_from_environment(), target.tokenizer().fingerprint, target.config.vocab_size)
    nodes, wait, draws, width = (values[name] for name in ("nodes", "wait", "draws", "width"))
    try:
        return RemoteSampler(link, nodes, wait, draws, width) if draws else RemoteDrafter(link, nodes, wait)
    except ValueError as error:
        link.close()
        raise InvalidRequest(f"The drafter '{spec}' cannot be built: {error}.") from error
