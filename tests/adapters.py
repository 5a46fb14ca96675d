"""Small LoRA adapters, written as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    shapes: Mapping[str, tuple[int, int]], seed: int = 0, rank: int = 3, ranks: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Factors for modules [out, in] by their names in the base model."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, (outputs, inputs) in shapes.items():
        own = (ranks or {}).get(module, rank)
        stem = f"base_model.model.{module}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * 0.7
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int = 3, **config: object) -> Path:
    """A folder as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**usual, "base_model_name_or_path": "org/base", **config}))
    return folder


def llama_modules(layers: int = 2, which: tuple[str, ...] = ALL, vocab: int = 13) -> dict[str, tuple[int, int]]:
    """Modules of `tiny.hf_config`'s Llama, as [out, in]."""
    hidden, inner, keys = 32, 48, 16
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    return {
        f"model.layers.{i}.{name}": shape
        for i in range(layers)
        for name, shape in shapes.items()
        if name.rpartition(".")[2] in which
    }
