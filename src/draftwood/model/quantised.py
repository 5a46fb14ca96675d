"""Quantised safetensors: AWQ, GPTQ, bitsandbytes, FP8, NVFP4 and compressed-tensors, recognised by their config.json.

Every one of them is codes with scales, so each is read into one form, `Scaled`. A weight is (code - zero) x scale, or
what a table has for its code x scale, as its format defines it; inputs of products are not rounded, whatever the
config says of activations. For our CPU kernels the same numbers are laid into blocks (ops/native/decode.c), without
loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.errors import CheckpointError
from draftwood.model.blocks import Blocks
from draftwood.model.weights import GROUP

Read = Callable[[str], Tensor | None]  # the tensor of a name, None where there is none

ADVICE = "Use the original checkpoint with --weights int8 or int4, or a GGUF file of it"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_INSTEAD = {
    "hqq": "HQQ safetensors are not read yet",
    "mxfp4": "MXFP4 safetensors are not read yet",
}
_COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision",
    "dense",
)  # fmt: skip
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice what the eight positive 4-bit floats are
# Eight columns lie in a word in this order, which suits the GPU kernels that AWQ was written for.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)  # twelve times the numbers
TABLES: Mapping[str, Tensor] = {"NF4": torch.tensor(_NF4), "FP4": torch.tensor(_FP4) / 12}  # of our kernels' blocks


@dataclass(frozen=True)
class Scheme:
    """How the quantised tensors of a folder are to be read."""

    method: str
    bits: int = 8
    zeros_less: int = 0  # what was taken off the zeros when they were stored
    block: tuple[int, int] = (128, 128)  # outputs and inputs that share a scale, where scales are a table of both


@dataclass(frozen=True)
class Scaled:
    """A matrix of codes with scales for groups of inputs."""

    codes: Tensor  # [out, in] int16, or 8-bit floats; indices of the table, where there is one
    scale: Tensor  # [out, groups], 16 or 32 bits
    zero: Tensor | None  # [out, groups] int16
    group_of: Tensor  # [in], the group of each input
    table: Tensor | None = None  # [16] float32

    def numbers(self) -> Tensor:
        """In float32, each weight rounded once at most. [out, in]."""
        codes = self.codes.float() if self.table is None else self.table[self.codes.long()]
        if self.zero is not None:
            codes -= self.zero.float()[:, self.group_of]
        return codes.mul_(self.scale.float()[:, self.group_of])

    def blocks(self) -> Blocks | None:
        """The same weights in blocks of 32 inputs; None where inputs of a block have different scales."""
        inputs = len(self.group_of)
        if inputs % GROUP:
            return None
        groups = self.group_of.view(-1, GROUP)
        if bool((groups != groups[:, :1]).any()):
            return None
        scale, codes = self.scale[:, groups[:, 0]], self.codes.unflatten(1, (-1, GROUP))
        zero = torch.zeros_like(scale, dtype=torch.int16) if self.zero is None else self.zero[:, groups[:, 0]]
        if self.table is not None:
            return _table_blocks(codes, scale, self.table, inputs)
        if self.codes.dtype == torch.float8_e4m3fn:
            return _laid_out("FP8", inputs, _bytes(scale.float()), _bytes(codes))
        if self.codes.dtype != torch.int16:
            return None
        return _nibble_blocks(codes, scale, zero, inputs) or _byte_blocks(codes, scale, zero, inputs)


def _nibble_blocks(codes: Tensor, scale: Tensor, zero: Tensor, inputs: int) -> Blocks | None:
    kind = {torch.float16: "INT4_F16", torch.bfloat16: "INT4_BF16"}.get(scale.dtype)
    lowest, highest = codes.aminmax()
    lift = 8 if lowest < 0 else 0  # signed codes
    least, most = zero.aminmax()
    if kind is None or lowest + lift < 0 or highest + lift > 15 or least + lift < 0 or most + lift > 255:
        return None
    low, high = (codes + lift).to(torch.uint8).chunk(2, -1)
    zeros = (zero + lift).to(torch.uint8)[..., None].numpy()
    return _laid_out(kind, inputs, _bytes(scale), zeros, (low | high << 4).numpy())


def _table_blocks(codes: Tensor, scale: Tensor, table: Tensor, inputs: int) -> Blocks | None:
    kind = next((kind for kind, known in TABLES.items() if torch.equal(known, table)), None)
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return None if kind is None else _laid_out(kind, inputs, _bytes(scale.float()), (low | high << 4).numpy())


def _byte_blocks(codes: Tensor, scale: Tensor, zero: Tensor, inputs: int) -> Blocks | None:
    steps = codes - zero[..., None]
    lowest, highest = steps.aminmax()
    if lowest < -128 or highest > 127:
        return None
    return _laid_out("INT8", inputs, _bytes(scale.float()), _bytes(steps.to(torch.int8)))


def _bytes(values: Tensor) -> np.ndarray:
    """The bytes of each number of the first two dimensions, or of all of the third."""
    values = values if values.dim() == 3 else values[..., None]
    return values.contiguous().view(torch.uint8).numpy()


def _laid_out(kind: str, inputs: int, *parts: np.ndarray) -> Blocks:
    return Blocks(kind, np.concatenate(parts, axis=-1).reshape(len(parts[0]), -1), inputs)


def scheme_of(config: Mapping[str, Any], name: str) -> Scheme | None:
    """What a config.json says of quantisation; None if nothing, an error if it is nothing we read."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise CheckpointError(f"{name} states quantization_config as {type(stated).__name__}, not as an object.")
    method = str(stated.get("quant_method", "compressed-tensors" if "config_groups" in stated else "unknown"))
    reader = _METHODS.get(method.lower())
    if reader is None:
        reason = _INSTEAD.get(method, f"its weights are quantised with {method!r}")
        raise CheckpointError(
            f"{name}: {reason}. {ADVICE}; AWQ, GPTQ, bitsandbytes, FP8 and compressed-tensors are read."
        )
    return reader(stated, name)


