"""Experts of transformers' modules where the host may not look at which are chosen: on a GPU, and captured there."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from draftwood.links import may_look

EXPERTS = "draftwood_experts"  # as experts implementation


def _run_experts(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Expert by expert as the module itself does where the host may look; on a GPU by our grouped products."""
    if may_look(hidden):
        return inspect.unwrap(type(module).forward)(module, hidden, chosen, shares)
    if hidden.device.type != "cuda" or not _in_rows(module):
        return batched_mm_experts_forward(module, hidden, chosen, shares)
    from draftwood.ops.cuda.experts import run_grouped  # Triton is there where CUDA is

    return run_grouped(hidden, chosen, shares, module.gate_up_proj, module.down_proj, module._apply_gate)


def _in_rows(module: nn.Module) -> bool:
    """Whether experts' matrices are [out, in], gates and ups in one, and nothing else."""
    held = vars(module)
    return bool(held["has_gate"]) and not (held["has_bias"] or held["is_transposed"] or held["has_post_expert_norm"])


ExpertsInterface.register(EXPERTS, _run_experts)
