"""What a request asks for holds alike with and without speculation: stops, limits, penalties, log-probabilities."""

from __future__ import annotations

import random

import pytest
import torch

from draftwood.cache.blocks import PageTables
from draftwood.drafters.none import NoDrafter
from draftwood.engine.engine import NOTHING, Engine
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.errors import IncompatibleParts, InvalidRequest
from draftwood.growers import Hybrid, Levels, chain
from draftwood.protocols import Budget
from draftwood.request import FinishReason, SamplingParams
from draftwood.tree import HostVerdict
from draftwood.verifiers import LAWS, Block, Match
from tiny import Ask, Harness, Regime, generated, no_drafter, scripted, tiny_runner, with_model

PARAMS = {
    "top-k": SamplingParams(temperature=0.9, top_k=4),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "min-p": SamplingParams(temperature=1.1, min_p=0.1),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5),
    "penalties, sampled": SamplingParams(temperature=1.0, repetition_penalty=0.8, frequency_penalty=-0.4),
    "bias": SamplingParams(temperature=0.7, logit_bias={3: 2.0, 4: -8.0}),
    "bad words": SamplingParams(temperature=1.0, bad_words=("bb", "ei", "m")),
    "stop strings": SamplingParams(temperature=1.0, stop=("ib", "j", "ebe")),
    "stop ids": SamplingParams(temperature=1.0, stop_token_ids=(4, 9)),
    "at least five": SamplingParams(temperature=1.0, stop=("ib", "j", "ebe"), stop_token_ids=(4, 9), min_tokens=5),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=8,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        stop=("hh",),
        bad_words=("ab",),
    ),
}


def asks(params: SamplingParams) -> list[Ask]:
    from dataclasses import replace

    rng = random.Random(3)
    prompts = [tuple(rng.randrange(13) for _ in range(rng.randrange(1, 9))) for _ in range(6)]
    return [Ask(p, replace(params, seed=i, max_tokens=18)) for i, p in enumerate(prompts)]


def everything(tokens):
    return [[a, b] for a in range(13) for b in range(13)]


DRAFTS = {
    "bushy": scripted(everything, 200, False),
    "tree": with_model(Levels((3, 2), Hybrid())),
    "chain": with_model(chain(5)),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_text_and_reasons_equal_plain_decoding(name: str, draft: str) -> None:
    plain = Harness(tiny_runner(), no_drafter(torch.float64), Match())
    want = plain.run(asks(PARAMS[name]))
    fast = Harness(tiny_runner(), DRAFTS[draft](torch.float64), Match(), Regime(max_rows=400))
    got = fast.run(asks(PARAMS[name]))
    assert generated(got) == generated(want)
    for i in range(len(want)):
        assert fast.text(i) == plain.text(i)
        assert fast.finish_reason(i) == plain.finish_reason(i)


def test_stops_that_matter_are_in_the_examples() -> None:
    """The test above must see answers cut inside an accepted run, or it would show nothing about them."""
    for name in ("stop strings", "stop ids"):
        harness = Harness(tiny_runner(), DRAFTS["bushy"](torch.float64), Match())
        answers = harness.run(asks(PARAMS[name]))
        assert [harness.finish_reason(i) for i in range(6)].count(FinishReason.STOP) >= 3
        cut = [e for e in harness.events if e.finish_reason == FinishReason.STOP and e.accepted[-1]]
        assert cut, "no stop came inside an accepted run"
        assert all(len(a.tokens) <= a.max_length for a in answers)


def test_a_stop_string_is_cut_from_the_text_and_its_tokens_stay() -> None:
    plain = Harness(tiny_runner(), NoDrafter(), Match())
    answer = plain.run([Ask((1, 2), SamplingParams(max_tokens=12))])[0]
    letters = "".join(chr(97 + t) for t in generated([answer])[0])
    stop = letters[4:6]
    harness = Harness(tiny_runner(), NoDrafter(), Match())
    stopped = harness.run([Ask((1, 2), SamplingParams(max_tokens=12, stop=(stop,)))])[0]
    assert harness.text(0) == letters[: letters.find(stop)]
    assert len(generated([stopped])[0]) == letters.find(stop) + 2


def test_a_stop_string_within_the_minimum_length_ends_nothing() -> None:
    plain = Harness(tiny_runner(), NoDrafter(), Match())
    answer = plain.run([Ask((1, 2), SamplingParams(max_tokens=12, temperature=1.0, seed=4))])[0]
    letters = "".join(chr(97 + t) for t in generated([answer])[0])
    for least in range(12):
        stop = letters[3:6]
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=4, stop=(stop,), min_tokens=least)
        harness = Harness(tiny_runner(), DRAFTS["bushy"](torch.float64), Match())
        said = generated(harness.run([Ask((1, 2), params)]))[0]
        if least < 6:  # it is complete behind the minimum, though it may begin within
            assert (harness.text(0), len(said), harness.finish_reason(0)) == (letters[:3], 6, FinishReason.STOP)
        else:
            assert (harness.text(0), len(said), harness.finish_reason(0)) == (letters, 12, FinishReason.LENGTH)