def _awq(stated: Mapping[str, Any], name: str) -> Scheme:
    version = str(stated.get("version", "gemm")).lower()
    if version != "gemm" or stated.get("bits", stated.get("w_bit", 4)) != 4:
        raise CheckpointError(f"{name} is AWQ in {version!r} with {stated.get('bits')} bits; 'gemm' with 4 is read.")
    return Scheme("awq", 4)


def _gptq(stated: Mapping[str, Any], name: str) -> Scheme:
    bits, form = stated.get("bits"), str(stated.get("checkpoint_format", "gptq"))
    if bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"{name} is GPTQ with {bits} bits as {form!r}; 2, 4 and 8 bits are read. {ADVICE}.")
    return Scheme("gptq", bits, 0 if form == "gptq_v2" else 1)


def _fp8(stated: Mapping[str, Any], name: str) -> Scheme:
    algorithm = stated.get("quant_algo", "FP8")
    block = stated.get("weight_block_size") or [128, 128]
    if algorithm not in ("FP8", "NVFP4"):
        raise CheckpointError(f"{name} is quantised with {algorithm!r}, which is not read yet. {ADVICE}.")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise CheckpointError(f"{name} states weight_block_size as {block!r}.")
    return Scheme("fp8", block=(block[0], block[1]))


def _compressed(stated: Mapping[str, Any], name: str) -> Scheme:
    form = stated.get("format", "dense")
    sparse = stated.get("sparsity_config") or {}
    if form not in _COMPRESSED or (isinstance(sparse, dict) and sparse.get("format", "dense") != "dense"):
        raise CheckpointError(f"{name} is compressed-tensors as {form!r}, which is not read yet. {ADVICE}.")
    return Scheme("compressed-tensors")


_METHODS: Mapping[str, Callable[[Mapping[str, Any], str], Scheme]] = {
    "awq": _awq,
    "bitsandbytes": lambda stated, name: Scheme("bitsandbytes"),
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _fp8,
    "compressed-tensors": _compressed,
}


