"""The loop: whatever ends a run, the next one goes on as if nothing had been."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draftwood.errors import InvalidRequest
from draftwood.train import state
from draftwood.train.loop import Summary, TrainConfig, Trainer
from draftwood.train.optim import OptimConfig
from draftwood.train.schedule import Schedule

STEPS = 7
FAST = OptimConfig(lr=1e-2, muon_lr=1e-2)


class Killed(Exception):
    pass


class Running(nn.Module):
    """A mean that training moves, and that no gradient knows of."""

    mean: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(size))

    def update(self, values: Tensor) -> None:
        self.mean.lerp_(values.mean(0), 0.5)


class Toy:
    """An MLP with all that a resumed run could get wrong: dropout, Python's random numbers, a running buffer."""

    def __init__(self, end_at: int | None = None, end=None) -> None:  # type: ignore[no-untyped-def]
        torch.manual_seed(11)
        self.module = nn.ModuleDict(
            {
                "embed": nn.Embedding(8, 6),
                "body": nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.3), nn.Tanh(), nn.Linear(10, 3)),
                "running": Running(3),
            }
        )
        self.seen: list[int] = []
        self._end_at, self._end = end_at, end

    def losses(self, batch: Tensor) -> dict[str, Tensor]:
        self.seen.append(int(batch[0]))
        if self._end is not None and len(self.seen) == self._end_at:
            self._end()
        out = self.module["body"](self.module["embed"](batch % 8))  # [8, 3]
        running = self.module["running"]
        running.update(out.detach().sigmoid())  # type: ignore[operator]
        weights = running.mean + random.random()  # type: ignore[operator]
        wanted = (batch % 8 / 8)[:, None]
        loss = ((out - wanted).square() * weights).mean()
        return {"loss": loss, "half": loss.detach() / 2, "tokens": torch.tensor(len(batch))}


class Numbers:
    """Five batches an epoch, in an order of the epoch's own; a batch begins with its number among all."""

    SIZE = 5

    def __len__(self) -> int:
        return self.SIZE

    def epoch(self, number: int, skip: int) -> Iterator[Tensor]:
        order = torch.randperm(self.SIZE, generator=torch.Generator().manual_seed(number)).tolist()
        for batch in order[skip:]:
            yield 100 * number + 10 * batch + torch.arange(8)


def config(**changes) -> TrainConfig:  # type: ignore[no-untyped-def]
    usual = {"steps": STEPS, "save_every": 2, "optimizer": FAST, "schedule": Schedule("cosine"), "log_every": 1}
    return TrainConfig(**(usual | changes))


def train(folder: Path, method: Toy, evaluate=None, **changes) -> Summary:  # type: ignore[no-untyped-def]
    return Trainer(method, Numbers(), config(**changes), folder, evaluate, lambda line: None).run()


def weights(method: Toy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in method.module.state_dict().items()}


def assert_same(left: Toy, right: Toy) -> None:
    first, second = weights(left), weights(right)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def whole(folder: Path, **changes) -> Toy:  # type: ignore[no-untyped-def]
    method = Toy()
    summary = train(folder, method, **changes)
    assert (summary.reason, summary.step) == ("finished", STEPS)
    return method


def kill() -> None:
    raise Killed


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("after", [1, 2, 3, 6])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, after: int, name: str, accumulate: int) -> None:
    changes = {"accumulate": accumulate, "optimizer": OptimConfig(name, lr=1e-2, muon_lr=1e-2)}  # type: ignore[arg-type]
    expected = whole(tmp_path / "whole", **changes)
    batch = after * accumulate + (1 if accumulate == 1 else 2)  # in the middle of the next step
    with pytest.raises(Killed):
        train(tmp_path / "pieces", Toy(batch, kill), **changes)
    random.seed(99)
    torch.manual_seed(99)
    resumed = Toy()
    torch.rand(5)
    summary = train(tmp_path / "pieces", resumed, **changes)
    assert summary.step == STEPS
    saved = after // 2 * 2
    assert resumed.seen == expected.seen[saved * accumulate :]
    assert_same(resumed, expected)
    assert summary.tokens == STEPS * accumulate * 8


