"""What a step reads and changes on the device: rows of the batch state, and accepted paths in the cache."""

from __future__ import annotations

import pytest
import torch

from draftwood.cache.batch_state import BatchState, StepInputs, input_numbers
from draftwood.cache.kv import KVCache, stage_trees
from draftwood.cache.row_settings import BIASES, STOPS, RowSettings, edits_on_device
from draftwood.protocols import BatchView, StepMode
from draftwood.request import SamplingParams
from draftwood.states import KeptPath
from draftwood.tree import TokenTree, Verdict
from no_sync import no_looking
from tiny import CPU, tiny_config
from trees import padded

PLAIN, EDITED = SamplingParams(), SamplingParams(logit_bias={5: 1.5, 2: -1.0}, presence_penalty=0.5, min_tokens=3)
LIMITED = StepMode(limited=True, truncates=True)


def state_of(*params: SamplingParams) -> BatchState:
    state = BatchState(4, 48, 16, 99, CPU)
    for i, own in enumerate(params):
        state.add(i, list(range(7, 11 + i)), RowSettings(own, 100 + i, 2, 40, 5, frozenset({1, 3})))
        state.update_block_tables({i: [2 * i, 2 * i + 1]})
    return state


def inputs_of(state: BatchState, *params: SamplingParams, batch: int) -> StepInputs:
    rows = [(row, 6 + i, 0, 0, 0) for i, row in enumerate(state.rows(range(len(params))))]
    edited = [i for i, own in enumerate(params) if edits_on_device(own)]
    numbers = input_numbers(rows, edited, [], (batch, 2, 0), state.padding_row)
    return StepInputs.over(torch.tensor(numbers), batch, 2)


def test_the_view_of_a_step_is_what_its_requests_say() -> None:
    params = (PLAIN, EDITED, SamplingParams(temperature=0.5, top_k=4, min_p=0.25))
    state = state_of(*params)
    inputs = inputs_of(state, *params, batch=4)
    with no_looking():
        view = state.view(inputs, LIMITED, 2)
    assert view.lengths.tolist() == [4, 5, 6, 1]
    assert view.roots.tolist() == [10, 11, 12, 0]
    assert view.seeds.tolist()[:3] == [100, 101, 102]
    assert view.temperature.tolist() == [0, 0, 0.5, 1]
    assert view.block_table.tolist() == [[0, 1], [2, 3], [4, 5], [99, 99]]
    assert view.truncation is not None
    assert view.truncation.top_k.tolist()[:3] == [1 << 31, 1 << 31, 4]
    assert view.truncation.min_p.tolist()[:3] == [0, 0, 0.25]
    assert view.max_nodes is not None
    assert view.max_depth is not None
    assert view.max_nodes.tolist() == [6, 7, 8, 0]
    assert view.max_depth.tolist() == [5, 5, 5, 0]
    edits = view.edits
    assert edits is not None
    assert edits.which.tolist() == [1, 1], "filled up with the first"
    assert dict(zip(edits.bias_tokens[0].tolist()[:2], edits.bias[0].tolist()[:2], strict=True)) == {5: 1.5, 2: -1.0}
    assert edits.bias[0].count_nonzero() == 2
    assert edits.penalties[0].tolist() == [1, 0.5, 0]
    assert set(edits.stop_tokens[0].tolist()) == {1, 3}
    assert (edits.min_lengths[0].item(), edits.prompt_lengths[0].item(), edits.lengths[0].item()) == (5, 2, 5)


def test_a_row_forgets_the_edits_of_its_last_sequence() -> None:
    state = state_of(EDITED)
    state.remove(0)
    state.add(9, [1, 2], RowSettings(PLAIN, 0, 2, 40, 5))
    assert state.rows([9]) == [0]
    tables = state.edits
    assert tables.bias[0].count_nonzero() == 0
    assert tables.penalties[0].tolist() == [1, 0, 0]
    assert tables.lengths[0].tolist() == [0, 2, 0]


