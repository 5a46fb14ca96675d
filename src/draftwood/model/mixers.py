"""Recurrent mixers in torch: what stands in attention's place, or beside it, and keeps a state of a fixed size.

Each projects rows, mixes them along a short convolution and, but for plain convolutions, through a memory; how that
runs over texts, chains and trees is the same for all and stands in `ops/recurrence.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.batch import ForwardBatch
from draftwood.errors import IncompatibleParts
from draftwood.links import may_look
from draftwood.model.layers import RMSNorm, wide
from draftwood.model.loading import WeightLoader
from draftwood.model.mixer_spec import GatedDeltaSpec, Gating, Mamba2Spec, MambaSpec, RecurrentSpec, ShortConvSpec
from draftwood.ops.linear import Linear
from draftwood.ops.recurrence import (
    advanced,
    convolved,
    delta_values,
    path_totals,
    read,
    scanned,
    text_blocks,
    tree_block,
)
from draftwood.states import Block, Carried, Deposit, StagedRows, StagedTrees, StateStore

_TINY = 1e-6  # below the length of keys and queries that are brought to length one


@dataclass(frozen=True)
class Projected:
    """What a mixer reads of each row."""

    inputs: Tensor  # [N, C] of the convolution
    gate: Tensor  # [N, width]
    rates: Tensor | None = None  # [N, any] decays and steps


@dataclass(frozen=True)
class Convolution:
    """One of each channel by itself."""

    weight: Tensor  # [K, C] the current row's last
    bias: Tensor | None

    def __call__(self, states: Carried, inputs: Tensor, block: Block) -> Tensor:
        """[S, R, C] -> [S, R, C]."""
        return convolved(states.tail, inputs, block, self.weight, self.bias)


class Mixer(Protocol):
    """A recurrent mixer with its weights."""

    @property
    def convolution(self) -> Convolution:
        """What rows pass first."""
        ...

    @property
    def output(self) -> Linear:
        """Width -> hidden."""
        ...

    @property
    def width(self) -> int:
        """Numbers of a row that `output` reads."""
        ...

    def project(self, x: Tensor) -> Projected:
        """[N, hidden]."""
        ...

    def mix(self, mixed: Tensor, rates: Tensor | None, states: Carried, block: Block) -> tuple[Tensor, Deposit | None]:
        """What rows read of the memory and of each other, behind the convolution, [S, R, C] -> [S, R, width]; and what
        they would add to the memory.
        """
        ...

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Gate and norm. [N, width]."""
        ...


@dataclass(frozen=True)
class Mamba2:
    """See `Mamba2Spec`."""

    spec: Mamba2Spec
    project_in: Linear
    scales: Tensor | None  # [projected]
    convolution: Convolution
    decay: Tensor  # [H] -exp(A)
    step: Tensor  # [H]
    skip: Tensor  # [H]
    gain: RMSNorm | None
    output: Linear

    @property
    def width(self) -> int:
        """Numbers of a row that `output` reads."""
        return self.spec.width

    def project(self, x: Tensor) -> Projected:
        """Gate, then x, B and C, then the step's length."""
        spec = self.spec
        made = self.project_in(x)
        made = made if self.scales is None else made * self.scales
        gate, inputs, step = made.split_with_sizes((spec.width, spec.channels, spec.heads), -1)
        length = F.softplus(step.to(self.step.dtype) + self.step).clamp(spec.least_step, spec.most_step)
        return Projected(inputs, gate, length)

    def mix(self, mixed: Tensor, rates: Tensor | None, states: Carried, block: Block) -> tuple[Tensor, Deposit]:
        """A step is the decay's strength and the value's."""
        assert rates is not None
        assert states.memory is not None
        spec = self.spec
        shared = spec.groups * spec.state
        x, keys, queries = F.silu(mixed).split_with_sizes((spec.width, shared, shared), -1)
        x = x.unflatten(-1, (spec.heads, -1)).transpose(1, 2)  # [S, H, R, P]
        keys, queries = (part.unflatten(-1, (spec.groups, -1)).transpose(1, 2) for part in (keys, queries))
        step = rates.masked_fill(~block.there[..., None], 0)
        total = path_totals(step * self.decay, block)
        deposit = Deposit(total, keys, x * step.transpose(1, 2)[..., None])
        y = read(states.memory, deposit, block, queries) + x * self.skip[:, None, None]
        return y.transpose(1, 2).flatten(2), deposit

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """As the family has it."""
        way, open_gate = self.spec.gating, F.silu(gate.to(mixed.dtype))
        if self.gain is None:
            return mixed * open_gate
        gated = mixed * open_gate if way is Gating.BEFORE_NORM else mixed
        normed = self.gain(gated.unflatten(-1, (self.spec.groups, -1))).flatten(-2)
        return normed * open_gate if way is Gating.AFTER_NORM else normed


