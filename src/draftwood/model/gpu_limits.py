"""What the GPU decoder can compute of what families say; apart from `cuda.py`, which needs Triton to be imported."""

from __future__ import annotations

from collections.abc import Callable

from draftwood.model.config import ModelConfig
from draftwood.model.spec import CLAMPED, ExpertsSpec, HeadNorms, LayerSpec

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", CLAMPED)


def refuses(config: ModelConfig) -> str | None:
    """What the kernels for a GPU cannot compute of a model, if there is something."""
    if config.stream.learned_positions:
        return "learned positions"
    if config.final_norm.centred:
        return "layer norms"
    unusual = next((layer.unusual for layer in config.layers if layer.unusual is not None), None)
    return unusual or next((what for layer in config.layers for what, does in _UNKNOWN.items() if does(layer)), None)


def _unusual_head_norms(layer: LayerSpec) -> bool:
    norms = layer.only_attention.head_norm
    return norms is not None and (norms.over != HeadNorms.EACH or norms.after_rope or norms.norm.centred)


def _ungated(layer: LayerSpec) -> bool:
    mlp = layer.only_mlp.expert if isinstance(layer.only_mlp, ExpertsSpec) else layer.only_mlp
    return not mlp.gated or mlp.activation not in ACTIVATIONS


_UNKNOWN: dict[str, Callable[[LayerSpec], bool]] = {
    "layer norms": lambda layer: layer.norm.centred,
    "attention and MLP side by side": lambda layer: layer.wiring.parallel,
    "norms of queries and keys as they are here": _unusual_head_norms,
    "MLPs without a gate": _ungated,
}
