"""Adapters beside a decoder's fused products: a layer has four, and each adds to its own.

Shapes: N rows of a forward · r ranks of all parts of a product together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..ops.linear import Linear
from .config import ModelConfig
from .lora import Adapter, LowRank
from .names import tensor_shapes
from .spec import ExpertsSpec

Join = Callable[[list[Tensor]], Tensor]  # rows of the parts, in the order of the fused matrix


@dataclass(frozen=True)
class Site:
    """A product of matrices that share their inputs: names within the layer, and rows of each."""

    modules: tuple[str, ...]
    outputs: tuple[int, ...]

    def low_rank(self, adapter: Adapter, layer: int, join: Join) -> LowRank | None:
        """What an adapter adds to it, as one product: the factors of its parts along a diagonal."""
        found = [adapter.parts.get(f"model.layers.{layer}.{module}.weight") for module in self.modules]
        ranks = [0 if part is None else len(part.down) for part in found]
        if not any(ranks):
            return None
        rows, start = [], 0
        for part, outputs, rank in zip(found, self.outputs, ranks, strict=True):
            own = torch.zeros(outputs, sum(ranks))
            if part is not None:
                own[:, start : start + rank] = part.up
            rows.append(own)
            start += rank
        return LowRank(torch.cat([part.down for part in found if part is not None]), join(rows).contiguous())


def sites(config: ModelConfig, layer: int) -> tuple[Site, Site, Site, Site]:
    """Of queries, keys and values; of attention's output; of gate and up; of the way down."""
    mlp, shapes = config.layer_specs[layer].only_mlp, tensor_shapes(config)
    gates = ("mlp.gate_proj", "mlp.up_proj") if isinstance(mlp, ExpertsSpec) or mlp.gated else ("mlp.up_proj",)
    named = (tuple(f"self_attn.{part}_proj" for part in "qkv"), ("self_attn.o_proj",), gates, ("mlp.down_proj",))
    qkv, output, gate_up, down = (
        Site(modules, tuple(shapes[f"model.layers.{layer}.{module}.weight"][0] for module in modules))
        for modules in named
    )
    return qkv, output, gate_up, down


def check_by_request(adapters: Sequence[Adapter], config: ModelConfig) -> None:
    """Refuse what cannot be chosen row by row."""
    if config.has_experts:
        raise InvalidRequest(
            "Adapters by request are not for mixtures of experts; merge one when loading: --lora PATH."
        )
    if config.recurrent:
        raise InvalidRequest("Adapters are not for models with recurrent layers yet.")
    for adapter in adapters:
        other = next((name for name in adapter.parts if not name.startswith("model.layers.")), None)
        if other is not None:
            raise InvalidRequest(
                f"The adapter {adapter.name} changes {other}, which is one for all requests; merge it: --lora PATH."
            )


@dataclass(frozen=True)
class AdaptedLinear:
    """A product, and what the adapter of each row adds to it."""

    inner: Linear
    parts: Sequence[LowRank | None]  # by adapter, on the product's device
    which: Tensor  # [N] int64, -1: none

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return self._with_added(self.inner(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The product, then the sum."""
        return self._with_added(self.inner.add_to(residual, x), x)

    def _with_added(self, out: Tensor, x: Tensor) -> Tensor:
        """Every adapter runs on all rows, so that nothing has to be looked at."""
        for number, part in enumerate(self.parts):
            if part is not None:
                added = x @ part.down.t() @ part.up.t()
                out = torch.where((self.which == number)[:, None], out + added, out)
        return out
