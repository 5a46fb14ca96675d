"""The small kernels that steps begin and end with, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood.cache.batch_state import BatchState, StepInputs
from draftwood.cache.row_settings import RowSettings
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.points import PointTree
from draftwood.ops.cuda.batch_state import closed, opened
from draftwood.ops.cuda.choice import likeliest, ranked
from draftwood.ops.cuda.lookup import suffix_lookup
from draftwood.ops.cuda.softmax import tempered as by_kernel
from draftwood.ops.cuda.staging import staged as staged_by_kernel
from draftwood.ops.lookup import reference_lookup
from draftwood.ops.lookup import suffix_lookup as on_any_device
from draftwood.ops.softmax import tempered
from draftwood.ops.staging import staged
from draftwood.protocols import BatchView, StepMode
from draftwood.request import SamplingParams
from draftwood.tree import TokenTree, Verdict
from no_sync import no_looking

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("linear", [True, False])
def test_rows_are_staged_as_torch_says(linear: bool) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 63, 64, 65, 200])
    table = torch.randperm(6 * 5).view(6, 5)
    index = torch.arange(-3, 37).expand(6, 40).contiguous()
    position = torch.randint(-2, 12, (6, 40))
    want = staged(lengths, table, index, position, 1, 64, 201, linear)
    parts = (part.to(DEVICE) for part in (lengths, table, index, position))
    for got, reference in zip(staged_by_kernel(*parts, 1, 64, 201, linear), want, strict=True):
        assert torch.equal(got.cpu(), reference)


@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_the_last_place_of_the_longest_end_is_found(nodes: int) -> None:
    torch.manual_seed(nodes)
    history = torch.randint(0, 3, (9, 2100))
    history[4] = torch.arange(2100)  # nothing ever comes again
    rows = torch.tensor([0, 3, 4, 8, 8, 5])
    lengths = torch.tensor([2050, 40, 1000, 1, 2, 7])
    want, alike = reference_lookup(history[rows], lengths, nodes, 4, 2)
    found = suffix_lookup(history.to(DEVICE), rows.to(DEVICE), lengths.to(DEVICE), nodes, 4, 2)
    got, got_alike = (part.cpu() for part in found)
    assert torch.equal(got, want)
    assert torch.equal(got_alike, alike)
    assert set(alike.tolist()) >= {0, 4}
    assert (want[0] >= 0).any()
    assert (want[2] == -1).all()
    assert (want[3] == -1).all()


def state_with(history: torch.Tensor, device: str) -> BatchState:
    batch_state = BatchState(4, history.shape[1], 16, 99, torch.device(device))
    batch_state.history[:4] = history.to(device)
    batch_state.length[:4] = torch.tensor([5, 17, 1, 30], device=device)
    batch_state.seed[:4] = torch.tensor([-3, 1 << 60, 7, 0], device=device)
    batch_state.sampling[:4] = torch.tensor(SAMPLING, dtype=torch.float64, device=device)
    batch_state.block_table[:4] = torch.arange(4 * batch_state.block_table.shape[1], device=device).view(4, -1)
    return batch_state


SAMPLING = [[0.0, 1 << 31, 1.0, 0.0], [0.7, 40, 0.9, 0.05], [1.0, 5, 1.0, 0.0], [1.3, 1 << 31, 0.5, 0.1]]


def view_of(state: BatchState, rows: torch.Tensor) -> BatchView:
    flat = torch.cat([rows, torch.zeros(4 * len(rows), dtype=torch.int64)])
    return state.view(StepInputs.over(flat, len(rows), 0), StepMode(), state.num_pages)


# Trees of one size, absent nodes included, and trees of different sizes.
EVEN = TokenTree.of_points([([0] * 4, [-1, 0, 1, 2])] * 5)
RAGGED = TokenTree.of_points([([0] * n, list(range(-1, n - 1))) for n in (4, 1, 4, 3, 2)])
GIVEN = torch.tensor([2, 0, 3, 1, 0])


@pytest.mark.parametrize(
    ("tree", "absent", "path"),
    [
        (EVEN, [3, 7], [[0, 1, 2, -1], [4, -1, -1, -1], [8, 9, 10, 11], [12, 14, -1, -1], [16, -1, -1, -1]]),
        (RAGGED, [], [[0, 1, 2, -1], [4, -1, -1, -1], [5, 6, 7, 8], [9, 10, -1, -1], [12, -1, -1, -1]]),
    ],
    ids=["even", "ragged"],
)
def test_a_step_opens_and_closes_as_torch_says(tree: TokenTree, absent: list[int], path: list[list[int]]) -> None:
    torch.manual_seed(1)
    history = torch.randint(0, 1000, (4, 40))
    want, got = state_with(history, "cpu"), state_with(history, DEVICE)
    rows = torch.tensor([3, 0, 4, 1, 4])
    for pages in (1, want.num_pages):
        kernel = opened(
            rows.to(DEVICE), got.length, got.seed, got.sampling, got.history, got.block_table[:, :pages]
        )  # fmt: skip
        for ours, theirs in zip(kernel, want._gathered(rows, pages), strict=True):
            assert torch.equal(ours.cpu(), theirs)
    tokens = torch.randint(0, 1000, (tree.num_nodes,))
    tokens[absent] = -1
    verdict = Verdict(torch.tensor(path), GIVEN, torch.tensor([11, 12, 13, 14, 15]))
    usable = torch.tensor([True, True, False, True, True])
    tree, view = replace(tree, tokens=tokens), view_of(want, rows)
    before = view.lengths.tolist()
    outcome = want.advance(view, tree, verdict, usable)
    parts = (rows, view.lengths, tokens, tree.offsets, verdict.path, verdict.length, verdict.bonus, usable)
    ours = closed(*(part.to(DEVICE) for part in parts), got.history, got.length, got.padding_row)
    assert got.length.tolist() == want.length.tolist()
    assert ours.shape == outcome.shape == (5, 7)
    for b, (row, accepted) in enumerate(zip(rows.tolist(), verdict.length.tolist(), strict=True)):
        assert ours[b, : 4 + accepted].tolist() == outcome[b, : 4 + accepted].tolist()
        there = tokens[tree.offsets[b] + 1 : tree.offsets[b + 1]] >= 0
        gained = tokens[path[b][1 : 1 + accepted]].tolist()
        assert outcome[b, : 4 + accepted].tolist() == [accepted, 11 + b, int(there.sum()), int(usable[b]), *gained]
        if row != want.padding_row:
            length = int(want.length[row])
            assert length == before[b] + accepted + 1
            assert want.history[row, before[b] : length].tolist() == [*gained, 11 + b]
            assert got.history[row, :length].tolist() == want.history[row, :length].tolist()


def test_a_new_sequence_finds_no_pages_of_others() -> None:
    batch_state = BatchState(1, 80, 16, 99, torch.device(DEVICE))
    settings = RowSettings(SamplingParams(), 0, 2, 80, 8)
    batch_state.add(7, [1, 2], settings)
    batch_state.update_block_tables({7: [3, 4, 5]})
    assert batch_state.block_table[0].tolist() == [3, 4, 5, 99, 99]
    assert batch_state.most_pages([7]) == 3
    batch_state.remove(7)
    batch_state.add(8, [1, 2], settings)
    batch_state.update_block_tables({8: [6]})
    assert batch_state.block_table[0].tolist() == [6, 99, 99, 99, 99]


@pytest.mark.parametrize("vocabulary", [13, 2048, 5000])
def test_the_likeliest_token_is_the_first_of_the_best(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randint(-5, 6, (3, 4, vocabulary)).float()
    logits[0, 1] = float("-inf")
    logits[0, 1, -1] = -3.0
    want = [[row.index(max(row)) for row in rows] for rows in logits.tolist()]
    assert likeliest(logits.to(DEVICE)).tolist() == want
    if DEVICE == "cuda":  # the interpreter warns of it
        logits[2, 2] = float("nan")
        assert 0 <= int(likeliest(logits.to(DEVICE))[2, 2]) < vocabulary


@pytest.mark.parametrize(("vocabulary", "count"), [(5, 4), (2049, 3), (5000, 16)])
def test_ranks_are_those_of_a_stable_sort(vocabulary: int, count: int) -> None:
    """Equal ones come in their order, also where nothing is left but what has no chance."""
    torch.manual_seed(vocabulary)
    logits = torch.randint(-9, 9, (2, 3, vocabulary)).float()
    logits[1, 1, 1:] = float("-inf")
    tokens = torch.arange(vocabulary).mul(3).add(1)
    want = logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    assert torch.equal(ranked(logits.to(DEVICE), count).cpu(), want)
    assert torch.equal(ranked(logits.to(DEVICE), count, tokens.to(DEVICE)).cpu(), tokens[want])


@pytest.mark.parametrize("vocabulary", [13, 2048, 5000])
def test_distributions_at_a_temperature_are_torchs(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = 8 * torch.randn(4, vocabulary)
    logits[1, : vocabulary // 2] = float("-inf")  # a whole part of it, where there are parts
    temperature = torch.tensor([1.0, 0.3, 0.0, 7.0])
    got = by_kernel(logits.to(DEVICE), temperature.to(DEVICE)).cpu()
    torch.testing.assert_close(got, tempered(logits, temperature), rtol=2e-6, atol=1e-9)
    assert got[2].sum() == 1
    assert got[2].argmax() == logits[2].argmax()


def test_looking_up_and_staging_look_at_no_values() -> None:
    history, rows, lengths = torch.randint(0, 3, (3, 40)), torch.tensor([2, 0]), torch.tensor([30, 7])
    index = torch.arange(4).expand(2, 4)
    found, _ = on_any_device(history, rows, lengths, 5, 4, 2)
    with no_looking():
        assert on_any_device(history, rows, lengths, 5, 4, 2)[0].shape == (2, 5)
        blind, _ = on_any_device(history, rows, lengths, 5, 4, 2)
        staged(lengths, history, index, index, 0, 16, 99, False)
    assert torch.equal(blind, found)
    assert torch.equal(found, reference_lookup(history[rows], lengths, 5, 4, 2)[0])


def test_the_device_finds_what_the_host_finds() -> None:
    """`ops.lookup` and the n-gram drafter's index are two ways to the same guesses."""
    torch.manual_seed(5)
    for length in (1, 2, 3, 9, 60, 200):
        text = torch.randint(0, 4, (length,)).tolist()
        tree = PointTree(text[-1], 5, 5)
        NgramDrafter(nodes=5, longest=4, shortest=2).fill(tree, 0, text)
        found = reference_lookup(torch.tensor([text]), torch.tensor([length]), 5, 4, 2)[0][0].tolist()
        assert [token for token in found if token >= 0] == tree.tokens[1:]