def test_training_changes_weights_and_lowers_the_loss(tmp_path: Path) -> None:
    method = Toy()
    before = weights(method)
    train(tmp_path, method, steps=60)
    assert all(not torch.equal(before[name], tensor) for name, tensor in weights(method).items())
    lines = [json.loads(line) for line in (tmp_path / state.METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    first, last = (sum(line["loss"] for line in part) for part in (lines[:10], lines[-10:]))
    assert last < 0.7 * first
    assert all(line["half"] == pytest.approx(line["loss"] / 2) for line in lines)
    assert all(line["tokens"] == 8 for line in lines)


def test_the_journal_of_a_resumed_run_is_that_of_a_whole_one(tmp_path: Path) -> None:
    whole(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "pieces", Toy(6, kill))
    train(tmp_path / "pieces", Toy())

    def numbers(folder: str) -> list[tuple[float, ...]]:
        lines = (tmp_path / folder / state.METRICS).read_text().splitlines()
        return [tuple(json.loads(line)[key] for key in ("step", "loss", "norm", "lr_factor")) for line in lines]

    assert numbers("pieces") == numbers("whole")


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    class Plain:
        def __init__(self) -> None:
            self.module = nn.Linear(1, 1)
            nn.init.constant_(self.module.weight, 0.5)
            nn.init.constant_(self.module.bias, 0.1)

        def losses(self, batch: Tensor) -> dict[str, Tensor]:
            return {"loss": self.module(batch.float().reshape(-1, 1) / 100).square().mean()}

    class Joined:
        def __len__(self) -> int:
            return 1

        def epoch(self, number: int, skip: int) -> Iterator[Tensor]:
            yield torch.cat(list(Numbers().epoch(number, 0)))

    few, many = Plain(), Plain()
    Trainer(few, Joined(), config(steps=2), tmp_path / "few", log=lambda line: None).run()
    Trainer(many, Numbers(), config(steps=2, accumulate=5), tmp_path / "many", log=lambda line: None).run()
    torch.testing.assert_close(few.module.weight, many.module.weight)
    torch.testing.assert_close(few.module.bias, many.module.bias)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_after_the_step_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    expected = whole(tmp_path / "whole", save_every=100)
    before = signal.getsignal(number)
    summary = train(tmp_path / "pieces", Toy(3, lambda: signal.raise_signal(number)), save_every=100)
    assert (summary.reason, summary.step) == ("interrupted", 3)
    assert signal.getsignal(number) is before
    resumed = Toy()
    assert train(tmp_path / "pieces", resumed, save_every=100).reason == "finished"
    assert len(resumed.seen) == STEPS - 3
    assert_same(resumed, expected)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, Toy(3, twice))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    thread = threading.Thread(target=whole, args=(tmp_path,))
    thread.start()
    thread.join()
    assert [path.name for path in state.checkpoints(tmp_path / "checkpoints")] == ["step-000000006", "step-000000007"]


def test_a_time_limit_cuts_a_run_into_pieces(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole")
    steps: list[int] = []
    for _ in range(10):
        resumed, now = Toy(), [0.0]

        def tick(now: list[float] = now) -> None:
            now[0] += 1.0

        class Slow(Toy):
            def losses(self, batch: Tensor) -> dict[str, Tensor]:
                tick()
                return super().losses(batch)

        resumed = Slow()
        limited = config(time_limit=2.5)
        clock = lambda now=now: now[0]  # noqa: E731
        summary = Trainer(resumed, Numbers(), limited, tmp_path / "pieces", None, lambda line: None, clock).run()
        steps.append(summary.step)
        if summary.reason == "finished":
            break
        assert summary.reason == "time"
    assert steps == [3, 6, 7]
    assert_same(resumed, expected)


def test_early_stopping_keeps_the_best_weights(tmp_path: Path) -> None:
    scores = {1: 0.1, 2: 0.5, 3: 0.4, 4: float("nan"), 5: 0.5, 6: 0.9}
    kept: dict[int, dict[str, Tensor]] = {}
    method = Toy()

    def evaluate(step: int) -> float:
        kept[step] = weights(method)
        assert not method.module.training
        return scores[step]

    changes = {"evaluate_every": 1, "patience": 3, "save_every": 100}
    summary = train(tmp_path, method, evaluate, **changes)
    assert (summary.reason, summary.step, summary.best, summary.best_step) == ("patience", 5, 0.5, 2)
    again = Toy()
    assert state.load_best(tmp_path, again.module) == (2, 0.5)
    assert all(torch.equal(tensor, kept[2][name]) for name, tensor in weights(again).items())
    more = Toy()
    summary = train(tmp_path, more, evaluate, **changes)  # it knows that its patience is spent
    assert (summary.reason, summary.step, summary.loss, more.seen) == ("patience", 5, None, [])
    assert train(tmp_path, more, lambda step: 0.9, **(changes | {"patience": 9})).best_step == 6


def test_patience_counts_on_over_a_kill(tmp_path: Path) -> None:
    changes = {"evaluate_every": 1, "patience": 3, "save_every": 1}
    with pytest.raises(Killed):
        train(tmp_path, Toy(4, kill), lambda step: -step, **changes)
    summary = train(tmp_path, Toy(), lambda step: -step, **changes)
    assert (summary.reason, summary.step, summary.best, summary.best_step) == ("patience", 4, -1.0, 1)


def test_evaluation_does_not_touch_training(tmp_path: Path) -> None:
    def evaluate(step: int) -> float:
        assert not torch.is_grad_enabled()
        return random.random() + float(torch.rand(()))

    method = Toy()
    train(tmp_path / "watched", method, evaluate, evaluate_every=2)
    assert_same(method, whole(tmp_path / "alone"))


def test_a_damaged_checkpoint_costs_some_steps_only(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "pieces", Toy(6, kill))
    (damaged := state.checkpoints(tmp_path / "pieces" / "checkpoints")[-1] / state.REST).write_bytes(b"")
    lines: list[str] = []
    resumed = Toy()
    Trainer(resumed, Numbers(), config(), tmp_path / "pieces", None, lines.append).run()
    assert str(damaged.parent) in lines[0]
    assert resumed.seen == expected.seen[2:]
    assert_same(resumed, expected)


def test_steps_without_a_finite_gradient_are_left_out(tmp_path: Path) -> None:
    class Broken(Toy):
        bad = (3,)

        def losses(self, batch: Tensor) -> dict[str, Tensor]:
            losses = super().losses(batch)
            factor = float("nan") if len(self.seen) in self.bad else 1.0
            return losses | {"loss": losses["loss"] * factor}

    method = Broken()
    summary = train(tmp_path / "once", method)
    assert (summary.skipped, summary.step) == (1, STEPS)
    assert all(tensor.isfinite().all() for tensor in weights(method).values())
    method.bad = tuple(range(100))
    with pytest.raises(InvalidRequest, match="not been finite"):
        train(tmp_path / "always", method, steps=50)


def test_a_run_is_not_resumed_with_other_settings(tmp_path: Path) -> None:
    whole(tmp_path)
    with pytest.raises(InvalidRequest, match="accumulate, seed"):
        train(tmp_path, Toy(), accumulate=2, seed=5)
    method = Toy()
    assert train(tmp_path, method, save_every=1, time_limit=9.0).reason == "finished"
    assert method.seen == []


def test_epochs_are_counted_in_batches(tmp_path: Path) -> None:
    method = Toy()
    summary = train(tmp_path, method, steps=None, epochs=2, accumulate=3)
    assert summary.total == summary.step == 3
    assert len(method.seen) == 9
    assert sorted(number // 10 for number in method.seen[:5]) == [0, 1, 2, 3, 4]
    assert all(number >= 100 for number in method.seen[5:])


def test_a_line_a_minute_tells_how_it_goes(tmp_path: Path) -> None:
    lines: list[str] = []
    times = iter(range(0, 100_000, 7))
    Trainer(Toy(), Numbers(), config(), tmp_path, None, lines.append, lambda: float(next(times))).run()
    told = [line for line in lines if line.startswith("Step ")]
    assert 1 < len(told) < STEPS
    assert all("loss" in line and "tokens/s" in line and "min left" in line for line in told)


def test_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "150")
    Trainer(Toy(), Numbers(), config(), tmp_path).run()
    shown = capsys.readouterr().out
    assert "7/7" in shown
    assert "tokens/s" in shown
    assert "Stopped after step 7 of 7: finished." in shown


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    for bad in ({"steps": None}, {"epochs": 1}, {"accumulate": 0}, {"time_limit": 0.0}, {"dtype": "float16"}):
        with pytest.raises(InvalidRequest):
            config(**bad)
    half = Toy()
    half.module.bfloat16()
    with pytest.raises(InvalidRequest, match="float32"):
        train(tmp_path, half)
    with pytest.raises(InvalidRequest, match="Patience"):
        train(tmp_path, Toy(), patience=2)

    class Short(Numbers):
        def epoch(self, number: int, skip: int) -> Iterator[Tensor]:
            yield from list(super().epoch(number, skip))[:-1]

    with pytest.raises(InvalidRequest, match="gave 4 batches"):
        Trainer(Toy(), Short(), config(), tmp_path, None, lambda line: None).run()


def test_a_checkpoint_is_never_long_ago(tmp_path: Path) -> None:
    """Steps of 25 s: after a minute there is a checkpoint, however many steps are to be between two."""
    expected = whole(tmp_path / "whole")
    now = 0.0

    class Slow(Toy):
        def losses(self, batch: Tensor) -> dict[str, Tensor]:
            nonlocal now
            now += 25.0
            return super().losses(batch)

    rare = config(save_every=100)
    killed = Trainer(Slow(6, kill), Numbers(), rare, tmp_path / "pieces", None, lambda line: None, lambda: now)
    with pytest.raises(Killed):
        killed.run()
    assert [path.name for path in state.checkpoints(tmp_path / "pieces" / "checkpoints")] == ["step-000000003"]
    resumed = Toy()
    assert train(tmp_path / "pieces", resumed, save_every=100).step == STEPS
    assert resumed.seen == expected.seen[3:]
    assert_same(resumed, expected)
    with pytest.raises(InvalidRequest, match="save_seconds"):
        config(save_seconds=0.0)


def test_scores_are_told_with_three_decimals(tmp_path: Path) -> None:
    lines: list[str] = []
    scores = {1: float("nan"), 2: 1.0655226707458496}
    Trainer(Toy(), Numbers(), config(steps=2, evaluate_every=1), tmp_path, scores.__getitem__, lines.append).run()
    assert "Step 1: score nan, best none yet." in lines
    assert "Step 2: score 1.066, best 1.066 of step 2." in lines
