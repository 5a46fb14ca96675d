"""The pieces of a decoder layer as plain functions and small weight holders; no autograd, no modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.model.spec import CLAMPED

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
_STEEPNESS, _MOST = 1.702, 7.0  # of gpt-oss


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """What goes on from a gate and what it lets through; both may be written over."""
    if activation != CLAMPED:
        return ACTIVATIONS[activation](gate).mul_(up)
    gate = gate.clamp(max=_MOST)
    return (up.clamp(-_MOST, _MOST) + 1) * (gate * torch.sigmoid(gate * _STEEPNESS))


class RMSNorm:
    """Root-mean-square norm; half precisions are normalised in float32.

    x / sqrt(mean(x^2) + eps) is x sqrt(n) / hypot(|x|, sqrt(n eps)): four small operations where torch's own takes a
    dozen. Between products that stream all weights through the caches, their number is what counts.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight  # [n], or [heads, n] for several norms side by side
        self._wide = wide(weight.dtype)
        self._floor = torch.tensor((size * eps) ** 0.5, dtype=self._wide, device=weight.device)
        self._scaled = weight.to(self._wide) * size**0.5

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self._wide)
        normed = x * (self._scaled / torch.hypot(length, self._floor))
        return normed if x.dtype == self._wide else normed.to(x.dtype)


class LayerNorm:
    """The norm that takes the mean off, too; half precisions are normalised in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight.to(wide(weight.dtype))  # [n], or [heads, n] for several norms side by side
        self.bias = None if bias is None else bias.to(self.weight.dtype)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        normed = F.layer_norm(x.to(self.weight.dtype), x.shape[-1:], eps=self._eps) * self.weight
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)


Norm = RMSNorm | LayerNorm


def wide(dtype: torch.dtype) -> torch.dtype:
    """What norms and rotations compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softcapped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def pair_adjacent(rows: Tensor, head_dim: int, rotated: int | None = None) -> Tensor:
    """Reorder each head's output rows so that the two halves of a rotation lie side by side.

    Checkpoints rotate dimension i with i + rotated / 2; as neighbours they are one complex number, and a rotation is
    one multiplication. Queries and keys are reordered alike, so no dot product changes.
    """
    turned = head_dim if rotated is None else rotated
    order = torch.cat([torch.arange(turned).view(2, -1).t().reshape(-1), torch.arange(turned, head_dim)])
    return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


class Rotary:
    """Rotations e^{i · position · frequency} for all positions, grown on demand.

    The last `still` pairs of a head do not turn: one multiplication by one costs less than taking them apart.
    """

    def __init__(
        self, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype, device: torch.device, still: int = 0
    ) -> None:
        self._frequencies = inverse_frequencies.to(device=device, dtype=torch.float64)
        self._scale = scale
        self._still = still
        self._dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        self._table = torch.empty(0, len(inverse_frequencies) + still, dtype=self._dtype, device=device)

    def at(
        self, positions: Tensor, highest: int, num_turned: int, num_still: int, planes: Tensor | None = None
    ) -> Tensor:
        """Rotations at `positions` [N], none above `highest`, for heads that turn and heads that do not; or, by
        `planes` [D / 2], at three of each row: [3, N], of which each pair turns by its own.

        Values do not turn, but one multiplication by one costs less than taking them apart from queries and keys.
        [N, (num_turned + num_still) * D / 2] complex.
        """
        found = self.table(highest + 1)[positions]
        if planes is not None:
            found = found.gather(0, planes.to(positions.device).expand(1, positions.shape[1], -1))[0]
        turned = found.unsqueeze(1).expand(-1, num_turned, -1)
        return torch.cat([turned, torch.ones_like(turned[:, :1]).expand(-1, num_still, -1)], 1).flatten(1)

    def table(self, length: int) -> Tensor:
        """Rotations at all positions below `length`, and perhaps more. [positions, D / 2] complex."""
        if length > self._table.shape[0]:
            self._grow(length)
        return self._table

    def _grow(self, length: int) -> None:
        length = 1 << (length - 1).bit_length()
        steps = torch.arange(length, device=self._frequencies.device, dtype=torch.float64)
        # The angle in float32 where the model is, as its checkpoint was trained and as transformers has it.
        narrow = torch.float64 if self._dtype == torch.complex128 else torch.float32
        angles = torch.outer(steps.to(narrow), self._frequencies.to(narrow)).double()
        table = torch.polar(torch.full_like(angles, self._scale), angles).to(self._dtype)
        self._table = F.pad(table, (0, self._still), value=1.0) if self._still else table


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn adjacent pairs by `rotation`. [N, n], [N, n / 2] complex -> [N, n]."""
    computed = wide(x.dtype)
    if x.dtype == computed:
        return (x.view(rotation.dtype) * rotation).view(computed)
    return (x.to(computed).view(rotation.dtype) * rotation).view(computed).to(x.dtype)


def tensors_of(holders: Iterable[object]) -> Iterator[Tensor]:
    """Every tensor these objects hold, and the objects they hold."""
    for holder in holders:
        if isinstance(holder, Tensor):
            yield holder
        elif isinstance(holder, tuple):
            yield from tensors_of(holder)
        elif hasattr(holder, "__dict__"):
            yield from tensors_of(vars(holder).values())


def write_over(old: Iterable[object], new: Iterable[object]) -> None:
    """Copy every tensor of `new` to where the like objects `old` have theirs: captured graphs know addresses only."""
    with torch.inference_mode():
        for place, value in zip(tensors_of(old), tensors_of(new), strict=True):
            place.copy_(value)
