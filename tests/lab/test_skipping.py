"""Layers that drafts leave out: what a set is worth, policies that find what is there, and results that are kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from draftwood.assembly import build_drafter
from draftwood.cli import app
from draftwood.config import EngineConfig
from draftwood.drafters.skips import NAME, SkipSet, find_skips, require_skips, save_skips
from draftwood.errors import IncompatibleParts, InvalidRequest
from draftwood.lab import skipping
from draftwood.lab.probe import Answer, Costs, Probe
from draftwood.lab.skipping import POLICIES, search
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.runner import ModelRunner
from draftwood.model.spec import Sublayers
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS
from test_views import Part
from tiny import CPU, Idle, TinyCheckpoint, tiny_config, tiny_folder

CONFIG = tiny_config(layers=4)
FLAT = Costs((1.0, 1.0, 1.0, 1.0), (0.05,) * 8)


def runner_of(checkpoint: TinyCheckpoint, dtype: torch.dtype = torch.float64) -> ModelRunner:
    return ModelRunner.load(checkpoint, dtype, CPU, 200, 4, FORMATS["stored"])  # type: ignore[arg-type]


def answers_of(runner: ModelRunner, lengths: tuple[int, ...] = (17, 23)) -> list[Answer]:
    """What the model says greedily behind some tokens."""
    part, found = Part(runner.model, runner.model, None), []
    for length in lengths:
        tokens = [random.Random(length).randrange(13) for _ in range(5)]
        while len(tokens) < length:
            tokens.append(int(part.logits(tokens, []).argmax()))
        found.append(Answer(tokens, 5))
    return found


@pytest.fixture(scope="module")
def probe() -> Iterator[Probe]:
    runner = runner_of(TinyCheckpoint(CONFIG))
    with Probe(runner, answers_of(runner), 4, 3).reading() as found:
        yield found
    assert runner.cache.tables.pool.num_available == 200


@pytest.mark.parametrize("skipped", [(), (2, 3), (0, 1, 4, 7)])
def test_survival_is_how_often_chains_are_right(probe: Probe, skipped: tuple[int, ...]) -> None:
    """Written out, place by place, on a model with an empty cache."""
    model = Transformer(TinyCheckpoint(CONFIG), torch.float64, CPU)
    whole, attention, mlp = {(): ((), (), ()), (2, 3): ((1,), (), ()), (0, 1, 4, 7): ((0,), (2,), (3,))}[skipped]
    assert probe.sets(skipped) == (whole, attention, mlp)
    without = Sublayers(frozenset(attention), frozenset(mlp))
    part = Part(model, model.part([i for i in range(4) if i not in whole], without), None)
    right = [0, 0, 0]
    for answer, places in zip(probe._answers, probe.places.tolist(), strict=True):
        for place in places:
            text, path = answer.tokens[: place + 1], []
            for step in range(3):
                path.append(int(part.logits(text, path).argmax()))
                right[step] += path == list(answer.tokens[place + 1 : place + 2 + step])
    assert probe.survival(skipped) == pytest.approx([count / 8 for count in right])
    assert (probe.survival(skipped) == [1.0] * 3) == (skipped == ())


def test_layers_one_by_one_are_the_model(probe: Probe) -> None:
    streams = probe.streams()
    assert len(streams) == 8
    for i in range(1, 8):
        assert torch.allclose(probe.item(i, streams[i - 1]), streams[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finds_the_layers_that_do_nothing(policy: str, dtype: torch.dtype, monkeypatch) -> None:
    runner = runner_of(Idle(CONFIG), dtype)
    monkeypatch.setattr(Probe, "costs", lambda self: FLAT)
    monkeypatch.setattr(Probe, "draft_share", lambda self, skipped: 1 - 0.05 * len(skipped))
    told: list[float] = []
    with Probe(runner, answers_of(runner), 4, 3).reading() as probe:
        found, _ = search(probe, policy, 150, lambda done, best: told.append(done))
    assert found.sets[0] == (1, 3)
    if policy != "search":  # which looks at larger sets too, and finds one that pays more
        assert found.sets == ((1, 3), (), ())
        assert found.survival == (1.0, 1.0, 1.0)
        assert (found.ratio, found.depth) == (pytest.approx(4 / (3 * 0.8 + 1)), 3)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert runner.cache.tables.pool.num_available == 200


def test_a_knapsack_leaves_out_what_takes_long(probe: Probe) -> None:
    """No set that saves more than half of all time is looked at, whatever the layers take."""
    costs = Costs(FLAT.rows, (0.05,) * 6 + (0.15, 0.15))
    sets = {skipped for _, skipped in POLICIES["knapsack"](skipping.Judge(probe, costs), 1) if skipped}
    saved = [sum(costs.items[i] for i in own) for own in sets]
    assert max(saved) == pytest.approx(0.3)


def test_no_set_that_leaves_the_model_like_itself(probe: Probe, monkeypatch) -> None:
    monkeypatch.setattr(skipping, "LEAST_COSINE", 1.1)
    monkeypatch.setattr(Probe, "costs", lambda self: FLAT)
    with pytest.raises(InvalidRequest, match="'cosine' finds no layers"):
        search(probe, "cosine", 1, lambda done, best: None)


def test_the_rate_of_a_chain() -> None:
    costs = Costs((2.0, 2.5, 3.0), (0.5, 0.5))
    assert costs.draft((0,)) == 1.5
    assert costs.ratio([0.5, 0.25], 0.5) == (pytest.approx(2 * 1.5 / (0.5 + 2.5)), 1)
    assert costs.ratio([0.9, 0.8], 0.5) == (pytest.approx(2 * 2.7 / (1.0 + 3.0)), 2)


def test_times_are_those_of_this_machine(probe: Probe) -> None:
    costs = probe.costs()
    assert len(costs.rows) == 4
    assert list(costs.rows) == sorted(costs.rows)
    assert len(costs.items) == 8
    assert min(costs.items) > 0
    assert probe.draft_share(()) > 0


def test_too_little_to_look_at_is_refused() -> None:
    runner = runner_of(TinyCheckpoint(CONFIG))
    with pytest.raises(InvalidRequest, match="more than 9 tokens"):
        Probe(runner, [Answer([1] * 12, 5)], 4, 8)
    thin = runner_of(TinyCheckpoint(tiny_config(layers=1)))
    with Probe(thin, answers_of(thin), 4, 3).reading() as probe, pytest.raises(InvalidRequest, match="has one layer"):
        search(probe, "auto", 1, lambda done, best: None)
    small = ModelRunner(runner.model, 6, 4)
    with pytest.raises(InvalidRequest, match="cache is too small"), Probe(small, answers_of(runner), 4, 3).reading():
        pass
    assert small.cache.tables.pool.num_available == 6


# --- what is kept

KEPT = SkipSet((1, 3), 3, 1.3, 0.9, "auto", attention=(2,))


def test_a_result_lies_beside_the_model_and_is_picked_up(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_folder(tmp_path / "model", layers=4))
    with pytest.raises(IncompatibleParts, match="run `draftwood search-skip"):
        build_drafter("layer-skip", None, checkpoint, EngineConfig())
    path = save_skips(KEPT, checkpoint)
    assert path == tmp_path / "model" / NAME
    assert find_skips(checkpoint) == KEPT
    drafter = build_drafter("layer-skip", None, checkpoint, EngineConfig())
    assert drafter.view.layers(checkpoint.config) == [0, 2]  # type: ignore[attr-defined]
    assert drafter.view.without == Sublayers(frozenset({2}))  # type: ignore[attr-defined]


def test_where_nothing_can_be_written_it_lies_in_our_own_folder(tmp_path: Path, monkeypatch) -> None:
    checkpoint = open_checkpoint(tiny_folder(tmp_path / "model", layers=4))
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    (tmp_path / "model" / NAME).with_suffix(".tmp").mkdir()  # root may write wherever permissions forbid it
    monkeypatch.setattr("draftwood.drafters.skips.why_unwritable", lambda error: "it is read-only")
    path = save_skips(KEPT, checkpoint)
    assert path.parent == tmp_path / "home" / "skips"
    assert find_skips(checkpoint) == KEPT


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: "{",
        lambda raw: "[]",
        lambda raw: json.dumps(raw | {"skipped": [1, 9]}),
        lambda raw: json.dumps(raw | {"skipped": [3, 1]}),
        lambda raw: json.dumps(raw | {"model": "another"}),
        lambda raw: json.dumps({**raw, "depth": None}),
    ],
)
def test_what_cannot_be_of_this_model_is_passed_over(damage, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    checkpoint = open_checkpoint(tiny_folder(tmp_path / "model", layers=4))
    path = save_skips(KEPT, checkpoint)
    path.write_text(damage(json.loads(path.read_text())))
    assert find_skips(checkpoint) is None


def test_one_that_does_not_pay_says_so(tmp_path: Path, caplog) -> None:
    checkpoint = open_checkpoint(tiny_folder(tmp_path / "model", layers=4))
    save_skips(SkipSet((1,), 1, 0.9, 0.5, "auto"), checkpoint)
    assert require_skips(checkpoint).skipped == (1,)
    assert "0.90 times the plain speed" in caplog.text


def test_the_command(tmp_path: Path) -> None:
    folder = str(tiny_folder(tmp_path / "model", layers=3))
    run = CliRunner().invoke(app, ["search-skip", folder, "--tokens", "20", "--tries", "3", "--json"])
    assert run.exit_code == 0, run.output
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["path"] == str(tmp_path / "model" / NAME)
    kept = find_skips(open_checkpoint(folder))
    assert kept is not None
    assert [*map(list, kept.sets)] == list(said["skipped"].values())
    table = CliRunner().invoke(app, ["search-skip", folder, "--tokens", "20", "--tries", "1", "--policy", "cosine"])
    assert "--drafter layer-skip" in table.output
    assert ("No set of layers pays here" in table.output) == (find_skips(open_checkpoint(folder)).ratio <= 1)  # type: ignore[union-attr]
    unknown = CliRunner().invoke(app, ["search-skip", folder, "--policy", "guess"])
    assert unknown.exit_code == 1
    assert "choose one of auto, cosine, fisher, knapsack, search" in unknown.output.replace("\n", " ")
