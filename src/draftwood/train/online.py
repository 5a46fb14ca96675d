"""A drafter that goes on learning from the answers it helps to give, between the engine's steps.

Speculation is exact for any drafter, so nothing here can change a token: a step begins and ends with the same weights.
What the target has written is put to the test before it is learnt from. The best of the contestants (the weights that
run, those learnt since, or those it all began with) runs from then on, and learning goes on from there.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from draftwood.drafters.features import FeatureDrafter
from draftwood.drafters.kangaroo import ShallowDrafter
from draftwood.drafters.predicted import PredictedDrafter
from draftwood.drafters.several import Several
from draftwood.drafters.student import StudentDrafter
from draftwood.drafting import Drafter
from draftwood.engine.engine import Engine
from draftwood.engine.llm import LLM
from draftwood.engine.sequence import Sequence
from draftwood.engine.worker import ComputeThread
from draftwood.errors import CheckpointError, IncompatibleParts, InvalidRequest
from draftwood.model.runner import ModelRunner
from draftwood.nets.export import export
from draftwood.request import FinishReason
from draftwood.train.data import TextBatch
from draftwood.train.evaluate import held_out_figures
from draftwood.train.optim import OptimConfig, build_optimizer
from draftwood.train.recipes import Target, method_of, recipe_of
from draftwood.train.run import target_name
from draftwood.train.teacher import Lesson, Teacher
from draftwood.train.traffic import Traffic

PAGE = 16  # tokens; texts of a lesson are short, and each begins a page of its own
Weights = Mapping[str, Tensor]
RUNNING, LEARNT, START = "running", "learnt", "start"  # in this order the first of equals wins


@dataclass(frozen=True)
class AdaptConfig:
    """How much a drafter may learn while it serves, and how fast."""

    share: float = 0.1  # of the time, at most
    length: int = 512  # tokens of a lesson: who asks meanwhile waits until it is over
    lessons: int = 64  # kept at most; what is older is forgotten
    repeats: int = 2  # steps for each lesson
    window: int = 4  # lessons after which it is decided whose weights run
    clip: float = 1.0  # largest norm of a gradient
    optimizer: OptimConfig = field(default_factory=lambda: OptimConfig(lr=8e-4, muon_lr=5e-3, weight_decay=0.0))
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InvalidRequest(f"The share of the time must be above 0 and at most 1, not {self.share}.")
        for name in ("length", "lessons", "repeats", "window", "clip"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be positive, not {getattr(self, name)}.")


@dataclass(frozen=True)
class Progress:
    """What has come of it so far."""

    answers: int = 0  # heard
    lessons: int = 0  # put to the test
    steps: int = 0
    adopted: int = 0  # times that what was learnt came to run
    discarded: int = 0  # times that it did not
    seconds: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)  # expected tokens a step, in the last window


class TimeShare:
    """Keeps work within a share of the time. It saves for every piece, and twice as long for one in a busy moment."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._share, self._clock, self._since = share, clock, clock()
        self._saved = 0.0  # seconds
        self._price = 0.0  # seconds of the last piece

    def wait(self, *, busy: bool) -> float:
        """Seconds until a piece may begin."""
        self._save()
        return max(0.0, ((2 if busy else 1) * self._price - self._saved) / self._share)

    def spend(self, seconds: float) -> None:
        """A piece took so long."""
        self._saved, self._price = self._saved - seconds, seconds
        self._save()

    def _save(self) -> None:
        now = self._clock()
        self._saved = min(self._saved + self._share * (now - self._since), 2 * self._price)
        self._since = now


