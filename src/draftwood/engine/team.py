"""The ranks of one LLM: itself alone, rank 0 with the others, or one of the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftwood.config import EngineConfig
from draftwood.engine.engine import Engine
from draftwood.engine.followers import Followers
from draftwood.engine.lockstep import Leader, Unpack, follow
from draftwood.engine.worker import Driver
from draftwood.machine import launched_size
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.sharding import sharded, share_of
from draftwood.model.stages import StageCheckpoint, stages_of
from draftwood.ranks import join, own_device


class Team:
    """One process; base of those with several."""

    follows = False  # another process
    lost: str | None = None  # why there are no more steps

    def share(self, checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
        """What this rank loads of the target."""
        return checkpoint

    def agreed(self, config: EngineConfig) -> EngineConfig:
        """What all ranks have memory for."""
        return config

    def drive(self, engine: Engine, capture_seconds: float) -> Driver:
        """What the worker drives; on a GPU, with steps captured for so many seconds."""
        if engine.runner.captures:
            engine.prepare(capture_seconds)
        return engine

    def follow(self, engine: Engine, unpack: Unpack) -> None:
        """Do as rank 0 does."""
        raise AssertionError("one process follows no other")

    def dismiss(self) -> None:
        """Tell the others that there are no more steps."""

    def close(self) -> None:
        """See the others end."""


class _Ranked(Team):
    """This process is one of several ranks."""

    def __init__(self, config: EngineConfig, followers: Followers | None) -> None:
        device = config.torch_device()
        self.followers = followers
        self.group = followers.ranks(device) if followers is not None else join(config.ranks, device)
        self.follows = self.group.rank > 0
        self._leader: Leader | None = None

    @property
    def lost(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Why the ranks cannot go on."""
        return self._leader and self._leader.lost

    def share(self, checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
        """This rank's part of every layer, or its layers."""
        if config.pp > 1:
            return StageCheckpoint(checkpoint, self.group)
        return share_of(checkpoint, self.group, config.weight_format())

    def agreed(self, config: EngineConfig) -> EngineConfig:
        """Caches of the same size."""
        return replace(config, cache_tokens=self.group.least(config.cache_tokens))

    def drive(self, engine: Engine, capture_seconds: float) -> Driver:
        """Lead the others, who capture the same steps at the same time."""
        self._leader = leader = Leader(engine, self.group)
        if self.followers is not None:
            self.followers.watch(self._end)
        leader.prepare(capture_seconds)
        return leader

    def _end(self, reason: str) -> None:
        assert self._leader is not None
        self._leader.give_up(reason)
        self.group.abort()

    def follow(self, engine: Engine, unpack: Unpack) -> None:
        """Do as rank 0 does, until it stops."""
        follow(engine, self.group, unpack)

    def dismiss(self) -> None:
        """On the compute thread, as all orders."""
        if self._leader is not None:
            self._leader.close()

    def close(self) -> None:
        """Those that this process has started."""
        if self.followers is not None:
            self.followers.close()


def gather(config: EngineConfig, checkpoint: Checkpoint, spec: Callable[[], dict[str, Any]]) -> Team:
    """Meet the ranks that were launched, or start them; what cannot be split is refused before."""
    if config.ranks == 1:
        return Team()
    if config.pp > 1:
        stages_of(checkpoint.config, config.pp)
    else:
        sharded(checkpoint.config, config.tp, config.weight_format())
    followers = None if launched_size() else Followers(config.ranks, spec())
    try:
        return _Ranked(config, followers)
    except BaseException:
        if followers is not None:
            followers.close()
        raise


def placed(config: EngineConfig) -> EngineConfig:
    """On this rank's own GPU, or with its share of the cores."""
    if config.ranks == 1:
        return config
    device = own_device(config.torch_device())
    if device.type == "cuda":
        return replace(config, device=str(device))
    return replace(config, threads=config.threads or max(1, (os.cpu_count() or 1) // config.ranks))
