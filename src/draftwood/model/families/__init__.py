"""Families of models, one file each: what their configurations say and where their tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..rope import require, shown
from . import (
    bamba,
    cohere,
    exaone4,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granitemoehybrid,
    hunyuan,
    jamba,
    lfm2,
    llama,
    llava,
    mamba,
    mamba2,
    mistral,
    mixtral,
    nemotron,
    nemotron_h,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from .base import Family, Place
from .in_gguf import GgufForm

__all__ = ["FAMILIES", "Family", "Place", "family_of", "gguf_family"]

_ALL = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma3.WITH_IMAGES,
    phi3.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
    starcoder2.FAMILY,
    gpt_neox.FAMILY,
    opt.FAMILY,
    gpt2.FAMILY,
    cohere.FAMILY,
    cohere.SECOND,
    stablelm.FAMILY,
    glm.FAMILY,
    glm.FOURTH,
    mixtral.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    gpt_oss.FAMILY,
    exaone4.FAMILY,
    seed_oss.FAMILY,
    hunyuan.FAMILY,
    nemotron.FAMILY,
    mamba.FAMILY,
    mamba.FALCON,
    mamba2.FAMILY,
    jamba.FAMILY,
    bamba.FAMILY,
    granitemoehybrid.FAMILY,
    falcon_h1.FAMILY,
    lfm2.FAMILY,
    nemotron_h.FAMILY,
    qwen3_next.FAMILY,
    qwen3_next.FIFTH,
    qwen3_next.FIFTH_WITH_IMAGES,
    qwen3_next.FIFTH_MOE,
    qwen3_next.FIFTH_MOE_WITH_IMAGES,
    llava.FAMILY,
    qwen2_vl.FAMILY,
    qwen2_vl.NEXT,
)
FAMILIES = {family.name: family for family in _ALL}


def family_of(name: object) -> Family:
    """The family of a `model_type`."""
    require(isinstance(name, str) and name in FAMILIES, _unsupported(name, list(FAMILIES)))
    return FAMILIES[str(name)]


def gguf_family(fields: Mapping[str, Any]) -> tuple[Family, GgufForm, dict[str, Any]]:
    """The family of a GGUF file's metadata, its form there, and the metadata that are its own."""
    name = fields.get("general.architecture")
    own = {key.removeprefix(f"{name}."): value for key, value in fields.items()}
    forms = [(family, family.gguf) for family in _ALL if family.gguf]
    known = list(dict.fromkeys(form.architecture for _, form in forms))
    require(isinstance(name, str) and name in known, _unsupported(name, known))
    found = next(((family, form) for family, form in forms if form.architecture == name and form.fits(own)), None)
    require(found is not None, f"its architecture is {shown(name)} as a mixture of experts, which is not known")
    assert found is not None
    return *found, own


def _unsupported(name: object, known: list[str]) -> str:
    return (
        f"its architecture is {shown(name)}; supported are {', '.join(known)} (text only), "
        "which also cover SmolLM2, TinyLlama and other models in the Llama format"
    )
