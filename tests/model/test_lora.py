"""LoRA adapters: read as PEFT defines them, merged, and beside the model row by row, in every family."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters import adapter_tensors, llama_modules, write_adapter
from draftwood.errors import CheckpointError, DraftwoodError, IncompatibleParts, InvalidRequest
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.families import FAMILIES as READERS
from draftwood.model.lora import Adapter, MergedCheckpoint, read_adapter
from draftwood.model.lora_layers import check_by_request
from draftwood.model.names import tensor_shapes
from draftwood.model.native import NativeTransformer, refuses
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS
from draftwood.ops.native import kernels
from draftwood.protocols import Span
from tiny import CPU, TinyCheckpoint, tiny_config, tiny_folder

from .test_families_native import CONFIGS

DENSE = [name for name, config in CONFIGS.items() if refuses(config) is None and not config.has_experts]
TEXTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3, 3], [5, 0, 12])


def modules_of(name: str) -> dict[str, tuple[int, int]]:
    """What PEFT would call a family's modules, as [out, in]: several of ours may be one of theirs."""
    config = CONFIGS[name]
    found: dict[str, tuple[int, int]] = {}
    for ours, shape in tensor_shapes(config).items():
        if len(shape) == 2 and ours.startswith("model.layers."):
            module = READERS[config.family].places(ours, config)[0].names[0].removesuffix(".weight")
            found[module] = (found.get(module, (0, 0))[0] + shape[0], shape[1])
    return found


def adapter_for(folder: Path, name: str, seed: int, scale: float = 1.0) -> Adapter:
    tensors = adapter_tensors(modules_of(name), seed)
    fan = CONFIGS[name].family == "gpt2"
    write_adapter(folder, tensors, lora_alpha=2 * scale, fan_in_fan_out=fan)
    return read_adapter(folder, TinyCheckpoint(CONFIGS[name]))


def logits(runner: ModelRunner, which: Mapping[int, int]) -> list[Tensor]:
    """Of all texts in one forward, each with its adapter."""
    tables = runner.cache.tables
    for i, text in enumerate(TEXTS):
        tables.open(i, text)
        assert tables.reserve(i, len(text))
    spans = [Span(i, text, 0, len(text), adapter=which.get(i, -1)) for i, text in enumerate(TEXTS)]
    rows = torch.arange(sum(map(len, TEXTS)))
    found = runner.forward(runner.cache.stage_text(spans, rows)).logits
    for i in range(len(TEXTS)):
        tables.close(i)
    return list(found.split([len(text) for text in TEXTS]))


def runner_of(model) -> ModelRunner:
    return ModelRunner(model, 40, 4)


