"""The decoder on GPU kernels against the plain one on every family, and its rows against themselves elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftwood.errors import InvalidRequest
from draftwood.model import cuda
from draftwood.model.config import ModelConfig
from draftwood.model.cuda import Ahead, CudaTransformer
from draftwood.model.runner import Model, ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FLOAT8, FORMATS, ON_ACCELERATORS, as_numbers, quantise_float8
from draftwood.protocols import Span
from draftwood.tree import TokenTree
from reference_model import written_out_logits
from staging import text_batch, tree_logits
from tiny import TinyCheckpoint, hf_config

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HEADS = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
VARIANTS: dict[str, dict] = {
    "llama": hf_config("llama", **HEADS),
    "llama-biased": hf_config("llama", attention_bias=True, mlp_bias=True, hidden_act="gelu", **HEADS),
    "smollm": hf_config("llama", tie_word_embeddings=True, **{**HEADS, "num_attention_heads": 3}),
    "mistral": hf_config("mistral", hidden_act="gelu_pytorch_tanh", **HEADS),
    "qwen2": hf_config("qwen2", **HEADS),
    "qwen3": hf_config("qwen3", **HEADS),
}
TEXT = [5, 3, 9, 12, 0, 1, 1, 7, 8, 2, 11, 4]
STRICT_DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # NumPy sums float32 in an order that the shape decides


def checkpoint_of(name: str, **changes: object) -> TinyCheckpoint:
    return TinyCheckpoint(ModelConfig.from_hf(VARIANTS[name] | changes))


def runner_of(model: Model) -> ModelRunner:
    return ModelRunner(model, num_pages=8, page_size=16)


def logits_of(runner: ModelRunner, tokens: list[int], chunk: int) -> Tensor:
    """All logits of one text, run in chunks through the pages."""
    tables = runner.cache.tables
    tables.open(0, tokens)
    tables.reserve(0, len(tokens))
    parts = []
    for start in range(0, len(tokens), chunk):
        end = min(len(tokens), start + chunk)
        parts.append(runner.forward(text_batch(runner, [Span(0, tokens, start, end)])).logits)
        tables.advance(0, end, tokens)
    tables.close(0)
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in VARIANTS), ("llama-biased", True)])
def test_logits_agree_with_the_mathematics(name: str, strict: bool) -> None:
    checkpoint = checkpoint_of(name)
    runner = runner_of(CudaTransformer(checkpoint, torch.float32, DEVICE, strict=strict))
    got = logits_of(runner, TEXT[:8], 7).cpu().double()
    if VARIANTS[name]["hidden_act"] == "silu":
        assert (got - written_out_logits(checkpoint, TEXT[:8])).abs().max() <= 1e-4
    plain = runner_of(Transformer(checkpoint, torch.float32, DEVICE))
    assert (got - logits_of(plain, TEXT[:8], 64).cpu()).abs().max() <= 1e-4


@pytest.mark.parametrize(("name", "weights"), [("llama", "int8"), ("smollm", "int4"), ("llama", "bfloat16")])
def test_rounded_weights_are_those_of_the_format(name: str, weights: str) -> None:
    checkpoint = checkpoint_of(name, num_hidden_layers=1)  # which takes long enough in the interpreter
    model = CudaTransformer(checkpoint, torch.float32, DEVICE, FORMATS[weights])
    want = logits_of(runner_of(Transformer(checkpoint, torch.float32, DEVICE, FORMATS[weights])), TEXT[:5], 64)
    off = (logits_of(runner_of(model), TEXT[:5], 4) - want).abs().amax(1)
    assert off[:4].max() <= 1e-4
    # A row alone adds 1 + code / 256 and takes the ones away again: five bits of float32's 24 go with them.
    assert off[4] <= (32 * 1e-5 if weights == "int4" else 1e-4)
    dense = CudaTransformer(checkpoint, torch.float32, DEVICE)
    assert model.num_bytes < dense.num_bytes or weights == "bfloat16"  # which float32 holds as float32


class RoundedCheckpoint(TinyCheckpoint):
    """Its matrices are what 8-bit floats make of them."""

    def tensor(self, name: str) -> Tensor:
        value = super().tensor(name)
        return as_numbers(quantise_float8(value)) if value.dim() == 2 else value


def test_eight_bit_floats() -> None:
    config = checkpoint_of("llama", num_hidden_layers=1).config
    got = logits_of(runner_of(CudaTransformer(TinyCheckpoint(config), torch.float32, DEVICE, FLOAT8)), TEXT[:5], 4)
    want = logits_of(runner_of(Transformer(RoundedCheckpoint(config), torch.float32, DEVICE)), TEXT[:5], 64)
    assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3"] if ON_GPU else ["qwen3"])
def test_strict_logits_do_not_depend_on_chunks(name: str) -> None:
    runner = runner_of(CudaTransformer(checkpoint_of(name), STRICT_DTYPE, DEVICE, strict=True))
    text = TEXT if ON_GPU else TEXT[:6]
    whole = logits_of(runner, text, 64)
    for chunk in (1, 4):
        assert torch.equal(logits_of(runner, text, chunk), whole)


def test_strict_logits_of_a_tree_are_those_of_its_paths() -> None:
    runner = runner_of(CudaTransformer(checkpoint_of("llama"), STRICT_DTYPE, DEVICE, strict=True))
    text, tokens, parents = TEXT[:5], [0, 3, 5, 3, 7, 1], [-1, 0, 0, 1, 1, 3]
    tree = TokenTree.of_points([([text[-1], *tokens[1:]], parents)], DEVICE)
    runner.cache.tables.open(1, text)
    runner.cache.tables.reserve(1, len(text) + 5)
    got = tree_logits(runner, [Span(1, text, 0, len(text))], tree)
    for node, path in {2: [5], 4: [3, 7], 5: [3, 3, 1]}.items():
        assert torch.equal(got[node], logits_of(runner, text + path, 64)[-1])


@pytest.mark.parametrize("strict", [False, True])
def test_asking_for_weights_ahead_changes_no_bit(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(CudaTransformer(checkpoint_of("qwen3"), STRICT_DTYPE, DEVICE, strict=strict))
    for chunk in (1, 3):
        logits = []
        for ahead in (Ahead(0, 0, 0, 0), Ahead(1 << 20, 4096, 1 << 12, 1 << 14)):
            monkeypatch.setattr(cuda, "ONE_ROW", ahead)
            logits.append(logits_of(runner, TEXT[:3], chunk))
        assert torch.equal(*logits)


def test_features_are_the_residual_stream() -> None:
    checkpoint = checkpoint_of("llama")
    outs = []
    for model in (CudaTransformer(checkpoint, torch.float32, DEVICE), Transformer(checkpoint, torch.float32, DEVICE)):
        runner = runner_of(model)
        runner.cache.tables.open(0, TEXT)
        runner.cache.tables.reserve(0, len(TEXT))
        batch = runner.cache.stage_text([Span(0, TEXT, 0, len(TEXT))], torch.tensor([2, 7], device=DEVICE))
        outs.append(runner.forward(batch, frozenset({0, 1})).features)
    assert outs[0].keys() == outs[1].keys() == {0, 1}
    assert all((outs[0][i] - outs[1][i]).abs().max() <= 1e-4 for i in (0, 1))


def test_what_cannot_be_is_refused() -> None:
    checkpoint = checkpoint_of("llama")
    with pytest.raises(InvalidRequest, match="not float64"):
        CudaTransformer(checkpoint, torch.float64, DEVICE)
    with pytest.raises(InvalidRequest, match="choose one of stored, bfloat16, fp8, int8, int4"):
        CudaTransformer(checkpoint, torch.float32, DEVICE, FORMATS["w4a8"])
    assert set(ON_ACCELERATORS) - set(FORMATS) == {"fp8"}


def test_loading_is_told_step_by_step() -> None:
    heard: list[tuple[int, int]] = []
    CudaTransformer(
        checkpoint_of("smollm"), torch.float32, DEVICE, progress=lambda done, total: heard.append((done, total))
    )
    assert heard == [(i + 1, 9) for i in range(9)]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("strict", [False, True])
def test_a_captured_forward_is_the_same_forward(strict: bool) -> None:
    runner = runner_of(CudaTransformer(checkpoint_of("llama"), torch.bfloat16, DEVICE, strict=strict))
    runner.cache.tables.open(0, TEXT)
    runner.cache.tables.reserve(0, len(TEXT))
    batch = text_batch(runner, [Span(0, TEXT, 0, 8)])
    want = runner.forward(batch).logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = runner.forward(batch).logits
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
