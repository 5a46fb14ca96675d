"""Kernels that follow each other closely: the start of one is prepared while the one before still runs.

A kernel launched with `OVERLAPPING` must call `wait_for_predecessors()` before it touches anything that another kernel
may write or read. From there on it is as if it had been started afterwards; what is saved is the start.

Products make way only once they have waited. So whatever starts behind a product may read, before it waits itself,
what had been written before that product began: how a batch is laid out, say, but not the product's rows.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

POSSIBLE = (
    os.environ.get("TRITON_INTERPRET") != "1"
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
)
OVERLAPPING: dict[str, Any] = {"launch_pdl": True} if POSSIBLE else {}
POSSIBLE = tl.constexpr(POSSIBLE)


@triton.jit
def wait_for_predecessors():
    """Everything before this kernel is done from here on."""
    if POSSIBLE:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_and_make_way():
    """The same, and the next kernel may take its place beside this one. Right for short kernels; beside the large tiles
    of a product with several rows it gets in the way.
    """
    if POSSIBLE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for(at):
    """Have what lies there brought into the cache, 128 bytes a pointer, without waiting for it."""
    if POSSIBLE:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
        )


@triton.jit
def ask_for_all(at, size):
    """The same of `size` bytes from each pointer on, both in sixteens; where it is 0, of nothing."""
    if POSSIBLE:
        tl.inline_asm_elementwise(
            "{ .reg .pred some; setp.ne.u32 some, $2, 0; "
            "@some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [at.to(tl.int64), size], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def read_at_once(at):
    """A 64-bit number that is not written meanwhile and is most likely cached. Where a pipeline makes copies of what a
    loop reads, a plain load would be one of them, and others wait for it.
    """
    if POSSIBLE:
        number = tl.inline_asm_elementwise("ld.global.b64 $0, [$1];", "=l,l", [at.to(tl.int64)], tl.int64, True, 1)
    else:
        number = tl.load(at)
    return number


@triton.jit
def make_way():
    """The next kernel may be prepared beside this one: it is short, or has only its results left to write."""
    if POSSIBLE:
        tl.extra.cuda.gdc_launch_dependents()
