"""What a model folder, file or hub id is, before anything of it is loaded: `draftwood models PATH`."""

from __future__ import annotations

import math
from collections import Counter

import torch
from rich.table import Table

from draftwood.cache.recurrent import state_bytes
from draftwood.engine.memory import token_bytes
from draftwood.model.checkpoint import files_of, open_checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.described import Held, held_formats
from draftwood.model.mixer_spec import GatedDeltaSpec, Mamba2Spec, MambaSpec, ShortConvSpec
from draftwood.model.names import count_active_parameters, count_parameters
from draftwood.model.row_file import embedding_file
from draftwood.model.runner import implementations
from draftwood.model.spec import ExpertsSpec
from draftwood.model.universal_folder import UniversalConfig
from draftwood.ops.packed import Packing

PROCESS = 250 << 20  # bytes beside weights and cache
CACHE = 4096  # tokens, as an example
_MIXERS = {
    MambaSpec: "a Mamba mixer",
    Mamba2Spec: "a Mamba-2 mixer",
    GatedDeltaSpec: "a gated delta net",
    ShortConvSpec: "a short convolution",
}
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def about_table(name: str, impl: str = "auto") -> Table:
    """A model's family, size, how it is stored, what runs it and what memory it takes."""
    checkpoint = open_checkpoint(name, impl)
    config, files = checkpoint.config, files_of(checkpoint)
    formats = held_formats(files)
    table = Table(show_header=False, box=None, title=checkpoint.name, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("family", config.family)
    table.add_row("parameters", _parameters(config))
    table.add_row("layers", _layers(config))
    table.add_row("context", _context(config))
    for device, runs in implementations(config).items():
        table.add_row(f"on a {device}", runs)
    if files:
        parts = f" in {len(files)} files" if len(files) > 1 else ""
        table.add_row("stored", f"{files[0].suffix[1:]}, {_bytes(sum(file.stat().st_size for file in files))}{parts}")
    for held in formats:
        if held.matrices:
            table.add_row("", _held(held))
    looked_up = embedding_file(checkpoint)
    loaded = sum(held.loaded for held in formats) - (0 if looked_up is None else looked_up.num_bytes)
    stays = "" if looked_up is None else f"; an embedding of {_bytes(looked_up.num_bytes)} stays in its file"
    table.add_row("weights on a CPU", f"{_bytes(loaded)} as they are stored{stays}")
    process = f"about {_bytes(loaded + PROCESS)} with Python, torch and the tokenizer, without the cache"
    table.add_row("process on a CPU", process)
    if isinstance(config, UniversalConfig):
        table.add_row("weights as float32", f"about {_bytes(4 * config.parameters)}; other formats are not read")
        return table
    for kind, size in (("bfloat16", 2), ("int8", 1.0625), ("int4", 0.625)):
        table.add_row(f"weights as {kind}", f"about {_bytes(count_parameters(config) * size)}")
    if config.recurrent:
        state = state_bytes(config.recurrent, torch.bfloat16)
        table.add_row("state", f"{_bytes(state)} a sequence, whatever its length")
    token = _token_bytes(config)
    cache = f"{CACHE:,} tokens of cache: {_bytes(CACHE * token)} in bfloat16, twice that in float32"
    table.add_row("cache", f"{_bytes(token)} a token in bfloat16; {cache}")
    packed = token_bytes(config, torch.float32, Packing.INT8)
    table.add_row("", f"{_bytes(packed)} a token with --cache-dtype int8 or fp8 (another model)")
    return table


def _held(held: Held) -> str:
    count = "1 matrix" if held.matrices == 1 else f"{held.matrices} matrices"
    note = ": not multiplied as stored, dequantised to float32" if held.expanded else ""
    return f"{count} in {held.type}, {_bytes(held.stored)}{note}"


def _parameters(config: ModelConfig) -> str:
    if isinstance(config, UniversalConfig):
        return f"{config.parameters / 1e6:,.0f} million"
    total, active = count_parameters(config), count_active_parameters(config)
    said = f"{total / 1e6:,.0f} million"
    return said if active == total else f"{said}, {active / 1e6:,.0f} million of which a token makes use of"


def _layers(config: ModelConfig) -> str:
    said = [f"{config.num_layers} of {config.hidden_size} numbers, {config.num_heads} heads"]
    if isinstance(config, UniversalConfig):
        return said[0]
    specs = config.layer_specs
    kinds = Counter(_MIXERS[type(mixer)] for mixer in config.recurrent)
    said += [f"{count} with {kind}" for kind, count in kinds.items()]
    if kinds:
        said.append(f"{config.cache_shape[0]} with attention")
    sliding = sum(spec.window is not None for spec in specs)
    if sliding:
        said.append(f"{sliding} with a sliding window")
    experts = [spec.mlp for spec in specs if isinstance(spec.mlp, ExpertsSpec)]
    if experts:
        said.append(f"{len(experts)} with {experts[0].top_k} of {experts[0].count} experts")
    return ", ".join(said)


def _context(config: ModelConfig) -> str:
    spec = config.encoder
    if spec is None:
        return f"{config.max_positions:,} tokens"
    shape = spec.features
    reads = f"up to {spec.max_source:,} tokens" if shape is None else f"{shape.bins} bins by {shape.frames:,} frames"
    return f"{spec.max_text:,} tokens of text, behind an encoder that reads {reads}"


def _token_bytes(config: ModelConfig) -> int:
    return 4 * math.prod(config.cache_shape)


def _bytes(size: float) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), _UNITS[-1])
    return f"{size / unit:,.1f} {name}"
