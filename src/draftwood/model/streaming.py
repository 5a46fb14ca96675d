"""Layers one at a time: all of them on the device, or some of them brought there as they are needed.

Layers that are away lie as flat buffers in host memory (a GPU's, pinned) or in a file that is mapped (a CPU's). Two
places on the device take them in turn: while one layer is computed, the next is copied to the other place. What is
computed does not change, and neither does a bit of it.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftwood.errors import InvalidRequest
from draftwood.machine import advise_home, spilled_memory
from draftwood.model.layers import tensors_of

L = TypeVar("L")
L_co = TypeVar("L_co", covariant=True)
ALIGNED = 256  # bytes; kernels read wide words


class Layers(Protocol[L_co]):
    """The layers of a model, in order."""

    def get(self, i: int) -> L_co:
        """The i-th layer, on the device, until the layer after the next is asked for."""
        ...

    def prefetch(self, i: int) -> None:
        """The i-th layer will be asked for next; behind the last comes the first again."""
        ...

    def part(self, layers: Sequence[int]) -> Layers[L_co]:
        """Some of them."""
        ...

    @property
    def resident(self) -> Sequence[L_co]:
        """Those that are always on the device: the first ones."""
        ...

    @property
    def held(self) -> Iterable[object]:
        """All that takes memory of the device."""
        ...


@dataclass(frozen=True)
class ResidentLayers(Generic[L]):
    """All on the device."""

    resident: Sequence[L]

    def get(self, i: int) -> L:
        """It is there."""
        return self.resident[i]

    def prefetch(self, i: int) -> None:
        """It is there."""

    def part(self, layers: Sequence[int]) -> Layers[L]:
        """Some of them."""
        return ResidentLayers([self.resident[i] for i in layers])

    @property
    def held(self) -> Iterable[object]:
        """All of them."""
        return self.resident


def require_resident(layers: Sequence[int], count: int) -> None:
    """Refuse to make a model of layers that are away."""
    if any(i >= count for i in layers):
        raise InvalidRequest(
            f"{count} of this model's layers stay on the device, and a drafter needs layer {max(layers) + 1}: lower "
            "offload."
        )


class Copies(Protocol):
    """Copies to two places on the device beside computation."""

    def begin(self, place: int, source: Tensor, target: Tensor) -> None:
        """Copy once everything that was computed so far is done with the place."""
        ...

    def finish(self, place: int) -> None:
        """What is computed from now on sees the copy."""
        ...


class CudaCopies:
    """On a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._ready = [torch.cuda.Event() for _ in range(2)]

    def begin(self, place: int, source: Tensor, target: Tensor) -> None:
        """Asynchronously: the source is pinned."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            self._ready[place].record()

    def finish(self, place: int) -> None:
        """Let the stream that computes wait, and not the host."""
        torch.cuda.current_stream().wait_event(self._ready[place])


class HostCopies:
    """By a thread: reading a mapped file waits for the disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "draftwood-layers")
        self._under_way: list[Future[object]] = [Future(), Future()]

    def begin(self, place: int, source: Tensor, target: Tensor) -> None:
        """A CPU has computed what it was told."""
        # By NumPy: a second thread that computes with torch would have a team of threads of its own.
        self._under_way[place] = self._thread.submit(np.copyto, target.numpy(), source.numpy())

    def finish(self, place: int) -> None:
        """Wait; what the disk says comes up here."""
        self._under_way[place].result()


@dataclass(frozen=True)
class _Away:
    """A layer that is not on the device."""

    data: Tensor  # [bytes] uint8 on the host
    layer: Any  # the same with its tensors' shapes alone
    begins: tuple[int, ...]  # of each tensor in the data


