"""GGUF files multiplied as they are stored: the formats' own numbers, and every row the same bits in any company."""

from __future__ import annotations

import ctypes
import logging
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.errors import CheckpointError
from draftwood.model.blocks import NUMBERS, Blocks
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.native import NativeTransformer
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS, Storage, as_numbers, store_as
from draftwood.ops.native import kernels, library, structs
from draftwood.protocols import Span
from draftwood.request import SamplingParams
from draftwood.verifiers import LAWS
from staging import text_batch
from tiny import CPU, Ask, Harness, TinyCheckpoint, generated, tiny_config

PORTABLE = (*library.FLAGS, "-mno-avx512f", "-mno-avxvnni")  # what other processors compile
KINDS = [kind for kind, number in NUMBERS.items() if number < 64]  # those of GGUF files
HALVES = {  # where a block has its float16 numbers
    "F16": range(0, 64, 2), "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "TQ2_0": [64],
}  # fmt: skip
# Of a typical weight, so that tiny models with random blocks have activations of a usual size.
STEP = {"Q2_K": 3e-3, "Q3_K": 1e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 3e-5, "IQ4_XS": 3e-5, "IQ4_NL": 1e-3}


@pytest.fixture(scope="module", params=["native", "portable"])
def compiled(request: pytest.FixtureRequest) -> library.Kernels:
    """The kernels for this processor, and those for one without AVX-512."""
    if kernels() is None:
        pytest.skip(f"no kernels here: {library.why_missing()}")
    return library.load(library.build(library.FLAGS if request.param == "native" else PORTABLE))


