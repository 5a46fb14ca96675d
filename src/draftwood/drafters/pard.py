"""A language model that guesses several tokens in one forward, behind masks (PaSS, PARD), with any grower.

It was trained to read `text, mask, mask, …` and to say at the i-th mask what stands i tokens further on. So a step has
one draft forward, and what is guessed for a place does not depend on what was chosen for the place before it. Accepted
tokens it has not run: the next step begins with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from draftwood.drafters.model import ModelDrafter
from draftwood.drafting import Front, Grower, Proposal, State, Vocabulary
from draftwood.errors import IncompatibleParts
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Features, Randomness
from draftwood.tree import Verdict

GUESSES = 8  # tokens ahead that PARD's drafters are trained for


class ParallelDrafter(ModelDrafter):
    """A model of the target's vocabulary that was trained to guess behind masks."""

    def __init__(self, runner: ModelRunner, grower: Grower, mask: int, guesses: int = GUESSES) -> None:
        super().__init__(runner, grower.within_depth(guesses))
        self.mask, self.guesses = mask, guesses

    def attach(self, target: ModelRunner) -> None:
        """See `CausalDrafter`."""
        if self.runner.model.config.recurrent:
            raise IncompatibleParts("Behind masks a model with recurrent layers cannot draft: take it as model:NAME.")
        super().attach(target)

    def staged(self, nodes: int) -> int:
        """The masks, however wide the tree is."""
        return max(0, self.depth(nodes) - 1)

    def grow(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """A tree of the logits of one forward."""
        return self.grower.grow(_OneForward(self, self.depth(nodes)), view, nodes, rng)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """Nothing to keep: behind the text it has run masks alone."""

    def look_ahead(self, view: BatchView, ahead: int) -> Tensor:
        """Logits of the next `ahead` tokens. [B, ahead, V]."""
        gained = self.grower.levels + 1 if view.gained is None else view.gained
        places, text, rows = self.last_tokens(view, gained, ahead - 1)
        tokens = torch.cat([text, _filled(view.size, ahead - 1, self.mask, text.device)], 1) if ahead > 1 else text
        return self.run(view, tokens, places, rows).view(view.size, ahead, -1)


@dataclass(frozen=True)
class _OneForward:
    """What a drafter's masks say, as a `FrontierModel`."""

    drafter: ParallelDrafter
    ahead: int  # tokens

    def begin(self, view: BatchView) -> tuple[Tensor, State]:
        """Run everything."""
        logits = self.drafter.look_ahead(view, self.ahead)
        return logits[:, :1], (logits,)

    def extend(self, view: BatchView, front: Front, state: State) -> tuple[Tensor, State]:
        """By depth."""
        (logits,) = state
        if front.level is not None:
            return logits[:, front.level, None].expand(-1, front.tokens.shape[1], -1), state
        depth = front.depth.clamp(max=self.ahead - 1)
        return logits.gather(1, depth[..., None].expand(-1, -1, logits.shape[-1])), state

    def vocabulary(self, level: int | None) -> Vocabulary | None:
        """All tokens."""
        return None


@lru_cache(maxsize=1024)
def _filled(size: int, count: int, token: int, device: torch.device) -> Tensor:
    """One token everywhere. [B, count]."""
    return torch.full((size, count), token, device=device)
