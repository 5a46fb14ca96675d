"""Reads a checkpoint tensor by tensor into the layout that the torch decoder wants.

Quantised formats are rounded and then held as the numbers they stand for: the definition of what they compute, not a
way to save memory. That is what `NativeTransformer` is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.experts import Experts, ExpertWeights, SharedExpert
from draftwood.model.layers import LayerNorm, Norm, RMSNorm, pair_adjacent, wide
from draftwood.model.sharding import ranks_of
from draftwood.model.spec import AttentionSpec, ExpertsSpec, HeadNorms, MlpSpec, NormSpec
from draftwood.model.weights import Storage, WeightFormat, as_numbers, round_inputs, store_as
from draftwood.ops.linear import Linear, RoundedInputs, make_linear, make_tied_head, summed


class WeightLoader:
    """Tensors of one checkpoint, for one device, dtype and weight format."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, weights: WeightFormat) -> None:
        self.checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.weights = weights
        self.ranks = ranks_of(checkpoint)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, as it is."""
        return self.checkpoint.tensor(name).to(device=self.device, dtype=dtype or self.dtype)

    def matrix(self, name: str, storage: Storage | None) -> Tensor:
        """One matrix, rounded to what the format can hold."""
        weight = self.checkpoint.matrix(name)
        rounded = as_numbers(weight if storage is None else store_as(storage, weight))
        return rounded[:, : weight.shape[1]].to(device=self.device, dtype=self.dtype)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product, its inputs rounded where the format says so."""
        return self._with_inputs_rounded(make_linear(weight, bias))

    def _with_inputs_rounded(self, linear: Linear) -> Linear:
        return RoundedInputs(linear, round_inputs) if self.weights.byte_activations else linear

    def _maybe(self, name: str, present: bool) -> Tensor | None:
        return self.tensor(name) if present else None

    def norm(self, name: str, spec: NormSpec) -> Norm:
        """A norm of the residual stream."""
        return self._norm([name], spec, lambda weight, _: weight)

    def _norm(self, names: Sequence[str], spec: NormSpec, arranged: Callable[[Tensor, str], Tensor]) -> Norm:
        """One norm of several weights; beyond plain models, weights are kept as precise as they are computed with."""
        dtype = self.dtype if self.config.is_plain else wide(self.dtype)
        weights = [arranged(self.tensor(f"{name}.weight", dtype), name) for name in names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if not spec.centred:
            return RMSNorm(weight, spec.eps)
        biases = [arranged(self.tensor(f"{name}.bias", dtype), name) for name in names if spec.bias]
        return LayerNorm(weight, torch.cat(biases) if biases else None, spec.eps)

    def head_and_embedding(self) -> tuple[Linear, Tensor]:
        """The output head and the token embedding [V, hidden], sharing memory where they are tied and can."""
        embedding = self.matrix("model.embed_tokens.weight", self.weights.head)
        if self.config.tied_head:
            head, embedding = make_tied_head(embedding)
            return self._with_inputs_rounded(head), embedding
        return self.linear(self.matrix("lm_head.weight", self.weights.head)), embedding

    def positions(self) -> Tensor | None:
        """Learned positions, where the model has some. [positions, hidden]."""
        return self._maybe("model.embed_positions.weight", self.config.stream.learned_positions)

    def linear_of(self, name: str, bias: bool) -> Linear:
        """One product of one matrix."""
        return self.linear(self.matrix(f"{name}.weight", self.weights.layers), self._maybe(f"{name}.bias", bias))

    def summed(self, name: str, bias: bool) -> Linear:
        """The same, where its inputs are split over the ranks."""
        return summed(self.linear_of(name, bias), self.ranks)

    def gate_up(self, name: str, mlp: MlpSpec) -> Linear:
        """Gate and up as one product, or up alone."""
        parts = ("gate", "up") if mlp.gated else ("up",)
        weights = [self.matrix(f"{name}.{part}_proj.weight", self.weights.layers) for part in parts]
        biases = [self._maybe(f"{name}.{part}_proj.bias", mlp.bias) for part in parts]
        return self.linear(torch.cat(weights), _joined(biases))

    def qkv(self, name: str, attention: AttentionSpec) -> Linear:
        """Queries, keys and values as one product; rows of the first two in pairs that turn together."""

        def turning(rows: Tensor, part: str) -> Tensor:
            return rows if part == "v" else pair_adjacent(rows, self.config.head_dim, attention.rotated)

        weights = [turning(self.matrix(f"{name}.{part}_proj.weight", self.weights.layers), part) for part in "qkv"]
        present = "qkv" if attention.qkv_bias else ""
        biases = [turning(self.tensor(f"{name}.{part}_proj.bias"), part) for part in present]
        return self.linear(torch.cat(weights), _joined(biases))

    def head_norm(self, name: str, attention: AttentionSpec) -> Norm | tuple[Norm, Norm] | None:
        """Norms of queries and keys: one for all their heads, or one for rows of either."""
        norms = attention.head_norm
        if norms is None:
            return None
        config, dim = self.config, self.config.head_dim
        names = [f"{name}.q_norm", f"{name}.k_norm"]
        heads = dict(zip(names, (config.num_heads, config.num_kv_heads), strict=True))

        def in_pairs(weight: Tensor, which: str) -> Tensor:
            paired = pair_adjacent(weight, dim, attention.rotated)
            if norms.over == HeadNorms.EACH:
                return paired.expand(heads[which], -1)
            return paired if norms.over == HeadNorms.WHOLE else paired.view(-1, dim)

        if norms.over == HeadNorms.WHOLE:
            query, key = (self._norm([which], norms.norm, in_pairs) for which in names)
            return query, key
        return self._norm(names, norms.norm, in_pairs)

    def experts(self, name: str, spec: ExpertsSpec) -> Experts:
        """A mixture of experts, matrices of the same part of all in one tensor."""
        rounding = round_inputs if self.weights.byte_activations else None
        router = make_linear(self.tensor(f"{name}.router.weight"), self._maybe(f"{name}.router.bias", spec.router_bias))
        gate_up, gate_up_bias = self._all_experts(name, spec, ("gate", "up"))
        down, down_bias = self._all_experts(name, spec, ("down",))
        weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
        return Experts(spec, router, weights, self._shared(name, spec), rounding, self.ranks)

    def _all_experts(self, name: str, spec: ExpertsSpec, parts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """[E, in, out], written to their place one by one, and biases [E, out]."""
        inner, hidden = spec.expert.width, self.config.hidden_size
        inputs, outputs = (hidden, 2 * inner) if len(parts) == 2 else (inner, hidden)
        weights = torch.empty(spec.count, inputs, outputs, dtype=self.dtype, device=self.device)
        biases = torch.zeros(spec.count, outputs, dtype=self.dtype, device=self.device) if spec.expert.bias else None
        for i in range(spec.count):
            modules = [f"{name}.experts.{i}.{part}_proj" for part in parts]
            weights[i] = torch.cat([self.matrix(f"{m}.weight", self.weights.layers) for m in modules]).t()
            if biases is not None:
                biases[i] = torch.cat([self.tensor(f"{m}.bias") for m in modules])
        self.checkpoint.forget()
        return weights, biases

    def _shared(self, name: str, spec: ExpertsSpec) -> SharedExpert | None:
        if spec.shared is None:
            return None
        gate_up, down = self.gate_up(f"{name}.shared", spec.shared), self.linear_of(f"{name}.shared.down_proj", False)
        weight = make_linear(self.tensor(f"{name}.shared_gate.weight")) if spec.shared_gate else None
        return SharedExpert(gate_up, down, weight, spec.shared.activation)


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    return torch.cat(present) if present else None