def block_bytes(kind: str) -> tuple[int, int]:
    """Values and bytes of a block; numbers that stand alone are taken thirty-two at a time, as the kernels do."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return (values, size) if values > 1 else (32, 32 * size)


def random_blocks(kind: str, rows: int, inputs: int, seed: int = 0, step: float | None = None) -> Blocks:
    """Every bit at random, but for scales: any finite number, or about `step`."""
    rng = np.random.default_rng(seed)
    values, size = block_bytes(kind)
    count = rows * inputs // values
    if kind in ("F32", "BF16"):
        numbers = (rng.standard_normal((count, 32)) * (step or 1)).astype("<f4").view("<u2").reshape(count, 32, 2)
        data = numbers.view(np.uint8).reshape(count, -1) if kind == "F32" else numbers[..., 1].copy().view(np.uint8)
    else:
        data = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for place in HALVES.get(kind, []):
        halves = data[:, place : place + 2].copy().view("<f2") if step is None else None
        data[:, place + 1] &= 0xBB  # below infinity
        if halves is None:
            spread = step * (1 + 0.2 * rng.standard_normal(count))
            data[:, place : place + 2] = spread.astype("<f2")[:, None].view(np.uint8)
    if kind == "MXFP4":
        data[:, 0] = rng.integers(0 if step is None else 118, 200 if step is None else 122, count)
    return Blocks(kind, data.reshape(rows, -1), inputs)


def reference(blocks: Blocks) -> np.ndarray:
    return dequantize(blocks.data, GGMLQuantizationType[blocks.kind]).reshape(blocks.shape).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_weights_are_bit_for_bit_the_formats(compiled: library.Kernels, kind: str) -> None:
    blocks = random_blocks(kind, 24, 512)
    assert np.isfinite(reference(blocks)).all()
    assert np.array_equal(blocks.numbers(compiled).numpy(), reference(blocks))
    assert np.array_equal(blocks[5:9].numbers(compiled).numpy(), reference(blocks)[5:9])


def test_our_numbers_are_those_of_the_gguf_package() -> None:
    assert all(GGMLQuantizationType[kind] == NUMBERS[kind] for kind in KINDS)


class Table:
    """A matrix of rows in any formats, as the kernels want it."""

    def __init__(self, parts: list[Blocks]) -> None:
        self.parts = parts
        rows = [row for part in parts for row in part.data]
        kinds = [NUMBERS[part.kind] for part in parts for _ in part.data]
        count = -(-len(rows) // 32) * 32
        self.addresses = np.array([row.ctypes.data for row in rows] + [0] * (count - len(rows)), dtype=np.int64)
        self.kinds = np.array(kinds + [0] * (count - len(rows)), dtype=np.uint8)
        self.struct = structs.Matrix(
            Storage.BLOCKS, count, parts[0].inputs, None, None, None, None,
            self.addresses.ctypes.data, self.kinds.ctypes.data,
        )  # fmt: skip

    def product(self, compiled: library.Kernels, x: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(x), len(self.kinds)), float("nan"))
        compiled.dw_block_product(ctypes.byref(self.struct), x.data_ptr(), len(x), out.data_ptr())
        return out


@pytest.mark.parametrize("inputs", [256, 768])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_decoded_weights(compiled: library.Kernels, kind: str, inputs: int) -> None:
    blocks = random_blocks(kind, 40, inputs, seed=1, step=STEP.get(kind, 0.01))
    x = torch.randn(13, inputs, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ torch.from_numpy(reference(blocks)).double().t()
    size = x.double().abs() @ torch.from_numpy(reference(blocks)).double().abs().t()
    table = Table([blocks])
    together = table.product(compiled, x)
    assert float(((together[:, :40] - exact).abs() / size).max()) < 2e-6
    assert not together[:, 40:].any()
    for count in range(1, 13):
        assert torch.equal(table.product(compiled, x[:count]), together[:count])


def test_one_matrix_may_have_rows_in_all_formats(compiled: library.Kernels) -> None:
    parts = [random_blocks(kind, 3, 256, seed=i, step=0.01) for i, kind in enumerate(KINDS)]
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    mixed = Table(parts).product(compiled, x)
    apart = torch.cat([Table([part]).product(compiled, x)[:, :3] for part in parts], 1)
    assert torch.equal(mixed[:, : apart.shape[1]], apart)


def test_rows_that_end_within_a_block_are_filled_up(compiled: library.Kernels) -> None:
    data = np.arange(3 * 40, dtype=np.float16).reshape(3, 40).view(np.uint8)
    blocks = Blocks("F16", data, 40)
    assert blocks.stride == 128
    assert np.array_equal(blocks.numbers(compiled).numpy(), data.view(np.float16).astype(np.float32))


HIDDEN, FEED, VOCAB = 256, 512, 67
SHAPES = {
    "token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN), "attn_q": (HIDDEN, HIDDEN), "attn_k": (128, HIDDEN),
    "attn_v": (128, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FEED, HIDDEN), "ffn_up": (FEED, HIDDEN),
    "ffn_down": (HIDDEN, FEED),
}  # fmt: skip
MIXTURES: Mapping[str, Mapping[str, str]] = {
    "Q4_K_M": {"": "Q4_K", "token_embd": "Q6_K", "output": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"},
    "Q5_K": {"": "Q5_K", "attn_q": "Q5_0", "attn_k": "Q5_1"},
    "Q3_K_M": {"": "Q3_K", "token_embd": "Q2_K", "attn_v": "Q5_K", "ffn_up": "Q2_K"},
    "IQ4_XS": {"": "IQ4_XS", "attn_output": "IQ4_NL", "output": "Q8_0", "token_embd": "MXFP4"},
    "Q4_0 beside Q8_0": {"": "Q4_0", "attn_v": "Q8_0", "ffn_gate": "Q4_1"},
    "F16": {"": "F16", "ffn_down": "BF16", "attn_v": "F32"},
}


def write_model(
    path: Path, kinds: Mapping[str, str], architecture: str = "llama", tied: bool = False, parts: int = 0
) -> Path:
    """A tiny GGUF model of random blocks, two layers with 64 numbers a head."""
    writer = GGUFWriter(path, architecture, split_max_tensors=parts)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_eos_token_id(2)
    names = ["token_embd", *([] if tied else ["output"])]
    names += [f"blk.{i}.{name}" for i in (0, 1) for name in SHAPES if name not in ("token_embd", "output")]
    for seed, name in enumerate(names):
        kind = kinds.get(name.split(".")[-1], kinds[""])
        blocks = random_blocks(kind, *SHAPES[name.split(".")[-1]], seed, STEP.get(kind, 0.02))
        writer.add_tensor(f"{name}.weight", blocks.data, raw_dtype=GGMLQuantizationType[kind])
    for name in ("output_norm", *(f"blk.{i}.{norm}" for i in (0, 1) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    if architecture == "qwen2":
        for i in (0, 1):
            for j, name in enumerate(("attn_q", "attn_k", "attn_v")):
                bias = np.random.default_rng(j).standard_normal(SHAPES[name][0]).astype(np.float32)
                writer.add_tensor(f"blk.{i}.{name}.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def runner_of(model) -> ModelRunner:
    return ModelRunner(model, 64, 4)


def logits(runner: ModelRunner, tokens: list[int], sizes: Iterator[int]) -> torch.Tensor:
    """Of a whole text, in chunks."""
    tables, rows, start = runner.cache.tables, [], 0
    tables.open(0, ())
    tables.reserve(0, len(tokens))
    while start < len(tokens):
        end = min(len(tokens), start + next(sizes))
        batch = text_batch(runner, [Span(0, tokens, start, end)])
        rows.append(runner.forward(batch).logits)
        start = end
    tables.close(0)
    return torch.cat(rows)


def always(size: int) -> Iterator[int]:
    while True:
        yield size


def text() -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(VOCAB) for _ in range(29)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_file_computes_what_its_dequantised_weights_do(
    compiled: library.Kernels, tmp_path: Path, mixture: str, architecture: str
) -> None:
    """The row order of Llama files, fused matrices in several formats, tied heads and biases included."""
    path = write_model(tmp_path / "m.gguf", MIXTURES[mixture], architecture, tied=architecture == "qwen2")
    model = NativeTransformer(compiled, open_checkpoint(path), FORMATS["stored"])
    native, torchs = runner_of(model), runner_of(Transformer(open_checkpoint(path), torch.float64, CPU))
    alone, want = logits(native, text(), always(1)), logits(torchs, text(), always(64))
    assert float((alone - want).abs().max() / want.abs().max()) < 1e-5
    assert torch.equal(alone.argmax(-1), want.argmax(-1))
    for size in (2, 4, 7, 12, 29):
        assert torch.equal(logits(native, text(), always(size)), alone)
    assert model.num_bytes < 1.25 * path.stat().st_size


@pytest.mark.parametrize("weights", ["int8", "w4a8", "bfloat16"])
def test_other_formats_are_rounded_from_the_same_numbers(
    compiled: library.Kernels, tmp_path: Path, weights: str
) -> None:
    path = write_model(tmp_path / "m.gguf", MIXTURES["Q4_K_M"])
    native = runner_of(NativeTransformer(compiled, open_checkpoint(path), FORMATS[weights]))
    torchs = runner_of(Transformer(open_checkpoint(path), torch.float64, CPU, FORMATS[weights]))
    got, want = logits(native, text(), always(64)), logits(torchs, text(), always(64))
    assert float((got - want).abs().max() / want.abs().max()) < (0.05 if weights == "w4a8" else 1e-5)


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_an_embedding_that_is_no_head_stays_in_the_file(
    compiled: library.Kernels, tmp_path: Path, weights: str
) -> None:
    """Bit for bit; a file that is cut meanwhile is an error and not the end of the process."""
    form, tokens = FORMATS[weights], torch.tensor(text())
    path = write_model(tmp_path / "m.gguf", MIXTURES["Q4_K_M"])
    checkpoint = open_checkpoint(path)
    model = NativeTransformer(compiled, checkpoint, form)
    own = model._embedding
    assert own is not None
    assert model._model.embedding.words is None
    assert model._model.embedding.rows is None
    blocks = checkpoint.blocks("model.embed_tokens.weight")
    assert blocks is not None
    whole = as_numbers(store_as(Storage.INT8, blocks.matrix(compiled))) if form.head else blocks.numbers(compiled)
    assert torch.equal(own.numbers(compiled, tokens, form.head), whole[tokens])
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="has been changed while the model ran"):
        logits(runner_of(model), text(), always(64))


class HalfCheckpoint(TinyCheckpoint):
    """Random weights in float16."""

    def tensor(self, name: str) -> torch.Tensor:
        return super().tensor(name).half()

    def blocks(self, name: str) -> Blocks:
        value = self.tensor(name).contiguous()
        return Blocks("F16", value.view(torch.uint8).numpy(), value.shape[1])


def test_sizes_need_not_be_multiples_of_a_block(compiled: library.Kernels) -> None:
    """Of inputs, of heads, and of gate and up in turn."""
    config = tiny_config("llama", vocab_size=VOCAB, hidden_size=40, intermediate_size=50, head_dim=20)
    model = NativeTransformer(compiled, HalfCheckpoint(config), FORMATS["stored"])
    assert model._model.layers[0].qkv.storage == Storage.BLOCKS
    native, torchs = runner_of(model), runner_of(Transformer(HalfCheckpoint(config), torch.float64, CPU))
    alone, want = logits(native, text(), always(1)), logits(torchs, text(), always(64))
    assert float((alone - want).abs().max() / want.abs().max()) < 1e-5
    assert torch.equal(logits(native, text(), always(5)), alone)


@pytest.mark.parametrize("weights", ["stored", "w8a8"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_do_not_change_what_is_said(tmp_path: Path, temperature: float, weights: str) -> None:
    if kernels() is None:
        pytest.skip("no kernels here")
    path = write_model(tmp_path / "m.gguf", MIXTURES["Q4_K_M"])
    asks = [
        Ask(tuple(text()[i : i + 6]), SamplingParams(max_tokens=24, temperature=temperature, seed=i)) for i in range(3)
    ]
    said = []
    for drafter in (NoDrafter(), NgramDrafter(nodes=6, branches=2)):
        runner = ModelRunner.load(open_checkpoint(path), torch.float32, CPU, 200, 4, FORMATS[weights])
        said.append(generated(Harness(runner, drafter, LAWS["match"]()).run(asks)))
    assert said[0] == said[1]


def test_types_that_are_expanded_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path / "m.gguf", {"": "Q4_K", "ffn_up": "TQ2_0"})
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(path)
        assert checkpoint.blocks("model.layers.0.mlp.up_proj.weight") is None
        assert checkpoint.blocks("model.layers.1.mlp.up_proj.weight") is None
    assert [record.getMessage().count("2 in TQ2_0") for record in caplog.records] == [1]
    if kernels() is not None:
        model = ModelRunner.load(checkpoint, torch.float32, CPU, 64, 4)
        torchs = runner_of(Transformer(open_checkpoint(path), torch.float64, CPU))
        got, want = logits(model, text(), always(64)), logits(torchs, text(), always(64))
        assert float((got - want).abs().max() / want.abs().max()) < 1e-5
