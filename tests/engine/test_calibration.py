"""Measuring a machine: the table is complete, kept under a name of everything it depends on, and read by engines."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from captured import Replayed
from draftwood import LLM, EngineConfig, SamplingParams, calibration
from draftwood.calibration import CONTEXTS, ROWS, assumed_costs, calibrate, costs_path, default_controller, known_costs
from draftwood.costs import LIKE_OTHER_CPUS, StepCosts
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.engine.controller import FixedBudget, MeasuredBudget, MeasuredTreeBudget
from draftwood.engine.engine import Engine
from draftwood.engine.worker import ComputeThread
from draftwood.errors import InvalidRequest
from draftwood.model.runner import ModelRunner
from draftwood.model.spec import ExpertsSpec, MlpSpec
from draftwood.protocols import Load, StepMode
from tiny import tiny_config, tiny_folder, tiny_runner


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(calibration, "REPEATS", 2)
    monkeypatch.setattr(calibration, "_timed_step", quiet_step)


def quiet_step(engine: Engine) -> float:
    """A step on a machine that nothing disturbs."""
    engine.step()
    return 1e-3


def roomy(**changes):
    config = tiny_config(max_position_embeddings=4096)
    return tiny_runner(config, num_pages=800, page_size=32, **changes)


def test_a_machine_is_measured_once() -> None:
    target = roomy(dtype=torch.float32)
    assert known_costs(target) is None
    heard: list[str] = []
    costs = calibrate(target, heard.append)
    assert costs.rows == ROWS
    assert costs.contexts == CONTEXTS
    assert costs.per_sequence >= 0
    assert len(heard) == 3
    assert known_costs(target) == costs
    target.cache.tables.check()
    assert target.cache.tables.pool.num_available == 800, "pages leaked"


class Counted(Replayed):
    """Where there are no events: steps are run, and how long sequences are when they begin is remembered."""

    begun: ClassVar[list[list[int]]] = []

    def seconds(self, seq_ids: Sequence[int], nodes: int, mode: StepMode, repeats: int) -> float:
        rows = self.state.rows(seq_ids)
        self.begun.append(self.state.length[rows].tolist())
        run = self.step_for(seq_ids, nodes, mode)
        for _ in range(1 + repeats):
            run()
        return float(self.state.length[rows].min())


def test_steps_of_every_size_are_measured_after_the_same_context(monkeypatch: pytest.MonkeyPatch) -> None:
    target = roomy(dtype=torch.float32)
    monkeypatch.setattr(calibration, "GraphRunner", Counted)
    forward, unlike = target.forward, set()
    monkeypatch.setattr(
        target, "forward", lambda batch, *a: unlike.add(len(batch.tokens.unique())) or forward(batch, *a)
    )
    after = calibration._time_steps(target, 3, 40, [0, 1, 7])
    assert Counted.begun == [[40] * 3] * 3
    assert min(after) >= 40 + 1 + calibration.GPU_REPEATS
    assert max(unlike) > 7, "nodes that are all the same token would share a mixture's experts"
    assert target.cache.tables.pool.num_available == 800, "pages leaked"


def test_a_small_cache_is_measured_as_far_as_it_reaches() -> None:
    costs = calibrate(tiny_runner(tiny_config(), num_pages=400, page_size=4))
    assert costs.contexts[-1] < 178


def test_the_name_holds_what_a_cost_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {costs_path(roomy()), costs_path(roomy(dtype=torch.float32))}
    names.add(costs_path(roomy(dtype=torch.float32, weights="int8")))
    names.add(costs_path(tiny_runner(tiny_config("qwen2"))))
    monkeypatch.setattr(calibration, "__version__", "99")
    names.add(costs_path(roomy()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    names.add(costs_path(roomy()))
    monkeypatch.setattr(calibration, "processor_features", lambda: "another")
    names.add(costs_path(roomy()))
    assert len(names) == 7


def test_budgets_read_the_table_if_there_is_one() -> None:
    target = roomy(dtype=torch.float32)
    assert default_controller(target, NgramDrafter())._timing.costs.table is LIKE_OTHER_CPUS
    calibrate(target)
    assert default_controller(target, NgramDrafter())._timing.costs.table == known_costs(target)
    assert isinstance(default_controller(target, NoDrafter()), FixedBudget)


def test_without_a_table_a_gpu_takes_its_rows_to_cost_what_they_cost_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always guessing all would make a full batch slower than plain decoding."""
    monkeypatch.setattr(calibration, "known_costs", lambda _: None)
    target: Any = SimpleNamespace(device=torch.device("cuda"), model=SimpleNamespace(config=tiny_config()))
    chain, trees = default_controller(target, NgramDrafter()), default_controller(target, NgramDrafter(branches=3))
    assert isinstance(chain, MeasuredBudget)
    assert isinstance(trees, MeasuredTreeBudget)
    for controller in (chain, trees):
        assert "(assumed)" in str(controller.budget(Load(num_running=256, num_waiting=0, padded=True)).why)


