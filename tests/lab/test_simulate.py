"""Simulated serving: the real scheduler and controller on machines that are only described, held against the engine."""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftwood import LLM, EngineConfig
from draftwood.cli.app import app
from draftwood.cli.simulate import rates_of, record
from draftwood.costs import LIKE_OTHER_CPUS, LIKE_OTHER_GPUS, StepCosts
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafting import padded_batch, tree_sizes
from draftwood.engine.policies import Guessing, make_controller
from draftwood.errors import InvalidRequest
from draftwood.lab.recording import Fleet, Recorder, Recording, rank_rates
from draftwood.lab.simulate import Limits, Simulation, Workload
from draftwood.protocols import Budget, Controller, Load, StepReport
from draftwood.request import GuessedTree, SamplingParams, Slo
from draftwood.verifiers import LAWS
from tiny import Ask, Harness, generated, no_drafter, tiny_folder, tiny_runner

BATCHES = (1, 2, 8, 32, 128)
SECONDS = StepCosts(LIKE_OTHER_GPUS.rows, (64,), (tuple(4e-3 * s for s in LIKE_OTHER_GPUS.seconds[0]),), 0.0)


def chain_of(chance: float, most: int = 7) -> dict[int, tuple[float, ...]]:
    """Every node is right with the same chance."""
    ends = [chance**depth * (1 - chance) for depth in range(most)]
    return {most: (*ends, chance**most)}


CODE, CHAT, LOST = chain_of(0.85), chain_of(0.4), {7: (1.0,)}
CHAINS = Recording(SECONDS, {"code": CODE, "chat": CHAT, "lost": LOST}, {n: (2e-4 * n, 0.0) for n in range(1, 8)})
# A beam: each size gains more than the one before, 63 nodes 3.4 tokens.
BEAMS = Recording(
    SECONDS,
    {
        "code": {1: (3, 7), 3: (2, 3, 3, 2), 7: (2, 2, 2, 2, 2), 15: (1,) * 6, 31: (1,) * 7, 63: (1, 1, 1, 1, 2, 2, 1)},
        "chat": {1: (6, 4), 3: (9, 8, 2, 1), 7: (8, 8, 3, 1), 15: (7, 8, 4, 1), 31: (6, 8, 4, 2), 63: (5, 8, 5, 2)},
        "lost": {1: (1.0,), 3: (1.0,), 7: (1.0,), 15: (1.0,), 31: (1.0,), 63: (1.0,)},
    },
    {n: (2e-4 * n.bit_length(), 0.0) for n in (1, 3, 7, 15, 31, 63)},
    chain=False,
)


def gained(recording: Recording, text: str, nodes: int) -> float:
    """Expected tokens of a step."""
    sizes = {0: (1.0,)} | dict(recording.texts[text])
    if recording.chain:
        counts = sizes[max(sizes)]
        return 1 + sum(min(i, nodes) * count for i, count in enumerate(counts)) / sum(counts)
    points = {
        size: 1 + sum(i * count for i, count in enumerate(counts)) / sum(counts) for size, counts in sizes.items()
    }
    below, above = max(n for n in points if n <= nodes), min(n for n in points if n >= nodes)
    share = 0.0 if above == below else math.log((1 + nodes) / (1 + below)) / math.log((1 + above) / (1 + below))
    return points[below] + share * (points[above] - points[below])


def rate(recording: Recording, text: str, nodes: int, batch: int, context: float = 64) -> float:
    """Tokens a second of a size that never changes, in closed form."""
    rows = padded_batch(batch) * (1 + nodes)
    seconds = recording.costs.at(rows, context, batch) + recording.drafting(nodes, batch)
    return batch * gained(recording, text, nodes) / seconds


def best(recording: Recording, text: str, batch: int, context: float = 64) -> float:
    return max(rate(recording, text, nodes, batch, context) for nodes in tree_sizes(recording.max_nodes))


def crowd(simulation: Simulation, batch: int, text: str, context: int = 64) -> None:
    """Sequences that do not end, past their prompts."""
    for _ in range(batch):
        simulation.ask(text, context, 20000)
    while any(seq.num_generated == 0 for seq in (*simulation.scheduler.running, *simulation.scheduler.waiting)):
        simulation.step()


def run(simulation: Simulation, steps: int) -> float:
    """Tokens a second. What became of drafts is replaced by what is expected: chance is not what is measured."""
    seconds, tokens = simulation.now, 0.0
    for _ in range(steps):
        before, sizes = simulation.outcome.tokens, simulation.outcome.sizes.copy()
        simulation.step()
        assert simulation.outcome.tokens > before
        (nodes,) = simulation.outcome.sizes - sizes
        text = next(iter(simulation.texts.values()))
        tokens += gained(simulation.recording, text, nodes) * len(simulation.scheduler.running)
    return tokens / (simulation.now - seconds)


