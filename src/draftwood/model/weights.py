"""Weight formats: what a matrix is stored as, and what its products round.

Whatever the format, the model made with it is a target of its own: speculation is exact with respect to it.
Quantised weights lie in groups of 32 inputs, as GGUF's Q8_0, Q4_0 and Q4_1 have them, so that those are taken over
number by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .folder import StoredRows

GROUP = 32  # inputs that share a scale


class Storage(IntEnum):
    """What a weight is; the numbers are those of ops/native/model.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    FLOAT8 = 4  # on accelerators alone
    BLOCKS = 5  # of a GGUF file, whatever they are: on a CPU alone


@dataclass(frozen=True)
class Quantised:
    """A matrix of whole numbers: weight = scale (code - zero) + minimum, by groups of 32 inputs.

    `zero` is 128 for int8, whose minimum is nothing, and 0 for int4.
    """

    storage: Storage
    codes: Tensor  # [out, in] uint8
    scale: Tensor  # [out, in / 32] float16
    minimum: Tensor | None  # [out, in / 32] float16

    def dequantise(self) -> Tensor:
        """In float32, each weight rounded once. [out, in]."""
        codes = self.codes.to(torch.float32).unflatten(1, (-1, GROUP))
        if self.minimum is None:
            return (codes.sub_(128) * self.scale[..., None].float()).flatten(1)
        return torch.addcmul(self.minimum[..., None].float(), codes, self.scale[..., None].float()).flatten(1)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.codes.shape

    def __getitem__(self, rows: slice | Tensor) -> Quantised:
        return self.each(lambda part: part[rows])

    def each(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        """The same change of rows made to all its parts."""
        minimum = None if self.minimum is None else change(self.minimum)
        return Quantised(self.storage, change(self.codes), change(self.scale), minimum)


@dataclass(frozen=True)
class Float8:
    """A matrix of 8-bit floats (e4m3) with one scale for each output."""

    codes: Tensor  # [out, in] float8_e4m3fn
    scale: Tensor  # [out] float32

    def dequantise(self) -> Tensor:
        """In float32. [out, in]."""
        return self.codes.float() * self.scale[:, None]

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.codes.shape


Matrix = Tensor | Quantised


def quantise_int8(weight: Tensor) -> Quantised:
    """Symmetric: the largest weight of a group is ±127 steps. [out, in]."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 127).to(torch.float16)
    steps = groups / _nonzero(scale)[..., None]
    codes = steps.round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return Quantised(Storage.INT8, codes.flatten(1), scale, None)


def quantise_int4(weight: Tensor) -> Quantised:
    """Sixteen steps from a group's least weight to its largest. [out, in]."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    lowest, highest = groups.aminmax(dim=-1)
    minimum = lowest.to(torch.float16)
    scale = ((highest - minimum.float()) / 15).clamp_(min=0).to(torch.float16)
    steps = (groups - minimum[..., None].float()) / _nonzero(scale)[..., None]
    codes = steps.round_().clamp_(0, 15).to(torch.uint8)
    return Quantised(Storage.INT4, codes.flatten(1), scale, minimum)


def quantise_float8(weight: Tensor) -> Float8:
    """The largest weight of an output becomes the largest number that eight bits hold. [out, in]."""
    numbers = weight.float()
    scale = numbers.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
    return Float8((numbers / _nonzero(scale)[:, None]).to(torch.float8_e4m3fn), scale)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale.float())


def round_inputs(x: Tensor) -> Tensor:
    """Inputs as bytes give them: each group of 32 of each row in steps of its own largest number / 127. [N, in]."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    steps = (groups * torch.where(largest == 0, 0, 127 / largest)).round_()
    return (steps * (largest / 127)).flatten(1)[:, : x.shape[1]].to(x.dtype)


@dataclass(frozen=True)
class WeightFormat:
    """How a model's matrices are stored and multiplied. Norms, positions and attention are float32 in all of them."""

    name: str
    layers: Storage | None  # None: the smallest that loses nothing of what the checkpoint has
    head: Storage | None  # of the output head and the token embedding
    byte_activations: bool  # inputs of a product are rounded to bytes, a scale for each row and group of 32
    says: str


FORMATS: Mapping[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("stored", None, None, False, "as the checkpoint has them: nothing is rounded"),
        WeightFormat(
            "float32", Storage.FLOAT32, Storage.FLOAT32, False, "four bytes a weight; exact for every checkpoint"
        ),
        WeightFormat(
            "bfloat16", Storage.BFLOAT16, Storage.BFLOAT16, False, "half the memory; exact for bfloat16 files"
        ),
        WeightFormat("int8", Storage.INT8, Storage.INT8, False, "8-bit weights; exact for Q8_0 files"),
        WeightFormat(
            "int4", Storage.INT4, Storage.INT8, False, "4-bit weights, 8-bit head; exact for Q4_0, Q4_1 files"
        ),
        WeightFormat(
            "w8a8", Storage.INT8, Storage.INT8, True, "int8, and inputs of products in 8 bits: flattest steps"
        ),
        WeightFormat("w4a8", Storage.INT4, Storage.INT8, True, "int4, and inputs of products in 8 bits: fastest"),
    )
}

FLOAT8 = WeightFormat("fp8", Storage.FLOAT8, Storage.FLOAT8, False, "8-bit floats with a scale an output")
ON_ACCELERATORS: Mapping[str, WeightFormat] = {
    f.name: f for f in (FORMATS["stored"], FORMATS["bfloat16"], FLOAT8, FORMATS["int8"], FORMATS["int4"])
}


def exact_storage(weight: Matrix | StoredRows) -> Storage:
    """The smallest storage that loses nothing of these weights."""
    if isinstance(weight, Quantised):
        return weight.storage
    return Storage.BFLOAT16 if weight.dtype == torch.bfloat16 else Storage.FLOAT32


def store_as(storage: Storage, weight: Matrix) -> Matrix:
    """`weight` in this storage: taken over as it is where it already has it, else rounded to the nearest."""
    if isinstance(weight, Quantised):
        if weight.storage == storage:
            return weight
        weight = weight.dequantise()
    if storage in (Storage.INT8, Storage.INT4):
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % GROUP))
        return quantise_int8(padded) if storage == Storage.INT8 else quantise_int4(padded)
    return weight.to(torch.float32 if storage == Storage.FLOAT32 else torch.bfloat16)


def as_numbers(weight: Matrix | Float8) -> Tensor:
    """The numbers that these weights stand for."""
    return weight if isinstance(weight, Tensor) else weight.dequantise()


def join_rows(parts: Sequence[Matrix], panel: int | None = None) -> Matrix:
    """Matrices one below the other; with `panel`, so many rows of each in turn, zero rows filling the last ones up."""
    if len(parts) == 1:
        return parts[0]
    quantised = [part for part in parts if isinstance(part, Quantised)]
    if len(quantised) == len(parts) and len({part.storage for part in quantised}) == 1:
        minima = [part.minimum for part in quantised if part.minimum is not None]
        joined = [_join([getattr(part, name) for part in quantised], panel) for name in ("codes", "scale")]
        return Quantised(quantised[0].storage, joined[0], joined[1], _join(minima, panel) if minima else None)
    numbers = [as_numbers(part) for part in parts]
    alike = len({part.dtype for part in numbers}) == 1
    return _join(numbers if alike else [part.float() for part in numbers], panel)


def _join(parts: Sequence[Tensor], panel: int | None) -> Tensor:
    if panel is None:
        return torch.cat(list(parts))
    padded = [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % panel)).unflatten(0, (-1, panel)) for part in parts]
    return torch.stack(padded, 1).flatten(0, 2)
