"""Families on our own GPU kernels, against the torch decoder; without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from draftwood.model.config import ModelConfig
from draftwood.model.cuda import CudaTransformer
from draftwood.model.gpu_limits import refuses
from draftwood.model.transformer import Transformer
from families import FAMILIES
from tiny import TinyCheckpoint

from .test_cuda_transformer import DEVICE, TEXT, logits_of, runner_of

CONFIGS = {name: ModelConfig.from_hf(raw) for name, raw in FAMILIES.items()}
OURS = [name for name, config in CONFIGS.items() if refuses(config) is None]


def test_what_the_kernels_know_is_said() -> None:
    assert {"gemma", "gemma2", "gemma3", "phi3", "phi4-mini", "smollm3", "granite", "glm4", "exaone4"} <= set(OURS)
    assert {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"} <= set(OURS)
    assert refuses(CONFIGS["gpt2"]) == "learned positions"
    assert refuses(CONFIGS["starcoder2"]) == "layer norms"
    assert refuses(CONFIGS["olmo2"]) == "norms of queries and keys as they are here"


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in OURS), ("gemma2", True), ("gpt_oss", True)])
def test_logits_are_the_references(name: str, strict: bool) -> None:
    checkpoint = TinyCheckpoint(CONFIGS[name])
    got = logits_of(runner_of(CudaTransformer(checkpoint, torch.float32, DEVICE, strict=strict)), TEXT[:7], 6).cpu()
    want = logits_of(runner_of(Transformer(checkpoint, torch.float64, DEVICE)), TEXT[:7], 64).cpu()
    assert (got - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))
