from __future__ import annotations

import pytest
import torch

from draftwood.assembly import build_lookup
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.points import PointDrafter, PointTree
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.engine.controller import FixedBudget
from draftwood.growers import Best, Coupled, Independent, Levels, Paths, chain
from draftwood.protocols import Budget, Span
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.verifiers import Match
from enumeration import view_of
from tiny import Ask, Harness, generated, tiny_runner, with_masks, with_net


def proposal(drafter, tokens: list[int], nodes: int = 100, depth: int = 100, budget: int = 100) -> set[tuple[int, ...]]:
    from dataclasses import replace

    view = replace(view_of(nodes=nodes, depth=depth), tokens=[tokens], lengths=torch.tensor([len(tokens)]))
    tree = drafter.propose(view, Budget(budget), KeyedRng())
    tree.validate()
    every = [tuple(tree.tokens[[n for n in path if n >= 0]].tolist()[1:]) for path in tree.paths.tolist()]
    return {path for path in every if path}


def leaves(paths: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {p for p in paths if not any(q[: len(p)] == p and q != p for q in paths)}


def test_longest_match_first() -> None:
    text = [1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3]
    assert leaves(proposal(NgramDrafter(nodes=2, longest=3), text)) == {(7, 0)}, "1 2 3 beats the later 2 3"
    assert leaves(proposal(NgramDrafter(nodes=2, longest=2), text)) == {(8, 0)}, "of equals the most recent"


def test_several_continuations_make_a_tree() -> None:
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 9, 9, 1, 2]
    drafter = NgramDrafter(nodes=6, longest=2, shortest=2, branches=2)
    assert leaves(proposal(drafter, text)) == {(9, 9, 1, 2)} or (5, 7) in proposal(drafter, text)
    assert {p[0] for p in proposal(drafter, text)} <= {9, 5}


def test_no_match_no_guess() -> None:
    assert proposal(NgramDrafter(), [1, 2, 3, 4, 5]) == set()
    assert proposal(NgramDrafter(), [1]) == set()


def test_lookup_keeps_up_with_a_growing_text() -> None:
    drafter = NgramDrafter(nodes=3, longest=2, shortest=2)
    text = [4, 5, 6]
    assert proposal(drafter, text) == set()
    text += [1, 4, 5]
    assert leaves(proposal(drafter, text)) == {(6, 1, 4)}
    drafter.release(0)
    assert drafter._indices == {}


def test_limits_of_a_point_tree() -> None:
    assert leaves(proposal(NgramDrafter(nodes=9, longest=1, shortest=1), [1, 2, 3, 1], nodes=2)) == {(2, 3)}
    assert leaves(proposal(NgramDrafter(nodes=9, longest=1, shortest=1), [1, 2, 3, 1], depth=1)) == {(2,)}
    assert proposal(NgramDrafter(nodes=9, longest=1, shortest=1), [1, 2, 3, 1], budget=0) == set()
    tree = PointTree(root=0, max_nodes=3, max_depth=2)
    tree.add_path([1, 2, 3])
    tree.add_path([1, 4])
    tree.add_path([5])
    assert (tree.tokens, tree.parents) == ([0, 1, 2, 4], [-1, 0, 1, 1])


def test_where_rows_are_run_anyhow_the_last_token_is_reason_enough() -> None:
    lone = [1, 2, 3, 1]
    assert proposal(NgramDrafter(), lone) == set(), "a row of its own would have to be paid for"
    assert [(d.shortest, d.shortest_in_rounds) for d in (NgramDrafter(), NgramDrafter(longest=1))] == [(2, 1), (1, 1)]
    asked = NgramDrafter(shortest=3)
    assert asked.shortest == asked.shortest_in_rounds == 3


def test_rows_cost_a_gpu_little_so_more_is_looked_up_there() -> None:
    usual = {device: build_lookup("ngram", torch.device(device)).max_nodes for device in ("cpu", "cuda")}
    assert usual == {"cpu": 4, "cuda": 15}
    assert build_lookup("ngram:longest=3", torch.device("cuda")).max_nodes == 15, "other settings leave it alone"


IMPOSSIBLE = [{"shortest": -1}, {"longest": 0}, {"shortest": 3, "longest": 2}, {"nodes": 0}, {"branches": 0}]


@pytest.mark.parametrize("settings", IMPOSSIBLE)
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="n-gram drafter needs"):
        NgramDrafter(**settings)


def test_a_script_may_branch() -> None:
    drafter = ScriptedDrafter(lambda tokens: [[1, 2], [1, 3]], 9)
    assert proposal(drafter, [0]) == {(1,), (1, 2), (1, 3)}
    drafter.release(0)


def test_a_point_drafter_must_say_something() -> None:
    drafter = PointDrafter()
    drafter.max_nodes = 1
    with pytest.raises(NotImplementedError):
        proposal(drafter, [0])


