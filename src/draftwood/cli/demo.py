"""`draftwood demo`: the same prompts by plain and by speculative decoding, next to each other.

Both sides run on one engine with one set of weights; a `Switch` in the drafter's place, and on the budget, is all that
differs.
Each prompt is read into the cache first, so neither side profits from coming second, and the sides take turns
in who goes first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draftwood.batch import ForwardBatch
from draftwood.cli.demo_prompts import PROMPTS, DemoPrompt
from draftwood.cli.demo_view import BlockView, ColumnView, draw_svg, print_summary
from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import Transcript, say, stdout, write_json
from draftwood.cli.session import (
    check_parts,
    collect,
    conversation,
    fetch_quietly,
    loading,
    mention_missing_kernels,
    setting,
)
from draftwood.drafters.none import NoDrafter
from draftwood.drafting import Drafter, Proposal
from draftwood.protocols import BatchView, Budget, Controller, Features, HostView, Load, Randomness, StepReport
from draftwood.request import SamplingParams
from draftwood.tree import Verdict

if TYPE_CHECKING:
    from draftwood.engine.llm import LLM
    from draftwood.model.runner import ModelRunner


STEADY = 1.5  # steps cost much the same; if they vary more than this, something else disturbed them


class Switch:
    """A drafter that can be switched off. To be turned between requests only."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._current: Drafter = drafter
        self.law, self.max_nodes, self.sizes = drafter.law, drafter.max_nodes, drafter.sizes
        self.surplus, self.remembers = drafter.surplus, drafter.remembers

    @property
    def on(self) -> bool:
        """Whether it drafts."""
        return self._current is self._drafter

    def turn(self, *, on: bool) -> None:
        """Draft, or do not."""
        self._current = self._drafter if on else NoDrafter()

    @property
    def needs(self) -> frozenset[int]:
        """Of the target's layers, while it drafts."""
        return self._current.needs

    @property
    def reads(self) -> bool:
        """Whether it runs tokens through a network of its own, while it drafts."""
        return self._current.reads

    @property
    def waits(self) -> bool:
        """Whether its trees come from the host, while it drafts."""
        return self._current.waits

    def attach(self, target: ModelRunner) -> None:
        """The target it drafts for."""
        self._drafter.attach(target)

    def depth(self, nodes: int) -> int:
        """The drafter's."""
        return self._current.depth(nodes)

    def staged(self, nodes: int) -> int:
        """The drafter's."""
        return self._current.staged(nodes)

    def prepare(self, view: HostView, size: int, nodes: int) -> None:
        """The host's part."""
        self._current.prepare(view, size, nodes)

    def propose(self, view: BatchView, nodes: int, rng: Randomness) -> Proposal:
        """The drafter's trees, or bare roots."""
        return self._current.propose(view, nodes, rng)

    def ingest(self, batch: ForwardBatch, features: Features | None) -> None:
        """Text that the target has run."""
        self._current.ingest(batch, features)

    def commit(self, view: BatchView, proposal: Proposal, verdict: Verdict, features: Features) -> None:
        """What became of a proposal."""
        self._current.commit(view, proposal, verdict, features)

    def release(self, seq_id: int) -> None:
        """A drafter is told of all sequences, also of those it never saw."""
        self._drafter.release(seq_id)


class SwitchedBudget:
    """A controller's budgets, and none while the switch is off."""

    def __init__(self, controller: Controller, switch: Switch) -> None:
        self._controller = controller
        self._switch = switch

    def budget(self, load: Load) -> Budget:
        """The controller's, or nothing."""
        return self._controller.budget(load) if self._switch.on else Budget(0)

    def observe(self, report: StepReport) -> None:
        """Only what came of guessing teaches anything about it."""
        if self._switch.on:
            self._controller.observe(report)


@dataclass(frozen=True)
class Comparison:
    """One prompt, answered twice."""

    prompt: DemoPrompt
    plain: Transcript
    speculative: Transcript

    @property
    def identical(self) -> bool:
        """Whether both sides gave the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def ratio(self) -> float:
        """How much faster speculation was."""
        before = self.plain.stats.tokens_per_second
        return self.speculative.stats.tokens_per_second / before if before else 0.0

    @property
    def is_plausible(self) -> bool:
        """Whether the ratio can be right: a step costs at least as much with guesses as without, so more than the
        tokens of a step is noise."""
        return 0 < round(self.ratio, 2) <= round(self.speculative.stats.tokens_per_step, 2)

    def record(self) -> dict[str, Any]:
        """Its figures, for the summary."""
        plain, speculative = self.plain.stats, self.speculative.stats
        return {
            "prompt": self.prompt.title,
            "identical": self.identical,
            "num_tokens": speculative.num_tokens,
            "steps": speculative.steps,
            "tokens_per_step": round(speculative.tokens_per_step, 3),
            "acceptance": round(speculative.acceptance, 3),
            "plain_tokens_per_second": round(plain.tokens_per_second, 2),
            "speculative_tokens_per_second": round(speculative.tokens_per_second, 2),
            "ratio": round(self.ratio, 3),
            "plausible": self.is_plausible,
        }


@dataclass(frozen=True)
class Summary:
    """All prompts; ratios are shown only where the machine was steady enough to compare times."""

    comparisons: Sequence[Comparison]

    @property
    def identical(self) -> bool:
        """Whether all answers were the same."""
        return all(comparison.identical for comparison in self.comparisons)

    @property
    def unsteadiness(self) -> float:
        """The worst of: stalls within an answer, and plain decoding's speed between answers."""
        rates = [comparison.plain.stats.tokens_per_second for comparison in self.comparisons]
        stalls = [side.unsteadiness for c in self.comparisons for side in (c.plain, c.speculative)]
        return max(max(rates) / min(rates), *stalls) if min(rates) > 0 else 1.0

    @property
    def steady(self) -> bool:
        """Whether steps took much the same time throughout."""
        return self.unsteadiness <= STEADY

    @property
    def median_ratio(self) -> float:
        """As measured, steady or not."""
        return statistics.median(comparison.ratio for comparison in self.comparisons)

    @property
    def why_withheld(self) -> str | None:
        """Why some ratios are not shown, and how to get them; None: all are."""
        if not self.steady:
            reason = f"a step's time varied {self.unsteadiness:.1f}-fold, so something else kept the machine busy"
        elif not all(comparison.is_plausible for comparison in self.comparisons):
            reason = "a ratio above the tokens of a step is noise"
        else:
            return None
        return (
            f"–: not steady enough to compare ({reason}). For a ratio, end other programs and run the demo again. "
            "Tokens are counted, not timed: they hold all the same."
        )