def test_rows_of_a_mixture_are_assumed_to_read_experts_of_their_own() -> None:
    """Four experts of which each row reads two: one more row reads one more on average, until all are read."""
    expert = MlpSpec(64, "silu")
    dense = tiny_config()
    layers = tuple(replace(layer, mlp=ExpertsSpec(4, 2, expert)) for layer in dense.layer_specs)
    mixture: Any = SimpleNamespace(
        device=torch.device("cpu"), model=SimpleNamespace(config=replace(dense, layers=layers))
    )
    plain: Any = SimpleNamespace(device=torch.device("cpu"), model=SimpleNamespace(config=dense))
    assert assumed_costs(plain) is LIKE_OTHER_CPUS
    own = assumed_costs(mixture)
    extra = [own.at(rows) - LIKE_OTHER_CPUS.at(rows) for rows in (1, 2, 4, 64)]
    assert own.assumed
    assert extra[0] == pytest.approx(0)
    assert extra[1] == pytest.approx(extra[3] / 2)
    assert extra[2] == pytest.approx(0.875 * extra[3], rel=0.01)
    assert 0 < extra[3] < 1


def test_an_llm_calibrates_itself_and_answers_the_same(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", max_position_embeddings=2048)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3)
    config = EngineConfig(threads=1, cache_tokens=16384)
    with LLM(folder, drafter="ngram:nodes=3,shortest=1", config=config) as llm:
        before = llm.generate("abcabcabc", params).token_ids
        assert not llm.is_calibrated
        llm.calibrate()
        assert llm.is_calibrated
        assert isinstance(llm.engine.controller, MeasuredBudget)
        assert llm.generate("abcabcabc", params).token_ids == before
        stream = llm.stream("abc", SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        with pytest.raises(InvalidRequest, match="no requests"):
            llm.calibrate()
        stream.close()


def test_a_table_is_plain_json() -> None:
    target = roomy(dtype=torch.float32)
    calibrate(target)
    assert set(json.loads(costs_path(target).read_text())) == {
        "rows", "contexts", "seconds", "per_sequence", "per_token", "spread",
    }  # fmt: skip


# --- tables of a busy machine


def poison(target: ModelRunner) -> Path:
    """A table as a busy machine gave it: four rows at 428 ms, one at 68. In the format that has no spread yet."""
    seconds = [0.068, 0.071, 0.074, 0.428, 0.43, 0.43, 0.44, 0.45, 0.47, 0.5, 0.6, 0.9]
    path = costs_path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": ROWS, "contexts": [64], "seconds": [seconds], "per_sequence": 0.0}))
    return path


def test_an_implausible_table_is_not_used_and_is_replaced() -> None:
    target = roomy(dtype=torch.float32)
    path = poison(target)
    assert StepCosts.load(path) is not None, "it can be read"
    assert known_costs(target) is None
    assert default_controller(target, NgramDrafter())._timing.costs.assumed
    calibrate(target)
    assert known_costs(target) is not None
    assert not default_controller(target, NgramDrafter())._timing.costs.assumed


class Busy:
    """A machine where rounds are disturbed: each takes longer than the one before."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, engine: Engine) -> float:
        engine.step()
        self.steps += 1
        return 1e-3 * (1 + self.steps)


def test_what_a_busy_machine_gives_is_recorded_but_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    target = roomy(dtype=torch.float32)
    monkeypatch.setattr(calibration, "_timed_step", Busy())
    heard: list[str] = []
    costs = calibrate(target, heard.append)
    assert costs.spread is not None
    assert costs.spread > 2
    assert costs.doubt is not None
    assert "not used" in heard[-1]
    assert "Run `draftwood calibrate` again" in heard[-1]
    assert json.loads(costs_path(target).read_text())["spread"] == costs.spread
    assert known_costs(target) is None


def test_a_steady_table_outlives_a_busy_day(monkeypatch: pytest.MonkeyPatch) -> None:
    target = roomy(dtype=torch.float32)
    steady = calibrate(target)
    monkeypatch.setattr(calibration, "_timed_step", Busy())
    heard: list[str] = []
    assert calibrate(target, heard.append).doubt is not None
    assert "the table before it stays" in heard[-1]
    assert known_costs(target) == steady


def test_an_llm_ignores_a_doubtful_table_until_it_has_measured_again(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", max_position_embeddings=2048)
    with LLM(folder, drafter="ngram", threads=1, config=EngineConfig(cache_tokens=16384)) as llm:
        ComputeThread.shared().call(lambda: poison(llm.engine.target))
        assert not llm.is_calibrated
        llm.calibrate()
        assert llm.is_calibrated
        assert isinstance(llm.engine.controller, MeasuredBudget)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_costs_that_cannot_be_kept_serve_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(self: StepCosts, path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(StepCosts, "save", fail)
    folder = tiny_folder(tmp_path / "model", max_position_embeddings=2048)
    heard: list[str] = []
    with LLM(folder, drafter="ngram", config=EngineConfig(threads=1, cache_tokens=16384)) as llm:
        llm.calibrate(heard.append)
        assert isinstance(llm.engine.controller, MeasuredBudget)
    assert "could not be kept" in heard[-1]
    assert "set DRAFTWOOD_HOME to a folder" in heard[-1]
    assert "Errno" not in heard[-1]
