"""From a checkpoint and names to an engine; runs on the compute thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path

import torch

from draftwood.assembly import (
    AUTO,
    build_drafter,
    choose_law,
    load_runner,
    makes_own_trees,
    offer,
    suited_tree,
)
from draftwood.cache.prefill_buffer import SEQUENCES
from draftwood.calibration import default_controller
from draftwood.config import EngineConfig
from draftwood.drafters.lookups import chosen_from
from draftwood.drafting import Drafter
from draftwood.engine.adapters import take_adapters
from draftwood.engine.engine import Engine, check_exact
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.engine.shapes import MIXED_ROWS
from draftwood.machine import reading_ahead
from draftwood.model.checkpoint import Checkpoint, files_of
from draftwood.model.native import Progress
from draftwood.protocols import Controller, Verifier
from draftwood.rng import KeyedRng
from draftwood.settling import memory_explained
from draftwood.verifiers import ByRequest
from draftwood.warmup import warming_up


@dataclass(frozen=True)
class Parts:
    """Who guesses, in what shape, and what is kept."""

    drafter: str | Drafter
    tree: str | None
    law: str | Verifier
    offers: Sequence[str] | None

    @property
    def offered(self) -> list[str]:
        """Drafters to be built besides the first."""
        names = [*self.choice, *(() if self.offers is None and not self.choice else ("none",)), *(self.offers or ())]
        return [name for name in dict.fromkeys(names) if name != self.drafter]

    @property
    def choice(self) -> list[str]:
        """Drafters from which one is chosen for each request."""
        return chosen_from(self.drafter) if isinstance(self.drafter, str) else []


@dataclass(frozen=True)
class Builder:
    """Builds one engine."""

    checkpoint: Checkpoint
    share: Checkpoint  # of the target: all of it, or this rank's part
    config: EngineConfig  # settled
    parts: Parts
    controller: Controller | None
    progress: Progress
    allow_pickle: bool
    adapters: Mapping[str, str | Path] = field(default_factory=dict)  # folders by the name that requests choose them by

    def build(self) -> tuple[Engine, ByRequest]:
        """The engine, and its laws."""
        device = self.config.torch_device()
        if device.type != "cuda":
            return self._assemble()
        if device.index is not None:
            torch.cuda.set_device(device)  # of this thread, the one that computes
        with ExitStack() as stack:
            stack.enter_context(memory_explained(self.config, self.share, self.parts.drafter))
            if self.config.ranks == 1:  # in processes of their own, which would be no ranks
                plan = self.checkpoint.config, self.config, self.parts.drafter, self.parts.tree
                stack.enter_context(warming_up(*plan))
            stack.enter_context(reading_ahead(files_of(self.checkpoint)))
            return self._assemble()

    def _assemble(self) -> tuple[Engine, ByRequest]:
        config, parts = self.config, self.parts
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        alone = None if parts.choice else self._drafter(parts.drafter)
        offered = {name: self._drafter(name) for name in parts.offered}
        drafter = offered[parts.choice[0]] if alone is None else alone
        drafts = reduce(or_, (offered[name].law for name in parts.choice), drafter.law)
        laws = choose_law(parts.law, drafts, config.torch_device())
        check_exact(laws.default, drafts)  # before the weights are read
        target = load_runner(self.share, config, self.progress, config.offload)
        take_adapters(target.model, self.checkpoint, self.adapters)
        if config.cache_host_tokens:
            target.cache.keep_evicted(-(-config.cache_host_tokens // config.page_size))
        if parts.offers is not None or parts.choice:
            own = {parts.drafter: drafter} if isinstance(parts.drafter, str) and not parts.choice else {}
            drafter = offer(drafter, own | offered, parts.choice)
        on_gpu = target.device.type == "cuda"
        captures = on_gpu and not config.eager and not config.offload and config.pp == 1
        limits = SchedulerConfig(
            config.max_rows,
            config.max_running,
            config.max_waiting,
            asynchronous=on_gpu and config.pp == 1,
            prefill_sizes=MIXED_ROWS if captures else (),
            max_pieces=SEQUENCES,
            groups=config.groups,
        )
        scheduler = Scheduler(target.cache.tables, limits)
        controller = self.controller or default_controller(target, drafter, policy=self._policy)
        name = parts.drafter if isinstance(parts.drafter, str) else None
        engine = Engine(target, drafter, laws, controller, scheduler, KeyedRng(), captures=captures, drafter_name=name)
        return engine, laws

    @property
    def _policy(self) -> str:
        """Where steps wait for their layers no other model's costs say anything: as much as the drafter likes."""
        config = self.config
        return "fixed" if config.offload and config.controller == AUTO else config.controller

    def _drafter(self, drafter: str | Drafter) -> Drafter:
        if not isinstance(drafter, str):
            return drafter
        takes_tree = not makes_own_trees(drafter) or drafter == self.parts.drafter
        tree = (self.parts.tree or suited_tree(drafter, self.parts.law)) if takes_tree else None
        return build_drafter(drafter, tree, self.checkpoint, self.config, allow_pickle=self.allow_pickle)
