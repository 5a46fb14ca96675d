"""The training loop: it knows neither drafters nor data, can be stopped anywhere, and goes on where it stopped."""

from __future__ import annotations

import itertools
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from draftwood.errors import InvalidRequest
from draftwood.train import state
from draftwood.train.optim import OptimConfig, build_optimizer
from draftwood.train.schedule import Schedule

Reason = Literal["finished", "patience", "time", "interrupted"]
CHECKPOINTS = "checkpoints"
LINE_SECONDS = 60.0  # between lines where there is no terminal
FAILURES = 10  # steps in a row without a finite gradient after which there is no hope
# What may change between the pieces of a run.
FREE = ("save_every", "save_seconds", "evaluate_every", "patience", "time_limit", "compile", "log_every")


class Method(Protocol):
    """A way to train one kind of drafter: a module, and the losses of a batch.

    All that changes in training and is not a global generator must be a weight or a buffer of the module.
    """

    @property
    def module(self) -> nn.Module:
        """What is trained and saved, its trainable weights in float32."""
        ...

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Scalars: "loss" is minimised; others are logged, as means but for "tokens", which are counted."""
        ...


class Batches(Protocol):
    """Data in an order that follows from its own seed and the number of the epoch, so that a run can be resumed."""

    def __len__(self) -> int:
        """Batches of an epoch."""
        ...

    def epoch(self, number: int, skip: int) -> Iterator[Any]:
        """The batches of an epoch from the one after the first `skip` on, without use of global generators."""
        ...


@dataclass(frozen=True)
class TrainConfig:
    """How long to train and how. Either `steps` or `epochs` is given; a step takes `accumulate` batches."""

    steps: int | None = None
    epochs: int | None = None
    accumulate: int = 1
    clip: float | None = 1.0  # largest norm of a step's gradient
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of products on a GPU; weights are float32 in any case
    optimizer: OptimConfig = field(default_factory=OptimConfig)
    schedule: Schedule = field(default_factory=Schedule)
    save_every: int = 500  # steps
    save_seconds: float = 60.0  # a checkpoint is written at the latest so long after the last one
    evaluate_every: int = 500  # steps; the last one is evaluated in any case
    patience: int | None = None  # evaluations without a better score after which a run ends
    seed: int = 0
    time_limit: float | None = None  # seconds of one call of `run`; what comes next resumes
    compile: bool = False  # the module's own forward
    log_every: int = 10  # steps

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InvalidRequest("Say how long to train, either in steps or in epochs.")
        counts = ("steps", "epochs", "accumulate", "clip", "save_every", "evaluate_every", "patience", "log_every")
        for name in (*counts, "save_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidRequest(f"{name} must be positive, not {value}.")
        if self.time_limit is not None and self.time_limit <= 0:
            raise InvalidRequest(f"A time limit must be positive, not {self.time_limit}.")
        if self.dtype not in ("float32", "bfloat16"):
            raise InvalidRequest(f"The dtype is float32 or bfloat16, not {self.dtype!r}.")

    def total(self, batches: int) -> int:
        """Steps of the whole run; batches at the end of the last epoch that do not fill a step are left out."""
        return self.steps if self.steps is not None else max(1, (self.epochs or 0) * batches // self.accumulate)


@dataclass(frozen=True)
class Summary:
    """How a call of `Trainer.run` ended: with the reason "finished" or "patience" the whole run has."""

    reason: Reason
    step: int
    total: int
    loss: float | None  # mean of the last logged steps; None if this call made none
    best: float | None
    best_step: int | None
    skipped: int  # steps left out because their gradient was not finite
    tokens: int  # of the whole run
    seconds: float  # of this call


class Trainer:
    """Trains a method's module over batches, and keeps in `folder` all that is needed to go on after any end.

    A resumed run takes the very steps of an uninterrupted one: bit for bit on a CPU, and on a GPU as far as its kernels
    are deterministic. `evaluate` gets the step and gives a score, of which more is better; the weights with the best
    are kept (`state.load_best`). Lines go to `log`; without it to the terminal, with a bar.
    """

    def __init__(
        self,
        method: Method,
        batches: Batches,
        config: TrainConfig,
        folder: Path,
        evaluate: Callable[[int], float] | None = None,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(batches) < 1:
            raise InvalidRequest("There is no batch to train on.")
        if config.patience is not None and evaluate is None:
            raise InvalidRequest("Patience needs a score to wait for: give a way to evaluate.")
        self._optimizer = build_optimizer(method.module, config.optimizer)
        self._weights = self._optimizer.parameters()
        if any(weight.dtype != torch.float32 for weight in self._weights):
            raise InvalidRequest("Weights are trained in float32: call module.float() first.")
        self._method, self._batches, self._config, self._folder = method, batches, config, folder
        self._evaluate, self._clock = evaluate, clock
        self._total = config.total(len(batches))
        self._screen = _Screen(self._total, log, clock)
        self._step = self._skipped = self._failures = self._tokens = self._stale = 0
        self._best: float | None = None
        self._best_step: int | None = None
        self._saved: int | None = None
        self._saved_at = 0.0
        self._asked = False
        if config.compile:
            method.module.compile()

    def run(self) -> Summary:
        """Train to the end, the limit or Ctrl-C (a second one does not wait), from where the folder says we are."""
        self._asked = False
        started = self._saved_at = self._clock()
        self._begin()
        journal, meter = state.Journal(self._folder, self._step), _Meter(self._clock)
        with closing(journal), closing(self._stream()) as stream, self._screen, self._until_asked():
            while (reason := self._reason_to_stop(started)) is None:
                losses = self._take_step(stream)
                meter.add(losses)
                self._tokens += int(losses.get("tokens", 0))
                self._screen.show(self._step, meter)
                if self._step % self._config.log_every == 0 or self._step == self._total:
                    journal.write(self._step, meter.flush() | {"lr_factor": self._factor(self._step - 1)})
                if self._evaluate and (self._step % self._config.evaluate_every == 0 or self._step == self._total):
                    journal.write(self._step, {"score": self._score(self._evaluate)})
                    meter.restart()
                if self._is_due():
                    self._save()
                    meter.restart()
            if self._saved != self._step:
                self._save()
        seconds = self._clock() - started
        self._screen.say(f"Stopped after step {self._step} of {self._total}: {reason}.")
        best = (self._best, self._best_step)
        return Summary(reason, self._step, self._total, meter.loss, *best, self._skipped, self._tokens, seconds)

    def _reason_to_stop(self, started: float) -> Reason | None:
        if self._step >= self._total:
            return "finished"
        if self._config.patience is not None and self._stale >= self._config.patience:
            return "patience"
        if self._asked:
            return "interrupted"
        limit = self._config.time_limit
        return "time" if limit is not None and self._clock() - started >= limit else None

    def _is_due(self) -> bool:
        """Whether a checkpoint is: after so many steps, and after so long whatever the steps."""
        late = self._clock() - self._saved_at >= self._config.save_seconds
        return late or self._step % self._config.save_every == 0

    def _take_step(self, stream: Iterator[Any]) -> dict[str, float]:
        """One update; the sums of what the method logs over its batches, as means but for tokens."""
        device = self._weights[0].device.type
        half = self._config.dtype == "bfloat16" and device == "cuda"
        share = 1 / self._config.accumulate
        sums: dict[str, Tensor] = {}
        for _ in range(self._config.accumulate):
            with torch.autocast(device, torch.bfloat16, enabled=half):
                losses = self._method.losses(next(stream))
            if "loss" not in losses:
                raise InvalidRequest('A method must return a "loss" to be minimised.')
            (losses["loss"] * share).backward()
            for name, value in losses.items():
                part = value.detach().float() * (1 if name == "tokens" else share)
                sums[name] = sums[name] + part if name in sums else part
        sums["norm"] = nn.utils.clip_grad_norm_(self._weights, self._config.clip or math.inf).float()
        # All in one look: a GPU has nothing to do while the host waits for it and then finds out what is next.
        found = dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))
        if math.isfinite(found["norm"]):
            self._optimizer.set_factor(self._factor(self._step))
            self._optimizer.step()
            self._failures = 0
        else:
            self._fail()
        self._optimizer.zero_grad()
        self._step += 1
        return found

    def _fail(self) -> None:
        self._skipped += 1
        self._failures += 1
        if self._failures >= FAILURES:
            raise InvalidRequest(
                f"The gradient has not been finite in {FAILURES} steps in a row, up to step {self._step + 1}. "
                "Try a smaller learning rate; the last checkpoint is still good."
            )

    def _stream(self) -> Generator[Any]:
        """Batches from where the run stands, epoch after epoch, without end."""
        size = len(self._batches)
        epoch, skip = divmod(self._step * self._config.accumulate, size)
        for number in itertools.count(epoch):
            given = 0
            for batch in itertools.islice(self._batches.epoch(number, skip), size - skip):
                given += 1
                yield batch
            if given < size - skip:
                raise InvalidRequest(
                    f"Epoch {number} gave {given} batches after {skip}, not {size} in all as promised."
                )
            skip = 0

    def _score(self, evaluate: Callable[[int], float]) -> float:
        """What the module is worth now; training is not touched by it, not even its random numbers."""
        rng = state.rng_state()
        self._method.module.eval()
        with torch.no_grad():
            score = float(evaluate(self._step))
        self._method.module.train()
        state.restore_rng(rng)
        if math.isfinite(score) and (self._best is None or score > self._best):
            self._best, self._best_step, self._stale = score, self._step, 0
            state.save_best(self._folder, self._method.module, self._step, score)
        else:
            self._stale += 1
        best = "none yet" if self._best is None else f"{self._best:.3f} of step {self._best_step}"
        self._screen.say(f"Step {self._step}: score {score:.3f}, best {best}.")
        return score

    def _shape(self) -> dict[str, Any]:
        """What must not change between the pieces of a run."""
        kept = {name: value for name, value in asdict(self._config).items() if name not in FREE}
        return kept | {"batches": len(self._batches)}

    def _save(self) -> None:
        epoch, batch = divmod(self._step * self._config.accumulate, len(self._batches))
        counts = {name: getattr(self, f"_{name}") for name in ("skipped", "failures", "tokens", "stale", "best_step")}
        snapshot = state.Snapshot(
            step=self._step,
            module=self._method.module.state_dict(),
            optimizer=self._optimizer.state_dict(),
            rng=state.rng_state(),
            cursor={"epoch": epoch, "batch": batch},
            best=self._best,
            progress={"counts": counts, "shape": self._shape()},
        )
        state.save(self._folder / CHECKPOINTS, snapshot)
        self._saved, self._saved_at = self._step, self._clock()

    def _begin(self) -> None:
        """From the last checkpoint, or from the seed."""
        self._method.module.train()
        self._optimizer.zero_grad()
        snapshot = state.load_latest(self._folder / CHECKPOINTS, self._screen.say)
        if snapshot is None and self._step:
            raise InvalidRequest("The run broke before its first checkpoint: build the module and the trainer anew.")
        if snapshot is None:
            random.seed(self._config.seed)
            torch.manual_seed(self._config.seed)
            return
        shape = self._shape()
        changed = [name for name, value in snapshot.progress["shape"].items() if shape.get(name) != value]
        if changed:
            raise InvalidRequest(
                f"The run in {self._folder} was begun with other settings: {', '.join(changed)}. "
                "Go on with those it has, or train into another folder."
            )
        state.load_module(self._method.module, snapshot.module)
        self._optimizer.load_state_dict(snapshot.optimizer)
        for name, value in snapshot.progress["counts"].items():
            setattr(self, f"_{name}", value)
        self._step = self._saved = snapshot.step
        self._best = snapshot.best
        state.restore_rng(snapshot.rng)
        self._screen.say(f"Going on after step {self._step} of {self._total}.")

    @contextmanager
    def _until_asked(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end the run between two steps, never within one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)}

        def ask(number: int, frame: Any) -> None:
            self._asked = True
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _factor(self, step: int) -> float:
        return self._config.schedule.lr_at(step, self._total)


class _Meter:
    """Means since it was last emptied, and tokens a second without the time of evaluations."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._seconds = 0.0
        self._since = clock()
        self.loss: float | None = None  # mean of the steps so far, or of those before the last emptying

    def add(self, losses: dict[str, float]) -> None:
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1
        self._seconds += self._clock() - self._since
        self._since = self._clock()
        self.loss = self._sums["loss"] / self._steps

    def restart(self) -> None:
        self._since = self._clock()

    def means(self) -> dict[str, float]:
        """Of all that was added, with the rates "tokens_per_second" and "steps_per_second"."""
        seconds = max(self._seconds, 1e-9)
        means = {name: value / self._steps for name, value in self._sums.items() if name != "tokens"}
        if "tokens" in self._sums:
            means |= {"tokens": self._sums["tokens"], "tokens_per_second": self._sums["tokens"] / seconds}
        return means | {"steps_per_second": self._steps / seconds}

    def flush(self) -> dict[str, float]:
        means = self.means()
        self._sums, self._steps, self._seconds = {}, 0, 0.0
        return means


class _Screen:
    """A bar on a terminal; elsewhere, or with a log, a line a minute."""

    def __init__(self, total: int, log: Callable[[str], None] | None, clock: Callable[[], float]) -> None:
        self._total, self._log, self._clock = total, log, clock
        self._console = Console()
        self._last = clock()
        self._bar: Progress | None = None

    def __enter__(self) -> _Screen:
        self._last = self._clock()
        if self._log is None and self._console.is_terminal:
            times = (TimeElapsedColumn(), TimeRemainingColumn())
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), *times)
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task("train", total=self._total, status="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        if self._log:
            self._log(line)
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, step: int, meter: _Meter) -> None:
        if self._bar is None and self._clock() - self._last < LINE_SECONDS:
            return
        means = meter.means()
        name = "tokens_per_second" if "tokens_per_second" in means else "steps_per_second"
        status = f"loss {meter.loss:.4f}, {means[name]:,.1f} {name.split('_')[0]}/s"
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, status=status)
        else:
            self._last = self._clock()
            left = (self._total - step) / means["steps_per_second"]
            self.say(f"Step {step} of {self._total}: {status}, {left / 60:.1f} min left.")
