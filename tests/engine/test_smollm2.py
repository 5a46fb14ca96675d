"""The embedded model itself: logits against transformers, and the same tokens with every kind of speculation."""

from __future__ import annotations

import pytest
import torch

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.engine.worker import ComputeThread
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.runner import ModelRunner
from draftwood.protocols import Span
from reference_model import load_into_transformers

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "Explain in three sentences why the sky is blue."}]
CODE = [
    {
        "role": "user",
        "content": "Rename the variable x to total in this code and print the whole code again:\n\n"
        "def add(numbers):\n    x = 0\n    for n in numbers:\n        x = x + n\n    return x\n",
    }
]
SUMMARY = [
    {
        "role": "user",
        "content": "Summarise in two sentences: The river Elbe rises in the mountains of the Czech Republic and flows "
        "through Dresden, Magdeburg and Hamburg before it reaches the North Sea. It is about 1,100 kilometres long. "
        "For centuries the river Elbe has been a road for goods between Bohemia and the North Sea.",
    }
]
MATHS = [{"role": "user", "content": "Ann has 3 boxes of 12 apples and gives 7 apples away. How many are left?"}]
PROMPTS = [CHAT, CODE, SUMMARY]
HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
CONFIG = EngineConfig(cache_tokens=4096, threads=1, weights="float32", controller="fixed")


@pytest.fixture(scope="module")
def plain():
    with LLM("smollm2", config=CONFIG) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(plain: LLM) -> dict[float, list[tuple[int, ...]]]:
    return {t: [r.token_ids for r in plain.generate(PROMPTS, params(t))] for t in (0.0, 0.8)}


def params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=11, max_tokens=48)


def test_logits_agree_with_transformers(plain: LLM) -> None:
    """With what they are in double precision: in single, transformers is up to 1e-4 away from that on some processors.

    On the compute thread, like everything heavy: a second thread that computes would slow both down.
    """
    texts = [plain.tokenizer.encode(plain.tokenizer.render_chat(m), special=False) for m in PROMPTS]
    for difference in ComputeThread.shared().call(lambda: largest_differences(plain.engine.target, texts)):
        assert difference <= 1e-4, difference


@torch.no_grad()
def largest_differences(runner: ModelRunner, texts: list[list[int]]) -> list[float]:
    reference = load_into_transformers(open_checkpoint("smollm2"), HF_CONFIG, torch.float64)
    tables, found = runner.cache.tables, []
    for tokens in texts:
        tables.open(-1, tokens)
        tables.reserve(-1, len(tokens))
        span = Span(-1, tokens, tables.num_cached(-1), len(tokens))
        batch = runner.cache.stage_text([span], torch.arange(span.end - span.start))
        got, want = runner.forward(batch).logits, reference(torch.tensor([tokens])).logits[0, span.start :]
        tables.close(-1)
        found.append(float((got - want).abs().max()))
    return found


@pytest.mark.parametrize(
    ("drafter", "tree", "law"),
    [
        ("ngram", None, "match"),
        ("ngram:nodes=12,shortest=1,branches=3", None, "match"),
        ("ngram", None, "walk"),
        ("ngram", None, "block"),
        ("model:smollm2", "chain", "match"),
        ("model:smollm2", "beam", "match"),
        ("model:smollm2", "hybrid", "match"),
        ("eagle3", None, "match"),
        ("eagle3", "beam", "match"),
        ("eagle3", "best-first", "walk"),
        ("eagle3", "without-replacement", "traversal"),
        ("block", None, "match"),
        ("block", "beam:nodes=24,width=6,depth=6", "match"),
        ("medusa", None, "match"),
        ("hydra", "beam:nodes=16,width=6,depth=3", "match"),
        ("student", None, "match"),
    ],
)
def test_tokens_equal_plain_decoding(wanted: dict, drafter: str, tree: str | None, law: str) -> None:
    with LLM("smollm2", drafter=drafter, tree=tree, law=law, config=CONFIG) as llm:
        results = llm.generate(PROMPTS, params(0.0))
        assert [r.token_ids for r in results] == wanted[0.0]
        assert sum(r.stats.accepted for r in results) > 0
        if law == "match":
            assert [r.token_ids for r in llm.generate(PROMPTS, params(0.8))] == wanted[0.8]


def test_the_shipped_drafter_guesses_well() -> None:
    with LLM("smollm2", drafter="eagle3", config=CONFIG) as llm:
        result = llm.chat(MATHS, params(0.0))
    assert result.stats.tokens_per_step > 2


@pytest.mark.parametrize("weights", ["stored", "bfloat16", "int8", "w8a8", "w4a8"])
def test_every_weight_format_is_a_target_of_its_own(weights: str) -> None:
    """Strictly: together and with guesses gives the bits of alone and without."""
    config = EngineConfig(cache_tokens=4096, threads=1, weights=weights, strict=True, controller="fixed")
    with LLM("smollm2", config=config) as llm:
        alone = [llm.generate([prompt], params(0.8))[0].token_ids for prompt in PROMPTS]
    with LLM("smollm2", drafter="ngram:nodes=12,shortest=1,branches=3", config=config) as llm:
        together = llm.generate(PROMPTS, params(0.8))
    assert [r.token_ids for r in together] == alone
    assert sum(r.stats.accepted for r in together) > 0


def test_stored_weights_are_the_files_own(plain: LLM) -> None:
    """SmolLM2's file is four-bit; taken over as it is, it says the same as the float32 numbers it stands for."""
    with LLM("smollm2", config=EngineConfig(cache_tokens=4096, threads=1)) as stored:
        assert stored.engine.target.model.num_bytes < 0.2 * plain.engine.target.model.num_bytes
        got, want = (llm.generate(PROMPTS, params(0.0)) for llm in (stored, plain))
    assert [r.token_ids for r in got] == [r.token_ids for r in want]


def test_a_long_prompt_in_chunks(plain: LLM) -> None:
    """1,500 tokens of prompt, read in chunks of different sizes, give the same answer."""
    text = SUMMARY[0]["content"] * 23
    short = EngineConfig(cache_tokens=4096, threads=1, max_rows=100, weights="float32", controller="fixed")
    want = plain.generate(text, SamplingParams(max_tokens=12)).token_ids
    with LLM("smollm2", drafter="ngram", config=short) as llm:
        result = llm.generate(text, SamplingParams(max_tokens=12))
    assert result.token_ids == want
    assert result.stats.prompt_tokens > 1000
