"""Keys and values in 8 bits: what a vector becomes, the same bytes from torch and from C, memory, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.cache.kv import KVCache
from draftwood.engine.memory import token_bytes
from draftwood.errors import InvalidRequest
from draftwood.model.native import NativeTransformer
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS
from draftwood.ops.native import kernels
from draftwood.ops.packed import SCALE_BYTES, Packing, pack, unpack
from draftwood.protocols import Span
from tiny import CPU, TinyCheckpoint, tiny_config, tiny_folder

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.mark.parametrize("packing", Packing)
def test_a_vector_keeps_its_largest_number_and_rounds_the_others(packing: Packing) -> None:
    values = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 50)[:, None]
    values[7], values[8, 1:] = 0, 0
    packed = pack(values, packing)
    assert packed.shape == (50, 24 + SCALE_BYTES)
    back = unpack(packed, packing, torch.float32)
    largest = values.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(back.abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)
    step = largest / 127 if packing == Packing.INT8 else torch.maximum(values.abs() / 8, largest / 448 / 512)
    assert bool(((back - values).abs() <= step / 2 * 1.001).all())
    assert torch.equal(unpack(pack(back, packing), packing, torch.float32)[7], torch.zeros(24))


def filled(model, packing: Packing | None) -> ModelRunner:
    runner = ModelRunner(model, 20, 4, packing=packing)
    tables = runner.cache.tables
    tables.open(0, TEXT)
    assert tables.reserve(0, len(TEXT))
    runner.logits = runner.forward(  # type: ignore[attr-defined]
        runner.cache.stage_text([Span(0, TEXT, 0, len(TEXT))], torch.arange(len(TEXT)))
    ).logits
    return runner


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_our_kernels_write_the_bytes_and_read_the_numbers_of_the_reference(family: str, packing: Packing) -> None:
    library = kernels()
    if library is None:
        pytest.skip("no kernels here")
    checkpoint = TinyCheckpoint(tiny_config(family))
    native = NativeTransformer(library, checkpoint, FORMATS["stored"])
    plain, packed = filled(native, None), filled(native, packing)
    slots = slice(0, len(TEXT))
    assert torch.equal(packed.cache.memory.layers[0][:, slots], pack(plain.cache.memory.read(0, slots), packing))
    reference = filled(Transformer(checkpoint, torch.float32, CPU), packing)
    difference = (packed.logits - reference.logits).abs().max()  # type: ignore[attr-defined]
    rounding = (packed.logits - plain.logits).abs().max()  # type: ignore[attr-defined]
    assert rounding > 0, "the cache is not packed"
    assert difference <= max(0.2 * float(rounding), 1e-4), "a number on the edge may fall to either side"


def test_memory_is_counted() -> None:
    config = tiny_config()
    plain, packed = (KVCache(config, 10, 4, torch.float32, CPU, packing=packing) for packing in (None, Packing.INT8))
    assert packed.num_bytes * config.head_dim * 4 == plain.num_bytes * (config.head_dim + SCALE_BYTES)
    for cache, packing in ((plain, None), (packed, Packing.INT8)):
        assert cache.num_bytes == 44 * token_bytes(config, torch.float32, packing)


def test_it_is_named_wherever_the_model_is(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    for cache_dtype in ("auto", "int8", "fp8"):
        with LLM(folder, drafter="ngram", config=EngineConfig(cache_dtype=cache_dtype)) as llm:
            done = llm.generate("the cat", SamplingParams(max_tokens=4))
            assert done.stats.cache_dtype == cache_dtype
    with pytest.raises(InvalidRequest, match="choose one of auto, int8, fp8"):
        EngineConfig(cache_dtype="int4")


def test_a_model_on_a_gpu_refuses_it() -> None:
    class OnGpu:
        device = torch.device("cuda")

    with pytest.raises(InvalidRequest, match="on a CPU only"):
        ModelRunner(OnGpu(), 4, 4, packing=Packing.INT8)  # type: ignore[arg-type]
