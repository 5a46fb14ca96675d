"""The GPU benchmark on a tiny model and no GPU: every section runs, and counts what it says it counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny import tiny_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_peers
import gpu_sections
from draftwood.model.checkpoint import open_checkpoint
from draftwood.nets.eagle import Eagle3, Eagle3Spec
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import export
from draftwood.nets.parts import DraftHead
from gpu_measure import QUICK, Lab
from gpu_prompts import CODE8
from standin import Shape, build, build_small

SHAPE = Shape(layers=3, hidden=128, heads=16, kv_heads=4, head_dim=32, inner=96, positions=4096)
SIZES = replace(QUICK, warm_up=2)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("models")
    source = open_checkpoint(tiny_folder(folder / "tiny", head_dim=8, max_position_embeddings=4096))
    build_small(source, folder / "small")
    build(source, folder / "large", SHAPE, torch.device("cpu"))
    own = Lab(folder / "large", folder / "small", "cpu", SIZES, fixed=True)
    yield own
    own.close_all()


def rows(lab: Lab, section: str) -> dict[str, float | None]:
    return {what: value for what, value, *_ in gpu_sections.SECTIONS[section](lab)}


def test_speeds_of_all_contenders(lab: Lab) -> None:
    found = rows(lab, "speed")
    for batch in QUICK.batches:
        for temperature in ("0", "1"):
            for name in ("plain", "ngram", "model", "strict always right"):
                assert found[f"{name}, batch {batch}, T={temperature}, tok/s"]
            # 24 tokens, four drafted ones and one of the model's own each time.
            assert found[f"strict always right, batch {batch}, T={temperature}, tokens a step"] == pytest.approx(24 / 5)
    assert (found["model, batch 1, T=0, tokens a step"] or 0) > 2  # both compute the same function


def test_answers_that_end_one_by_one(lab: Lab) -> None:
    found = rows(lab, "traffic")
    for name in ("plain", "ngram", "model"):
        assert found[f"{name}, batch 4, answers that end one by one, tok/s"]
        assert found[f"{name}, batch 4, the same / all at once"]


def test_requests_that_ask_for_more(lab: Lab) -> None:
    found = rows(lab, "features")
    assert len(found) == len(gpu_sections.WISHES) + 1 + len(gpu_sections.ALL_OF_THEM)
    assert all(ratio is not None and ratio > 0 for ratio in found.values())


def test_first_tokens_by_length(lab: Lab) -> None:
    found = rows(lab, "first")
    assert {what for what in found if "slowest" not in what} == {f"first token, {n} tokens" for n in (128, 512, 2048)}
    assert all(value is not None and value > 0 for value in found.values())


def test_trees_cost_and_give_nothing(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(lab, "tree")
    assert found["step with 1 rows / 1 row, batch 1"] == 1
    assert len(found) == 2 * len(QUICK.trees), "on the device and with the host"
    assert "rows:" in capsys.readouterr().out


def test_trained_drafters_by_task(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(lab.standin)
    words = TargetEmbeddings(checkpoint, torch.device("cpu"), torch.float32)
    config = replace(checkpoint.config, num_layers=1, windows=(None,))
    head = DraftHead(words.head(), None, config.vocab_size, own=False)
    export(Eagle3(config, Eagle3Spec((0, 1), config.hidden_size), head), tmp_path / "own", "stand-in", {})
    monkeypatch.setattr(lab, "trained", (tmp_path / "own",))
    monkeypatch.setattr(gpu_sections, "TRAINED_TREES", ("chain:depth=2",))
    monkeypatch.setattr(gpu_sections, "TASKS", {"code": CODE8[:1], "chat": CODE8[1:2]})
    found = rows(lab, "trained")
    assert set(found) == {"own, batch 1, code, / plain", "own, batch 1, chat, / plain"}
    assert all(found.values())


def test_strict_answers_are_equal(lab: Lab) -> None:
    found = rows(lab, "strict")
    equal = {what: share for what, share in found.items() if "equal" in what}
    assert len(equal) == 9
    assert set(equal.values()) == {1.0}


def test_a_format_that_cannot_be_had_is_missing(lab: Lab) -> None:
    found = rows(lab, "quant")
    assert found["fp8, plain, batch 1, tok/s"] is None  # on accelerators alone
    assert found["int8, plain, batch 1, tok/s"]


def test_a_long_context(lab: Lab) -> None:
    assert all(value for what, value in rows(lab, "context").items() if "peak" not in what)


def test_a_section_that_fails_does_not_stop_the_others(lab: Lab) -> None:
    if torch.cuda.is_available():
        pytest.skip("the section would not fail")
    found, failures = gpu.run_sections(lab, ["idle", "tree"])
    assert list(failures) == ["idle"]
    assert found


def test_waiting_is_told_from_short_gaps() -> None:
    # A third of prompts, then steps of 8 µs with 1 µs inside and 10 µs between them.
    steps = [(start + at, start + at + 4) for start in range(90, 290, 19) for at in (0, 5)]
    waiting, idle = gpu_sections.idle_shares([(0, 90), *steps])
    whole = max(end for _, end in steps) * 2 / 3
    inside = [start for start, _ in steps if start >= max(end for _, end in steps) / 3]
    assert waiting == pytest.approx(10 * (len(inside) // 2 - (len(inside) % 2 == 0)) / whole, rel=0.1)
    assert idle > waiting


def test_wrong_trees_have_the_size_that_is_asked_for() -> None:
    for nodes in (0, 1, 15, 63):
        drafter = gpu_sections.wrong_tree([nodes], 127, 49152)
        paths = drafter.script(list(range(50)))  # pyright: ignore[reportAttributeAccessIssue]
        assert len({tuple(path) for path in paths}) == nodes


@pytest.mark.parametrize("mode", ["plain", "assisted", "lookup"])
def test_the_same_work_by_transformers(lab: Lab, mode: str) -> None:
    pytest.importorskip("transformers")
    given = argparse.Namespace(standin=lab.standin, small=lab.small, device="cpu", quick=True)
    answer = gpu_peers.transformers_answer(mode, given)
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 8]][: 2 if mode == "plain" else 1]
    for temperature in (0.0, 1.0):
        assert answer(prompts, 6, temperature) == 6 * len(prompts)