class Contest:
    """Whose weights guess the latest answers best, over whole windows of lessons."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._scores: dict[str, list[float]] = {}
        self.means: dict[str, float] = {}  # of the last window

    def enter(self, scores: Mapping[str, float]) -> str | None:
        """Scores of all contestants in one lesson; the winner, if that completes a window."""
        for name, score in scores.items():
            self._scores.setdefault(name, []).append(score)
        if len(self._scores[RUNNING]) < self._window:
            return None
        self.means = {name: sum(many) / len(many) for name, many in self._scores.items()}
        self._scores = {}
        return max(self.means, key=lambda name: self.means[name])


class _Attentive(Teacher):
    """Teaches the same batch several times in a row without asking the target again."""

    _last: tuple[TextBatch, Lesson] | None = None

    def teach(self, batch: TextBatch) -> Lesson:
        if self._last is None or self._last[0] is not batch:
            self._last = batch, super().teach(batch)
        return self._last[1]

    def forget(self) -> None:
        self._last = None


class Adapter:
    """Teaches an engine's drafter; a `Companion`, so all it does happens on the compute thread."""

    def __init__(
        self,
        engine: Engine,
        config: AdaptConfig | None = None,
        target: str = "",  # its name, for what is saved
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config = config or AdaptConfig()
        self._drafter = _learner(engine.drafter)
        self._target, self._clock = target, clock
        length = min(config.length, engine.target.model.config.max_positions)
        self._traffic = Traffic(length, config.lessons)
        # Pages of its own: it takes none from running requests, and evicts no prefix.
        runner = ModelRunner(engine.target.model, -(-3 * length // PAGE), PAGE)
        net, words = _trainable(self._drafter.module), self._drafter.words.to(torch.float32)
        self._teacher = _Attentive(runner, getattr(net, "reads", ()))
        self._method = method_of(recipe_of(net), net, Target(words.config, words, None), lambda _: self._teacher)
        self._weights = dict(net.named_parameters())
        self._start: Weights = self._snapshot()
        self._running = self._start
        self._optimizer = build_optimizer(net, config.optimizer)
        self._pace, self._contest = TimeShare(config.share, clock), Contest(config.window)
        self._random = random.Random(config.seed)
        self._factor = 1.0  # of the learning rates
        self._owed = 0  # steps for lessons that have been tested
        self._counts = dict.fromkeys(("answers", "lessons", "steps", "adopted", "discarded"), 0)
        self._seconds = 0.0

    def hear(self, answer: Sequence, reason: FinishReason) -> None:
        """Remember an answer that the target finished, if every word of it is the target's own."""
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or not answer.lossless:
            return
        tokens = tuple(answer.tokens)
        self._traffic.add(tokens[: answer.prompt_length], tokens[answer.prompt_length :])
        self._counts["answers"] += 1

    def wants(self, *, busy: bool) -> float:
        """As soon as it has saved the time for it, rather while no request runs."""
        return self._pace.wait(busy=busy) if self._owed or self._traffic.num_fresh else math.inf

    def work(self) -> None:
        """Put a lesson to the test, or take a step."""
        started = self._clock()
        if self._owed:
            self._practise(self._next_lesson())
            self._teacher.forget()
            self._owed -= 1
        elif self._traffic.num_fresh:
            self._test(self._traffic.take())
            self._owed = self._config.repeats
        spent = self._clock() - started
        self._pace.spend(spent)
        self._seconds += spent

    def catch_up(self) -> None:
        """Learn from all full lessons there are, however long that takes. Not from the compute thread itself."""
        ComputeThread.shared().call(self._finish)

    def save(self, folder: str | Path) -> Path:
        """Write the drafter as it runs now to a folder that `--drafter` takes. Not from the compute thread itself."""
        return ComputeThread.shared().call(lambda: self._export(folder))

    @property
    def progress(self) -> Progress:
        """How far it has come."""
        return Progress(**self._counts, seconds=self._seconds, scores=dict(self._contest.means))

    def _finish(self) -> None:
        while self._owed or self._traffic.num_fresh:
            self.work()

    def _export(self, folder: str | Path) -> Path:
        try:
            with self._wearing(self._running):
                return export(self._method.module, folder, self._target, {"adapted": asdict(self.progress)})
        except OSError as error:
            raise CheckpointError(f"The drafter could not be written to {folder}: {error}.") from error

    def _next_lesson(self) -> TextBatch:
        """The one just tested, then any."""
        known = self._traffic.known
        return known[-1] if self._owed == self._config.repeats else self._random.choice(known)

    def _practise(self, lesson: TextBatch) -> None:
        """One small step; one without a finite gradient is left out."""
        device = next(iter(self._weights.values())).device.type
        with (
            torch.random.fork_rng(devices=[]),
            torch.autocast(device, torch.bfloat16, enabled=device == "cuda"),
        ):
            torch.default_generator.manual_seed(self._config.seed + self._counts["steps"])
            loss = self._method.losses(lesson)["loss"]
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self._weights.values(), self._config.clip))
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._counts["steps"] += 1

    def _test(self, lesson: TextBatch) -> None:
        """What would each contestant have drafted of a lesson that none has learnt from?"""
        with self._wearing(self._running):
            scores = {RUNNING: self._score(lesson)}
        scores[LEARNT] = self._score(lesson)
        with self._wearing(self._start):
            scores[START] = scores[RUNNING] if self._running is self._start else self._score(lesson)
        self._counts["lessons"] += 1
        winner = self._contest.enter(scores)
        if winner == LEARNT:
            self._adopt()
        elif winner is not None:
            self._go_back_to(self._running if winner == RUNNING else self._start)

    def _score(self, lesson: TextBatch) -> float:
        """Expected tokens a step."""
        return held_out_figures(self._method, [lesson])["chain"]

    def _adopt(self) -> None:
        self._run_on(self._snapshot())
        self._counts["adopted"] += 1
        self._pick_up_speed(2.0)

    def _go_back_to(self, weights: Weights) -> None:
        """What was learnt since is forgotten, and learnt more carefully from now on."""
        if weights is not self._running:
            self._run_on(weights)
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(weights[name])
        self._optimizer = build_optimizer(self._method.module, self._config.optimizer)
        self._counts["discarded"] += 1
        self._pick_up_speed(0.5)

    def _run_on(self, weights: Weights) -> None:
        self._running = weights
        self._drafter.update(weights)

    def _pick_up_speed(self, by: float) -> None:
        self._factor = min(1.0, by * self._factor)
        self._optimizer.set_factor(self._factor)

    def _snapshot(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self._weights.items()}

    @contextmanager
    def _wearing(self, weights: Weights) -> Iterator[None]:
        """The network with other weights; nothing is copied."""
        own = {name: weight.data for name, weight in self._weights.items()}
        try:
            for name, weight in self._weights.items():
                weight.data = weights[name]
            yield
        finally:
            for name, weight in self._weights.items():
                weight.data = own[name]


def adapt(llm: LLM, config: AdaptConfig | None = None) -> Adapter:
    """Let the drafter of an LLM learn from its answers from now on; `llm.accompany(None)` ends it."""
    adapter = ComputeThread.shared().call(lambda: Adapter(llm.engine, config, target_name(llm.checkpoint.name)))
    llm.accompany(adapter)
    return adapter


def _learner(drafter: Drafter) -> FeatureDrafter | ShallowDrafter | StudentDrafter:
    """The first drafter that has something to learn with."""
    for guesser in _guessers(drafter):
        if isinstance(guesser, FeatureDrafter | ShallowDrafter | StudentDrafter):
            return guesser
    raise IncompatibleParts(
        "Only trained drafters can be adapted, such as eagle3 or a folder that `draftwood train` wrote: n-grams, "
        "second models and plain decoding have nothing that could learn here."
    )


def _guessers(drafter: Drafter) -> Iterator[Drafter]:
    """Itself, or those whose guesses it passes on."""
    if isinstance(drafter, PredictedDrafter):
        yield from _guessers(drafter.drafter)
    elif isinstance(drafter, Several):
        for guard in drafter.guards:
            yield from _guessers(guard.drafter)
    else:
        yield drafter


def _trainable(module: nn.Module) -> nn.Module:
    """A copy in float32 to be trained; what it has of the target's words is shared, where that is float32 already."""
    words = {id(buffer): buffer for buffer in module.buffers()}
    return copy.deepcopy(module, words).float().requires_grad_(True)
