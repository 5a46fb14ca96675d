"""Pages that have left the device, in host memory: found again by their content, and copied back.

Copies run in order with the steps around them, so that a page is saved as the last step left it and is there before
the next one reads it.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from draftwood.batch import Pages


class HostTier:
    """So many pages of keys and values; the one used least recently makes room."""

    def __init__(self, memory: Pages, num_pages: int) -> None:
        self._memory = memory
        store, size = memory.store, memory.page_size
        shape = (num_pages, *store.shape[:3], size, store.shape[4])
        pinned = store.device.type == "cuda"
        self._pages = torch.empty(shape, dtype=store.dtype, pin_memory=pinned)
        self._free = list(range(num_pages))
        self._places: OrderedDict[int, int] = OrderedDict()  # key of a content -> its place, least recently used first

    @property
    def num_bytes(self) -> int:
        """Host memory."""
        return self._pages.nbytes

    def save(self, page: int, key: int) -> int | None:
        """Keep what a page holds under `key`; returns the key that had to go for it."""
        dropped = None
        if not self._free:
            dropped, place = self._places.popitem(last=False)
            self._free.append(place)
        place = self._places[key] = self._free.pop()
        self._pages[place].copy_(self._on_device(page), non_blocking=True)
        return dropped

    def load(self, key: int, page: int) -> None:
        """Put it into another page; it is kept no longer."""
        place = self._places.pop(key)
        self._on_device(page).copy_(self._pages[place], non_blocking=True)
        self._free.append(place)

    def touch(self, key: int) -> None:
        """What has this key goes last."""
        self._places.move_to_end(key)

    def drop(self, key: int) -> None:
        """Keep it no longer."""
        self._free.append(self._places.pop(key))

    def _on_device(self, page: int) -> torch.Tensor:
        size = self._memory.page_size
        return self._memory.store[:, :, :, page * size : (page + 1) * size]
