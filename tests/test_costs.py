from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.costs import StepCosts
from draftwood.errors import InvalidRequest

COSTS = StepCosts((1, 2, 4, 8), (100, 1000), ((1.0, 1.2, 1.1, 2.0), (2.0, 2.4, 3.0, 5.0)), 0.1)


def test_measured_points_come_back() -> None:
    assert COSTS.at(1, 100) == 1.0
    assert COSTS.at(8, 1000) == 5.0


def test_more_rows_never_cost_less() -> None:
    """A step that is slower than one with more work was disturbed."""
    assert COSTS.at(2, 100) == COSTS.at(4, 100) == 1.1
    assert COSTS.slope(2, 100, over=2) == 0


def test_between_and_beyond() -> None:
    assert COSTS.at(6, 100) == pytest.approx(1.55)
    assert COSTS.at(12, 100) == pytest.approx(2.9)
    assert COSTS.at(1, 550) == pytest.approx(1.5)
    assert COSTS.at(1, 1900) == pytest.approx(3.0)
    assert COSTS.at(1, 0) == 1.0, "a shorter context than any measured is no cheaper than the shortest"
    assert COSTS.at(4, 100, batch=3) == pytest.approx(1.3)


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "some" / "costs.json"
    assert StepCosts.load(path) is None
    COSTS.save(path)
    assert StepCosts.load(path) == COSTS


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": [1, 2], "contexts": [3], "seconds": [[1]]}'])
def test_a_damaged_table_is_no_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert StepCosts.load(path) is None


@pytest.mark.parametrize(
    ("rows", "contexts", "seconds"),
    [
        ((1, 2), (3,), ((1.0,),)),
        ((1,), (3,), ((1.0,),)),
        ((2, 1), (3,), ((1.0, 1.0),)),
        ((1, 2), (3,), ((1.0, 0.0),)),
        ((1, 2), (), ()),
    ],
)
def test_nonsense_is_refused(rows: tuple, contexts: tuple, seconds: tuple) -> None:
    with pytest.raises(InvalidRequest):
        StepCosts(rows, contexts, seconds, 0.0)


def test_each_further_sequence_adds_itself_and_its_keys() -> None:
    costs = StepCosts((1, 64), (64, 1024), ((1.0, 2.0), (1.0, 2.0)), 0.01, 0.001)
    assert costs.at(1, 64, 1) == costs.at(1, 1024, 1) == 1.0
    assert costs.at(1, 64, 11) == pytest.approx(1.1)
    assert costs.at(1, 164, 11) == pytest.approx(1.1 + 10 * 100 * 0.001)
    assert costs.at(1, 8, 11) == costs.at(1, 64, 11), "the shortest context counts as itself"


# --- tables nobody should budget by

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
REAL = (2.74, 3.20, 3.50, 3.69, 3.87, 3.81, 4.20, 5.84, 7.19, 9.94, 12.8, 24.5)  # ms, SmolLM2 in 8 bits on two cores


def table(milliseconds: tuple[float, ...], spread: float | None = None) -> StepCosts:
    return StepCosts(ROWS, (64,), (tuple(time / 1e3 for time in milliseconds),), 0.0, spread=spread)


def test_a_measured_table_is_trusted() -> None:
    assert table(REAL).doubt is None
    assert table(REAL, spread=1.06).doubt is None
    assert table((1.0,) * len(ROWS)).doubt is None, "rows may cost nothing"
    assert table(tuple(map(float, ROWS))).doubt is None, "and they may cost as much as steps of their own"


@pytest.mark.parametrize(
    ("row", "milliseconds"),
    [(3, 28.0), (0, 40.0), (11, 300.0)],
    ids=["four rows slower than four steps of one", "one row slower than many", "64 rows slower than two steps of 32"],
)
def test_times_that_contradict_each_other_are_doubtful(row: int, milliseconds: float) -> None:
    wrong = (*REAL[:row], milliseconds, *REAL[row + 1 :])
    assert f"{milliseconds:.1f}" in str(table(wrong).doubt)


def test_measurements_that_differ_are_doubtful() -> None:
    assert "differed 1.9-fold" in str(table(REAL, spread=1.9).doubt)


def test_a_table_without_a_spread_still_loads(tmp_path: Path) -> None:
    """As they were written before the spread was recorded."""
    path = tmp_path / "costs.json"
    path.write_text(
        '{"rows": [1, 2], "contexts": [64], "seconds": [[1.0, 1.1]], "per_sequence": 0.1, "per_token": 0.0}'
    )
    assert StepCosts.load(path) == StepCosts((1, 2), (64,), ((1.0, 1.1),), 0.1)
    table(REAL, spread=1.9).save(path)
    assert StepCosts.load(path) == table(REAL, spread=1.9)
