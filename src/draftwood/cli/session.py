"""From flags to a running model and its answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import AnswerPrinter, Transcript, figures, say, stderr, write_json
from draftwood.model import store
from draftwood.request import Event, SamplingParams

if TYPE_CHECKING:
    from draftwood.engine.llm import LLM, Prompt

Message = dict[str, str]


def open_llm(flags: EngineFlags) -> LLM:
    """Fetch and load what the flags name; what can be refused without reading weights is refused first."""
    from draftwood.engine.llm import LLM

    config = flags.config()
    check_parts(flags)
    fetch_quietly(flags.model)
    with loading(flags.model):
        return LLM(flags.model, drafter=flags.drafter, law=flags.law, tree=flags.tree, config=config)


def check_parts(flags: EngineFlags) -> None:
    """Refuse names nobody knows."""
    from draftwood.assembly import build_grower, build_verifier

    build_verifier(flags.law)
    if flags.tree is not None:
        build_grower(flags.tree)


def fetch_quietly(model: str) -> None:
    """Fetch an embedded model, saying so only if it is not here yet."""
    if model in store.EMBEDDED:
        store.fetch(model, say)


def loading(model: str) -> Any:
    """A spinner where somebody can see it."""
    console = stderr()
    return console.status(f"Loading {model} …") if console.is_terminal else nullcontext()


def conversation(prompt: str, system: str | None) -> list[Message]:
    """A question and who is asked."""
    system_message = [] if system is None else [{"role": "system", "content": system}]
    return [*system_message, {"role": "user", "content": prompt}]


def collect(
    llm: LLM, prompt: Prompt, params: SamplingParams, transcript: Transcript, listen: Callable[[Event], None]
) -> None:
    """Answer a prompt into `transcript`, which survives an interruption; `listen` hears every event.

    Leaving early, by whatever exception, cancels the request.
    """
    stream = llm.stream(prompt, params)
    with closing(stream) as events:
        for event in events:
            transcript.add(event)
            listen(event)


def print_answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, transcript: Transcript, *, quiet: bool = False
) -> None:
    """Stream an answer to stdout, or only collect it."""
    printer = AnswerPrinter()
    try:
        collect(llm, prompt, params, transcript, _ignore if quiet else printer.event)
    finally:
        printer.end()


def _ignore(event: Event) -> None:
    pass


def report(transcript: Transcript, flags: EngineFlags, params: SamplingParams, *, as_json: bool) -> None:
    """The figures of an answer: one JSON line, or a line for whoever watches."""
    if as_json:
        names = {"model": flags.model, "drafter": flags.drafter, "law": flags.law, "tree": flags.tree}
        write_json(transcript.record() | names | {"seed": params.seed})
    elif stderr().is_terminal:
        say(figures(transcript.stats))
