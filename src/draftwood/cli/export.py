"""`draftwood export`: a trained drafter for another engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwood.cli.screen import say
from draftwood.errors import InvalidRequest


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=True)


@dataclass(frozen=True)
class ExportFlags:
    """What for, and where to."""

    destination: Annotated[str, _option("vllm, sglang or speculators.", "--for")]
    out: Annotated[Path, _option("Folder to write.", "--out", "-o")]
    model: Annotated[str, _option("The target it was trained for, as we read it.", "--model", "-m")] = "smollm2"
    target: Annotated[
        str | None, _option("What the engine calls the target, a hub id or a folder; --model if not given.")
    ] = None
    dtype: Annotated[str, _option("bfloat16, float16 or float32.")] = "bfloat16"
    mask_token: Annotated[
        int | None,
        _option("Token that stands for a block head's own mask; the last of the vocabulary if not given."),
    ] = None
    allow_pickle: Annotated[bool, _option("Read a drafter's .pt or .bin file where it has nothing else.")] = False


def run_export(drafter: str, flags: ExportFlags) -> None:
    """Read, write, and say what loads it."""
    import torch

    from draftwood.assembly import trained_folder
    from draftwood.cli.session import fetch_quietly
    from draftwood.config import DTYPES
    from draftwood.model.checkpoint import open_checkpoint
    from draftwood.nets.embeddings import TargetEmbeddings
    from draftwood.nets.exchange import Destination, Target, export_for
    from draftwood.nets.layouts import open_drafter
    from draftwood.nets.layouts.alone import read_net

    if flags.destination not in list(Destination):
        raise InvalidRequest(f"Unknown engine '{flags.destination}': choose one of {', '.join(Destination)}.")
    if flags.dtype not in DTYPES:
        raise InvalidRequest(f"Unknown dtype '{flags.dtype}': choose one of bfloat16, float16, float32.")
    fetch_quietly(flags.model)
    checkpoint = open_checkpoint(flags.model)
    folder = trained_folder(drafter)
    files = open_drafter(folder if folder.is_dir() else drafter, allow_pickle=flags.allow_pickle)
    net = read_net(files, checkpoint)
    words = TargetEmbeddings(checkpoint, torch.device("cpu"), torch.float32)
    target = Target(flags.target or checkpoint.name, words, flags.mask_token, checkpoint.tokenizer())
    done = export_for(Destination(flags.destination), net, flags.out, target, dtype=DTYPES[flags.dtype])
    say(f"Written to {done.folder}. It is loaded by: {done.usage}")
