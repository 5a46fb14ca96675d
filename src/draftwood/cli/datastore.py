"""`draftwood datastore`: what `--drafter rest:path=FOLDER` looks texts up in."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from draftwood.cli.flags import EngineFlags, command
from draftwood.cli.screen import say, stderr, write_json

app = typer.Typer(no_args_is_help=True, help="Datastores of your own files, for --drafter rest:path=FOLDER.")


@app.callback()
def _root() -> None:
    """Datastores of your own files, for --drafter rest:path=FOLDER."""


@app.command("build")
@command
def build_command(
    files: Annotated[list[Path], typer.Argument(help="Text files, JSON lines (.jsonl), and folders of these.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The datastore's folder; made if it is not there.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Whose vocabulary: an alias, a folder, a .gguf file or a hub id.")
    ] = EngineFlags.model,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line and nothing else.")] = False,
) -> None:
    """Build a datastore, or add to it what is new: files that it has already are passed over.

    [dim]Example:[/]

    draftwood datastore build src docs answers.jsonl --model smollm2 --out store

    draftwood generate "…" --drafter rest:path=store
    """
    from draftwood.cli.session import fetch_quietly
    from draftwood.drafters.datastore import build
    from draftwood.model.checkpoint import open_checkpoint

    fetch_quietly(model)
    checkpoint = open_checkpoint(model)
    columns = TextColumn("Reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=stderr(), disable=as_json or not stderr().is_terminal, transient=True) as progress:
        task = progress.add_task("")
        built = build(
            out,
            files,
            checkpoint.tokenizer(),
            checkpoint.config.vocab_size,
            lambda done, size: progress.update(task, completed=done, total=max(size, 1)),
        )
    if as_json:
        write_json(asdict(built) | {"datastore": str(out)})
    else:
        say(f"{built.added} files added, {built.known} were there already: {built.tokens:,} tokens in {out}.")
