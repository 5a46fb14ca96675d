"""`draftwood search-skip`: which layers drafts of a model can leave out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import say, stderr, stdout, write_json
from draftwood.cli.session import open_llm
from draftwood.errors import InvalidRequest

if TYPE_CHECKING:
    from draftwood.engine.llm import LLM
    from draftwood.lab.probe import Answer, Costs
    from draftwood.lab.skipping import Found, Say

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the prime numbers below n, with a docstring.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show each step.",
    "Summarise what a hash table is for a new programmer.",
    "Write a short letter that asks a landlord to repair a window.",
    "List five differences between cats and dogs.",
)


def run_search(
    engine: EngineFlags, policy: str, prompts: Path | None, tokens: int, effort: int, *, as_json: bool
) -> None:
    """Answer the prompts plainly, search, and keep the result where `layer-skip` looks for it."""
    from draftwood.drafters.skips import save_skips
    from draftwood.engine.worker import ComputeThread
    from draftwood.lab.experiment import read_prompts
    from draftwood.lab.probe import Probe
    from draftwood.lab.skipping import POLICIES, as_skips, search

    if policy not in POLICIES:
        raise InvalidRequest(f"There is no policy '{policy}': choose one of {', '.join(POLICIES)}.")
    if tokens < 16 or effort < 1:
        raise InvalidRequest("Answers need at least 16 tokens, and a search at least one try: see --tokens, --tries.")
    texts = PROMPTS if prompts is None else read_prompts(prompts)
    with open_llm(replace(engine, drafter="none")) as llm:
        say(f"answering {len(texts)} prompts")
        answers = _answers(llm, texts, tokens)

        def find() -> tuple[Found, Costs]:
            with _progress() as tell, Probe(llm.engine.target, answers, PLACES, DEPTH).reading() as probe:
                return search(probe, policy, effort, tell)

        found, costs = ComputeThread.shared().call(find)
        kept = as_skips(found, policy, llm.config.weights)
        path = save_skips(kept, llm.checkpoint)
    _report(engine, found, costs, path, as_json=as_json)


PLACES, DEPTH = 12, 6  # of each answer, and tokens of the chains that are drafted there


def _answers(llm: LLM, prompts: Sequence[str], tokens: int) -> list[Answer]:
    from draftwood.lab.probe import Answer
    from draftwood.request import SamplingParams

    chats: list[Any] = [[{"role": "user", "content": p}] if llm.tokenizer.has_chat_template else p for p in prompts]
    results = llm.generate(chats, SamplingParams(max_tokens=tokens))
    return [Answer([*r.prompt_token_ids, *r.token_ids], len(r.prompt_token_ids)) for r in results if r.token_ids]


@contextmanager
def _progress() -> Iterator[Say]:
    """A bar where there is a terminal, else nothing."""
    columns = TextColumn("searching"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.description}"), console=stderr(), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda done, best: bar.update(task, completed=done, description=f"best so far: {best}")


def _report(engine: EngineFlags, found: Found, costs: Costs, path: Path, *, as_json: bool) -> None:
    sets = dict(zip(("skip", "attention", "mlp"), found.sets, strict=True))
    skipped = ",".join(f"{name}={'x'.join(map(str, own))}" for name, own in sets.items() if own)
    if as_json:
        write_json(
            {
                "model": engine.model, "skipped": sets, "depth": found.depth, "ratio": found.ratio,
                "survival": list(found.survival), "plain_seconds": costs.plain, "path": str(path),
            }
        )  # fmt: skip
        return
    table = Table("Left out", "Depth", "Drafts right, by depth", "Expected, over plain decoding")
    rates = " ".join(f"{chance:.0%}" for chance in found.survival)
    table.add_row(skipped, str(found.depth), rates, f"{found.ratio:.2f}×")
    stdout().print(table)
    say(f"Kept in {path}; --drafter layer-skip uses it from now on.")
    if found.ratio <= 1:
        say(
            f"No set of layers pays here: the best one found would decode at {found.ratio:.2f} times the plain speed. "
            "Take another drafter; self-int8, self-int4 and those from text need no training either."
        )
    else:
        say(f"Try: --drafter layer-skip --tree chain:depth={found.depth}")