LIMITS = Limits(cache_tokens=1 << 22)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("recording", "text"),
    [(CHAINS, "code"), (CHAINS, "chat"), (CHAINS, "lost"), (BEAMS, "code"), (BEAMS, "lost")],
    ids=["chains of code", "chains of chat", "chains that are wrong", "beams", "beams that are wrong"],
)
def test_auto_is_as_good_as_the_best_fixed_setting(recording: Recording, text: str, batch: int) -> None:
    simulation = Simulation(recording, "auto", LIMITS)
    crowd(simulation, batch, text)
    run(simulation, 20)
    found = run(simulation, 100 if batch > 100 else 200)
    assert found >= 0.97 * best(recording, text, batch)
    assert found >= 0.99 * rate(recording, text, 0, batch)


@pytest.mark.parametrize("batch", [2, 32])
@pytest.mark.parametrize(("recording", "share"), [(CHAINS, 0.97), (BEAMS, 0.9)], ids=["chains", "beams"])
def test_traffic_may_change_and_change_back(recording: Recording, share: float, batch: int) -> None:
    """From text that is guessed to text that is not, and back: fifty steps later everything is as it should be. A tree
    tells of its own size only, a chain of all that are shorter.
    """
    simulation = Simulation(recording, "auto", LIMITS)
    crowd(simulation, batch, "code")
    for text in ("code", "lost", "code", "chat"):
        simulation.texts = dict.fromkeys(simulation.texts, text)
        run(simulation, 50)
        found = run(simulation, 100)
        assert found >= share * best(recording, text, batch), text
        assert found >= 0.99 * rate(recording, text, 0, batch), text


def test_a_request_that_cannot_be_guessed_does_not_spoil_the_next() -> None:
    """On two cores, one request at a time: each has a text of its own, which every fixed setting is wrong for."""
    texts = {"code": chain_of(0.7, 6), "lost": chain_of(0.05, 6)}
    recording = Recording(replace(LIKE_OTHER_CPUS.scaled(5e-3), assumed=False), texts, {6: (2e-3, 0.0)}, padded=False)
    load = Workload(1, requests=16, prompt=(16, 16), answer=(120, 120), texts=("lost", "code"))
    known = Guessing(LIKE_OTHER_CPUS, 6, recording.depth)
    auto = Simulation(recording, make_controller("auto", known)).run(load).rate
    fixed = [Simulation(recording, policy).run(load).rate for policy in ("off", "fixed:nodes=2", "fixed:nodes=3")]
    assert auto >= 1.1 * max(fixed)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("wrong", [0.25, 4.0])
def test_a_wrong_cost_table_is_corrected_within_a_hundred_steps(wrong: float, batch: int) -> None:
    """What rows take beyond the first is wrong by a factor: rows are not free, or much cheaper than they seem."""
    first = SECONDS.seconds[0][0]
    line = tuple(first + wrong * (seconds - first) for seconds in SECONDS.seconds[0])
    table = StepCosts(SECONDS.rows, (64,), (line,), 0.0)
    controller = make_controller("auto", Guessing(table, 7, CHAINS.depth))
    simulation = Simulation(CHAINS, controller, LIMITS)
    crowd(simulation, batch, "code")
    run(simulation, 100)
    assert run(simulation, 200) >= 0.97 * best(CHAINS, "code", batch)


@pytest.mark.parametrize("context", [64, 4096, 32000])
def test_long_contexts_make_rows_cheap(context: int) -> None:
    """Where reading keys takes most of a step, a row more costs next to nothing; a short context is another matter."""
    fleet = Fleet(8, 1.0, 4000, 400, kv_bytes=131072)
    recording = replace(CHAINS, costs=fleet.costs(), texts={"chat": chain_of(0.5)}, draft_seconds={})
    simulation = Simulation(recording, "auto", Limits(cache_tokens=1 << 22, max_rows=32000))
    crowd(simulation, 64, "chat", context)
    run(simulation, 30)
    found, late = run(simulation, 60), simulation.scheduler.load.context
    assert found >= 0.97 * best(recording, "chat", 64, late)
    common = simulation.outcome.sizes.most_common(1)[0][0]
    assert common >= 3 if context == 32000 else common <= 2


