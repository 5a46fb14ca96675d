"""Kernels that follow each other closely: the start of one is prepared while the one before still runs.

A kernel launched with `OVERLAPPING` must call `wait_for_predecessors()` before it touches anything that another kernel
may write or read. From there on it is as if it had been started afterwards; what is saved is the start.
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
_POSSIBLE = tl.constexpr(POSSIBLE)


@triton.jit
def wait_for_predecessors():
    """Everything before this kernel is done from here on."""
    if _POSSIBLE:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_and_make_way():
    """The same, and the next kernel may take its place beside this one. Right for short kernels; beside the large tiles
    of a product with several rows it gets in the way.
    """
    if _POSSIBLE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def make_way():
    """The next kernel may be prepared beside this one, which has only its results left to write."""
    if _POSSIBLE:
        tl.extra.cuda.gdc_launch_dependents()
