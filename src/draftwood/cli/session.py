"""From flags to a running model and its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import AnswerPrinter, Transcript, figures, say, seed_note, stderr, write_json
from draftwood.errors import InvalidRequest
from draftwood.machine import reading_ahead
from draftwood.model import store
from draftwood.request import Event, GuessedTree, SamplingParams

if TYPE_CHECKING:
    from draftwood.engine.kv_events import KvEvents
    from draftwood.engine.llm import LLM, Prompt
    from draftwood.model.native import Progress
    from draftwood.train.online import Adapter

Message = dict[str, str]


def open_llm(
    flags: EngineFlags,
    *,
    offers: Sequence[str] | None = None,
    max_running: int = 0,
    adapters: Mapping[str, str] | None = None,
) -> LLM:
    """Fetch and load what the flags name; what can be refused without reading weights is refused first."""
    with reading_ahead(store.local_files(flags.model)):  # importing torch takes seconds, too
        return _load(flags, offers, max_running, adapters)


def _load(
    flags: EngineFlags, offers: Sequence[str] | None, max_running: int, adapters: Mapping[str, str] | None
) -> LLM:
    from draftwood.engine.llm import LLM

    config = replace(flags.config(), max_running=max_running)
    check_parts(flags)
    fetch_quietly(flags.model)
    with loading(flags.model) as progress:
        llm = LLM(
            flags.model,
            drafter=flags.drafter,
            offers=offers,
            law=flags.law,
            tree=flags.tree,
            config=config,
            progress=progress,
            allow_pickle=flags.allow_pickle,
            lora=flags.lora,
            adapters=adapters,
        )
    mention_missing_kernels(llm)
    return llm


def check_parts(flags: EngineFlags) -> None:
    """Refuse unknown names."""
    from draftwood.assembly import AUTO, build_grower, build_verifier

    if flags.law != AUTO:
        build_verifier(flags.law)
    if flags.tree is not None:
        build_grower(flags.tree)


def check_adaptable(flags: EngineFlags) -> None:
    """Refuse to adapt what was not trained for its target, before any weights are read."""
    from draftwood.assembly import makes_own_trees
    from draftwood.drafters.lookups import members_of
    from draftwood.drafters.self_drafts import is_self_draft

    names = members_of(flags.drafter) or [flags.drafter]
    if all(makes_own_trees(name) or is_self_draft(name) or name.partition(":")[0] == "model" for name in names):
        raise InvalidRequest(
            f"The drafter '{flags.drafter}' cannot learn: --adapt goes with trained ones, such as --drafter eagle3."
        )


def start_adapting(llm: LLM) -> Adapter:
    """Let the drafter learn from now on."""
    from draftwood.train.online import adapt

    return adapt(llm)


def publish_events(llm: LLM, endpoint: str, topic: str) -> KvEvents:
    """Tell routers what the prefix cache holds, from now on."""
    from draftwood.engine.kv_events import KvEvents

    return KvEvents.of(llm.engine, endpoint, topic)


def save_adapted(adapter: Adapter, folder: Path) -> None:
    """Keep what the drafter has learnt."""
    say(f"The drafter, adopted anew {adapter.progress.adopted} times, is in {adapter.save(folder)}")


def fetch_quietly(model: str) -> None:
    """Fetch an embedded model, saying so only if it is not here yet."""
    if model in store.EMBEDDED:
        store.fetch(model, say)


@contextmanager
def loading(model: str) -> Iterator[Progress]:
    """A spinner where there is a terminal, and what to tell it."""
    console = stderr()
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with console.status(f"Loading {model} …") as status:
        yield lambda done, total: status.update(f"Loading {model} … {done / total:.0%}")


def mention_missing_kernels(llm: LLM) -> None:
    """Say why it will be slow, where it will."""
    from draftwood.ops.native import why_missing

    if llm.engine.target.device.type == "cpu" and why_missing() is not None:
        say(f"Our own CPU kernels are missing, so this runs on torch's operations, slower: {why_missing()}.")


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
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    transcript: Transcript,
    *,
    quiet: bool = False,
    listen: Callable[[Event], None] | None = None,
) -> None:
    """Stream an answer to stdout, or only collect it; `listen` hears every event besides."""
    printer = AnswerPrinter()

    def hear(event: Event) -> None:
        if not quiet:
            printer.event(event)
        if listen is not None:
            listen(event)

    try:
        collect(llm, prompt, params, transcript, hear)
    finally:
        printer.end()


def step_told(event: Event) -> None:
    """A line about the step that gave an event its tokens."""
    step = event.step
    if step is None:
        return
    guessed = 0 if step.tree is None else len(step.tree.tokens) - 1
    members = "" if step.tree is None else _by_member(step.tree)
    gain = "" if step.expected_gain is None else f", {step.expected_gain:.2f} times as fast as plain"
    by = "" if step.drafter is None else f" of {step.drafter}"
    say(
        f"step {event.stats.steps}: {event.text!r} · {sum(event.accepted)} of {guessed} guesses{by} kept{members} · "
        f"{1000 * step.seconds:.1f} ms{gain} · {step.why}"
    )


def _by_member(tree: GuessedTree) -> str:
    """Which drafters of a combination have guessed, and what was kept of each."""
    guessed = Counter(name for names in tree.members for name in names)
    kept = Counter(name for names, right in zip(tree.members, tree.accepted, strict=True) if right for name in names)
    told = ", ".join(f"{name} {kept[name]} of {count}" for name, count in guessed.items())
    return f" ({told})" if told else ""


def setting(flags: EngineFlags) -> dict[str, Any]:
    """What an answer was made with, for JSON."""
    import torch

    from draftwood.engine.worker import ComputeThread

    parts = {"model": flags.model, "drafter": flags.drafter, "tree": flags.tree}
    return parts | {"weights": flags.weights, "threads": ComputeThread.shared().call(torch.get_num_threads)}


def report(transcript: Transcript, flags: EngineFlags, params: SamplingParams, *, as_json: bool) -> None:
    """The figures of an answer: one JSON line, or a line for a person."""
    if as_json:
        write_json(transcript.record() | setting(flags))
        return
    if stderr().is_terminal:
        say(figures(transcript.stats))
    if params.seed is not None and not transcript.stats.reproducible:
        say(seed_note(transcript.stats))
