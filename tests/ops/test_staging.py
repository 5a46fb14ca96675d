"""The kernels that rounds begin with, against plain torch."""

from __future__ import annotations

import pytest
import torch

from draftwood.ops.cuda.lookup import suffix_lookup
from draftwood.ops.cuda.staging import staged as staged_by_kernel
from draftwood.ops.lookup import reference_lookup
from draftwood.ops.staging import staged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("linear", [True, False])
def test_rows_are_staged_as_torch_says(linear: bool) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 63, 64, 65, 200])
    table = torch.randperm(6 * 5).view(6, 5)
    index = torch.arange(-2, 38).expand(6, 40).contiguous()
    position = torch.randint(-2, 12, (6, 40))
    want = staged(lengths, table, index, position, 64, 201, linear)
    parts = (part.to(DEVICE) for part in (lengths, table, index, position))
    for got, reference in zip(staged_by_kernel(*parts, 64, 201, linear), want, strict=True):
        assert torch.equal(got.cpu(), reference)


@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_the_last_place_of_the_longest_end_is_found(nodes: int) -> None:
    torch.manual_seed(nodes)
    history = torch.randint(0, 3, (9, 2100))
    history[4] = torch.arange(2100)  # nothing ever comes again
    rows = torch.tensor([0, 3, 4, 8, 8, 5])
    lengths = torch.tensor([2050, 40, 1000, 1, 2, 7])
    want = reference_lookup(history[rows], lengths, nodes, 4, 2)
    got = suffix_lookup(history.to(DEVICE), rows.to(DEVICE), lengths.to(DEVICE), nodes, 4, 2).cpu()
    assert torch.equal(got, want)
    assert (want[0] >= 0).any()
    assert (want[2] == -1).all()
    assert (want[3] == -1).all()