def test_every_row_goes_to_experts_of_its_own() -> None:
    """A mixture reads as many experts as its rows touch: what a dense model of its active size takes for granted does
    not pay, and nothing is lost by it.
    """
    dense = Fleet(35, 1.0, 4000, 900)
    mixture = replace(dense, experts=256, active=8, expert_share=0.95)
    assert mixture.costs().at(1) < 0.1 * dense.costs().at(1)
    assert mixture.costs().at(8) > 3 * mixture.costs().at(1)
    assert dense.costs().at(8) < 1.01 * dense.costs().at(1)
    for fleet, drafts in ((dense, True), (mixture, False)):
        recording = replace(CHAINS, costs=fleet.costs(), texts={"chat": CHAT}, draft_seconds={})
        simulation = Simulation(recording, "auto", LIMITS)
        crowd(simulation, 4, "chat")
        run(simulation, 30)
        assert run(simulation, 100) >= 0.97 * best(recording, "chat", 4)
        assert (simulation.outcome.sizes.most_common(1)[0][0] > 1) is drafts


def test_promises_are_kept_where_fixed_settings_break_them() -> None:
    """Long prompts arrive while others decode: read whole, each holds everything up."""
    fleet = Fleet(8, 2.0, 3000, 150, kv_bytes=131072)
    recording = replace(CHAINS, costs=fleet.costs(), texts={"code": CODE}, draft_seconds={})
    load = Workload(0, rate=6.0, requests=60, prompt=(1000, 4000), answer=(20, 40), slo=Slo(tpot_ms=14))
    broken = {name: Simulation(recording, name).run(load).violated for name in ("auto", "fixed:nodes=3", "off")}
    assert broken["auto"] <= 0.5 * min(broken["fixed:nodes=3"], broken["off"])
    assert broken["off"] > 0.1


# --- held against the engine


def fake_costs() -> StepCosts:
    return StepCosts((1, 2, 4, 8, 16, 32, 64), (16,), ((10.0, 10.5, 11.5, 14.0, 19.0, 30.0, 55.0),), 0.1)


@dataclass
class FakeTime:
    """A controller that is told what steps of a described machine would take, instead of what they took."""

    controller: Controller
    seconds: float = 0.0
    tokens: int = 0
    prompts: list[int] = field(default_factory=list)

    def budget(self, load: Load) -> Budget:
        return self.controller.budget(load)

    def observe(self, report: StepReport) -> None:
        rows = report.num_rows + report.prompt_rows
        drafting = 0.8 if report.drafted else 0.0
        took = fake_costs().at(rows, report.context, max(report.num_sampling, 1)) + drafting
        self.seconds, self.tokens = self.seconds + took, self.tokens + report.emitted
        mixed = report.prompt_rows > 0
        self.controller.observe(
            replace(
                report,
                draft_seconds=drafting,
                step_seconds=None if mixed else took,
                whole_seconds=took if mixed else None,
            )
        )


ANSWER, DEPTH = 60, 6


@pytest.mark.parametrize("right", [0.9, 0.5])
def test_the_simulator_agrees_with_the_engine(right: float) -> None:
    """The engine on a tiny model with a drafter that is right so often; the simulator on what was recorded of it."""
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    asks = [Ask((1 + i, 2, 3 + i % 5, 4), params, arrives=3 * i) for i in range(12)]
    target = tiny_runner(num_pages=400)
    plain = generated(Harness(target, no_drafter(target.model.dtype), LAWS["match"]()).run(asks))
    said = {
        (ask.prompt, tuple(answer[:n])): answer[n]
        for ask, answer in zip(asks, plain, strict=True)
        for n in range(ANSWER)
    }

    def luck(*parts: object) -> float:
        return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") / 2**32

    def script(tokens: Sequence[int]) -> list[list[int]]:
        prompt, answer, path = tuple(tokens[:4]), list(tokens[4:]), []
        while len(path) < DEPTH:
            token = said.get((prompt, tuple(answer + path)), 0)
            path.append(token if luck(prompt, len(answer), len(path)) < right else (token + 1) % 13)
        return [path]

    def engine(controller: Controller) -> FakeTime:
        told = FakeTime(controller)
        harness = Harness(target, ScriptedDrafter(script, DEPTH, chain=True), LAWS["match"]())
        harness.engine.controller = told
        assert generated(harness.run(asks)) == plain
        return told

    recorder = Recorder(DEPTH)
    engine(recorder)
    recording = Recording(
        fake_costs(), {"text": {DEPTH: recorder.histogram}}, {DEPTH: (0.8, 0.0)}, {"text": recorder.silent},
        padded=False,
    )  # fmt: skip
    known = Guessing(fake_costs(), DEPTH, lambda nodes: nodes)
    for policy in ("auto", "off", "fixed", "fixed:nodes=2"):
        told = engine(make_controller(policy, known))
        seconds = []
        for seed in range(5):
            simulation = Simulation(recording, policy, Limits(max_running=64, cache_tokens=1 << 16), seed)
            step, waiting = 0, list(asks)
            while waiting or simulation.scheduler.has_work:
                while waiting and waiting[0].arrives <= step:
                    simulation.ask("text", len(waiting.pop(0).prompt), ANSWER)
                simulation.step() if simulation.scheduler.has_work else None
                step += 1
            assert simulation.outcome.tokens == told.tokens == ANSWER * len(asks)
            seconds.append(simulation.now)
        assert statistics.mean(seconds) == pytest.approx(told.seconds, rel=0.05), policy


