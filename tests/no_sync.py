"""Running as if a CUDA graph were being captured, without a GPU: nothing may look at values on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LOOKS = frozenset(
    {
        "_local_scalar_dense",  # item, tolist, bool(tensor), int(tensor)
        "nonzero",
        "nonzero_static",
        "masked_select",
        "unique_consecutive",
        "unique_dim",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "histc",
    }
)
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})


class _State:
    """Whether looks are refused at this moment, and plain numbers that became tensors while they were."""

    refused = False
    numbers: tuple[torch.Tensor, ...] = ()


class NoLooking(TorchDispatchMode):
    """Refuses every op whose result, or whose shape, would have to be fetched from a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _State.refused:
            _check(func, args, kwargs)
        return func(*args, **kwargs)


def _check(func: Any, args: tuple, kwargs: dict) -> None:
    name = func.overloadpacket.__name__
    assert name not in LOOKS, f"{func} looks at values on the host"
    if name in INDEXING:
        masks = (part for part in args[1] if part is not None and part.dtype in (torch.bool, torch.uint8))
        assert next(masks, None) is None, f"{func} with a mask looks at values on the host"
        number = len(args) > 2 and any(args[2].data_ptr() == x.data_ptr() for x in _State.numbers)
        assert not number, f"{func} of a plain number would fetch it from the host: use index_fill_ or where"
    if name == "lift_fresh":  # a plain number can be filled in without a copy
        assert args[0].ndim == 0, "a tensor made of host values would be copied to the GPU: keep such constants"
        _State.numbers += (args[0],)
    if name == "repeat_interleave" and func._overloadname != "self_int":  # as often each: the shape is known
        assert kwargs.get("output_size") is not None, f"{func} without output_size looks at values on the host"


def _watched(name: str) -> Any:
    """A method of tensors that is no op on a CPU, and would wait for a GPU."""
    method = getattr(torch.Tensor, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        assert not _State.refused, f"{name}() looks at values on the host"
        return method(*args, **kwargs)

    return called


@contextmanager
def no_looking() -> Iterator[None]:
    """Values may not be looked at, as where a step is captured; what looks all the same fails."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("draftwood.links.LOOKED_AT", frozenset()))
        for name in ("tolist", "numpy", "__array__"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, _watched(name)))
        stack.enter_context(NoLooking())
        stack.enter_context(mock.patch.object(_State, "refused", True))
        stack.enter_context(mock.patch.object(_State, "numbers", ()))
        yield


@contextmanager
def looking() -> Iterator[None]:
    """Inside `no_looking`, for what only a test does: a source of randomness that enumerates all outcomes."""
    with mock.patch.object(_State, "refused", False):
        yield
