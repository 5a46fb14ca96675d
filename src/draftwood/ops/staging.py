"""Positions, slots and masks of rows around the end of their sequences."""

from __future__ import annotations

from torch import Tensor


def staged(
    lengths: Tensor,
    table: Tensor,
    index: Tensor,
    position: Tensor,
    shift: int,
    page_size: int,
    highest: int,
    linear: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Position, slot and visible keys of rows whose key has number `index` [B, R] and whose position is `position`
    [B, R], both counted from `shift` behind their sequence's length [B]; `table` [B, P] are its pages. 3 x [B * R].

    A row of a text sees all keys up to its own, a node (not `linear`) the whole text. Nothing lies before the text,
    and no position beyond `highest`: what overshoots is never heard of.
    """
    if lengths.is_cuda:
        from draftwood.ops.cuda.staging import staged as launch

        return launch(lengths, table, index, position, shift, page_size, highest, linear)
    key = (lengths[:, None] + shift + index).clamp(min=0)
    page = table.gather(1, (key // page_size).clamp(max=table.shape[1] - 1))
    slots = page * page_size + key % page_size
    positions = (lengths[:, None] + shift + position).clamp(0, highest)
    visible = key + 1 if linear else lengths[:, None].expand_as(key)
    # One repeated number can be reshaped without being written out, and kernels count on its being written out.
    return positions.reshape(-1), slots.reshape(-1), visible.contiguous().view(-1)
