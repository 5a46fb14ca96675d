"""Ranks: processes that compute one model together, each with a part of every layer, or with some of the layers.

Sums, parts and rows travel by NCCL between GPUs, else by gloo; orders and findings always by gloo, so that a rank which
has ended is noticed as a closed connection. No process group of torch's own is made or used: a program may have one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from draftwood.errors import DraftwoodError, InvalidRequest
from draftwood.machine import launched_size

FOREVER = timedelta(days=30)  # an idle engine sends no orders
SHORT = 2040  # bytes of a message that travels in one piece
ORDERS, ROWS, FINDINGS = range(3)  # what one rank sends to another; findings have numbers, counted from there
AHEAD = (8, 8, 256)  # of each kind, that may wait to be received before their sender waits as well
NUMBERS = 1 << 20  # of findings, after which they begin again
TOGETHER = 600.0  # seconds that ranks wait for each other at start
log = logging.getLogger(__name__)
dist: Any = torch.distributed  # the types that come with it lack most of what its groups can do
Store = Any
_LOST = "lost"  # the store's key for why a rank has ended


class RankLost(DraftwoodError):
    """The ranks cannot go on together: one has ended, or they no longer compute the same."""

    code = "rank_lost"


class Ranks(Protocol):
    """What a model asks of the other ranks; every rank asks the same, in the same order."""

    rank: int
    size: int

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, with the same bits on each; may be written over the part."""
        ...

    def side_by_side(self, part: Tensor) -> Tensor:
        """All ranks' parts. [N, n] -> [N, size n]."""
        ...


class Alone:
    """One process that has all of the model."""

    rank, size = 0, 1

    def sum(self, part: Tensor) -> Tensor:
        """The part is all there is."""
        return part

    def side_by_side(self, part: Tensor) -> Tensor:
        """The part is all there is."""
        return part


ALONE = Alone()


