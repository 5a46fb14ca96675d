"""Attention of transformers' modules over our pages: `_attend` answers every layer's call, masks are laws.

Where the host may look, sequence by sequence; else, as on a GPU and in captured steps, all rows at once: layers that
are alike and see all of a text, or a window of it, on the attention of our own decoder; what that does not know (keys
and values of two sizes, chunks, biases) from gathered keys, for some rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from draftwood.batch import AttentionShape
from draftwood.errors import CheckpointError
from draftwood.model.universal_rows import Law, LayerShape, MaskLaw, Step, here
from draftwood.ops.reference import weigh

CALLED = "draftwood_rows"  # as attention implementation: layers call `_attend`
GATHERED = "draftwood_pages"  # layers compute by themselves, from gathered keys and a mask
_blocked = F.scaled_dot_product_attention  # torch's blocked kernel, which never writes all scores out
_TRIED = 32  # rows of a law, of the first ones and of all
_AT_ONCE = 64  # rows whose keys are gathered together


def _law_of(*_: Any, mask_function: Law, **__: Any) -> MaskLaw:
    return MaskLaw(mask_function)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskLaw | Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, H, N, D], [1, K, N, D], [1, K, N, Dv] -> [1, N, H, Dv]."""
    step = here()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    other = step.beside(module, query, key, value, scale)
    if other is not None:
        return other, None
    if step.pages is None:
        require_window(attention_mask, sliding_window)
        plain, window = _known_window(step, attention_mask)
        step.found.append(LayerShape(key.shape[1], key.shape[-1], value.shape[-1], module, plain, window))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    if isinstance(attention_mask, Tensor):
        raise CheckpointError("a layer is given a mask that is not made of a law")
    call = step.next_call(module)
    step.write(call, key[0], value[0])
    bias = None if position_bias is None else position_bias[0]
    if bias is not None and bias.shape[-1] != step.seen.shape[1]:
        raise CheckpointError("a layer adds a bias to its scores that was not made for our keys")
    if not step.looks:
        mixed = _attend_paged(step, call, query[0], attention_mask, scale, softcap, s_aux, bias)
        return mixed.view(1, query.shape[2], query.shape[1], -1), None
    one = _attend_one if softcap is None and s_aux is None and bias is None else _attend_written_out
    rows = [one(step, call, i, query[0], attention_mask, scale, softcap, s_aux, bias) for i in range(len(step.slots))]
    return torch.cat(rows, 1).transpose(0, 1)[None].contiguous(), None


def require_window(mask: MaskLaw | Tensor | None, window: int | None) -> None:
    """Refuse a window that the mask's law does not have: texts of the self-check may be too short to show it."""
    if window is None:
        return
    row = torch.tensor(window)
    if not isinstance(mask, MaskLaw) or bool(mask(row, torch.zeros_like(row))):
        raise CheckpointError(f"a layer has a window of {window}, and its mask does not")


def _known_window(step: Step, law: MaskLaw | Tensor | None) -> tuple[bool, int | None]:
    """The same for every layer with the same mask."""
    if id(law) not in step.windows:
        step.windows[id(law)] = *window_of(law, step.longest), law  # which stays, and so does its id
    return step.windows[id(law)][:2]


def window_of(law: MaskLaw | Tensor | None, longest: int) -> tuple[bool, int | None]:
    """Whether rows see all positions up to their own, or a window of them, and how long that is."""
    if law is None:
        return True, None
    last, key = torch.tensor([max(longest, 1) - 1]), torch.arange(max(longest, 1))
    rows = torch.cat([key[:_TRIED], torch.linspace(0, longest - 1, _TRIED).long()])[:, None]
    try:
        if not isinstance(law, MaskLaw) or not longest:
            return False, None
        width = int(law(last[:, None], key).expand(1, longest).sum())
        same = law(rows, key).expand(len(rows), longest) == (key <= rows) & (key > rows - width)
    except (IndexError, RuntimeError):  # a law of a mask that was given for so many keys
        return False, None
    return bool(same.all()), None if width == longest else width