@dataclass(frozen=True)
class Mamba:
    """See `MambaSpec`."""

    spec: MambaSpec
    project_in: Linear
    convolution: Convolution
    project_x: Linear
    project_step: Linear
    norms: tuple[RMSNorm, RMSNorm, RMSNorm] | None  # of what makes the step, of keys and of queries
    decay: Tensor  # [width, N] -exp(A)
    step: Tensor  # [width]
    skip: Tensor  # [width]
    output: Linear

    @property
    def width(self) -> int:
        """Numbers of a row that `output` reads."""
        return self.spec.width

    def project(self, x: Tensor) -> Projected:
        """x and the gate."""
        return Projected(*self.project_in(x).chunk(2, -1))

    def mix(self, mixed: Tensor, rates: Tensor | None, states: Carried, block: Block) -> tuple[Tensor, Deposit]:
        """The step, keys and queries are made of what the convolution gives."""
        assert states.memory is not None
        spec, x = self.spec, F.silu(mixed)
        made = self.project_x(x.flatten(0, 1).to(states.tail.dtype))
        parts = made.split_with_sizes((spec.rank, spec.state, spec.state), -1)
        if self.norms is not None:
            parts = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        length = F.softplus(self.project_step(parts[0]).to(self.step.dtype) + self.step).view_as(x)
        length = length.masked_fill(~block.there[..., None], 0)
        keys, queries = (part.to(x.dtype).view(*x.shape[:2], -1)[:, None] for part in parts[1:])
        values = (x * length).transpose(1, 2)[..., None]
        deposit = Deposit(path_totals(length, block), keys, values, self.decay)
        return scanned(states.memory, deposit, length, block, queries) + x * self.skip, deposit

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Gated."""
        return mixed * F.silu(gate.to(mixed.dtype))


@dataclass(frozen=True)
class GatedDelta:
    """See `GatedDeltaSpec`."""

    spec: GatedDeltaSpec
    project_in: Linear
    convolution: Convolution
    decay: Tensor  # [H] -exp(A)
    step: Tensor  # [H]
    gain: RMSNorm
    output: Linear

    @property
    def width(self) -> int:
        """Numbers of a row that `output` reads."""
        return self.spec.width

    def project(self, x: Tensor) -> Projected:
        """Queries, keys and values; the gate; how much is learnt, and how much forgotten."""
        spec = self.spec
        sizes = (spec.channels, spec.width, spec.value_heads, spec.value_heads)
        inputs, gate, learn, forget = self.project_in(x).split_with_sizes(sizes, -1)
        decay = self.decay * F.softplus(forget.to(self.step.dtype) + self.step)
        return Projected(inputs, gate, torch.cat([torch.sigmoid(learn.to(decay.dtype)), decay], -1))

    def mix(self, mixed: Tensor, rates: Tensor | None, states: Carried, block: Block) -> tuple[Tensor, Deposit]:
        """Values are what the memory does not know yet."""
        assert rates is not None
        assert states.memory is not None
        spec = self.spec
        shared = spec.key_heads * spec.key_dim
        queries, keys, values = F.silu(mixed).split_with_sizes((shared, shared, spec.width), -1)
        queries, keys = (part.unflatten(-1, (spec.key_heads, -1)).transpose(1, 2) for part in (queries, keys))
        queries, keys = _of_length_one(queries) * spec.key_dim**-0.5, _of_length_one(keys)
        values = values.unflatten(-1, (spec.value_heads, -1)).transpose(1, 2)
        learn, decay = rates.masked_fill(~block.there[..., None], 0).chunk(2, -1)
        total = path_totals(decay, block)
        gained = delta_values(states.memory, total, block, keys, values, learn.transpose(1, 2))
        deposit = Deposit(total, keys, gained)
        return read(states.memory, deposit, block, queries).transpose(1, 2).flatten(2), deposit

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Each head normed, then gated."""
        normed = self.gain(mixed.unflatten(-1, (self.spec.value_heads, -1))).flatten(-2)
        return normed * F.silu(gate.to(mixed.dtype))