class ProcessRanks:
    """Ranks that are processes and know each other by a store."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._store = dist.PrefixStore("draftwood", store)
        self._orders = dist.ProcessGroupGloo(dist.PrefixStore("orders", self._store), rank, size, FOREVER)
        self._tensors = self._orders if device.type == "cpu" else self._between_gpus()
        self._posted: dict[tuple[int, int], deque[tuple[Any, Tensor]]] = defaultdict(deque)

    def _between_gpus(self) -> Any:
        store, options = dist.PrefixStore("tensors", self._store), dist.ProcessGroupNCCL.Options()
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def sum(self, part: Tensor) -> Tensor:
        """By an all-reduce, in place; within a CUDA graph it is captured with the kernels around it."""
        part = part.contiguous()
        with self._explained():
            self._tensors.allreduce([part]).wait()
        return part

    def side_by_side(self, part: Tensor) -> Tensor:
        """By an all-gather."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with self._explained():
            self._tensors.allgather([parts], [part]).wait()
        return torch.cat(parts, -1)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        own = torch.zeros(self.size, dtype=torch.int64)
        own[self.rank] = number
        with self._explained():
            self._orders.allreduce([own]).wait()
        return int(own.min())

    def post(self, tensor: Tensor, to: int, what: int = ROWS) -> None:
        """Send a tensor without waiting until it is received; it must not be written to any more."""
        group, kind = self._tensors if what == ROWS else self._orders, min(what, FINDINGS)
        posted = self._posted[to, kind]
        with self._explained():
            posted.append((group.send([tensor], to, what), tensor))
            while len(posted) > AHEAD[kind]:
                posted.popleft()[0].wait()

    def receive(self, tensor: Tensor, source: int, what: int = ROWS) -> Tensor:
        """Wait for what a rank posts, and write it to `tensor`."""
        group = self._tensors if what == ROWS else self._orders
        with self._explained():
            group.recv([tensor], source, what).wait()
        return tensor

    def tell(self, tensors: Sequence[Tensor], number: int) -> None:
        """Post findings to all other ranks, by way of the host."""
        host = [tensor.cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        header = json.dumps([(str(t.dtype).removeprefix("torch."), t.shape) for t in host]).encode()
        parts = [torch.tensor([len(header)]).view(torch.uint8), torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        message = torch.cat([*parts, *(tensor.view(-1).view(torch.uint8) for tensor in host)])
        self._post_to_all(message, FINDINGS + number % NUMBERS)

    def told(self, source: int, number: int) -> list[Tensor]:
        """Wait for the next findings of a rank under a number; they are on the host."""
        message = self._message(source, FINDINGS + number % NUMBERS)
        at = 8 + int(message[:8].view(torch.int64))
        found = []
        for name, shape in json.loads(message[8:at].numpy().tobytes()):
            dtype: torch.dtype = vars(torch)[name]
            end = at + math.prod(shape) * dtype.itemsize
            found.append(message[at:end].clone().view(dtype).view(shape))
            at = end
        return found

    def say(self, order: Mapping[str, Any]) -> None:
        """Send an order to all other ranks, who may be behind by some."""
        self._post_to_all(torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8), ORDERS)

    def hear(self) -> dict[str, Any]:
        """Wait for the next order of rank 0."""
        return json.loads(self._message(0, ORDERS).numpy().tobytes())

    def delivered(self) -> None:
        """Wait until all that was posted is received."""
        with self._explained():
            for posted in self._posted.values():
                while posted:
                    posted.popleft()[0].wait()

    def _post_to_all(self, message: Tensor, what: int) -> None:
        short = torch.zeros(8 + SHORT, dtype=torch.uint8)
        short[:8] = torch.tensor([len(message)]).view(torch.uint8)
        short[8 : 8 + len(message)] = message[:SHORT]
        for other in range(self.size):
            if other != self.rank:
                self.post(short, other, what)
                if len(message) > SHORT:
                    self.post(message, other, what)

    def _message(self, source: int, what: int) -> Tensor:
        short = self.receive(torch.empty(8 + SHORT, dtype=torch.uint8), source, what)
        length = int(short[:8].view(torch.int64))
        if length <= SHORT:
            return short[8 : 8 + length]
        return self.receive(torch.empty(length, dtype=torch.uint8), source, what)

    def leave_word(self, reason: str) -> None:
        """Let the others know why this rank ends."""
        with suppress(RuntimeError):  # the store may have gone with rank 0
            self._store.set(_LOST, f"Rank {self.rank} has stopped: {reason}")

    def abort(self) -> None:
        """End what waits for a rank that is not there any more."""
        if self._tensors is not self._orders:
            self._tensors.abort()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(self._why(error)) from error

    def _why(self, error: RuntimeError) -> str:
        with suppress(RuntimeError):
            if self._store.check([_LOST]):
                return self._store.get(_LOST).decode()
        log.error("ranks: %s", error)
        return "A rank has ended or cannot be reached; its own messages say more."


def join(size: int, device: torch.device) -> ProcessRanks:
    """Meet the other ranks that were launched with this process."""
    if launched_size() != size:
        raise InvalidRequest(
            f"{launched_size()} processes were launched, and tp or pp is {size}: launch as many, or none and let "
            "rank 0 do it."
        )
    store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=TOGETHER)))
    store.set_timeout(timedelta(seconds=TOGETHER))
    return meet(store, rank, size, device)


def meet(
    store: Store, rank: int, size: int, device: torch.device, check: Callable[[], None] = lambda: None
) -> ProcessRanks:
    """Wait until every rank is there; `check` raises if one cannot come any more."""
    store.set(f"here/{rank}", "")
    until = time.monotonic() + TOGETHER
    while not store.check([f"here/{other}" for other in range(size)]):
        check()
        if time.monotonic() > until:
            raise RankLost(f"Not all of {size} ranks were there within {TOGETHER:g} seconds; their messages say why.")
        time.sleep(0.02)
    return ProcessRanks(store, rank, size, device)


def own_device(device: torch.device) -> torch.device:
    """A rank's own GPU of this machine, where GPUs are used."""
    if device.type != "cuda" or device.index is not None:
        return device
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= count:
        raise InvalidRequest(f"Rank {local} of this machine has no GPU: there are {count}. Lower tp or pp.")
    return torch.device("cuda", local)