def stored_under(name: str) -> list[str]:
    """The names under which the weight of a Hugging Face name may be stored instead of its own."""
    stem = name.removesuffix(".weight")
    return [f"{stem}.qweight", f"{stem}.weight_packed"] if stem != name else []


def read_scaled(scheme: Scheme, read: Read, name: str, shape: tuple[int, int]) -> Scaled | None:
    """The matrix of a Hugging Face name, which should be [out, in]; None where it is not quantised."""
    stem = name.removesuffix(".weight")
    packed, words = read(f"{stem}.weight_packed"), read(f"{stem}.qweight")
    parts = _Parts(read, stem, shape)
    if words is not None and scheme.method == "awq":
        return parts.awq(words)
    if words is not None and scheme.method == "gptq":
        return parts.gptq(words, scheme)
    if packed is not None:
        return parts.nvfp4(packed, "weight_packed") if packed.dtype == torch.uint8 else parts.compressed(packed)
    plain = read(name)
    if plain is not None and scheme.method == "bitsandbytes":
        return parts.bitsandbytes(plain)
    if plain is not None and plain.dtype == torch.uint8:
        return parts.nvfp4(plain, "weight")
    if plain is None or plain.dtype not in (*_FLOAT8, torch.int8):
        return None
    return parts.plain(plain, scheme)


