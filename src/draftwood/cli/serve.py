"""`draftwood serve`: an engine behind OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli.engine_process import EngineOrder, start_engine
from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import say
from draftwood.cli.session import check_adaptable, open_llm, publish_events, save_adapted, start_adapting
from draftwood.errors import InvalidRequest
from draftwood.machine import is_follower, reading_ahead
from draftwood.model import store
from draftwood.server.config import ServerConfig
from draftwood.server.keys import ApiKey, read_key_file
from draftwood.server.sockets import listening

if TYPE_CHECKING:
    from draftwood.engine.served import ServedEngine


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
    adapters: Annotated[
        list[str] | None,
        _option("NAME=FOLDER of a LoRA adapter that requests may name as their model; several times.", "Parts"),
    ] = None
    adapt: Annotated[
        Path | None, _option("Let a trained drafter learn from the answers, and keep it in this folder.", "Parts")
    ] = None
    engine_process: Annotated[
        bool,
        _option("Run the engine in a process of its own, so that answering clients takes no time of it.", "Machine"),
    ] = False
    max_running: Annotated[int, _option("Answers at a time; 0: 64 on a CPU, 256 on a GPU.", "Machine")] = 0
    max_queue: Annotated[int, _option("Answers that may wait; others are told to come back later.", "Server")] = (
        ServerConfig.max_queue
    )
    deadline: Annotated[float, _option("Seconds a request may take.", "Server")] = ServerConfig.deadline
    drain: Annotated[float, _option("Seconds that SIGTERM waits for answers under way.", "Server")] = (
        ServerConfig.drain_seconds
    )
    vllm_metrics: Annotated[bool, _option("Export metrics under vLLM's names too.", "Server")] = True
    kv_events: Annotated[
        str | None,
        _option(
            "ZeroMQ endpoint to publish events of the prefix cache at, such as tcp://*:5557, for routers.", "Server"
        ),
    ] = None
    kv_topic: Annotated[str, _option("Topic of these events; llm-d reads kv@ADDRESS@MODEL.", "Server")] = ""
    api_key_file: Annotated[
        Path | None,
        _option("TOML file of named API keys with their limits; see docs/serving.md.", "Server"),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _option("A name clients may call the server by, beside localhost and addresses; * for all.", "Server"),
    ] = None
    trusted_proxy: Annotated[
        list[str] | None, _option("Address or network of a proxy whose X-Forwarded-* headers are believed.", "Server")
    ] = None
    cors_origin: Annotated[
        list[str] | None, _option("Origin whose pages may call the server from a browser; * for all.", "Server")
    ] = None
    manage_port: Annotated[
        int | None, _option("Port of 127.0.0.1 for /manage, which is then nowhere else.", "Server")
    ] = None
    max_connections: Annotated[int, _option("Connections at a time.", "Limits")] = ServerConfig.max_connections
    max_body: Annotated[int, _option("Bytes of a request's body.", "Limits")] = ServerConfig.max_body
    max_header: Annotated[int, _option("Bytes of a request's headers.", "Limits")] = ServerConfig.max_header
    header_timeout: Annotated[float, _option("Seconds a client has to send its headers.", "Limits")] = (
        ServerConfig.header_timeout
    )
    body_timeout: Annotated[float, _option("Seconds it has to send the body.", "Limits")] = ServerConfig.body_timeout
    write_timeout: Annotated[float, _option("Seconds it may leave an answer unread.", "Limits")] = (
        ServerConfig.write_timeout
    )
    keep_alive: Annotated[int, _option("Seconds an idle connection stays open.", "Limits")] = ServerConfig.keep_alive

    def config(self, model: str) -> ServerConfig:
        """Checked."""
        return ServerConfig(
            model_name=self.name or model,
            api_keys=(*(self.api_key or ()), *self._keys_from_file()),
            max_queue=self.max_queue,
            deadline=self.deadline,
            drain_seconds=self.drain,
            vllm_names=self.vllm_metrics,
            allowed_hosts=(self.host, *(self.allowed_host or ())),
            trusted_proxies=tuple(self.trusted_proxy or ()),
            cors_origins=tuple(self.cors_origin or ()),
            manage_port=self.manage_port,
            max_connections=self.max_connections,
            max_body=self.max_body,
            max_header=self.max_header,
            header_timeout=self.header_timeout,
            body_timeout=self.body_timeout,
            write_timeout=self.write_timeout,
            keep_alive=self.keep_alive,
        )

    def adapter_paths(self, model: str) -> dict[str, str]:
        """The folders of adapters by name; names must be different, and not the model's."""
        found: dict[str, str] = {}
        for given in self.adapters or ():
            name, equals, path = given.partition("=")
            if not (name and equals and path):
                raise InvalidRequest(f"--adapters takes NAME=FOLDER, not '{given}'.")
            if name in found or name == model:
                raise InvalidRequest(f"The adapter name '{name}' is taken; give each adapter one of its own.")
            found[name] = path
        return found

    def _keys_from_file(self) -> tuple[ApiKey, ...]:
        return () if self.api_key_file is None else read_key_file(self.api_key_file)


