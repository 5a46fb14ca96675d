"""Log-probabilities of prompts: those of the model, however the prompt is read, and nothing changes for others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from captured import GPU, CapturedHarness, runner
from draftwood import LLM, EngineConfig
from draftwood.drafters.none import NoDrafter
from draftwood.errors import InvalidRequest
from draftwood.growers import Best, Independent, Levels, chain
from draftwood.request import FinishReason, SamplingParams, TokenLogprob
from draftwood.verifiers import LAWS
from reference_model import written_out_logits
from tiny import (
    Ask,
    Harness,
    Regime,
    TinyCheckpoint,
    generated,
    ngram,
    tiny_config,
    tiny_folder,
    tiny_runner,
    with_arrivals,
    with_model,
    with_net,
)

V = 13


def asks(scored: Callable[[int], bool] = lambda i: i % 2 == 0, temperature: float = 1.0) -> list[Ask]:
    """Some of them with prompt log-probabilities, among others that ask for none; some share a prompt."""
    rng = random.Random(5)
    made = []
    for i in range(8):
        prompt = tuple(rng.randrange(V) for _ in range((1, 2, 30, 17, 9, 23, 4, 12)[i]))
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=(6, 12, 9, 15, 3, 8, 20, 1)[i])
        made.append(Ask(prompt, params))
    made += [replace(ask, params=replace(ask.params, seed=50)) for ask in made[2:4]]
    return [
        replace(ask, params=replace(ask.params, prompt_logprobs=3)) if scored(i) else ask for i, ask in enumerate(made)
    ]


def told(harness: Harness, i: int) -> list[TokenLogprob | None]:
    """What the events of a request say of its prompt; only one of them says something."""
    found = [event.prompt_logprobs for event in harness.events if event.request_id == i and event.prompt_logprobs]
    assert len(found) <= 1
    return list(found[0]) if found else []


def check_told(entries: list[TokenLogprob | None], prompt: tuple[int, ...], k: int = 3) -> None:
    """Against the decoder written out in float64."""
    assert len(entries) == len(prompt)
    assert entries[0] is None
    rows = torch.log_softmax(written_out_logits(TinyCheckpoint(tiny_config()), list(prompt)), -1)
    for i, entry in enumerate(entries[1:], 1):
        assert entry is not None
        assert entry.token == prompt[i]
        assert entry.logprob == pytest.approx(float(rows[i - 1, prompt[i]]), abs=1e-8)
        best, tokens = rows[i - 1].topk(k)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-8)


REGIMES = {
    "one batch": Regime(),
    "chunks of five": Regime(max_rows=5),
    "starved": Regime(max_rows=24, num_pages=16),
    "one by one": Regime(max_running=1),
}
DRAFTERS = {
    "none": lambda dtype: NoDrafter(),
    "ngram": ngram(nodes=4, longest=3, shortest=1),
    "model": with_model(Levels((3, 2, 1), Best())),
    "sampled": with_model(Levels((1, 1, 1), Independent())),
    "eagle3": with_net("eagle3", Levels((2, 2), Best())),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_they_are_the_models_and_change_no_tokens(name: str, regime: str) -> None:
    target = tiny_runner(num_pages=REGIMES[regime].num_pages)
    harness = Harness(target, DRAFTERS[name](torch.float64), LAWS["match"](), REGIMES[regime])
    answers = harness.run(asks())
    silent = asks(lambda i: False)
    plain = [generated(Harness(tiny_runner(), NoDrafter(), LAWS["match"]()).run([ask]))[0] for ask in silent]
    assert generated(answers) == plain
    for i, ask in enumerate(asks()):
        if ask.params.prompt_logprobs is None:
            assert told(harness, i) == []
        else:
            check_told(told(harness, i), ask.prompt)
    if regime == "starved":
        assert harness.engine.scheduler.num_preemptions > 0


NOT_ON_GPU = pytest.mark.skipif(GPU, reason="another tiny model runs there, in bfloat16")


@NOT_ON_GPU
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("regime", ["one batch", "chunks of five", "starved"])
@pytest.mark.parametrize("name", ["ngram", "model", "eagle3"])
def test_captured_steps_tell_the_same(name: str, regime: str, by_hand: bool) -> None:
    """Also while a request among them asks for log-probabilities of its answer."""
    hard = REGIMES[regime]
    drafters = {
        "ngram": lambda: ngram(nodes=4, longest=3, shortest=1)(torch.float64),
        "model": lambda: with_model(chain(3), num_pages=hard.num_pages)(torch.float64),
        "eagle3": lambda: with_net("eagle3", chain(3))(torch.float64),
    }
    wanted = with_arrivals(asks(), every=2)
    if by_hand:
        wanted[3] = replace(wanted[3], params=replace(wanted[3].params, logprobs=1))
    harness = CapturedHarness(drafters[name](), "match", hard)
    answers = harness.run(wanted)
    assert generated(answers) == generated(Harness(runner(), NoDrafter(), LAWS["match"]()).run(asks(lambda i: False)))
    assert sum(answer.accepted for answer in answers) > 0, "no step drafted anything"
    assert len(harness.runner.ready) > 0
    for i, ask in enumerate(wanted):
        if ask.params.prompt_logprobs is not None:
            check_told(told(harness, i), ask.prompt)


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=NOT_ON_GPU)])
def test_no_token_may_be_generated_at_all(captured: bool) -> None:
    prompts = [(3,), tuple(range(12)) * 2, (5, 6)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    wanted = [*(Ask(prompt, params) for prompt in prompts), Ask((1, 2), SamplingParams(max_tokens=8))]
    drafter = ngram(nodes=4, longest=3, shortest=1)(torch.float64)
    regime = Regime(max_rows=7)
    harness = (
        CapturedHarness(drafter, "match", regime)
        if captured
        else Harness(tiny_runner(), drafter, LAWS["match"](), regime)
    )
    answers = harness.run(wanted)
    assert [len(said) for said in generated(answers)] == [0, 0, 0, 8]
    for i, prompt in enumerate(prompts):
        check_told(told(harness, i), prompt, k=2)
        events = [event for event in harness.events if event.request_id == i]
        assert [event.finish_reason for event in events] == [FinishReason.LENGTH]
        assert (events[0].token_ids, events[0].text, events[0].stats.num_tokens) == ((), "", 0)
    assert harness.engine.scheduler.tables.pool.num_available == harness.engine.scheduler.tables.pool.num_pages


def test_a_scored_prompt_reads_no_prefix_and_leaves_one_for_others() -> None:
    prompt = tuple(range(12))
    scored = SamplingParams(max_tokens=2, prompt_logprobs=0)
    harness = Harness(tiny_runner(), NoDrafter(), LAWS["match"]())
    plain = Ask(prompt, SamplingParams(max_tokens=2), arrives=5)
    answers = harness.run([Ask(prompt, scored), plain, Ask(prompt, scored, arrives=10)])
    assert [answer.cached_prompt_tokens for answer in answers] == [0, 8, 0]
    assert told(harness, 2) == told(harness, 0)
    assert len(told(harness, 0)) == 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_they_equal_those_of_transformers_for_a_prompt_longer_than_a_chunk(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 3
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    config = EngineConfig(cache_tokens=2048, page_size=16, max_rows=48, threads=1, dtype="float32")
    with LLM(folder, drafter="ngram", config=config) as llm:
        result = llm.generate(text, SamplingParams(max_tokens=0, prompt_logprobs=5))
    tokens = torch.tensor([result.prompt_token_ids])
    with torch.inference_mode():
        rows = torch.log_softmax(model(tokens).logits[0].double(), -1)
    wanted = rows[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert len(result.prompt_token_ids) == len(text) > 48
    assert result.prompt_logprobs[0] is None
    found = [entry for entry in result.prompt_logprobs if entry is not None]
    assert [entry.logprob for entry in found] == pytest.approx(wanted.tolist(), abs=1e-4)
    best = rows[:-1].topk(5)
    assert [token for entry in found for token, _ in entry.top] == best.indices.flatten().tolist()
    assert [value for entry in found for _, value in entry.top] == pytest.approx(
        best.values.flatten().tolist(), abs=1e-4
    )
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), FinishReason.LENGTH)


def test_several_answers_share_one_prompt_and_a_full_context_may_be_scored(folder: Path) -> None:
    config = EngineConfig(cache_tokens=2048, page_size=16, threads=1)
    with LLM(folder, config=config) as llm:
        params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=4)
        plain = llm.generate("Once upon a time", params)
        scored = llm.generate("Once upon a time", replace(params, prompt_logprobs=1))
        assert [c.token_ids for c in scored.completions] == [c.token_ids for c in plain.completions]
        assert len(scored.prompt_logprobs) == 16
        assert plain.prompt_logprobs == ()
        assert scored.stats.cached_prompt_tokens == 0
        nothing = llm.generate("Once", replace(params, max_tokens=0, prompt_logprobs=1))
        assert [c.finish_reason for c in nothing.completions] == [FinishReason.LENGTH] * 3
        full = llm.generate([[5] * 512], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
        assert len(full.prompt_logprobs) == llm.max_length == 512
        with pytest.raises(InvalidRequest, match=r"513 tokens and the limit is 512"):
            llm.generate("x" * 513, SamplingParams(max_tokens=0, prompt_logprobs=0))
        with pytest.raises(InvalidRequest, match=r"512 tokens and the limit is 511"):
            llm.generate("x" * 512, SamplingParams(max_tokens=1))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidRequest, match="prompt_logprobs must be"):
        SamplingParams(prompt_logprobs=101)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
