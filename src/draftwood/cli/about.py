"""What a model folder, file or hub id is, before anything of it is loaded: `draftwood models PATH`."""

from __future__ import annotations

from rich.table import Table

from draftwood.model.checkpoint import files_of, open_checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.names import count_active_parameters, count_parameters
from draftwood.model.runner import implementations
from draftwood.model.spec import ExpertsSpec

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def about_table(name: str) -> Table:
    """A model's family, size, what runs it and what memory it takes."""
    checkpoint = open_checkpoint(name)
    config = checkpoint.config
    table = Table(show_header=False, box=None, title=checkpoint.name, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("family", config.family)
    table.add_row("parameters", _parameters(config))
    table.add_row("layers", _layers(config))
    table.add_row("context", f"{config.max_positions:,} tokens")
    for device, runs in implementations(config).items():
        table.add_row(f"on a {device}", runs)
    for kind, size in (("bfloat16", 2), ("int8", 1.0625), ("int4", 0.625)):
        table.add_row(f"weights as {kind}", f"about {_bytes(count_parameters(config) * size)}")
    table.add_row("cache", f"{_bytes(_token_bytes(config))} a token in bfloat16")
    stored = sum(file.stat().st_size for file in files_of(checkpoint))
    if stored:
        table.add_row("on disk", _bytes(stored))
    return table


def _parameters(config: ModelConfig) -> str:
    total, active = count_parameters(config), count_active_parameters(config)
    said = f"{total / 1e6:,.0f} million"
    return said if active == total else f"{said}, {active / 1e6:,.0f} million of which a token makes use of"


def _layers(config: ModelConfig) -> str:
    specs = config.layer_specs
    said = [f"{config.num_layers} of {config.hidden_size} numbers, {config.num_heads} heads"]
    sliding = sum(spec.attention.window is not None for spec in specs)
    if sliding:
        said.append(f"{sliding} with a sliding window")
    experts = [spec.mlp for spec in specs if isinstance(spec.mlp, ExpertsSpec)]
    if experts:
        said.append(f"{len(experts)} with {experts[0].top_k} of {experts[0].count} experts")
    return ", ".join(said)


def _token_bytes(config: ModelConfig) -> int:
    return 4 * config.num_layers * config.num_kv_heads * config.head_dim


def _bytes(size: float) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), _UNITS[-1])
    return f"{size / unit:,.1f} {name}"
