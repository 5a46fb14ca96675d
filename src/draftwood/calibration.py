"""Measure what steps cost here, and remember it for as long as nothing that matters has changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from draftwood import __version__
from draftwood.costs import LIKE_OTHER_CPUS, LIKE_OTHER_GPUS, StepCosts
from draftwood.drafters.by_request import OfferedDrafters
from draftwood.drafters.scripted import Script, ScriptedDrafter
from draftwood.drafting import Drafter
from draftwood.engine.controller import FixedBudget
from draftwood.engine.decode_step import Parts
from draftwood.engine.engine import Engine
from draftwood.engine.graph_runner import GraphRunner, batch_state_for
from draftwood.engine.policies import AUTO, Guessing, make_controller
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.engine.sequence import Sequence
from draftwood.engine.shapes import ShapePlan
from draftwood.engine.text import TextStream
from draftwood.errors import InvalidRequest
from draftwood.machine import advise_home, home, processor_features
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Controller, HostView, StepMode
from draftwood.request import FinishReason, SamplingParams
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
CONTEXTS = (64, 1024)
BATCH = 8
REPEATS = 4
BURST = 3
GPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
GPU_BATCH = 32
WIDE_ROWS = (256, 512, 1024)
GPU_REPEATS = 20
Say = Callable[[str], None]


def costs_path(target: ModelRunner) -> Path:
    """Where this model's table on this machine is kept; another machine, format or version has another name."""
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "processor": processor_features(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": _device_name(target.device),
        "dtype": str(target.model.dtype),
        "weights": target.model.weights.name,
        "implementation": target.model.implementation,
        "model": asdict(target.model.config),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return home() / "costs" / f"{key}.json"


def known_costs(target: ModelRunner) -> StepCosts | None:
    """The table, if this machine has measured it before and was steady enough then."""
    costs = StepCosts.load(costs_path(target))
    return costs if costs is not None and costs.doubt is None else None


def assumed_costs(target: ModelRunner) -> StepCosts:
    """Of another machine of the kind; for a mixture also what its rows read of experts of their own."""
    table = LIKE_OTHER_GPUS if target.device.type == "cuda" else LIKE_OTHER_CPUS
    config = target.model.config
    mixtures = config.mixtures
    if not mixtures:
        return table
    one, hidden = mixtures[0], config.hidden_size
    shared = 0 if one.shared is None else one.shared.width
    routed = len(mixtures) * 3 * one.top_k * one.expert.width
    others = config.num_layers * 4 * hidden + len(mixtures) * 3 * shared + config.vocab_size
    dense = 3 * config.intermediate_size * (config.num_layers - len(mixtures))
    return table.of_experts(one.count, one.top_k, routed / (routed + others + dense))


def default_controller(
    target: ModelRunner, drafter: Drafter, costs: StepCosts | None = None, policy: str = AUTO
) -> Controller:
    """By costs that are given or known, else by those of another machine of the kind, until steps have run here."""
    offered = drafter if isinstance(drafter, OfferedDrafters) else None
    choice = () if offered is None else offered.choice
    return make_controller(
        policy,
        Guessing(
            costs or known_costs(target) or assumed_costs(target),
            drafter.max_nodes,
            drafter.depth,
            chain=drafter.law.chain,
            reads=drafter.reads,
            choice=choice,
            readers=frozenset() if offered is None else frozenset(filter(offered.reads_for, choice)),
        ),
    )


def calibrate(target: ModelRunner, say: Say = lambda _: None) -> StepCosts:
    """Measure, and keep the result. Takes a few seconds; the target must have no requests meanwhile.

    A doubtful result never replaces one that is not; it is kept otherwise, but no budget goes by it, and it is
    measured again at the next opportunity.
    """
    costs = _on_gpu(target, say) if target.device.type == "cuda" else _on_cpu(target, say)
    before = known_costs(target)
    if costs.doubt is None or before is None:
        _keep(costs, costs_path(target), say)
    if costs.doubt is not None:
        instead = "drafts are sized as if nothing had been measured" if before is None else "the table before it stays"
        say(
            f"These costs are not used, {instead}: {costs.doubt}, so something else kept the machine busy. "
            "Run `draftwood calibrate` again when it is quiet."
        )
    return costs


def _keep(costs: StepCosts, path: Path, say: Say) -> None:
    """Save a table; one that cannot be saved still serves this process."""
    try:
        costs.save(path)
    except OSError as error:
        say(f"The costs of steps could not be kept, and will be measured again: {advise_home(error)}.")


def _on_gpu(target: ModelRunner, say: Say) -> StepCosts:
    """Captured steps, timed by the device itself: trees of one sequence, then a batch."""
    room = min(target.model.config.max_positions, target.cache.tables.capacity // (GPU_BATCH + 1)) - 2 * max(GPU_ROWS)
    contexts = sorted({min(context, max(room, 1)) for context in CONTEXTS})
    lines = []
    for context in contexts:
        say(f"steps with {context} tokens of context")
        lines.append(_time_steps(target, 1, context, [count - 1 for count in GPU_ROWS]))
    say(f"steps of {GPU_BATCH} sequences")
    together, *wide = _time_steps(target, GPU_BATCH, contexts[0], [0, *(rows // GPU_BATCH - 1 for rows in WIDE_ROWS)])
    far = _time_steps(target, GPU_BATCH, contexts[-1], [0])[0] if len(contexts) > 1 else together
    others, same = GPU_BATCH - 1, GPU_ROWS.index(GPU_BATCH)
    near, beyond = (max(0.0, (t - line[same]) / others) for t, line in ((together, lines[0]), (far, lines[-1])))
    own = [max(seconds - others * near, lines[0][-1]) for seconds in wide]
    longer = [[line[-1] / lines[0][-1] * seconds for seconds in own] for line in lines]
    seconds = tuple((*line, *more) for line, more in zip(lines, longer, strict=True))
    per_token = max(0.0, beyond - near) / max(contexts[-1] - contexts[0], 1)
    return StepCosts((*GPU_ROWS, *WIDE_ROWS), tuple(contexts), seconds, near, per_token)


def _time_steps(target: ModelRunner, batch: int, context: int, nodes: list[int]) -> list[float]:
    """Seconds of a step of `batch` sequences by draft nodes of each, all of them wrong."""
    size, vocabulary = [0], target.model.config.vocab_size
    drafter = ScriptedDrafter(_unlike_tokens(size, vocabulary), max(nodes), chain=True)
    tables = target.cache.tables
    answers = [_answer(i, context, vocabulary) for i in range(batch)]
    length = context + 2 * max(nodes) + 2 + GPU_REPEATS
    if tables.states is not None and tables.states.count < batch:
        raise InvalidRequest(f"Measuring steps of {batch} sequences needs max_running={batch} or more for this model.")
    state = batch_state_for(target, batch, max(nodes))
    shapes = ShapePlan(sorted({0, *nodes}), batch, batch * length, state.num_pages, tables.page_size)
    runner = GraphRunner(Parts(target, drafter, LAWS["match"](), KeyedRng()), state, shapes, captures=True)
    try:
        for answer in answers:
            tables.open(answer.id, [])
            if not tables.reserve(answer.id, length):
                raise InvalidRequest(f"The cache is too small to measure {batch} sequences of {length} tokens.")
        with torch.inference_mode():
            return [_time_step(runner, answers, count, size) for count in nodes]
    finally:
        for answer in answers:
            tables.close(answer.id)


def _time_step(runner: GraphRunner, answers: Tokens[Sequence], nodes: int, size: list[int]) -> float:
    """With trees of one size, from the context on: what steps before have gained is forgotten."""
    size[0] = nodes
    if nodes:
        runner.parts.drafter.prepare(_seen(answers, nodes), len(answers), nodes)
    state, tables = runner.state, runner.target.cache.tables
    for answer in answers:
        state.remove(answer.id)
        settings = answer.row_settings(runner.target.model.config.vocab_size)
        state.add(answer.id, answer.tokens, settings, tables.state(answer.id))
    state.update_block_tables({answer.id: tables.pages(answer.id) for answer in answers})
    return runner.seconds([answer.id for answer in answers], nodes, StepMode(greedy=True), GPU_REPEATS)


def _on_cpu(target: ModelRunner, say: Say) -> StepCosts:
    room = min(target.model.config.max_positions, target.cache.tables.capacity // (BATCH + 1)) - 2 * max(ROWS)
    contexts = sorted({min(context, max(room, 1)) for context in CONTEXTS})
    measured = []
    for context in contexts:
        say(f"steps with {context} tokens of context")
        measured.append(_measure(target, 1, context, ROWS))
    say(f"steps of {BATCH} sequences")
    together = _measure(target, BATCH, contexts[0], (1,))
    alone = measured[0].seconds[ROWS.index(BATCH)]
    per_sequence = max(0.0, (together.seconds[0] - alone) / (BATCH - 1))
    spread = max(each.spread for each in (*measured, together))
    return StepCosts(ROWS, tuple(contexts), tuple(each.seconds for each in measured), per_sequence, spread=spread)


@dataclass(frozen=True)
class _Measured:
    """Steps of several sizes, each timed in several rounds."""

    rounds: tuple[tuple[float, ...], ...]  # [sizes][rounds] seconds, the best of each round

    @property
    def seconds(self) -> tuple[float, ...]:
        """Undisturbed, of every size: nothing makes a step faster."""
        return tuple(min(times) for times in self.rounds)

    @property
    def spread(self) -> float:
        """How far the second best round is from the best, for the size where it is farthest."""
        return max(sorted(times)[:2][-1] / min(times) for times in self.rounds)


def _measure(target: ModelRunner, batch: int, context: int, rows: tuple[int, ...]) -> _Measured:
    """Seconds of a step by rows a sequence, in rounds with a few steps of every size."""
    with _drafting(target, batch, context) as (engine, size):
        times: dict[int, list[float]] = {count: [] for count in rows}
        for _ in range(REPEATS):
            for count in rows:
                size[0] = count - 1
                engine.step()  # not timed: what another size has left in the caches is none of this one's business
                times[count].append(min(_timed_step(engine) for _ in range(BURST)))
    return _Measured(tuple(tuple(times[count]) for count in rows))


def _timed_step(engine: Engine) -> float:
    _wait(engine.target.device)
    start = time.perf_counter()
    engine.step()
    _wait(engine.target.device)
    return time.perf_counter() - start


@contextmanager
def _drafting(target: ModelRunner, batch: int, context: int) -> Iterator[tuple[Engine, list[int]]]:
    """An engine with `batch` sequences past their prompts, guessing as many wrong tokens as `size[0]` says."""
    size, vocabulary = [0], target.model.config.vocab_size
    drafter = ScriptedDrafter(_unlike_tokens(size, vocabulary), max(ROWS) - 1, chain=True)
    scheduler = Scheduler(target.cache.tables, SchedulerConfig())
    engine = Engine(target, drafter, LAWS["match"](), FixedBudget(drafter.max_nodes), scheduler, KeyedRng())
    answers = [_answer(i, context, vocabulary) for i in range(batch)]
    scheduler.add(answers)
    while any(answer.num_generated < 2 for answer in answers):
        engine.step()
    try:
        yield engine, size
    finally:
        for answer in answers:
            scheduler.abort(answer.request_id, FinishReason.CANCELLED)


def _unlike_tokens(size: list[int], vocabulary: int) -> Script:
    """As many guesses as `size[0]` says; equal ones would all go to the same experts."""
    return lambda tokens: [[(len(tokens) + 7 * i) % vocabulary for i in range(size[0])]]


def _seen(answers: Tokens[Sequence], nodes: int) -> HostView:
    """What the host knows of them, with room for so many nodes."""
    ids, texts = tuple(answer.id for answer in answers), tuple(answer.tokens for answer in answers)
    room = (nodes,) * len(answers)
    params = tuple(answer.params for answer in answers)
    return HostView(ids, texts, tuple(map(len, texts)), params, max_nodes=room, max_depth=room)


class _Silence:
    """A decoder of nothing: what is measured has no text."""

    def push(self, ids: Tokens[int]) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


def _answer(index: int, context: int, vocabulary: int) -> Sequence:
    # A negative id never meets one of a request's; differing prompts share no pages.
    tokens = [(7 * index + 13 * i + 1) % vocabulary for i in range(context)]
    params = SamplingParams(max_tokens=8 + (1 + BURST) * REPEATS * len(ROWS) * 2, temperature=0.0)
    return Sequence(
        id=-1 - index,
        request_id=-1 - index,
        index=0,
        tokens=tokens,
        params=params,
        seed=0,
        max_length=context + params.max_tokens,
        stop_ids=frozenset(),
        bad_words=(),
        text=TextStream(_Silence(), ()),
        arrived=0.0,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
