"""A saved run is read back exactly, or refused."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draftwood.errors import InvalidRequest
from draftwood.train import state
from draftwood.train.state import Snapshot


def snapshot(step: int) -> Snapshot:
    torch.manual_seed(step)
    shared = torch.randn(3, 4)
    optimizer = [{"state": {0: {"step": torch.tensor(3.0), "m": torch.randn(4).bfloat16()}}, "betas": (0.9, 0.95)}]
    module = {"a": shared, "tied": shared, "view": shared.T}
    progress = {"stale": 2, "none": None, "odd": math.inf, "text": "é"}
    return Snapshot(step, module, optimizer, state.rng_state(), {"epoch": 1, "batch": 7}, 0.1 + 0.2, progress)


def same(left: object, right: object) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        alike = type(left) is type(right) and len(left) == len(right)  # type: ignore[arg-type]
        return alike and all(same(a, b) for a, b in zip(left, right, strict=True))  # type: ignore[call-overload]
    return left == right and type(left) is type(right)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved = snapshot(5)
    found = state.load(state.save(tmp_path, saved))
    for name in ("step", "module", "optimizer", "rng", "cursor", "best", "progress"):
        assert same(getattr(saved, name), getattr(found, name)), name
    assert same(vars(state.load(state.save(tmp_path, Snapshot(6, {})))), vars(Snapshot(6, {})))


def test_only_tensors_and_plain_values_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="PosixPath"):
        state.save(tmp_path, Snapshot(1, {}, progress={"path": Path("/")}))
    assert state.load_latest(tmp_path) is None
    state.save(tmp_path, snapshot(1))  # what was left lying about is no hindrance
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_random_numbers_go_on_as_they_would_have() -> None:
    saved = state.rng_state()
    expected = (random.random(), random.gauss(0, 1), torch.rand(3).tolist())
    state.restore_rng(saved)
    assert (random.random(), random.gauss(0, 1), torch.rand(3).tolist()) == expected


def test_the_last_two_are_kept_and_steps_gone_back_from_are_not(tmp_path: Path) -> None:
    for step in (1, 2, 10, 30):
        state.save(tmp_path, snapshot(step))
    assert [path.name for path in state.checkpoints(tmp_path)] == ["step-000000010", "step-000000030"]
    state.save(tmp_path, snapshot(20))
    state.save(tmp_path, snapshot(20))
    assert [path.name for path in state.checkpoints(tmp_path)] == ["step-000000010", "step-000000020"]
    assert len(list(tmp_path.iterdir())) == 2


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [state.WEIGHTS, state.REST, state.RECORD, state.MANIFEST])
@pytest.mark.parametrize("harm", [flip, lambda path: path.write_bytes(path.read_bytes()[:-9]), Path.unlink])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(tmp_path: Path, name: str, harm) -> None:  # type: ignore[no-untyped-def]
    state.save(tmp_path, snapshot(1))
    damaged = state.save(tmp_path, snapshot(2))
    harm(damaged / name)
    with pytest.raises(InvalidRequest, match="step-000000002 is damaged"):
        state.load(damaged)
    lines: list[str] = []
    found = state.load_latest(tmp_path, lines.append)
    assert found is not None
    assert found.step == 1
    assert len(lines) == 1
    assert "step-000000002 is damaged" in lines[0]


def test_if_all_are_damaged_nothing_begins_again_unasked(tmp_path: Path) -> None:
    flip(state.save(tmp_path, snapshot(1)) / state.WEIGHTS)
    with pytest.raises(InvalidRequest, match="All checkpoints"):
        state.load_latest(tmp_path)


@pytest.mark.parametrize("when", [1, 2])
def test_a_crash_while_saving_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    state.save(tmp_path, snapshot(1))
    calls = 0
    real = state.save_file

    def failing(*args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == when:
            raise OSError("No space left on device")
        real(*args, **kwargs)

    monkeypatch.setattr(state, "save_file", failing)
    with pytest.raises(OSError, match="No space"):
        state.save(tmp_path, snapshot(2))
    found = state.load_latest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_best_weights(tmp_path: Path) -> None:
    module, other = nn.Linear(2, 3), nn.Linear(2, 3)
    with pytest.raises(InvalidRequest, match="no best weights"):
        state.load_best(tmp_path, other)
    state.save_best(tmp_path, module, 7, 0.1 + 0.2)
    assert state.load_best(tmp_path, other) == (7, 0.1 + 0.2)
    assert torch.equal(module.weight, other.weight)
    with pytest.raises(InvalidRequest, match="another module"):
        state.load_best(tmp_path, nn.Linear(3, 3))
    assert [path.name for path in tmp_path.iterdir()] == [state.BEST]


def test_the_journal_forgets_steps_that_will_be_taken_again(tmp_path: Path) -> None:
    journal = state.Journal(tmp_path, 0)
    for step in (1, 2, 3):
        journal.write(step, {"loss": step / 2})
    journal.close()
    path = tmp_path / state.METRICS
    path.write_text(path.read_text() + '{"step": 1, "lo')
    journal = state.Journal(tmp_path, 2)
    journal.write(3, {"loss": 9.0})
    journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 9.0}]