def test_tables_grow_with_the_widest_request_and_say_so() -> None:
    state, version = state_of(EDITED), 0
    assert state.edits.version == version
    many = SamplingParams(logit_bias=dict.fromkeys(range(BIASES + 40), 1.0), min_tokens=1)
    state.add(1, [1], RowSettings(many, 0, 1, 40, 5, frozenset(range(STOPS + 30))))
    assert state.edits.version > version, "captured steps know where the tables were"
    assert state.edits.bias[1].sum() == BIASES + 40
    assert set(state.edits.stop_tokens[1].tolist()) == set(range(STOPS + 30))
    assert set(state.edits.stop_tokens[0].tolist()) == {1, 3}


TREES = [([1, 4, 2, 4], [-1, 0, 0, 2]), ([1], [-1]), ([2, 0, 2, 2], [-1, 0, 0, 1])]


@pytest.mark.parametrize("size", [4, 6])
def test_a_step_goes_on_as_well_without_a_look_at_values(size: int) -> None:
    params = (PLAIN, EDITED, PLAIN)
    tree, moved = padded(TokenTree.of_points(TREES), size)
    path = moved[torch.tensor([[0, 2, 3], [4, 0, 0], [5, 6, 8]])]
    verdict = Verdict(path, torch.tensor([2, 0, 1]), torch.tensor([31, 32, 33]))
    usable = torch.tensor([True, False, True])

    def advanced(state: BatchState, view: BatchView) -> tuple[torch.Tensor, ...]:
        return state.advance(view, tree, verdict, usable), state.history, state.length

    seen, blind = state_of(*params), state_of(*params)
    views = [state.view(inputs_of(state, *params, batch=3), StepMode(), 3) for state in (seen, blind)]
    want = advanced(seen, views[0])
    with no_looking():
        got = advanced(blind, views[1])
        stage_trees(views[1], tree, 16, 40, chain=False)
    assert all(torch.equal(own, other) for own, other in zip(got, want, strict=True))
    assert want[0][:, :4].tolist() == [[2, 31, 3, 1], [0, 32, 0, 0], [1, 33, 3, 1]]
    assert seen.history[0, 4:7].tolist() == [2, 4, 31]
    assert seen.length.tolist()[:3] == [7, 6, 8]


def test_accepted_paths_are_kept_without_a_look_at_values() -> None:
    """Nodes of other numbers move, those in their places and those that lie nowhere stay."""
    caches = [KVCache(tiny_config(), 12, 4, torch.float32, CPU) for _ in range(3)]
    want = caches[0].memory.store
    want.copy_(torch.randn(want.shape, generator=torch.Generator().manual_seed(1)))
    for cache in caches[1:]:
        cache.memory.store.copy_(want)
    table = torch.tensor([[3, 1, 7], [0, 2, 4], [5, 6, 8], [9, 10, 11]])
    base, length = torch.tensor([3, 6, 1, 9]), torch.tensor([3, 0, 2, 2])
    index = torch.tensor([[0, 2, 3, 6], [0, 4, 5, 6], [0, 1, 3, 0], [0, 2, 0, 0]])
    for b, (first, path, count) in enumerate(zip(base.tolist(), index.tolist(), length.tolist(), strict=True)):
        for step in range(1, 1 + count):
            to, at = (table[b, (first + i - 1) // 4] * 4 + (first + i - 1) % 4 for i in (step, path[step]))
            if path[step]:
                want[:, :, :, to] = caches[1].memory.store[:, :, :, at]
    path = KeptPath(table, base, index, length)
    caches[1].commit(path)
    with no_looking():
        caches[2].commit(path)
    owned = slice(0, 12 * 4)  # the scratch page may hold anything
    for cache in caches[1:]:
        assert torch.equal(cache.memory.store[:, :, :, owned], want[:, :, :, owned])