class _Parts:
    """The tensors that make a matrix up. Their shapes are a stranger's word: each is checked before it is used."""

    def __init__(self, read: Read, stem: str, shape: tuple[int, int]) -> None:
        self._read = read
        self._stem = stem
        self._outputs, self._inputs = shape

    def awq(self, words: Tensor) -> Scaled:
        """Words hold eight outputs of an input."""
        self._expect("qweight", words, (self._inputs, self._outputs // 8), torch.int32)
        scales = self._needed("scales")
        groups = self._groups("scales", scales, len(scales))
        self._expect("scales", scales, (groups, self._outputs))
        zeros = self._needed("qzeros")
        self._expect("qzeros", zeros, (groups, self._outputs // 8), torch.int32)
        order = torch.tensor(_AWQ_COLUMNS).argsort()
        codes, zero = (_unpacked(part, 4, 1).unflatten(1, (-1, 8))[..., order].flatten(1) for part in (words, zeros))
        return Scaled(codes.t(), scales.t(), zero.t(), self._in_turn(groups))

    def gptq(self, words: Tensor, scheme: Scheme) -> Scaled:
        """Words hold several inputs of an output; g_idx says which group an input is in."""
        per_word = 32 // scheme.bits
        self._expect("qweight", words, (self._inputs // per_word, self._outputs), torch.int32)
        scales = self._needed("scales")
        groups = len(scales)
        self._expect("scales", scales, (groups, self._outputs))
        zeros = self._needed("qzeros")
        self._expect("qzeros", zeros, (groups, self._outputs // per_word), torch.int32)
        zero = (_unpacked(zeros, scheme.bits, 1) + scheme.zeros_less) & (1 << scheme.bits) - 1
        index = self._read(f"{self._stem}.g_idx")
        group_of = (
            self._in_turn(self._groups("scales", scales, groups)) if index is None else self._index(index, groups)
        )
        return Scaled(_unpacked(words, scheme.bits, 0).t(), scales.t(), zero.t(), group_of)

    def compressed(self, words: Tensor) -> Scaled:
        """Signed codes, stored from zero on; words hold several inputs of an output."""
        bits = next((b for b in (4, 8, 2, 3) if words.shape[-1] == -(-self._inputs // (32 // b))), 4)
        per_word = 32 // bits
        self._expect("weight_packed", words, (self._outputs, -(-self._inputs // per_word)), torch.int32)
        scale = self._needed("weight_scale")
        groups = self._groups("weight_scale", scale, scale.shape[-1] if scale.dim() else 1)
        scale = self._per_output("weight_scale", scale, groups)
        middle = 1 << bits - 1
        zero = self._read(f"{self._stem}.weight_zero_point")
        if zero is not None and zero.dtype == torch.int32:
            self._expect("weight_zero_point", zero, (-(-self._outputs // per_word), groups))
            zero = _unpacked(zero, bits, 0)[: self._outputs] - middle
        zero = None if zero is None else self._per_output("weight_zero_point", zero, groups).to(torch.int16)
        index = self._read(f"{self._stem}.weight_g_idx")
        group_of = self._in_turn(groups) if index is None else self._index(index, groups)
        return Scaled(_unpacked(words, bits, 1)[:, : self._inputs] - middle, scale, zero, group_of)

    def nvfp4(self, pairs: Tensor, part: str) -> Scaled:
        """Bytes hold two 4-bit floats, the first one low; a scale in 8 bits for each sixteen, and one for all."""
        self._expect(part, pairs, (self._outputs, self._inputs // 2), torch.uint8)
        scale = self._needed("weight_scale")
        groups = self._groups("weight_scale", scale, self._inputs // 16)
        self._expect("weight_scale", scale, (self._outputs, groups), torch.float8_e4m3fn)
        multiplied = self._read(f"{self._stem}.weight_scale_2")
        whole = self._needed("weight_global_scale") if multiplied is None else multiplied
        if whole.numel() != 1:
            raise self._wrong("its scale for all", whole, "one number")
        whole = whole.float().reshape(1, 1)
        wide = scale.float() / whole if multiplied is None else scale.float() * whole
        nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1).long()
        codes = torch.tensor([*_E2M1, *(-code for code in _E2M1)], dtype=torch.int16)[nibbles]
        return Scaled(codes, wide / 2, None, self._in_turn(groups))

    def bitsandbytes(self, codes: Tensor) -> Scaled | None:
        """A byte for each weight and a scale for each output, or two 4-bit codes a byte; None where it is neither."""
        if codes.dtype == torch.int8:
            self._expect("weight", codes, (self._outputs, self._inputs))
            scale = self._needed("SCB").flatten()
            self._expect("SCB", scale, (self._outputs,))
            return Scaled(codes.to(torch.int16), scale[:, None].float() / 127, None, self._in_turn(1))
        states = [self._read(f"{self._stem}.weight.quant_state.bitsandbytes__{kind}") for kind in ("nf4", "fp4")]
        stated = next((state for state in states if state is not None), None)
        return None if stated is None else self._by_table(codes.contiguous().flatten().view(torch.uint8), stated)

    def _by_table(self, pairs: Tensor, stated: Tensor) -> Scaled:
        """The first code of a byte is high; a scale for each so many weights in a row, itself perhaps in codes."""
        state = _object_in(stated, self._stem)
        count, each = self._outputs * self._inputs, _positive(state, "blocksize", self._stem)
        self._expect("weight", pairs, (-(-count // 2),))
        table = self._needed("weight.quant_map")
        self._expect("weight.quant_map", table, (16,), torch.float32)
        scale = self._needed("weight.absmax")
        self._expect("weight.absmax", scale, (-(-count // each),))
        nested = self._read(f"{self._stem}.weight.nested_absmax")
        if nested is not None:
            size, steps = _positive(state, "nested_blocksize", self._stem), self._needed("weight.nested_quant_map")
            self._expect("weight.nested_quant_map", steps, (256,), torch.float32)
            self._expect("weight.nested_absmax", nested, (-(-len(scale) // size),), torch.float32)
            whole = nested.repeat_interleave(size)[: len(scale)]
            scale = steps[scale.long()] * whole + float(state.get("nested_offset", 0))
        codes = torch.stack([pairs >> 4, pairs & 15], -1).flatten()[:count].to(torch.int16)
        unit = math.gcd(each, self._inputs)
        groups = self._inputs // unit
        scale = scale.float().repeat_interleave(each // unit)[: self._outputs * groups].view(self._outputs, groups)
        return Scaled(codes.view(self._outputs, self._inputs), scale, None, self._in_turn(groups), table)

    def plain(self, codes: Tensor, scheme: Scheme) -> Scaled:
        """A byte for each weight: whole numbers or 8-bit floats."""
        self._expect("weight", codes, (self._outputs, self._inputs))
        inverse = self._read(f"{self._stem}.weight_scale_inv")
        name, scale = ("weight_scale", self._needed("weight_scale")) if inverse is None else ("scale_inv", inverse)
        zero = self._read(f"{self._stem}.weight_zero_point")
        whole = codes.dtype == torch.int8
        codes = codes.to(torch.int16) if whole else codes
        rows, columns = scheme.block
        if scale.dim() == 2 and scale.shape == (-(-self._outputs // rows), -(-self._inputs // columns)):
            scale = scale.repeat_interleave(rows, 0)[: self._outputs]
            return Scaled(codes, scale, None, torch.arange(self._inputs) // columns)
        groups = self._groups(name, scale, scale.shape[1] if scale.dim() == 2 else 1)
        zero = self._per_output("weight_zero_point", zero, groups).to(torch.int16) if zero is not None else None
        return Scaled(codes, self._per_output(name, scale, groups), zero, self._in_turn(groups))

    def _needed(self, part: str) -> Tensor:
        found = self._read(f"{self._stem}.{part}")
        if found is None:
            raise CheckpointError(
                f"{self._stem} is quantised and lacks its {part}: the file is incomplete. Download the model again."
            )
        return found

    def _per_output(self, part: str, values: Tensor, groups: int) -> Tensor:
        """One for all, one for each output, or one for each output and group. [out, groups]."""
        if values.numel() == 1:
            return values.reshape(1, 1).expand(self._outputs, 1)
        values = values[:, None] if values.dim() == 1 else values
        self._expect(part, values, (self._outputs, groups))
        return values

    def _groups(self, part: str, values: Tensor, groups: int) -> int:
        if groups < 1 or self._inputs % groups:
            raise self._wrong(part, values, f"{groups} groups of {self._inputs} inputs")
        return groups

    def _in_turn(self, groups: int) -> Tensor:
        return torch.arange(self._inputs) // (self._inputs // groups)

    def _index(self, index: Tensor, groups: int) -> Tensor:
        if index.shape != (self._inputs,) or index.dtype.is_floating_point or index.dtype.is_complex:
            raise self._wrong("g_idx", index, f"({self._inputs},)")
        index = index.to(torch.int64)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise self._wrong("g_idx", index, f"numbers below {groups}")
        return index

    def _expect(self, part: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        if tuple(values.shape) != shape or (dtype is not None and values.dtype != dtype):
            raise self._wrong(part, values, f"{shape}{f' {dtype}' if dtype else ''}")

    def _wrong(self, part: str, values: Tensor, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._stem}.{part} is {tuple(values.shape)} {values.dtype} where {expected} belongs: weights and "
            "configuration do not belong together. Download or convert the model again."
        )


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned codes out of 32-bit words along a dimension, lowest bits first. int16."""
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32)
    shifts = shifts.view(-1, 1) if dim == 0 else shifts
    codes = words.unsqueeze(dim + 1) >> shifts & (1 << bits) - 1
    return codes.to(torch.int16).flatten(dim, dim + 1)


def _object_in(values: Tensor, stem: str) -> Mapping[str, Any]:
    """A JSON object that lies in a tensor as bytes."""
    try:
        found = json.loads(bytes(values.tolist()))
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{stem}.weight.quant_state is none where a JSON object belongs. Download or convert the model again."
        )
    return found


def _positive(state: Mapping[str, Any], key: str, stem: str) -> int:
    found = state.get(key)
    if not isinstance(found, int) or found < 1:
        raise CheckpointError(
            f"{stem}.weight.quant_state has {key} {found!r} where a positive number belongs. Download the model again."
        )
    return found