# --- recordings, and the command


def test_a_recording_is_plain_json(tmp_path: Path) -> None:
    CHAINS.save(tmp_path / "own.json")
    assert Recording.load(tmp_path / "own.json") == CHAINS
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no recording"):
        Recording.load(tmp_path / "other.json")
    record = json.loads((tmp_path / "own.json").read_text())
    for changes, words in (
        ({"texts": {}}, "at least one kind"),
        ({"texts": {"a": {"1": [1, 2, 3]}}}, "0 to 1 accepted"),
        ({"costs": {}}, "KeyError"),
        ({"fleet": {"billions": 0}}, "above 0"),
        ({"fleet": {"gpus": 8}}, "gpus"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(record | changes))
        with pytest.raises(InvalidRequest, match=words):
            Recording.load(tmp_path / "bad.json")


def test_sizes_between_those_recorded_lie_between_them() -> None:
    draw = random.Random(0)
    means = [statistics.mean(BEAMS.accepted("code", nodes, draw) for _ in range(4000)) for nodes in (3, 5, 7)]
    assert means[0] + 0.1 < means[1] < means[2] - 0.1
    assert statistics.mean(CHAINS.accepted("code", 2, draw) for _ in range(4000)) == pytest.approx(0.85 + 0.85**2, 0.05)


def test_the_command_compares_controllers(tmp_path: Path) -> None:
    CHAINS.save(tmp_path / "own.json")
    options = ["--controllers", "auto,off", "--at", "2", "--requests", "6", "--answer", "20-30", "--text", "code"]
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "own.json"), *options, "--json"])
    assert done.exit_code == 0, done.output
    auto, off = (json.loads(line) for line in done.output.splitlines())
    assert (auto["controller"], off["controller"], off["tokens_per_step"]) == ("auto", "off", 1.0)
    assert auto["tokens_per_second"] > 1.5 * off["tokens_per_second"]
    for wrong in (["--text", "poems"], ["--at", "few"], ["--controllers", "best"], ["--at", "0"]):
        done = CliRunner().invoke(app, ["simulate", str(tmp_path / "own.json"), *wrong])
        assert done.exit_code == 1, wrong


def test_the_fleet_of_the_documents_can_be_simulated(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "controller.md").read_text()
    (tmp_path / "fleet.json").write_text(page.split("```json\n")[1].split("```")[0])
    simulation = Simulation(Recording.load(tmp_path / "fleet.json"), "auto")
    assert simulation.run(Workload(4, requests=6, answer=(20, 30))).tokens >= 120


def test_ranks_of_siblings_are_counted_where_their_parent_was_accepted() -> None:
    def tree(parents: tuple[int, ...], accepted: tuple[bool, ...]) -> GuessedTree:
        nothing = (None,) * len(parents)
        return GuessedTree((0,) * len(parents), parents, nothing, nothing, accepted)

    first = tree((-1, 0, 0, 1, 1, 2), (True, True, False, False, True, False))
    second = tree((-1, 0, 0, 0), (True, False, False, False))
    assert rank_rates([first, second]) == [33, 33], "the first of three parents, the second of three, never the third"


def test_a_real_drafter_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    folder = tiny_folder(tmp_path / "model", max_position_embeddings=512)
    config = EngineConfig(cache_tokens=4096, page_size=16, threads=1)
    with LLM(folder, drafter="ngram:nodes=4,shortest=1,branches=2", config=config) as llm:
        controller = llm.engine.controller
        recording = record(llm, ["abcabcabcabc", "xyxyxyxy"], 16)
        rates = rates_of(llm, ["abcabcabcabc"], 16)
        assert llm.engine.controller is not controller, "it was calibrated"
    assert set(recording.texts["recorded"]) == {1, 2, 3, 4}
    assert not recording.chain
    assert 0 <= recording.silent["recorded"] < 1
    assert all(0 < rate <= 100 for rate in rates)
    recording.save(tmp_path / "own.json")
    assert Recording.load(tmp_path / "own.json") == recording