@pytest.mark.parametrize("name", DENSE)
def test_rows_with_adapters_are_those_of_the_merged_models(tmp_path: Path, name: str) -> None:
    """In one forward, two adapters and the model itself, on torch's operations and on our kernels."""
    base = TinyCheckpoint(CONFIGS[name])
    pair = [adapter_for(tmp_path / "a", name, 1), adapter_for(tmp_path / "b", name, 2)]
    which = {0: 1, 2: 0, 3: 1}
    models = [base, MergedCheckpoint(base, pair[0]), MergedCheckpoint(base, pair[1])]
    wanted = [logits(runner_of(Transformer(model, torch.float64, CPU)), {}) for model in models]
    expected = [wanted[which.get(i, -1) + 1][i] for i in range(len(TEXTS))]
    assert (wanted[0][0] - wanted[1][0]).abs().max() > 1e-3, "the adapter changes nothing"

    torch_model = Transformer(base, torch.float64, CPU)
    torch_model.adapt(pair)
    for got, want in zip(logits(runner_of(torch_model), which), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    library = kernels()
    if library is None:
        return
    native = NativeTransformer(library, base, FORMATS["stored"])
    native.adapt(pair)
    runner = runner_of(native)
    mixed, alone = logits(runner, which), logits(runner_of(NativeTransformer(library, base, FORMATS["stored"])), {})
    for got, want in zip(mixed, expected, strict=True):
        assert (got - want).abs().max() <= 2e-4 * max(1.0, float(want.abs().max()))
    assert torch.equal(mixed[1], alone[1]), "the base's rows are the same bits beside adapted ones"
    for i in which:
        assert torch.equal(logits(runner, {i: which[i]})[i], mixed[i]), "and adapted ones in any company"


def test_fused_and_transposed_matrices_are_among_them() -> None:
    assert modules_of("phi3")["model.layers.0.self_attn.qkv_proj"] == (64, 32)
    assert modules_of("gpt2")["transformer.h.1.attn.c_attn"] == (96, 32)


def merged_by_hand(base: TinyCheckpoint, tensors: Mapping[str, Tensor], module: str, scale: float) -> Tensor:
    a, b = (tensors[f"base_model.model.{module}.lora_{which}.weight"].double() for which in "AB")
    return base.tensor(f"{module}.weight") + scale * b @ a


def test_scales_ranks_and_patterns_are_pefts(tmp_path: Path) -> None:
    base, modules = TinyCheckpoint(tiny_config()), llama_modules()
    q, down = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    tensors = adapter_tensors(modules, ranks={down: 5})
    patterns = {"rank_pattern": {"layers.1.mlp.down_proj": 5}, "alpha_pattern": {"q_proj": 7}}
    for rslora in (False, True):
        folder = write_adapter(tmp_path / str(rslora), tensors, lora_alpha=4, use_rslora=rslora, **patterns)
        made = MergedCheckpoint(base, read_adapter(folder, base))
        for module, alpha, rank in ((q, 7, 3), (down, 4, 5), ("model.layers.0.mlp.up_proj", 4, 3)):
            scale = alpha / (math.sqrt(rank) if rslora else rank)
            want = merged_by_hand(base, tensors, module, scale)
            torch.testing.assert_close(made.tensor(f"{module}.weight"), want, rtol=1e-6, atol=1e-6)
        norm = "model.layers.0.input_layernorm.weight"
        assert torch.equal(made.tensor(norm), base.tensor(norm))


def test_merged_matrices_keep_the_type_they_are_stored_in(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    half = {name: value.bfloat16() for name, value in load_file(model / "model.safetensors").items()}
    save_file(half, model / "model.safetensors")
    base = open_checkpoint(model)
    tensors = adapter_tensors(llama_modules())
    made = MergedCheckpoint(base, read_adapter(write_adapter(tmp_path / "a", tensors, lora_alpha=3), base))
    name = "model.layers.0.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
    assert torch.equal(made.tensor(f"{name}.weight"), (half[f"{name}.weight"].float() + b @ a).bfloat16())
    assert made.blocks(f"{name}.weight") is None
    assert made.config == base.config


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "dora": ({"use_dora": True}, "DoRA"),
    "ia3": ({"peft_type": "IA3"}, "only LoRA"),
    "biases": ({"bias": "lora_only"}, "biases"),
    "modules": ({"modules_to_save": ["lm_head"]}, "whole modules"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "base was changed"),
    "rank": ({"r": 4}, "where its rank is 4"),
    "no rank": ({"r": "many"}, "no number"),
    "alpha": ({"lora_alpha": None}, "no number"),
    "tokens": ({"trainable_token_indices": [3]}, "rows of the embedding"),
    "experts": ({"target_parameters": ["mlp.experts"]}, "no modules"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_computed_differently_is_refused(tmp_path: Path, kind: str) -> None:
    changes, why = REFUSED[kind]
    folder = write_adapter(tmp_path, adapter_tensors(llama_modules()), **changes)
    with pytest.raises(CheckpointError, match=why):
        read_adapter(folder, TinyCheckpoint(tiny_config()))


def test_tensors_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    base, good = TinyCheckpoint(tiny_config()), adapter_tensors(llama_modules())
    first = next(iter(good))
    cases: dict[str, tuple[dict[str, Tensor], type[DraftwoodError], str]] = {
        "more layers": (adapter_tensors(llama_modules(layers=3)), IncompatibleParts, "does not fit this model"),
        "wider": (adapter_tensors({"model.layers.0.mlp.up_proj": (48, 40)}), IncompatibleParts, "does not fit"),
        "half": ({name: value for name, value in good.items() if name != first}, CheckpointError, "only one"),
        "dora": ({**good, "base_model.model.x.lora_magnitude_vector": torch.ones(2)}, CheckpointError, "none of LoRA"),
        "damaged": ({**good, first: good[first] * math.nan}, CheckpointError, "NaN"),
    }
    for name, (tensors, kind, why) in cases.items():
        with pytest.raises(kind, match=why):
            read_adapter(write_adapter(tmp_path / name, tensors), base)
    with pytest.raises(CheckpointError, match="no adapter"):
        read_adapter(tmp_path, base)
    (tmp_path / "half" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        read_adapter(tmp_path / "half", base)


def test_hostile_configurations_are_refused_in_bounded_time(tmp_path: Path) -> None:
    base, tensors = TinyCheckpoint(tiny_config()), adapter_tensors(llama_modules())
    folder = write_adapter(tmp_path / "a", tensors, rank_pattern={"(" * 2000 + "a" * 50 + "$": 3, "(a+)+$": 9})
    assert read_adapter(folder, base).parts  # a pattern is a text, not a program
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(DraftwoodError):
        read_adapter(folder, base)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1e308, "lora_alpha": 1}))
    with pytest.raises(CheckpointError, match="rank"):
        read_adapter(folder, base)


def test_a_changed_head_is_merged_only(tmp_path: Path) -> None:
    base = TinyCheckpoint(tiny_config())
    adapter = read_adapter(write_adapter(tmp_path, adapter_tensors({"lm_head": (13, 32)})), base)
    merged = MergedCheckpoint(base, adapter)
    assert not torch.equal(merged.tensor("lm_head.weight"), base.tensor("lm_head.weight"))
    with pytest.raises(InvalidRequest, match="one for all requests"):
        check_by_request([adapter], base.config)
    with pytest.raises(InvalidRequest, match="mixtures of experts"):
        check_by_request([adapter], tiny_config("gpt_oss"))