def _shown(host: str) -> str:
    """An address a browser can open."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def run_serve(engine: EngineFlags, flags: ServeFlags) -> None:
    """Serve until a signal."""
    addresses = [(flags.host, flags.port)]
    if flags.manage_port is not None:
        addresses.append(("127.0.0.1", flags.manage_port))
    config = flags.config(engine.model)
    if is_follower(engine.tp * engine.pp):  # rank 0 has the clients
        open_llm(engine, offers=tuple(flags.offer or ()), max_running=flags.max_running)
    with listening(addresses) as sockets:  # before anything is imported or loaded: the port may be in use
        _serve(engine, flags, config, sockets)


def _serve(engine: EngineFlags, flags: ServeFlags, config: ServerConfig, sockets: list[socket]) -> None:
    with reading_ahead(store.local_files(engine.model)):
        try:
            from draftwood.server.app import make_app
            from draftwood.server.run import DrainingServer, set_up_logging
        except ImportError as error:
            raise InvalidRequest(f"Serving needs {error.name}: pip install 'draftwood[serve]'.") from error
        if flags.adapt is not None:
            check_adaptable(engine)
        set_up_logging()
        served, finish = _engine(engine, flags)
    app = make_app(served, config, engine.drafter, flags.offer or ())
    address = f"http://{_shown(flags.host)}:{sockets[0].getsockname()[1]}"
    say(f"{config.model_name} with {engine.drafter} at {address}/v1, a page to try it at {address}/")
    server = DrainingServer(app)
    server.run(sockets)
    if server.engine_died or not server.started:
        raise typer.Exit(1)  # do not wait for a thread that may never come back
    finish()


def _engine(engine: EngineFlags, flags: ServeFlags) -> tuple[ServedEngine, Callable[[], None]]:
    """An engine here or in a process of its own, and what is left to do once the server has ended."""
    offers, adapters = tuple(flags.offer or ()), flags.adapter_paths(flags.name or engine.model)
    if flags.engine_process:
        adapt = None if flags.adapt is None else str(flags.adapt)
        events = (flags.kv_events, flags.kv_topic)
        remote = start_engine(EngineOrder(engine, offers, flags.max_running, adapt, *events, adapters))
        return remote, remote.close
    llm = open_llm(engine, offers=offers, max_running=flags.max_running, adapters=adapters)
    adapter = start_adapting(llm) if flags.adapt is not None else None
    events = None if flags.kv_events is None else publish_events(llm, flags.kv_events, flags.kv_topic)

    def finish() -> None:
        if events is not None:
            events.close()
        if adapter is not None and flags.adapt is not None:
            save_adapted(adapter, flags.adapt)
        llm.close()

    return llm, finish