@dataclass(frozen=True)
class ShortConv:
    """See `ShortConvSpec`."""

    spec: ShortConvSpec
    project_in: Linear
    convolution: Convolution
    output: Linear

    @property
    def width(self) -> int:
        """Numbers of a row that `output` reads."""
        return self.spec.width

    def project(self, x: Tensor) -> Projected:
        """What one gate lets into the convolution, and the gate behind it."""
        before, behind, inputs = self.project_in(x).chunk(3, -1)
        return Projected(before * inputs, behind)

    def mix(self, mixed: Tensor, rates: Tensor | None, states: Carried, block: Block) -> tuple[Tensor, None]:
        """There is no memory."""
        return mixed, None

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Gated."""
        return gate.to(mixed.dtype) * mixed


def load_mixer(loader: WeightLoader, name: str, spec: RecurrentSpec) -> Mixer:
    """A layer's mixer."""
    own = f"{name}.mixer"
    computed = wide(loader.dtype)
    biased = not isinstance(spec, GatedDeltaSpec) and spec.bias
    project_in = loader.linear_of(f"{own}.in_proj", biased)
    output = loader.linear_of(f"{own}.out_proj", spec.output_bias)
    weight = loader.tensor(f"{own}.conv.weight", computed).t().contiguous()
    bias = loader.tensor(f"{own}.conv.bias", computed) if spec.conv_bias else None
    convolution = Convolution(weight, bias)
    if isinstance(spec, ShortConvSpec):
        return ShortConv(spec, project_in, convolution, output)
    decay = -loader.tensor(f"{own}.decay.weight", computed).exp()
    step = loader.tensor(f"{own}.step.bias", computed)
    if isinstance(spec, GatedDeltaSpec):
        gain = RMSNorm(loader.tensor(f"{own}.gain.weight", computed), spec.eps)
        return GatedDelta(spec, project_in, convolution, decay, step, gain, output)
    skip = loader.tensor(f"{own}.skip.weight", computed)
    if isinstance(spec, MambaSpec):
        made = loader.linear_of(f"{own}.x_proj", False), loader.linear_of(f"{own}.step_proj", False)
        return Mamba(spec, project_in, convolution, *made, _inner_norms(loader, own, spec), decay, step, skip, output)
    gain = None
    if spec.gating is not Gating.PLAIN:
        gain = RMSNorm(loader.tensor(f"{own}.gain.weight", computed).view(spec.groups, -1), spec.eps)
    return Mamba2(spec, project_in, _scales(loader, spec), convolution, decay, step, skip, gain, output)


def _inner_norms(loader: WeightLoader, own: str, spec: MambaSpec) -> tuple[RMSNorm, RMSNorm, RMSNorm] | None:
    if spec.norm_eps is None:
        return None

    def norm(part: str, size: int) -> RMSNorm:
        ones = torch.ones(size, dtype=wide(loader.dtype), device=loader.device)
        weight = loader.tensor(f"{own}.{part}_norm.weight", ones.dtype) if spec.normed_by_weights else ones
        return RMSNorm(weight, spec.norm_eps or 0.0)

    return norm("step", spec.rank), norm("key", spec.state), norm("query", spec.state)