class View(Protocol):
    """Somewhere to watch two sides."""

    def begin(self, number: int, prompt: DemoPrompt, plain: Transcript, speculative: Transcript) -> None:
        """A prompt's turn."""
        ...

    def changed(self) -> None:
        """One of the two transcripts has grown."""
        ...

    def end(self, comparison: Comparison) -> None:
        """Both sides are done."""
        ...

    def close(self) -> None:
        """No more is to come, for whatever reason."""
        ...


def run_demo(flags: EngineFlags, params: SamplingParams, svg: Path | None, *, as_json: bool = False) -> bool:
    """Run everything and report; whether all answers were the same."""
    console = stdout()
    view: View = ColumnView(console, flags.drafter) if console.is_terminal else BlockView(console, flags.drafter)
    llm, switch = _open(flags)
    with llm, closing(view):
        _warm_up(llm, switch)
        summary = Summary(
            [_compare(llm, switch, view, number, prompt, params) for number, prompt in enumerate(PROMPTS, start=1)]
        )
    print_summary(console, summary)
    if svg is not None:
        draw_svg(svg, summary, flags.drafter)
    if as_json or not console.is_terminal:
        write_json(_record(summary, flags, params))
    return summary.identical


def _record(summary: Summary, flags: EngineFlags, params: SamplingParams) -> dict[str, Any]:
    """What was measured, for programs: ratios too, with whether they mean anything."""
    return {
        "identical": summary.identical,
        "steady": summary.steady,
        "median_ratio": round(summary.median_ratio, 3),
        "max_tokens": params.max_tokens,
        "law": flags.law,
        "prompts": [comparison.record() for comparison in summary.comparisons],
    } | setting(flags)


def _open(flags: EngineFlags) -> tuple[LLM, Switch]:
    from draftwood.assembly import build_drafter
    from draftwood.engine.llm import LLM
    from draftwood.engine.worker import ComputeThread
    from draftwood.model.checkpoint import open_checkpoint
    from draftwood.settling import settle

    check_parts(flags)
    fetch_quietly(flags.model)
    with loading(flags.model) as progress:
        checkpoint = open_checkpoint(flags.model, flags.impl)
        config = settle(flags.config(), checkpoint, flags.drafter)
        # A draft model's weights belong on the thread that will use them.
        pickles = flags.allow_pickle
        drafter = ComputeThread.shared().call(
            lambda: build_drafter(flags.drafter, flags.tree, checkpoint, config, allow_pickle=pickles)
        )
        switch = Switch(drafter)
        llm = LLM(checkpoint, drafter=switch, law=flags.law, config=config, progress=progress)
    mention_missing_kernels(llm)
    if not llm.is_calibrated:
        say("Measuring what a step costs on this machine, to know how much guessing pays …")
        llm.calibrate(say)
    llm.engine.controller = SwitchedBudget(llm.engine.controller, switch)
    return llm, switch


def _warm_up(llm: LLM, switch: Switch) -> None:
    """First forwards are slow on either side; let both be over before anything is timed."""
    for on in (False, True):
        switch.turn(on=on)
        llm.chat(conversation("Say one two one two one two.", None), SamplingParams(max_tokens=8))


def _compare(
    llm: LLM, switch: Switch, view: View, number: int, prompt: DemoPrompt, params: SamplingParams
) -> Comparison:
    messages = conversation(prompt.text, None)
    plain, speculative = Transcript(), Transcript()
    view.begin(number, prompt, plain, speculative)
    switch.turn(on=True)
    llm.chat(messages, SamplingParams(max_tokens=1))  # the prompt's whole pages are in the cache now, for both
    sides = [(False, plain), (True, speculative)]
    for on, transcript in sides if number % 2 else reversed(sides):
        switch.turn(on=on)
        collect(llm, messages, params, transcript, lambda event: view.changed())
    comparison = Comparison(prompt, plain, speculative)
    view.end(comparison)
    return comparison
