"""`draftwood models MODEL`: what it is, how it is stored and what it will need, without loading it."""

from __future__ import annotations

from rich.table import Table

_CACHE = 4096  # tokens


def model_table(name: str) -> Table:
    """A model's facts."""
    import torch

    from draftwood.engine.memory import BYTES, count_parameters, token_bytes, weight_bytes
    from draftwood.model.checkpoint import files_of, open_checkpoint
    from draftwood.model.described import held_formats

    checkpoint = open_checkpoint(name)
    config, files = checkpoint.config, files_of(checkpoint)
    formats = held_formats(files)
    table = Table(title=checkpoint.name, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    sizes = f"{count_parameters(config) / 1e6:,.0f} M weights, {config.num_layers} layers"
    table.add_row("Model", f"{config.family}, {sizes}, {config.max_positions:,} positions")
    suffix = files[0].suffix.removeprefix(".") if files else "?"
    parts = f" in {len(files)} files" if len(files) > 1 else ""
    table.add_row("Stored", f"{suffix}, {_mb(sum(file.stat().st_size for file in files))}{parts}")
    for held in formats:
        if held.matrices:
            count = f"{held.matrices} {'matrices' if held.matrices > 1 else 'matrix'}"
            note = ": not multiplied as stored, dequantised to float32" if held.expanded else ""
            table.add_row(
                "",
                f"{count} in {held.type}, {_mb(held.stored)}{note}",
            )
    table.add_row("Needs on a CPU", f"{_mb(sum(held.loaded for held in formats))} for the weights as they are stored")
    table.add_row("", f"or {_mb(count_parameters(config) * BYTES['INT8'])} with --weights int8 or w8a8")
    cache = token_bytes(config, torch.float32)
    table.add_row("", f"and {_mb(cache * _CACHE)} for {_CACHE:,} tokens of cache")
    size = weight_bytes(config, "bfloat16", torch.bfloat16)
    table.add_row("On a GPU", f"{_mb(size)} for the weights in bfloat16, {_mb(cache // 2 * _CACHE)} for that cache")
    return table


def _mb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 2e9 else f"{size / 1e6:,.0f} MB"
