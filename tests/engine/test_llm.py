"""The Python interface on a tiny checkpoint folder: blocking, streaming, asynchronous, and everything bad."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood import LLM, EngineConfig, FinishReason, SamplingParams
from draftwood.errors import (
    CheckpointError,
    DraftwoodError,
    IncompatibleParts,
    InvalidRequest,
    TokenizerError,
)
from tiny import tiny_folder

SMALL = EngineConfig(cache_tokens=2048, page_size=16, threads=1, controller="fixed")
PROMPTS = ["the cat sat on the mat", "abcabcabc", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path):
    with LLM(folder, drafter="ngram:shortest=1", config=SMALL) as made:
        yield made


def test_a_batch_equals_one_by_one_and_plain_decoding(llm: LLM, folder: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    batch = [r.token_ids for r in llm.generate(PROMPTS, params)]
    assert batch == [llm.generate(p, params).token_ids for p in PROMPTS]
    with LLM(folder, config=SMALL) as plain:
        assert batch == [r.token_ids for r in plain.generate(PROMPTS, params)]


def test_every_prompt_of_a_list_may_have_parameters_of_its_own(llm: LLM) -> None:
    each = [SamplingParams(temperature=float(i), seed=i, max_tokens=3 + i) for i in range(len(PROMPTS))]
    found = [r.token_ids for r in llm.generate(PROMPTS, each)]
    assert found == [llm.generate(p, params).token_ids for p, params in zip(PROMPTS, each, strict=True)]
    with pytest.raises(InvalidRequest, match="prompts came with 1 sets"):
        llm.generate(PROMPTS, each[:1])


def test_a_stream_adds_up_to_the_result(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=1)
    events = list(llm.stream(PROMPTS[0], params))
    result = llm.generate(PROMPTS[0], params)
    assert "".join(e.text for e in events) == result.text
    assert tuple(t for e in events for t in e.token_ids) == result.token_ids
    assert [e.finished for e in events].index(True) == len(events) - 1
    assert "".join(text for e in events for text, _ in e.pieces) == result.text
    assert result.stats.num_tokens == len(result.token_ids) == 12
    assert result.finish_reason == FinishReason.LENGTH


def test_n_answers_are_different_and_reproducible(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, n=3, seed=9, max_tokens=8)
    first, second = llm.generate(PROMPTS[0], params), llm.generate(PROMPTS[0], params)
    texts = [c.token_ids for c in first.completions]
    assert texts == [c.token_ids for c in second.completions]
    assert len(set(texts)) == 3
    alone = llm.generate(PROMPTS[0], SamplingParams(temperature=1.5, seed=first.completions[2].seed, max_tokens=8))
    assert alone.token_ids == texts[2], "the seed of an answer reproduces it"


def test_without_a_seed_every_time_is_another(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12)
    assert llm.generate(PROMPTS[0], params).token_ids != llm.generate(PROMPTS[0], params).token_ids


def test_conversations_and_token_ids_are_prompts_too(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    chat = llm.chat([{"role": "user", "content": "hi"}], params)
    assert chat.prompt == "user: hi\nassistant:"
    ids = llm.tokenizer.encode(chat.prompt, special=False)
    assert llm.generate([ids], params)[0].token_ids == chat.token_ids


def test_async_answers_share_a_batch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, seed=4, temperature=1.0)

    async def both() -> list:
        return await asyncio.gather(*(llm.agenerate(p, params) for p in PROMPTS))

    assert [r.token_ids for r in asyncio.run(both())] == [r.token_ids for r in llm.generate(PROMPTS, params)]


def test_async_streams_and_their_cancellation(llm: LLM) -> None:
    async def first_two() -> int:
        seen = 0
        async for _ in llm.astream(PROMPTS[0], SamplingParams(max_tokens=400)):
            seen += 1
            if seen == 2:
                break
        return seen

    async def cancelled() -> None:
        task = asyncio.create_task(llm.agenerate(PROMPTS[0], SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert asyncio.run(first_two()) == 2
    asyncio.run(cancelled())
    assert llm.generate(PROMPTS[2], SamplingParams(max_tokens=3)).stats.num_tokens == 3
    assert not llm.engine.scheduler.has_work, "what was abandoned has been cancelled"


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=400))
    next(stream)
    stream.close()
    llm.generate("x", SamplingParams(max_tokens=1))
    assert not llm.engine.scheduler.has_work
    llm.engine.scheduler.tables.check()


def test_many_threads_may_ask_at_once(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=9)
    want = [r.token_ids for r in llm.generate(PROMPTS, params)]
    got: dict[int, tuple[int, ...]] = {}
    threads = [
        threading.Thread(target=lambda i=i: got.update({i: llm.generate(PROMPTS[i % 3], params).token_ids}))
        for i in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(9)] == want * 3


def test_a_bad_prompt_in_a_batch_leaves_the_others_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5)
    results = llm.generate([PROMPTS[0], "", "y" * 5000, "\ud800", [0, 99999], PROMPTS[1]], params)
    assert [r.finish_reason for r in results] == ["length", "error", "error", "error", "error", "length"]
    reasons = [r.completions[0].error for r in results]
    for reason, words in zip(reasons[1:5], ("empty", "context window is 512", "surrogate", "99999"), strict=True):
        assert reason is not None
        assert words in reason
    assert [results[i].token_ids for i in (0, 5)] == [r.token_ids for r in llm.generate(PROMPTS[:2], params)]


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", SamplingParams(), InvalidRequest),
        ("y" * 5000, SamplingParams(), InvalidRequest),
        ("\udcff", SamplingParams(), TokenizerError),
        ("x", SamplingParams(stop_token_ids=(99999,)), InvalidRequest),
        ("x", SamplingParams(logit_bias={99999: 1.0}), InvalidRequest),
    ],
)
def test_a_single_bad_prompt_raises(llm: LLM, prompt: str, params: SamplingParams, error: type) -> None:
    with pytest.raises(error):
        llm.generate(prompt, params)


def test_a_prompt_of_the_wrong_kind_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="list of token ids"):
        list(llm.stream([1.5]))  # type: ignore[list-item]


def test_a_failing_step_ends_the_running_answers_with_the_reason_and_nothing_else(folder: Path) -> None:
    with LLM(folder, config=SMALL) as llm:
        verify = llm.engine.verifier.verify
        llm.engine.verifier.verify = lambda *_: 1 / 0  # type: ignore[method-assign]
        broken = llm.generate(["a", "b"], SamplingParams(max_tokens=3, temperature=0.7))
        assert [r.finish_reason for r in broken] == ["error", "error"]
        assert "ZeroDivisionError" in (broken[0].completions[0].error or "")
        llm.engine.verifier.verify = verify  # type: ignore[method-assign]
        assert llm.generate("a", SamplingParams(max_tokens=3)).stats.num_tokens == 3
        llm.engine.scheduler.tables.check()


def test_a_full_queue_refuses_one_request_and_keeps_the_rest(folder: Path) -> None:
    config = EngineConfig(cache_tokens=512, page_size=16, threads=1, max_waiting=1)
    with LLM(folder, config=config) as llm:
        results = llm.generate(["a", "b", "c", "d"], SamplingParams(max_tokens=40))
        reasons = [r.finish_reason for r in results]
        assert reasons.count(FinishReason.LENGTH) >= 1
        for result in results:
            if result.finish_reason == FinishReason.ERROR:
                assert "queue is full" in (result.completions[0].error or "")


def test_a_closed_llm_says_so_and_cancels_what_ran(folder: Path) -> None:
    llm = LLM(folder, config=SMALL)
    stream = llm.stream("x", SamplingParams(max_tokens=400))
    next(stream)
    llm.close()
    llm.close()
    assert list(stream)[-1].finish_reason == FinishReason.CANCELLED
    with pytest.raises(DraftwoodError, match="closed"):
        llm.generate("x")


def test_what_is_loaded_is_not_searched_for_garbage_until_it_may_be_some(folder: Path) -> None:
    gc.unfreeze()
    with LLM(folder) as llm:
        assert gc.get_freeze_count() > 10_000
        engine = weakref.ref(llm.engine)
    assert gc.get_freeze_count() == 0
    del llm
    gc.collect()
    assert engine() is None


def test_a_minimum_length_is_kept_by_lossless_laws_only(llm: LLM) -> None:
    end = next(iter(llm.tokenizer.eos_ids))
    eager = SamplingParams(max_tokens=12, logit_bias={end: 50.0})
    assert llm.generate("abc", eager).stats.num_tokens == 1
    patient = llm.generate("abc", replace(eager, min_tokens=7))
    assert (patient.stats.num_tokens, patient.token_ids[-1], patient.finish_reason) == (8, end, FinishReason.STOP)
    with pytest.raises(IncompatibleParts, match="min_tokens forbids"):
        llm.generate("abc", replace(eager, min_tokens=7, law="typical"))
    unending = llm.answer_maker.answers(
        llm.intake.request("abc", SamplingParams(max_tokens=9, min_tokens=9, ignore_eos=True))[1]
    )[0]
    assert (unending.params.min_tokens, unending.max_length) == (0, 12)


def test_bad_words_are_never_written(llm: LLM) -> None:
    free = llm.generate("x", SamplingParams(max_tokens=30, temperature=1.0, seed=6)).text
    word = next(letter for letter in free if letter.isascii() and letter.isprintable())
    banned = llm.generate("x", SamplingParams(max_tokens=30, temperature=1.0, seed=6, bad_words=(word,))).text
    assert word in free
    assert word not in banned


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"drafter": "psychic"},
            InvalidRequest,
            "none, ngram, suffix, recycling, lookahead, rest, combined, remote, cascade, early-exit, layer-skip",
        ),
        ({"drafter": "ngram:colour=3"}, InvalidRequest, "no setting 'colour'"),
        ({"drafter": "ngram:nodes=many"}, InvalidRequest, "another kind of value"),
        ({"drafter": "ngram:nodes"}, InvalidRequest, "name=value"),
        ({"drafter": "ngram:nodes=0"}, InvalidRequest, "cannot be built"),
        ({"drafter": "ngram", "tree": "beam"}, InvalidRequest, "its own trees"),
        ({"law": "martial"}, InvalidRequest, "auto, match, coupled, token, block"),
        ({"law": "typical:colour=3"}, InvalidRequest, "no setting 'colour'"),
        ({"law": "typical:threshold=2"}, InvalidRequest, "between 0 and 1"),
        ({"law": "block:threshold=0.5"}, InvalidRequest, "no setting 'threshold'"),
        ({"law": "block", "drafter": "ngram:branches=2"}, IncompatibleParts, "one path"),
        ({"drafter": "model:./nowhere.gguf"}, CheckpointError, "nowhere"),
    ],
)
def test_unknown_parts_are_refused_with_the_choices(folder: Path, settings: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(folder, config=SMALL, **settings)


TREES = {  # shape -> the law it gets if none is named
    None: "match",
    "static:widths=2x2": "match",
    "beam:nodes=6,width=2,depth=2": "match",
    "best-first": "match",
    "coupled": "match",
    "coupled:widths=2x1": "match",
    "sampled-chain": "block",
    "sampled": "layer",
    "hybrid": "layer",
    "without-replacement": "traversal",
    "sequoia:nodes=6,depth=3": "traversal",
    "greedy:nodes=6,forwards=3": "traversal",
    "paths:paths=3,depth=2": "layer-kseq",
    "paths:paths=2,depth=2,trunk=2": "layer-kseq",
    "paths:paths=1": "block",
}


@pytest.mark.parametrize("tree", TREES)
def test_a_second_model_drafts_with_any_tree(folder: Path, llm: LLM, tree: str | None) -> None:
    """With `match` the text of a seed is the same whatever is guessed; with the law that suits, the greedy one is."""
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=8, law="match")
    with LLM(folder, drafter=f"model:{folder}", tree=tree, config=SMALL) as fast:
        assert fast.laws.name == TREES[tree]
        for params in (sampled, SamplingParams(max_tokens=12)):
            got = fast.generate(PROMPTS, params)
            assert [r.token_ids for r in got] == [r.token_ids for r in llm.generate(PROMPTS, params)]
            assert sum(r.stats.accepted for r in got) > 0


def test_the_law_is_by_default_what_suits_the_drafts_and_always_lossless(folder: Path) -> None:
    with LLM(folder, config=SMALL) as plain:
        assert plain.laws.name == "match"
        assert plain.generate("x", SamplingParams(max_tokens=2)).stats.lossless
    with LLM(folder, drafter=f"model:{folder}", tree="sampled-chain", law="walk", config=SMALL) as asked:
        assert asked.laws.name == "walk"


def test_the_coupled_law_brings_its_tree(folder: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=8)
    with LLM(folder, drafter=f"model:{folder}", law="coupled", config=SMALL) as coupled:
        got = coupled.generate(PROMPTS, params)
    assert [r.token_ids for r in got] == [r.token_ids for r in llm.generate(PROMPTS, params)]
    assert [r.stats.law for r in got] == ["coupled"] * 3
    for stats in (r.stats for r in got):  # the draft model is the target itself, so every guess is right
        assert stats.accepted == stats.num_tokens - stats.steps
        assert stats.steps <= 4


@pytest.mark.parametrize("tree", [None, "sampled-chain"])
def test_a_model_of_another_vocabulary_drafts_and_the_log_says_how(
    folder: Path, llm: LLM, tmp_path: Path, tree: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The same model, whose tokens are called otherwise: the guesses it can make are all right."""
    other = tiny_folder(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"!"', '"swapped"'))
    params = SamplingParams(max_tokens=12, temperature=0.0 if tree is None else 1.0, seed=3)
    with (
        caplog.at_level("INFO"),
        LLM(folder, drafter=f"model:{other}", tree=tree, law="match", config=SMALL) as drafted,
    ):
        got = drafted.generate(PROMPTS, params)
    assert "different vocabularies: it drafts token by token" in caplog.text
    assert [r.token_ids for r in got] == [r.token_ids for r in llm.generate(PROMPTS, params)]
    assert sum(r.stats.accepted for r in got) > 0


def test_combinations_of_all_kinds_by_name(folder: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    wanted = [r.token_ids for r in llm.generate(PROMPTS, params)]
    spec = f"combined:model:{folder}+suffix+recycling,nodes=6"
    with LLM(folder, drafter=spec, tree="beam:nodes=6,width=2", offers=["combined"], config=SMALL) as combined:
        for name in (None, "combined"):
            got = combined.generate(PROMPTS, replace(params, drafter=name))
            assert [r.token_ids for r in got] == wanted
            assert sum(r.stats.accepted for r in got) > 0
            for stats in (r.stats for r in got):
                assert [*stats.members] == [*([] if name else [f"model:{folder}"]), "suffix", "recycling"]
                assert sum(drafted for drafted, _ in stats.members.values()) >= stats.drafted > 0
                assert sum(accepted for _, accepted in stats.members.values()) >= stats.accepted
    for wrong, words in (("suffix+suffix", "different drafters"), ("suffix+psychic", "Unknown drafter 'psychic'")):
        with pytest.raises(InvalidRequest, match=words):
            LLM(folder, drafter=f"combined:{wrong}", config=SMALL)
    for wrong, words in (("colour=3", "no setting 'colour'"), ("nodes=0", "at least one node"), ("nodes=x", "whole")):
        with pytest.raises(InvalidRequest, match=words):
            LLM(folder, drafter=f"combined:model:{folder}+suffix,{wrong}", config=SMALL)


def test_an_unknown_tree_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="Unknown tree 'oak'"):
        LLM(folder, drafter=f"model:{folder}", tree="oak", config=SMALL)


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "int3"}, {"cache_tokens": -1}, {"page_size": 0}, {"threads": 0}, {"device": "abacus"}],
)
def test_impossible_engines_are_refused(folder: Path, settings: dict) -> None:
    with pytest.raises(InvalidRequest):
        LLM(folder, config=EngineConfig(**settings))


@pytest.mark.parametrize("tokens", [10**11, 10**17])
def test_a_cache_beyond_all_memory_is_refused_with_its_size(folder: Path, tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="GiB does not fit"):
        LLM(folder, config=EngineConfig(cache_tokens=tokens))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_every_dtype_answers(folder: Path, dtype: str) -> None:
    with LLM(folder, config=EngineConfig(dtype=dtype, cache_tokens=512, threads=1)) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=4)).stats.num_tokens == 4


def test_threads_may_be_given_without_a_configuration(folder: Path) -> None:
    assert EngineConfig(cache_tokens=64).with_numbers(threads=1) == EngineConfig(cache_tokens=64, threads=1)
    with LLM(folder, threads=1) as llm:
        assert llm.config.threads == 1
    with LLM(folder, threads=1, config=SMALL) as llm:
        assert llm.config.threads == 1
        assert llm.config.cache_tokens == SMALL.cache_tokens


def test_threads_that_contradict_the_configuration_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"threads=2 contradicts the configuration's threads=1"):
        LLM(folder, threads=2, config=SMALL)
    with pytest.raises(InvalidRequest, match="at least 1"):
        LLM(folder, threads=0)