def test_the_end_that_a_grammar_demands_comes_before_the_minimum_length() -> None:
    class OnlyTheEnd:
        """Two tokens, then nothing but token 0."""

        error = None

        def allowed(self, answer, tokens, parents):
            depths = [len(answer)]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
            rows = torch.zeros(len(depths), 13, dtype=torch.bool)
            for row, depth in zip(rows, depths, strict=True):
                row[(slice(0, 1) if depth >= 2 else slice(1, 13))] = True
            return rows

    harness = Harness(tiny_runner(), DRAFTS["bushy"](torch.float64), Match())
    answer = harness.answer(0, Ask((1, 2), SamplingParams(stop_token_ids=(0,), min_tokens=8, max_tokens=12)))
    answer.constraint = OnlyTheEnd()
    harness.engine.scheduler.add([answer])
    while harness.engine.scheduler.has_work:
        harness.events += harness.engine.step()
    assert (len(generated([answer])[0]), answer.tokens[-1]) == (3, 0)
    assert harness.finish_reason(0) == FinishReason.STOP


@pytest.mark.parametrize("least", [-1, 2.5, True, 13])
def test_a_minimum_length_that_cannot_be_is_refused(least) -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(max_tokens=12, min_tokens=least)


@pytest.mark.parametrize("draft", ["none", "chain", "bushy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_their_request_and_no_other(draft: str, temperature: float) -> None:
    """From some position on, the model has nothing to say to request 2; the law may not say something instead."""
    wanted = asks(SamplingParams(temperature=temperature))
    plain = Harness(tiny_runner(), no_drafter(torch.float64), Match()).run(wanted)
    target = tiny_runner()
    forward = target.forward

    def broken(batch, needs=frozenset()):
        out = forward(batch, needs)
        sequence = torch.searchsorted(batch.row_offsets, batch.logit_rows, right=True) - 1
        pages = torch.tensor(target.cache.tables.pages(2) if 2 in target.cache.tables else [-2])
        own = (batch.block_table[sequence, :1] == pages[:1]).any(-1)
        out.logits[own & (batch.positions[batch.logit_rows] >= 12)] = float("nan")
        return out

    target.forward = broken  # type: ignore[method-assign]
    drafter = no_drafter(torch.float64) if draft == "none" else DRAFTS[draft](torch.float64)
    harness = Harness(target, drafter, Match())
    answers = harness.run(wanted)
    for i in range(6):
        if i == 2:
            assert harness.finish_reason(i) == FinishReason.ERROR
            assert any("not finite" in (event.error or "") for event in harness.events)
            assert generated(answers)[i] == generated(plain)[i][: len(generated(answers)[i])]
        else:
            assert generated(answers)[i] == generated(plain)[i]
            assert harness.finish_reason(i) == FinishReason.LENGTH


@pytest.mark.parametrize(
    "extreme",
    [
        SamplingParams(temperature=1e-40),
        SamplingParams(temperature=1e-6, logit_bias={3: 1e30, 4: -1e30}),
        SamplingParams(temperature=1e300),
        SamplingParams(temperature=1.0, repetition_penalty=1e-6),
        SamplingParams(temperature=1e-6, repetition_penalty=1e6, logit_bias={5: 1e30}),
    ],
    ids=str,
)
def test_extreme_parameters_still_have_a_distribution(extreme: SamplingParams) -> None:
    harness = Harness(tiny_runner(dtype=torch.float32), DRAFTS["chain"](torch.float32), Match())
    answers = harness.run(asks(extreme))
    assert [harness.finish_reason(i) for i in range(6)] == [FinishReason.LENGTH] * 6
    assert all(len(said) == 18 for said in generated(answers))


def test_max_tokens_and_the_context_window_end_an_answer() -> None:
    from tiny import tiny_config

    harness = Harness(tiny_runner(tiny_config(max_position_embeddings=20)), DRAFTS["bushy"](torch.float64), Match())
    answers = harness.run(
        [Ask(tuple(range(12)), SamplingParams(max_tokens=50)), Ask((1,), SamplingParams(max_tokens=1))]
    )
    assert [len(a.tokens) for a in answers] == [20, 2]
    assert [harness.finish_reason(i) for i in range(2)] == [FinishReason.LENGTH] * 2


def test_logprobs_do_not_depend_on_speculation() -> None:
    params = SamplingParams(temperature=1.0, logprobs=3)
    runs = []
    for draft in (no_drafter, DRAFTS["bushy"]):
        harness = Harness(tiny_runner(), draft(torch.float64), Match())
        harness.run(asks(params))
        runs.append([[lp for e in harness.events if e.request_id == i for lp in e.logprobs] for i in range(6)])
    for plain, fast in zip(*runs, strict=True):
        assert len(plain) == 18
        assert [lp.token for lp in plain] == [lp.token for lp in fast]
        assert [lp.logprob for lp in fast] == pytest.approx([lp.logprob for lp in plain], abs=1e-9)
        assert [t for lp in fast for t, _ in lp.top] == [t for lp in plain for t, _ in lp.top]


def test_statistics_add_up() -> None:
    harness = Harness(tiny_runner(), DRAFTS["bushy"](torch.float64), Match())
    answers = harness.run(asks(SamplingParams()))
    for i, answer in enumerate(answers):
        events = [e for e in harness.events if e.request_id == i]
        stats = events[-1].stats
        assert stats.num_tokens == sum(len(e.token_ids) for e in events) == answer.num_generated
        assert stats.accepted == sum(sum(e.accepted) for e in events)
        assert stats.steps == len(events)
        assert stats.num_tokens <= stats.steps + stats.accepted


def test_a_law_is_refused_when_the_engine_is_built() -> None:
    with pytest.raises(IncompatibleParts, match="made for one path"):
        Harness(tiny_runner(), with_model(Levels((2,), Hybrid()))(torch.float64), Block())
    assert LAWS["walk"]().refuses(DRAFTS["tree"](torch.float64).law) is None


def test_the_queue_has_a_limit_and_takes_all_or_nothing() -> None:
    harness = Harness(tiny_runner(), NoDrafter(), Match())
    scheduler = Scheduler(harness.engine.target.cache.tables, SchedulerConfig(max_waiting=2))
    first, second, third = (harness.answer(i, Ask((1,))) for i in range(3))
    scheduler.add([first])
    with pytest.raises(InvalidRequest, match="queue is full"):
        scheduler.add([second, third])
    assert list(scheduler.waiting) == [first]


def test_one_answers_broken_text_leaves_its_neighbours_alone() -> None:
    harness = Harness(tiny_runner(), NoDrafter(), Match())
    want = generated(Harness(tiny_runner(), NoDrafter(), Match()).run(asks(SamplingParams())))
    requests = asks(SamplingParams())
    make = harness.answer

    def sabotaged(i: int, ask: Ask):
        answer = make(i, ask)
        if i == 2:
            answer.text._decoder.push = lambda ids: 1 / 0  # type: ignore[method-assign]
        return answer

    harness.answer = sabotaged  # type: ignore[method-assign]
    got = generated(harness.run(requests))
    assert harness.finish_reason(2) == FinishReason.ERROR
    assert [e.error for e in harness.events if e.request_id == 2][-1] == "ZeroDivisionError: division by zero"
    assert [g for i, g in enumerate(got) if i != 2] == [w for i, w in enumerate(want) if i != 2]


def test_answers_of_one_request_share_their_prompt() -> None:
    """n > 1: the prompt is read once, the others find its pages."""
    target = tiny_runner()
    harness = Harness(target, NoDrafter(), Match())
    prompt = tuple(range(12)) * 2
    answers = [harness.answer(i, Ask(prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=3))) for i in range(3)]
    for answer in answers:
        answer.request_id = 0
    harness.engine.scheduler.add(answers)
    while harness.engine.scheduler.has_work:
        harness.events += harness.engine.step()
        harness.check()
    assert [a.cached_prompt_tokens for a in answers] == [0, 20, 20]


def test_an_idle_engine_may_be_stepped() -> None:
    harness = Harness(tiny_runner(), NoDrafter(), Match())
    assert harness.engine.step() == []
    assert isinstance(harness.engine, Engine)


@pytest.mark.parametrize("limits", [{"max_rows": 0}, {"max_running": 0}, {"max_waiting": 0}])
def test_scheduler_limits_must_be_positive(limits: dict) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SchedulerConfig(**limits)


def test_draft_nodes_never_push_anybody_out() -> None:
    """Pages for exactly everybody's next token: an endless appetite for nodes gets what the last pages have left."""
    tables = PageTables(num_pages=6, page_size=4)
    scheduler = Scheduler(tables, SchedulerConfig(max_rows=500))
    make = Harness(tiny_runner(), NoDrafter(), Match()).answer
    answers = [make(i, Ask(tuple(range(i, i + 4)), SamplingParams(max_tokens=30))) for i in range(3)]
    scheduler.add(answers)
    prompts, _ = scheduler.schedule(Budget(0))
    scheduler.commit(prompts, NOTHING)
    _, plan = scheduler.schedule(Budget(0))
    scheduler.commit(plan, HostVerdict([[1], [2], [3]], [0] * 3, [0] * 3, [0.0] * 3, [True] * 3))
    _, plan = scheduler.schedule(Budget(200))
    assert [item.seq for item in plan.items] == answers
    assert [item.max_nodes for item in plan.items] == [3, 3, 3]
    assert scheduler.num_preemptions == 0
    tables.check()


def test_rows_are_shared_before_anybody_guesses() -> None:
    """Everybody who can decode does, prompts go on, and guesses take half of what is left meanwhile."""
    tables = PageTables(num_pages=100, page_size=4)
    scheduler = Scheduler(tables, SchedulerConfig(max_rows=22))
    make = Harness(tiny_runner(), NoDrafter(), Match()).answer
    ready = [make(i, Ask((i,), SamplingParams(max_tokens=30))) for i in range(2)]
    scheduler.add([*ready, make(2, Ask(tuple([3] * 40), SamplingParams(max_tokens=30)))])
    prompts, plan = scheduler.schedule(Budget(200))
    items = plan.items + prompts.items
    assert [(item.end - item.start, item.max_nodes) for item in items] == [(1, 5), (1, 5), (10, 0)]


def test_no_salt_of_a_caller_is_that_of_an_adapter() -> None:
    """Pages are shared by the salt: whatever a caller writes there must not name what an adapter has computed."""
    harness = Harness(tiny_runner(), NoDrafter(), LAWS["match"]())

    def salt(cache_salt: str, adapter: int = -1) -> str:
        answer = harness.answer(0, Ask((1, 2, 3), SamplingParams(cache_salt=cache_salt)))
        answer.adapter = adapter
        return answer.prefix_salt

    salts = ["", "x", "0", "0 x", " 0 x", "\0", "\0 0 x", "\0 0", "\0 \0 0 x"]
    assert [salt(own) for own in salts[:4]] == salts[:4]
    named = [salt(own, adapter) for own in salts for adapter in (-1, 0, 1)]
    assert len(set(named)) == len(named)
