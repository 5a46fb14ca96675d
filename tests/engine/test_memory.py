"""Memory is planned before it is taken: sizes by hand, advice that fits, no device needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood import settling
from draftwood.config import EngineConfig
from draftwood.engine.memory import (
    SPARE_PAGES,
    MemoryPlan,
    automatic_cache_tokens,
    check,
    device_memory,
    explain_out_of_memory,
    plan_memory,
    token_bytes,
    weight_bytes,
)
from draftwood.errors import InvalidRequest
from draftwood.model.names import count_parameters
from tiny import TinyCheckpoint, tensor_names, tiny_config, tiny_runner

GIB = 1 << 30
SMOLLM2 = tiny_config(
    vocab_size=49152,
    layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
LARGE = tiny_config(
    vocab_size=49152,
    layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=40960,
)
CONFIG = EngineConfig(dtype="bfloat16", device="cpu", cache_tokens=65536)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_parameters_are_those_of_the_tensors(family: str, changes: dict[str, bool]) -> None:
    config = tiny_config(family, **changes)
    checkpoint = TinyCheckpoint(config)
    assert count_parameters(config) == sum(checkpoint.tensor(name).numel() for name in tensor_names(config))


def test_known_models() -> None:
    assert count_parameters(SMOLLM2) == 134_515_008
    assert count_parameters(LARGE) == pytest.approx(7.38e9, rel=1e-3)
    assert token_bytes(LARGE, torch.bfloat16) == 131_072


def test_a_loaded_model_takes_what_was_planned() -> None:
    runner = tiny_runner(dtype=torch.float64, num_pages=7, page_size=4)
    config = runner.model.config
    assert weight_bytes(config, "stored", torch.float64) == pytest.approx(runner.model.num_bytes, rel=0.02)
    assert (7 + SPARE_PAGES) * 4 * token_bytes(config, torch.float64) == runner.cache.num_bytes


def test_smaller_formats_are_smaller() -> None:
    sizes = [weight_bytes(LARGE, name, torch.bfloat16) for name in ("float32", "bfloat16", "int8", "fp8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == weight_bytes(LARGE, "stored", torch.bfloat16) == 2 * count_parameters(LARGE)
    assert sizes[2] == pytest.approx(sizes[1] * 1.0625 / 2, rel=0.03)  # the embedding stays as it is


def test_a_plan_that_fits_is_silent() -> None:
    plan = plan_memory(LARGE, SMOLLM2, CONFIG, 139 * GIB, 140 * GIB)
    assert plan.weights > plan.cache > plan.graphs > plan.draft_weights > 0
    assert plan.cache_tokens == 65536
    check(plan)


def test_a_plan_without_room_says_what_to_lower() -> None:
    plan = plan_memory(LARGE, SMOLLM2, CONFIG, 22 * GIB, 24 * GIB)
    with pytest.raises(InvalidRequest) as refusal:
        check(plan)
    said = str(refusal.value)
    for part in ("weights 13.8 GiB", "draft model 0.3 GiB", "cache of 65536 tokens", "22.0 GiB of 24.0 GiB", "ngram"):
        assert part in said
    assert "taken already" not in said
    tokens = int(said.split("cache_tokens=")[1].split(";")[0].split(".")[0])
    assert 0 < tokens < 65536
    check(plan_memory(LARGE, SMOLLM2, replace(CONFIG, cache_tokens=tokens), 22 * GIB, 24 * GIB))
    assert f"weights='{next(iter(plan.formats))}'" in said  # the largest format that is enough
    assert "\n" not in said


def test_weights_that_are_too_large_alone_get_no_advice_about_the_cache() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(plan_memory(LARGE, None, CONFIG, 8 * GIB, 24 * GIB))
    said = str(refusal.value)
    assert "cache_tokens=" not in said
    assert "several together may be: lower cache_tokens, store the weights as int4 (4.6 GiB)" in said
    assert "draft model" not in said
    assert "16.0 GiB are taken already" in said


def test_a_plan_of_plain_numbers_can_be_explained() -> None:
    with pytest.raises(InvalidRequest, match="No single change is enough"):
        check(MemoryPlan(weights=10 * GIB, draft_weights=0, cache=4 * GIB, graphs=GIB, free=12 * GIB, total=12 * GIB))


@pytest.mark.parametrize("free", [20 * GIB, 40 * GIB, 139 * GIB])
def test_an_automatic_cache_fits_and_leaves_some_room(free: int) -> None:
    config = replace(CONFIG, max_running=1000)
    tokens = automatic_cache_tokens(LARGE, SMOLLM2, config, free, 140 * GIB)
    assert tokens % config.page_size == 0
    plan = plan_memory(LARGE, SMOLLM2, replace(config, cache_tokens=tokens), free, 140 * GIB)
    left = free - plan.needed + plan.cache
    assert 0.88 * left < plan.cache <= 0.9 * left


def test_an_automatic_cache_is_no_larger_than_requests_can_use() -> None:
    config = replace(CONFIG, max_running=2)
    tokens = automatic_cache_tokens(SMOLLM2, None, config, 139 * GIB, 140 * GIB)
    assert 2 * 8192 <= tokens <= 2 * (8192 + 512 + 64)


def test_an_automatic_cache_without_room_is_explained() -> None:
    with pytest.raises(InvalidRequest, match="no room for a cache: weights"):
        automatic_cache_tokens(LARGE, None, CONFIG, 14 * GIB, 16 * GIB)


def test_running_out_all_the_same_is_explained() -> None:
    plan = plan_memory(LARGE, None, CONFIG, 40 * GIB, 80 * GIB)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")
    explained = explain_out_of_memory(error, plan)
    assert "run out (CUDA out of memory)" in str(explained)
    assert "cache_tokens=32768" in str(explained)  # it should have fitted: half of what was asked for
    assert explained.__cause__ is error
    assert "OutOfMemoryError" in str(explain_out_of_memory(torch.OutOfMemoryError(), plan))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_says_what_it_has() -> None:
    free, total = device_memory(torch.device("cuda"))
    assert 0 < free <= total


def test_draft_and_target_share_the_plan() -> None:
    alone, together = (plan_memory(LARGE, draft, CONFIG, GIB, GIB) for draft in (None, SMOLLM2))
    assert together.draft_weights == 2 * count_parameters(SMOLLM2)
    assert together.token - alone.token == token_bytes(SMOLLM2, torch.bfloat16)


def test_memory_that_runs_out_while_loading_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "device_memory", lambda _: (2 << 30, 8 << 30))
    config = replace(EngineConfig(device="cpu"), cache_tokens=1 << 20).settled()
    checkpoint = TinyCheckpoint(tiny_config())
    failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with (
        pytest.raises(InvalidRequest, match=r"memory has run out.*cache of 1048576 tokens.*cache_tokens="),
        settling.memory_explained(config, checkpoint, "none"),  # type: ignore[arg-type]
    ):
        raise failure
