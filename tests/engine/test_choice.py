"""Which of several drafters drafts for each request."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.costs import StepCosts
from draftwood.engine.choice import NONE, ChoosingBudget
from draftwood.engine.controller import FixedBudget
from draftwood.errors import InvalidRequest
from draftwood.protocols import Load, StepReport
from tiny import tiny_folder

COSTS = StepCosts((1, 64), (64,), ((1.0, 4.0),), 0.0)
HEAD, LOOKUP = "head", "lookup"
ADDS = {HEAD: 0.5, LOOKUP: 0.05, NONE: 0.0}  # to a step of one sequence, plain ones taking 1


class World:
    """Sequences for which drafters are right as `gains` say; steps take what their drafters do."""

    def __init__(self, gains: dict[int, dict[str, float]], *, padded: bool = False) -> None:
        self.gains, self.padded, self.draw = gains, padded, random.Random(3)
        self.controller = ChoosingBudget(FixedBudget(4), COSTS, (HEAD, LOOKUP))
        self.seconds = self.tokens = 0.0

    def step(self) -> dict[int, str]:
        ids = tuple(self.gains)
        budget = self.controller.budget(Load(len(ids), 0, 64, self.padded, sequences=ids))
        chosen = dict(budget.drafters)
        accepted = [sum(self.draw.random() < self._gain(seq, chosen[seq]) / 4 for _ in range(4)) for seq in ids]
        if self.padded:
            seconds = 1 + sum(ADDS[name] for name in set(chosen.values()))
        else:
            seconds = 1 + sum(ADDS[name] for name in chosen.values()) / len(ids)
        self.seconds += seconds
        self.tokens += len(ids) + sum(self._gain(seq, chosen[seq]) for seq in ids)
        report = StepReport(
            5 * len(ids), len(ids), 4 * len(ids), sum(accepted), len(ids) + sum(accepted),
            tuple((4, own) for own in accepted), None if self.padded else 0.1, seconds, context=64, room=4,
            sequences=ids, drafters=tuple(chosen[seq] for seq in ids),
        )  # fmt: skip
        self.controller.observe(report)
        return chosen

    def _gain(self, seq: int, name: str) -> float:
        return self.gains[seq].get(name, 0.0)

    def run(self, steps: int) -> float:
        self.seconds = self.tokens = 0.0
        self.chosen = [self.step() for _ in range(steps)]
        return self.tokens / self.seconds

    def most(self, seq: int) -> str:
        return Counter(own[seq] for own in self.chosen).most_common(1)[0][0]


CHAT, COPY, LOST = {HEAD: 2.5, LOOKUP: 0.2}, {HEAD: 1.5, LOOKUP: 3.5}, {HEAD: 0.1, LOOKUP: 0.0}


@pytest.mark.parametrize("padded", [False, True])
def test_each_request_gets_the_drafter_that_gains_it_most(padded: bool) -> None:
    world = World({0: CHAT, 1: COPY, 2: CHAT, 3: CHAT if padded else LOST}, padded=padded)
    world.run(60)
    world.run(100)
    assert [world.most(seq) for seq in (0, 1, 2)] == [HEAD, LOOKUP, HEAD]
    assert padded or world.most(3) != HEAD, "it costs time and gains nothing"


@pytest.mark.parametrize(("gains", "best"), [(CHAT, 3.5 / 1.5), (COPY, 4.5 / 1.05)])
def test_looking_around_costs_little(gains: dict[str, float], best: float) -> None:
    world = World({0: gains})
    world.run(40)
    assert world.run(300) >= 0.97 * best


def test_a_request_whose_text_changes_changes_its_drafter() -> None:
    world = World({0: CHAT})
    world.run(100)
    for gains, name in ((COPY, LOOKUP), (CHAT, HEAD), (COPY, LOOKUP)):
        world.gains = {0: gains}
        world.run(60)
        world.run(60)
        assert world.most(0) == name


def test_new_requests_begin_with_what_gained_most_for_all() -> None:
    world = World({0: COPY})
    world.run(60)
    world.gains = {1: COPY}
    assert [world.step()[1] for _ in range(5)] == [LOOKUP] * 5


def test_where_a_drafter_runs_for_all_it_does_not_run_for_one() -> None:
    """Of 16 sequences one would gain a little by the head; it would hold up the others."""
    world = World({**dict.fromkeys(range(15), COPY), 15: {HEAD: 1.0, LOOKUP: 0.8}}, padded=True)
    world.run(60)
    world.run(60)
    assert sum(HEAD in own.values() for own in world.chosen) <= 6


def test_nothing_is_chosen_without_drafts_or_for_those_who_name_a_drafter() -> None:
    controller = ChoosingBudget(FixedBudget(0), COSTS, (HEAD, LOOKUP))
    assert controller.budget(Load(1, 0, sequences=(1,))).drafters == {}
    controller = ChoosingBudget(FixedBudget(3), COSTS, (HEAD, LOOKUP))
    assert controller.budget(Load(2, 0, sequences=())).drafters == {}
    assert set(controller.budget(Load(2, 0, sequences=(7,))).drafters) == {7}
    assert controller.predicted_seconds(StepReport(1, 1, 0, 0, 1)) is None


def test_a_drafter_that_has_to_catch_up_is_not_looked_at_for_nothing() -> None:
    """What it missed costs time before it can draft again."""
    found = []
    for reads in (frozenset[str](), frozenset({HEAD})):
        world = World({0: {HEAD: 1.6, LOOKUP: 1.5}})
        world.controller = ChoosingBudget(FixedBudget(4), replace(COSTS, rows=(1, 2)), (HEAD, LOOKUP), reads)
        world.run(400)
        found.append(sum(own[0] == HEAD for own in world.chosen[20:]))
    assert found[1] <= found[0]


def test_an_engine_chooses_request_by_request(tmp_path: object) -> None:
    """Tokens are those of plain decoding, and each step says who drafted."""
    folder = tiny_folder(tmp_path, max_position_embeddings=256)  # type: ignore[arg-type]
    config = EngineConfig(cache_tokens=2048, page_size=16, threads=1)
    prompts = ["abcabcabcabcabc", "a quick fox", "xyxyxyxyxyxyxy"]
    params = SamplingParams(max_tokens=24, trace=True, temperature=0.7, seed=3)
    with LLM(folder, config=config) as llm:
        plain = [result.token_ids for result in llm.generate(prompts, replace(params, trace=False))]
    with LLM(folder, drafter="choice:ngram+suffix", law="match", config=config) as llm:
        results = llm.generate(prompts, params)
        assert [result.token_ids for result in results] == plain
        assert all(not result.stats.members for result in results), "a choice is no combination"
        drafted_by = dict(llm.pulse.drafted_by)
        named = llm.generate(prompts[0], replace(params, drafter="suffix"))
        assert named.token_ids == plain[0]
        assert llm.generate(prompts[0], replace(params, drafter="choice:ngram+suffix")).token_ids == plain[0]
    assert set(drafted_by) <= {"ngram", "suffix", NONE}
    assert {"ngram", "suffix"} <= set(drafted_by), "both are tried"
    with pytest.raises(InvalidRequest, match="different drafters"):
        LLM(folder, drafter="choice:ngram", config=config)