def test_the_target_as_its_own_draft_model_is_always_right() -> None:
    """Every guess of a chain is accepted: the draft cache is kept right through partial runs and commits."""
    harness = Harness(tiny_runner(), ModelDrafter(tiny_runner(), chain(3)), Match())
    answers = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=21)), Ask((5,), SamplingParams(max_tokens=9))])
    for answer in answers:
        assert answer.accepted == answer.num_generated - answer.steps
    assert answers[0].steps <= 7


@pytest.mark.parametrize("grower", [Paths(3, 3), Paths(2, 2, trunk=1), Levels((1, 1, 1), Independent())])
def test_drawn_guesses_of_the_target_itself_are_always_right_without_chance(grower) -> None:
    """At temperature 0 all paths are one, merged in the draft cache as in the tree; three tokens a round."""
    harness = Harness(tiny_runner(), ModelDrafter(tiny_runner(), grower), Match())
    (answer,) = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=21))])
    assert answer.accepted == answer.num_generated - answer.steps
    assert answer.steps <= 7
    assert answer.drafted <= 18, "agreeing paths are one node each"


def test_with_shared_noise_the_target_itself_is_always_right() -> None:
    drafter = ModelDrafter(tiny_runner(), Levels((1, 1, 1), Coupled()))
    harness = Harness(tiny_runner(), drafter, Match())
    asks = [Ask((1, 2, 3), SamplingParams(temperature=1.0, seed=seed, max_tokens=21)) for seed in range(4)]
    for answer in harness.run(asks):
        assert answer.accepted == answer.num_generated - answer.steps
        assert answer.steps <= 7


def test_a_draft_cache_without_room_for_everybody_serves_whom_it_can() -> None:
    """Too small for all: some are drafted for, nobody's tokens change, and idle sequences make room."""
    asks = [Ask((i, 2, 3), SamplingParams(max_tokens=20)) for i in range(5)]
    want = generated(Harness(tiny_runner(), NoDrafter(), Match()).run(asks))
    drafter = ModelDrafter(tiny_runner(num_pages=12), Levels((2, 1), Best()))
    harness = Harness(tiny_runner(), drafter, Match())
    answers = harness.run(asks)
    assert generated(answers) == want
    assert sum(a.accepted for a in answers) > 0
    assert any(a.drafted == 0 for a in answers) or len({a.drafted for a in answers}) > 1
    assert drafter.runner.cache.tables.pool.num_available == 12, "released with the sequence"


def test_a_draft_model_with_a_shorter_context_stops_guessing_there() -> None:
    from tiny import tiny_config

    drafter = ModelDrafter(tiny_runner(tiny_config(max_position_embeddings=12)), chain(3))
    harness = Harness(tiny_runner(), drafter, Match())
    answer = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=30))])[0]
    assert generated([answer]) == generated(
        Harness(tiny_runner(), NoDrafter(), Match()).run([Ask((1, 2, 3), SamplingParams(max_tokens=30))])
    )
    assert answer.steps > 20


def test_a_budget_of_nothing_means_bare_roots() -> None:
    assert proposal(ModelDrafter(tiny_runner(), chain(3)), [1, 2], budget=0) == set()


def test_what_is_guessed_behind_masks_is_what_the_model_says_there() -> None:
    text, runner = [3, 1, 4, 1, 5, 9, 2, 6], tiny_runner(noise=0.2)
    masked = [*text, 5, 5, 5]
    runner.cache.tables.open(0, ())
    runner.cache.tables.reserve(0, len(masked))
    rows = torch.arange(len(text) - 1, len(masked))
    logits = runner.forward(runner.cache.stage([Span(0, masked, 0, len(masked))], None, rows)).logits
    drafter = with_masks(chain(6))(torch.float64)
    assert leaves(proposal(drafter, text)) == {tuple(logits.argmax(-1).tolist())}, "and no deeper than there are slots"
    longer = [*text, *range(12), *range(12)]  # more than a forward has room for
    assert leaves(proposal(drafter, longer)) == leaves(proposal(with_masks(chain(6))(torch.float64), longer))


@pytest.mark.parametrize(("kind", "most"), [("eagle3", 2), ("dflash", 2), ("medusa", 0)])
def test_features_nobody_reads_cost_nothing(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty steps without a guess: what a network has to see is put together many at a time, or never."""
    target = tiny_runner(dtype=torch.float32)
    drafter = with_net(kind, chain(2))(torch.float32)
    asked: list[int] = []
    digest = drafter.digest  # type: ignore[attr-defined]
    monkeypatch.setattr(drafter, "digest", lambda features: (asked.append(len(features)), digest(features))[1])
    harness = Harness(target, drafter, Match())
    harness.engine.controller = FixedBudget(0)
    (answer,) = harness.run([Ask([1, 2, 3], SamplingParams(max_tokens=30))])
    assert len(answer.tokens) == 33
    assert len(asked) <= most
    assert all(count >= 16 for count in asked)