def _attend_one(step: Step, call: int, i: int, query: Tensor, law: MaskLaw | None, scale: float, *_: Any) -> Tensor:
    """The rows of one sequence, by torch's kernel. [H, n, Dv]."""
    low, high = step.offsets[i], step.offsets[i + 1]
    keys, values = step.read(call, step.runs[i])
    mask, own = step.part(law, i), query[None, :, low:high]
    if high - low == 1:  # the queries that share a key head are the rows of one small product
        grouped = own.view(1, len(keys), -1, query.shape[-1])
        mixed = _blocked(grouped, keys[None], values[None], attn_mask=mask, scale=scale)
        return mixed.view(query.shape[0], 1, -1)
    return _blocked(own, keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True)[0]


def _attend_written_out(
    step: Step,
    call: int,
    i: int,
    query: Tensor,
    law: MaskLaw | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """With what that does not know; a bias [H, N, keys] is added to scores. [H, n, Dv]."""
    mask = step.mask(law)
    low, high = step.offsets[i], step.offsets[i + 1]
    keys, values = step.read(call, step.runs[i])
    grouped = query[:, low:high].unflatten(0, (len(keys), -1))  # [K, H / K, n, D]
    scores = grouped @ keys[:, None].transpose(2, 3) * scale
    if bias is not None:
        scores = scores + bias[:, low:high, : keys.shape[1]].unflatten(0, (len(keys), -1))
    sink = None if sinks is None else sinks.view(*grouped.shape[:2], 1, 1)
    weights = weigh(scores, mask[low:high, : keys.shape[1]], softcap, sink)
    return (weights @ values[:, None]).flatten(0, 1)


def _gathered_mask(*_: Any, mask_function: Law, dtype: torch.dtype = torch.float32, **__: Any) -> Tensor:
    """A mask that is added to the scores of all sequences' keys, side by side. [1, 1, N, keys of all]."""
    step = here()
    own = step.mask(MaskLaw(mask_function))
    seen = own.new_zeros(len(own), sum(step.num_keys))
    first = 0
    for i, count in enumerate(step.num_keys):
        low, high = step.offsets[i], step.offsets[i + 1]
        seen[low:high, first : first + count] = own[low:high, :count]
        first += count
    added = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
    return added[None, None]


def _attend_paged(
    step: Step,
    call: int,
    query: Tensor,
    law: MaskLaw | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """[H, N, D] -> [N, H * Dv]."""
    assert step.layout is not None
    shape = step.layout.shapes[call]
    if step.layout.uniform and shape.plain and bias is None:
        own = AttentionShape(shape.window, scale, softcap, sinks is not None)
        return step.planned(own).run(call, query.transpose(0, 1), sinks=sinks)
    mask, sequences = step.mask(law), len(step.batch.tree_base)
    keys, values = (part.unflatten(1, (sequences, -1)) for part in step.read(call, step.every_slot))
    grouped = query.unflatten(0, (shape.kv_heads, -1))  # [K, G, N, D]
    sink = None if sinks is None else sinks.view(*grouped.shape[:2], 1, 1)
    mixed = []
    for first in range(0, query.shape[1], _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        scores = torch.einsum("kgnd,knsd->kgns", grouped[:, :, rows], keys[:, step.owner[rows]]) * scale
        if bias is not None:
            scores = scores + bias[:, rows].unflatten(0, (shape.kv_heads, -1))
        weights = weigh(scores, mask[rows], softcap, sink)
        mixed.append(torch.einsum("kgns,knsd->nkgd", weights, values[:, step.owner[rows]]).flatten(1))
    return torch.cat(mixed)


AttentionInterface.register(CALLED, _attend)
AttentionMaskInterface.register(CALLED, _law_of)
AttentionMaskInterface.register(GATHERED, _gathered_mask)
