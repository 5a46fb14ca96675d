"""Pages that have left the device, in host memory: found again by their content, and copied back.

Copies run in order with the steps around them, so that a page is saved as the last step left it and is there before
the next one reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slotted:
    """Memory with a place for each of the cache's slots: keys and values, or what a drafter keeps of a token."""

    memory: Tensor
    dim: int  # that counts slots

    def page(self, number: int, size: int) -> Tensor:
        """The places of a page's slots."""
        return self.memory.narrow(self.dim, number * size, size)


class HostTier:
    """So many pages of everything that lies under the cache's slots; the one used least recently makes room."""

    def __init__(
        self, parts: Sequence[Slotted], before: Sequence[Callable[[], None]], page_size: int, num_pages: int
    ) -> None:
        self._parts, self._before = parts, before  # drafters add theirs when they meet the target
        self._page_size = page_size
        self._kept: list[Tensor] = []  # of each part [pages, …]
        self._free = list(range(num_pages))
        self._num_pages = num_pages
        self._places: OrderedDict[int, int] = OrderedDict()  # key of a content -> its place, least recently used first

    @property
    def num_bytes(self) -> int:
        """Host memory, once a page was saved."""
        return sum(kept.nbytes for kept in self._kept)

    def save(self, page: int, key: int) -> int | None:
        """Keep what a page holds under `key`; returns the key that had to go for it."""
        dropped = None
        self._write_what_waits()
        if not self._kept:
            self._kept = [self._room_for(part) for part in self._parts]
        if not self._free:
            dropped, place = self._places.popitem(last=False)
            self._free.append(place)
        place = self._places[key] = self._free.pop()
        for part, kept in zip(self._parts, self._kept, strict=True):
            kept[place].copy_(part.page(page, self._page_size), non_blocking=True)
        return dropped

    def load(self, key: int, page: int) -> None:
        """Put it into another page; it is kept no longer."""
        self._write_what_waits()
        place = self._places.pop(key)
        for part, kept in zip(self._parts, self._kept, strict=True):
            part.page(page, self._page_size).copy_(kept[place], non_blocking=True)
        self._free.append(place)

    def touch(self, key: int) -> None:
        """What has this key goes last."""
        self._places.move_to_end(key)

    def drop(self, key: int) -> None:
        """Keep it no longer."""
        self._free.append(self._places.pop(key))

    def _write_what_waits(self) -> None:
        for write in self._before:
            write()

    def _room_for(self, part: Slotted) -> Tensor:
        shape = (self._num_pages, *part.page(0, self._page_size).shape)
        return torch.empty(shape, dtype=part.memory.dtype, pin_memory=part.memory.is_cuda)
