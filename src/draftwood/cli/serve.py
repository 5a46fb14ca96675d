"""`draftwood serve`: an engine behind OpenAI's interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import say
from draftwood.cli.session import check_adaptable, open_llm, start_adapting
from draftwood.errors import InvalidRequest
from draftwood.machine import reading_ahead
from draftwood.model import store

if TYPE_CHECKING:
    from draftwood.server.config import ServerConfig


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=True, **more)


@dataclass(frozen=True)
class ServeFlags:
    """Where it listens, whom it lets in, and how much it takes on."""

    host: Annotated[str, _option("Address to listen at; 0.0.0.0 is everywhere.", "Server")] = "127.0.0.1"
    port: Annotated[int, _option("Port to listen at.", "Server")] = 8000
    name: Annotated[str | None, _option("What clients call the model; as --model if not given.", "Server")] = None
    api_key: Annotated[
        list[str] | None,
        _option(
            "A key clients must send; may be given several times. Safer in the environment than on a command line.",
            "Server",
            envvar="DRAFTWOOD_API_KEY",
            show_envvar=True,
        ),
    ] = None
    offer: Annotated[
        list[str] | None, _option("A drafter that requests may name; may be given several times.", "Parts")
    ] = None
    adapt: Annotated[
        Path | None, _option("Let a trained drafter learn from the answers, and keep it in this folder.", "Parts")
    ] = None
    max_running: Annotated[int, _option("Answers at a time; 0: 64 on a CPU, 256 on a GPU.", "Machine")] = 0
    max_queue: Annotated[int, _option("Answers that may wait; others are told to come back later.", "Server")] = 256
    deadline: Annotated[float, _option("Seconds a request may take.", "Server")] = 600.0
    drain: Annotated[float, _option("Seconds that SIGTERM waits for answers under way.", "Server")] = 30.0
    vllm_metrics: Annotated[bool, _option("Export metrics under vLLM's names too.", "Server")] = False

    def config(self, model: str) -> ServerConfig:
        """Checked."""
        from draftwood.server.config import ServerConfig

        return ServerConfig(
            model_name=self.name or model,
            api_keys=tuple(self.api_key or ()),
            max_queue=self.max_queue,
            deadline=self.deadline,
            drain_seconds=self.drain,
            vllm_names=self.vllm_metrics,
        )


def run_serve(engine: EngineFlags, flags: ServeFlags) -> None:
    """Serve until a signal."""
    with reading_ahead(store.local_files(engine.model)):
        try:
            from draftwood.server.app import make_app
            from draftwood.server.run import DrainingServer, set_up_logging
        except ImportError as error:
            raise InvalidRequest(f"Serving needs {error.name}: pip install 'draftwood[serve]'.") from error
        config = flags.config(engine.model)
        if flags.adapt is not None:
            check_adaptable(engine)
        set_up_logging()
        llm = open_llm(engine, offers=tuple(flags.offer or ()), max_running=flags.max_running)
    adapter = start_adapting(llm) if flags.adapt is not None else None
    app = make_app(llm, config, engine.drafter, flags.offer or ())
    say(f"{config.model_name} with {engine.drafter} at http://{flags.host}:{flags.port}/v1")
    server = DrainingServer(app, flags.host, flags.port)
    server.run()
    if server.engine_died or not server.started:
        raise typer.Exit(1)  # nobody waits for a thread that may never come back
    if adapter is not None and flags.adapt is not None:
        say(f"The drafter, adopted anew {adapter.progress.adopted} times, is in {adapter.save(flags.adapt)}")
    llm.close()