def _scales(loader: WeightLoader, spec: Mamba2Spec) -> Tensor | None:
    if spec.input_scales == (1.0,) * len(spec.input_scales):
        return None
    shared = spec.groups * spec.state
    sizes = (spec.width, spec.width, shared, shared, spec.heads)
    parts = [
        torch.full((size,), scale, dtype=torch.float64) for size, scale in zip(sizes, spec.input_scales, strict=True)
    ]
    return torch.cat(parts).to(device=loader.device, dtype=loader.dtype)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _TINY)


@dataclass(frozen=True)
class _Part:
    """Rows of a forward of one kind: text, block by block, or trees."""

    first: int  # of all rows of the forward
    count: int
    places: Tensor  # [S]
    fresh: Tensor | None  # [S] bool: their texts begin here; None: none of them
    blocks: Sequence[Block]
    is_text: bool

    @classmethod
    def of(cls, batch: ForwardBatch, first: int) -> _Part:
        if batch.states is None:
            raise IncompatibleParts(
                "What is asked of a model with recurrent layers here has no place for states; take another drafter."
            )
        count = len(batch.tokens)
        fresh = batch.positions.index_select(0, batch.row_offsets[:-1].clamp(max=count - 1)) == 0
        blocks = text_blocks(batch) if batch.is_text else [tree_block(batch)]
        none = may_look(fresh) and not bool(fresh.any())
        return cls(first, count, batch.states, None if none else fresh, blocks, batch.is_text)


class Recurrences:
    """All recurrent layers of one forward."""

    def __init__(self, batch: ForwardBatch, stores: Sequence[StateStore]) -> None:
        self._stores = stores
        self._parts: list[_Part] = []
        for part in batch.parts or (batch,):
            first = sum(known.count for known in self._parts)
            self._parts.append(_Part.of(part, first))
        self._staged: list[StagedRows] = []

    @property
    def staged(self) -> StagedTrees | None:
        """What the layers have made of rows that are not committed; a forward has one such part at most."""
        trees = next((part for part in self._parts if not part.is_text), None)
        return trees and StagedTrees(trees.places, trees.fresh, trees.blocks[0], tuple(self._staged))

    def run(self, number: int, mixer: Mixer, x: Tensor) -> Tensor:
        """The `number`-th recurrent layer, up to its output projection. [N, hidden] -> [N, width]."""
        projected, store = mixer.project(x), self._stores[number]
        found = [self._run_part(mixer, projected, store, part) for part in self._parts]
        mixed = found[0] if len(found) == 1 else torch.cat(found)
        return mixer.finish(mixed, projected.gate).to(x.dtype)

    def _run_part(self, mixer: Mixer, projected: Projected, store: StateStore, part: _Part) -> Tensor:
        rows = slice(part.first, part.first + part.count)
        inputs, rates = projected.inputs[rows], None if projected.rates is None else projected.rates[rows]
        states = store.at(part.places, part.fresh)
        computed = wide(inputs.dtype)
        out = torch.zeros(part.count + 1, mixer.width, dtype=computed, device=inputs.device)  # the last: none
        for block in part.blocks:
            own = inputs[block.index]
            mixed = mixer.convolution(states, own, block)
            y, deposit = mixer.mix(mixed, None if rates is None else rates[block.index], states, block)
            to = torch.where(block.there, block.index, part.count)
            out.index_copy_(0, to.flatten(), y.flatten(0, 1).to(computed))
            staged = StagedRows(own, deposit)
            if part.is_text:
                states = advanced(states, staged, block, block.last)
            else:
                self._staged.append(staged)
        if part.is_text:
            store.write(part.places, states)
        return out[:-1]
