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
