"""Small whole numbers to floats in one instruction, where the compiler would make two or three."""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.ops.cuda.pdl import POSSIBLE

ONE, LARGE = tl.constexpr(0x3F800000), tl.constexpr(0x4B000000)  # 1.0 and 2^23
SIXTEENTHS, SMALLER = tl.constexpr(0x780000), tl.constexpr(0x078000)  # bits 19 to 22, and 15 to 18


@triton.jit
def behind_one(word, BITS: tl.constexpr):
    """1 + n / 16, where n are the SIXTEENTHS of a word; 1 + n / 256 of what is SMALLER."""
    if POSSIBLE:
        word = tl.inline_asm_elementwise(
            f"lop3.b32 $0, $1, {BITS}, 0x3F800000, 0xEA;", "=r,r", [word], tl.int32, True, 1
        )
    else:
        word = (word & BITS) | ONE
    return word.to(tl.float32, bitcast=True)


@triton.jit
def bytes_above_large(word):
    """2^23 + n, where n is each of a word's four bytes, lowest first."""
    if POSSIBLE:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0x4B000000, 0x7540; prmt.b32 $1, $4, 0x4B000000, 0x7541; "
            "prmt.b32 $2, $4, 0x4B000000, 0x7542; prmt.b32 $3, $4, 0x4B000000, 0x7543;",
            "=&r,=&r,=&r,=r,r", [word], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
        )  # fmt: skip
    else:
        bits = (
            (word & 255) | LARGE,
            ((word >> 8) & 255) | LARGE,
            ((word >> 16) & 255) | LARGE,
            ((word >> 24) & 255) | LARGE,
        )
    return (
        bits[0].to(tl.float32, bitcast=True),
        bits[1].to(tl.float32, bitcast=True),
        bits[2].to(tl.float32, bitcast=True),
        bits[3].to(tl.float32, bitcast=True),
    )