@dataclass
class StreamedLayers(Generic[L]):
    """The first layers on the device, the others brought there in turn."""

    resident: Sequence[L]
    away: Sequence[_Away]
    places: tuple[Tensor, Tensor]
    copies: Copies
    _holds: list[int | None] = field(default_factory=lambda: [None, None])  # the layer in each place, or on its way
    _there: list[bool] = field(default_factory=lambda: [False, False])  # it was waited for
    _used: int = 1  # the place that was asked for last
    _made: dict[tuple[int, int], L] = field(default_factory=dict)  # layers over the tensors of a place

    def get(self, i: int) -> L:
        """Waits for a copy that is on its way; begins one where nobody has."""
        if i < len(self.resident):
            return self.resident[i]
        self._bring(i)
        place = self._holds.index(i)
        if not self._there[place]:
            self.copies.finish(place)
            self._there[place] = True
        self._used = place
        if (i, place) not in self._made:
            away = self.away[i - len(self.resident)]
            self._made[i, place] = _placed(away.layer, self.places[place], away.begins)
        return self._made[i, place]

    def prefetch(self, i: int) -> None:
        """Of the layers from the i-th on, the first that is away begins to come."""
        count = len(self.resident) + len(self.away)
        self._bring(max(i % count, len(self.resident)))

    def _bring(self, i: int) -> None:
        if i in self._holds:
            return
        place = 1 - self._used
        if self._holds[place] is not None and not self._there[place]:
            self.copies.finish(place)  # asked for and never used: copies to one place must not overtake each other
        data = self.away[i - len(self.resident)].data
        self._holds[place], self._there[place] = i, False
        self.copies.begin(place, data, self.places[place][: len(data)])

    def part(self, layers: Sequence[int]) -> Layers[L]:
        """Some of them, if they are on the device."""
        require_resident(layers, len(self.resident))
        return ResidentLayers([self.resident[i] for i in layers])

    @property
    def held(self) -> Iterable[object]:
        """The resident ones, and the places."""
        return [*self.resident, *self.places]


def load_layers(make: Callable[[int], L], count: int, offload: float, device: torch.device) -> Layers[L]:
    """Layers as `make` loads them, the last ones away: a share of all (up to 1), or so many bytes.

    At most one that will be away is on the device at a time.
    """
    if not offload:
        return ResidentLayers([make(i) for i in range(count)])
    store = _pinned if device.type == "cuda" else _spilled
    away: list[_Away] = []
    wanted = round(offload * count) if offload <= 1 else count
    while len(away) < max(1, wanted) and (offload <= 1 or sum(len(layer.data) for layer in away) < offload):
        away.insert(0, _taken_away(make(count - 1 - len(away)), store))
    largest = max(len(layer.data) for layer in away)
    places = tuple(torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2))
    resident = [make(i) for i in range(count - len(away))]
    copies = CudaCopies(device) if device.type == "cuda" else HostCopies()
    return StreamedLayers(resident, away, (places[0], places[1]), copies)


def _taken_away(layer: Any, store: Callable[[int], Tensor]) -> _Away:
    begins, end = [], 0
    tensors = list(tensors_of([layer]))
    for tensor in tensors:
        begins.append(end)
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    data = store(end)
    for tensor, begin in zip(tensors, begins, strict=True):
        data[begin : begin + tensor.nbytes].copy_(_as_bytes(tensor))
    shapes = _with_tensors(layer, (torch.empty_like(tensor, device="meta") for tensor in tensors))
    return _Away(data, shapes, tuple(begins))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _placed(layer: L, place: Tensor, begins: Sequence[int]) -> L:
    """The layer with its tensors in `place`."""

    def views() -> Iterator[Tensor]:
        for shape, begin in zip(tensors_of([layer]), begins, strict=True):
            yield place[begin : begin + shape.nbytes].view(shape.dtype).view(shape.shape)

    return _with_tensors(layer, views())


def _with_tensors(holder: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of an object that holds other tensors in the order of `tensors_of`."""
    if isinstance(holder, Tensor):
        return next(tensors)
    if isinstance(holder, tuple):
        return tuple(_with_tensors(part, tensors) for part in holder)
    if next(tensors_of([holder]), None) is None:
        return holder
    other = copy.copy(holder)
    for name, part in vars(holder).items():
        object.__setattr__(other, name, _with_tensors(part, tensors))
    return other


def _pinned(num_bytes: int) -> Tensor:
    """Host memory that a GPU copies from by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _spilled(num_bytes: int) -> Tensor:
    """Memory that may leave for the disk."""
    return torch.frombuffer(spilled(num_bytes), dtype=torch.uint8)


def spilled(num_bytes: int) -> mmap.mmap:
    """The same as a mapping, what goes wrong in the user's words."""
    try:
        return spilled_memory(num_bytes)
    except OSError as error:
        raise InvalidRequest(f"Layers could not be written to disk: {advise_home(error)}.") from error
