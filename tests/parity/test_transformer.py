"""Our decoder against transformers on every family, and against the mathematics written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood.batch import AttentionShape, Pages, with_text
from draftwood.model.config import ModelConfig
from draftwood.model.runner import ModelRunner
from draftwood.ops.cpu import SegmentedAttention
from draftwood.ops.reference import DenseAttention
from draftwood.protocols import Span
from draftwood.tree import TokenTree
from reference_model import load_into_transformers, written_out_logits
from staging import text_batch, tree_batch, tree_logits
from tiny import CPU, TinyCheckpoint, hf_config

VARIANTS: dict[str, dict] = {
    "llama": hf_config("llama"),
    "llama-biased": hf_config("llama", attention_bias=True, mlp_bias=True),
    "llama-rope-linear": hf_config("llama", rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama-rope-llama3": hf_config(
        "llama",
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-rope-yarn": hf_config(
        "llama", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    ),
    "smollm": hf_config(
        "llama", num_attention_heads=3, num_key_value_heads=1, hidden_size=48, tie_word_embeddings=True
    ),
    "mistral": hf_config("mistral"),
    "mistral-full": hf_config("mistral", sliding_window=None),
    "qwen2": hf_config("qwen2"),
    "qwen2-full": hf_config("qwen2", use_sliding_window=False),
    "qwen3": hf_config("qwen3"),
    "qwen3-tied": hf_config("qwen3", tie_word_embeddings=True),
}
TEXT = [5, 3, 9, 12, 0, 1, 1, 7, 8, 2, 11, 4, 6, 10, 3, 5, 9, 0, 2, 12, 7]


def runner_of(raw: dict, dtype: torch.dtype) -> tuple[TinyCheckpoint, ModelRunner]:
    checkpoint = TinyCheckpoint(ModelConfig.from_hf(raw))
    runner = ModelRunner.load(checkpoint, dtype, CPU, num_pages=20, page_size=4)
    return checkpoint, runner


def paged_logits(runner: ModelRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    """All logits of one text, run in chunks through the pages."""
    tables = runner.cache.tables
    tables.open(0, tokens)
    tables.reserve(0, len(tokens))
    rows = []
    for start in range(0, len(tokens), chunk):
        end = min(len(tokens), start + chunk)
        rows.append(runner.forward(text_batch(runner, [Span(0, tokens, start, end)])).logits)
        tables.advance(0, end, tokens)
    tables.close(0)
    return torch.cat(rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_agree_with_transformers(name: str) -> None:
    checkpoint, runner = runner_of(VARIANTS[name], torch.float32)
    reference = load_into_transformers(checkpoint, VARIANTS[name], torch.float32)
    with torch.no_grad():
        want = reference(torch.tensor([TEXT])).logits[0]
    assert (paged_logits(runner, TEXT, 64) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_agree_with_the_mathematics_whatever_the_chunking(name: str, chunk: int) -> None:
    checkpoint, runner = runner_of(VARIANTS[name], torch.float64)
    want = written_out_logits(checkpoint, TEXT)
    assert (paged_logits(runner, TEXT, chunk) - want).abs().max() <= 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    checkpoint, runner = runner_of(VARIANTS["llama"], dtype)
    got, want = paged_logits(runner, TEXT, 64).double(), written_out_logits(checkpoint, TEXT)
    assert ((got - want).norm() / want.norm()) <= {torch.bfloat16: 0.03, torch.float16: 0.005}[dtype]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_tree_node_sees_its_own_path_and_nothing_else(name: str) -> None:
    """Logits at every node of two bushy trees in one batch equal those of its path as a plain text."""
    checkpoint, runner = runner_of(VARIANTS[name], torch.float64)
    texts = [TEXT[:9], TEXT[4:7]]
    shapes = [([0, 3, 5, 3, 7, 1], [-1, 0, 0, 1, 1, 3]), ([0, 2, 2, 9], [-1, 0, 1, 0])]
    trees = [([text[-1], *tokens[1:]], parents) for text, (tokens, parents) in zip(texts, shapes, strict=True)]
    tree = TokenTree.of_points(trees)
    spans = []
    for i, text in enumerate(texts):
        runner.cache.tables.open(i, text)
        runner.cache.tables.reserve(i, len(text) + 5)
        spans.append(Span(i, text, 0, len(text)))
    logits = tree_logits(runner, spans, tree)
    for node in range(tree.num_nodes):
        path = [int(tree.tokens[n]) for n in tree.paths[node].tolist()[1:] if n >= 0]
        want = written_out_logits(checkpoint, texts[int(tree.owner[node])] + path)[-1]
        assert (logits[node] - want).abs().max() <= 1e-9


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("window", [None, 3])
def test_cpu_attention_equals_the_reference(rows: int, window: int | None) -> None:
    """Few rows and many, pages in one run and scattered, with a tree of more than one word of ancestors."""
    _, runner = runner_of(VARIANTS["llama"], torch.float64)
    cache, generator = runner.cache, torch.Generator().manual_seed(1)
    cache.tables.open(7, TEXT)
    cache.tables.reserve(7, 4)
    cache.tables.open(0, TEXT)
    cache.tables.reserve(0, 9)
    cache.tables.open(1, TEXT)
    cache.tables.reserve(1, 60 if rows > 5 else 30)
    tree = TokenTree.of_points([([0] * (rows + 1), [-1, *range(rows)]), ([0, 1], [-1, 0])])
    spans = [Span(1, TEXT, 3, 9), Span(0, TEXT, 0, 6)]
    trees, text = tree_batch(runner, spans, tree), cache.stage_text([Span(7, TEXT, 2, 4), Span(0, TEXT, 0, 6)])
    missing = trees.block_table.shape[1] - text.block_table.shape[1]
    batch = with_text(trees, replace(text, block_table=torch.nn.functional.pad(text.block_table, (0, missing))))
    shape = AttentionShape(window, 0.5)
    query = torch.randn(batch.tokens.shape[0], 4, 8, generator=generator, dtype=torch.float64)
    pages = Pages(torch.randn(2, 2, 2, 80, 8, generator=generator, dtype=torch.float64), cache.page_size)
    for layer in (0, 1):
        want = DenseAttention.plan(batch, pages, shape).run(layer, query)
        got = SegmentedAttention.plan(batch, pages, shape).run(layer, query)
        assert (got - want).abs().max() <= 1e-12
    for softcap, sinks in ((0.7, None), (None, query[0, :, 0]), (0.7, query[0, :, 0])):
        capped = AttentionShape(window, 0.5, softcap, sinks is not None)
        want = DenseAttention.plan(batch, pages, capped).run(0, query, sinks=sinks)
        got = SegmentedAttention.plan(batch, pages, capped).run(0, query, sinks=sinks)
        assert (got - want).abs().max() <= 1e-12


def test_a_long_chain_of_nodes_needs_more_than_one_word_of_ancestors() -> None:
    """A tree of 150 nodes: bits beyond the first 64 still hide what they must."""
    checkpoint, _ = runner_of(VARIANTS["llama"], torch.float64)
    runner = ModelRunner.load(checkpoint, torch.float64, CPU, num_pages=60, page_size=4)
    text = TEXT[:3]
    guesses = [(7 * i) % 13 for i in range(70)]
    parents = [-1, *range(70), *[0] * 79]  # one long path and a fan of 79
    tree = TokenTree.of_points([([text[-1], *guesses, *[i % 13 for i in range(79)]], parents)])
    runner.cache.tables.open(0, text)
    runner.cache.tables.reserve(0, 160)
    logits = tree_logits(runner, [Span(0, text, 0, 3)], tree)
    want = written_out_logits(checkpoint, text + guesses)
    assert (logits[1:71] - want[3:]).abs().max() <= 1e-9
    assert (logits[71 + 78] - written_out_logits(checkpoint, [*text, 78 % 13])[-1]).abs().max() <= 1e-9
