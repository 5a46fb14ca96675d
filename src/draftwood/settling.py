"""Sizes of an engine where none are asked for, and whether a device has the memory for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from draftwood.assembly import SUBSTITUTE, trained_folder
from draftwood.config import EngineConfig
from draftwood.drafters.cascade import middle_of
from draftwood.drafters.lookups import members_of
from draftwood.drafters.self_drafts import copied_as
from draftwood.drafting import Drafter
from draftwood.engine.memory import (
    automatic_cache_tokens,
    check,
    device_memory,
    explain_out_of_memory,
    plan_memory,
    with_states_for,
)
from draftwood.machine import give_back_memory
from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.universal_folder import UniversalCheckpoint, require_supported
from draftwood.nets.layouts import Layout, open_drafter, recognise


def settle(config: EngineConfig, target: Checkpoint, drafter: str | Drafter) -> EngineConfig:
    """Sizes that suit the device where none are asked for; refuses, with the plan, what a GPU has no memory for."""
    asked, config = config.max_running, config.settled()
    if isinstance(target, UniversalCheckpoint):  # before memory is planned
        require_supported(
            target.name,
            config.torch_dtype(),
            config.torch_device(),
            config.weight_format(),
            bool(target.config.encoder),
        )
    draft = _draft_config(drafter, target.config)
    if config.torch_device().type != "cuda":
        return config if asked else with_states_for(target.config, draft, config, None)
    free, total = device_memory(config.torch_device())
    config = config if asked else with_states_for(target.config, draft, config, free)
    if not config.cache_tokens:
        tokens = automatic_cache_tokens(target.config, draft, config, free, total, copied_as(middle_of(drafter)))
        config = replace(config, cache_tokens=tokens)
    check(plan_memory(target.config, draft, config, free, total, copied_as(middle_of(drafter))))
    return config


def _draft_config(drafter: str | Drafter, target: ModelConfig) -> ModelConfig | None:
    """A model that needs about as much memory as the drafter will; a network counts for four of the target's layers."""
    drafter = middle_of(drafter)
    if not isinstance(drafter, str):
        return None
    if drafter.partition(":")[0] == SUBSTITUTE:
        return target
    if members := members_of(drafter):
        configs = [config for name in members if (config := _draft_config(name, target)) is not None]
        return max(configs, key=lambda config: config.num_layers * config.hidden_size**2, default=None)
    if drafter.startswith("model:"):
        return open_checkpoint(drafter.removeprefix("model:")).config
    folder = trained_folder(drafter)
    if not (folder / "config.json").is_file():
        return None
    if any(folder.glob("*.safetensors")):
        files = open_drafter(folder)
        if recognise(files) in (Layout.STUDENT, Layout.MASKED_STUDENT, Layout.LANGUAGE_MODEL, Layout.PARD):
            return ModelConfig.from_hf(files.config)
    return target.with_layers(4)


@contextmanager
def memory_explained(config: EngineConfig, target: Checkpoint, drafter: str | Drafter) -> Iterator[None]:
    """Say what needs how much where a GPU's memory runs out although the plan had room for everything."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        give_back_memory()
        free, total = device_memory(config.torch_device())
        draft = _draft_config(drafter, target.config)
        plan = plan_memory(target.config, draft, config, free, total, copied_as(middle_of(drafter)))
        raise explain_out_of_memory(error, plan) from error
