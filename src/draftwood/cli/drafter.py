"""`draftwood drafter serve`: a model that drafts for targets on other machines."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Annotated, Any

import typer

from draftwood.cli.flags import EngineFlags, command
from draftwood.cli.screen import say
from draftwood.cli.session import open_llm
from draftwood.errors import InvalidRequest
from draftwood.server.sockets import listening

SHORT_PAGE = 8
app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Drafters for targets elsewhere.")


def _option(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Server", show_default=True)


@dataclass(frozen=True)
class DrafterFlags:
    """Where it listens, and how it drafts."""

    host: Annotated[str, _option("Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, _option("Port to listen at.")] = 7300
    width: Annotated[int, _option("Tokens in each place: the likeliest, and alternatives where a tree has room.")] = 1


@app.callback()
def group() -> None:
    """Drafters for targets elsewhere."""


@app.command("serve")
@command
def serve(engine: EngineFlags, flags: DrafterFlags) -> None:
    """Draft for a target on another machine: there, use --drafter remote:HOST:PORT.

    Both sides read the same secret from DRAFTWOOD_DRAFTER_KEY.

    [dim]Example:[/]

    draftwood drafter serve --model path/to/small --drafter none --host 0.0.0.0
    """
    run_drafter(engine, flags)


def run_drafter(engine: EngineFlags, flags: DrafterFlags) -> None:
    """Draft until Ctrl-C."""
    from draftwood.drafters.remote_protocol import KEY_VARIABLE, key_from_environment
    from draftwood.engine.drafter_host import DrafterHost, EngineSpeaker

    key = key_from_environment()
    if not key and not _is_loopback(flags.host):
        raise InvalidRequest(
            f"Without a key any machine that reaches {flags.host} could have drafts made: set {KEY_VARIABLE} to the "
            "same secret here and where the target runs."
        )
    if engine.config().torch_device().type == "cpu":  # it begins anew all the time, and reads its last page again
        engine = replace(engine, page_size=min(engine.page_size, SHORT_PAGE))
    if not 1 <= flags.width <= 8:
        raise InvalidRequest("--width must lie between 1 and 8.")
    with listening([(flags.host, flags.port)]) as (listener,), open_llm(engine) as llm:
        host = DrafterHost(EngineSpeaker(llm, flags.width), llm.tokenizer.fingerprint, listener, key)
        say(f"{engine.model} drafts at {flags.host}:{listener.getsockname()[1]} (process {os.getpid()})")
        try:
            host.run()
        finally:
            host.close()


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"
