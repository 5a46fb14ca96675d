"""Drafts from suffix automata, and several drafters' trees as one, against brute force."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from draftwood.assembly import build_lookup, is_lookup
from draftwood.drafters.automaton import MOST, NOWHERE, SuffixAutomaton
from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.points import HostDrafter, HostTrees
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafters.suffix import OVERHEAD, SharedTexts, SuffixDrafter
from draftwood.errors import InvalidRequest
from draftwood.protocols import HostView
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from test_host_drafters import agree_with_parents, batch_view, host_view, leaves, paths_of, proposal, proposed


def pieces(text: list[int], size: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[i : i + size]) for i in range(len(text) - size + 1))


def texts() -> list[list[int]]:
    rng = random.Random(3)
    some = [[rng.randrange(k) for _ in range(40)] for k in (1, 2, 3, 5) for _ in range(3)]
    return [*some, [0, 1] * 20, [1, 2, 3, 1, 2, 4, 1, 2, 3]]


@pytest.mark.parametrize("text", texts(), ids=lambda text: "".join(map(str, text[:8])))
def test_an_automaton_counts_every_piece_and_what_follows_it_while_the_text_grows(text: list[int]) -> None:
    automaton, last = SuffixAutomaton(), 0
    for end, token in enumerate(text, 1):
        last = automaton.append(last, token)
        if end % 7 and end != len(text):
            continue
        for size in range(1, end + 1):
            for piece, count in pieces(text[:end], size).items():
                place = NOWHERE
                for one in piece:
                    place = automaton.follow(place, one, end)
                assert place[1] == size
                assert automaton.counts[place[0]] == count
                after = {t: automaton.counts[s] for t, s in automaton.successors[place[0]].items()}
                assert after == {p[-1]: n for p, n in pieces(text[:end], size + 1).items() if p[:-1] == piece}


def test_an_automaton_of_several_texts_counts_in_all_of_them() -> None:
    automaton = SuffixAutomaton()
    for text in texts():
        automaton.extend(text)
    whole = sum((pieces(text, 3) for text in texts()), Counter())
    for piece, count in whole.items():
        place = NOWHERE
        for one in piece:
            place = automaton.follow(place, one, 3)
        assert (place[1], automaton.counts[place[0]]) == (3, min(count, MOST))


@pytest.mark.parametrize("longest", [1, 3, 100])
@pytest.mark.parametrize("text", texts(), ids=lambda text: "".join(map(str, text[:8])))
def test_the_longest_end_that_stood_in_the_text_before(text: list[int], longest: int) -> None:
    """Also after the automaton has read on, which may split the state of what was found."""
    automaton, last, place = SuffixAutomaton(), 0, NOWHERE
    for end, token in enumerate(text, 1):
        place = automaton.follow(place, token, longest)
        before = [n for n in range(1, min(end, longest + 1)) if pieces(text[: end - 1], n)[tuple(text[end - n : end])]]
        assert place[1] == max(before, default=0)
        last = automaton.append(last, token)
        state, length = automaton.settled(place)
        assert automaton.counts[state] == (pieces(text[:end], length)[tuple(text[end - length : end])] if length else 0)
        while place != NOWHERE:
            shorter = automaton.shortened(automaton.settled(place))
            assert shorter[1] < place[1]
            place = shorter
        place = (state, length)


def test_counts_stop_so_that_a_token_costs_a_bounded_number_of_steps() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([7] * 1000)
    assert max(automaton.counts) == MOST
    assert automaton.counts[automaton.follow(NOWHERE, 7, 1)[0]] == MOST
    assert automaton.size == 1000


def suffix(**settings) -> SuffixDrafter:
    return SuffixDrafter(**{"nodes": 9, "least": 0.0, "shared": 0, **settings})


def test_longest_match_first_and_the_likeliest_of_it() -> None:
    text = [1, 2, 3, 7, 0, 2, 3, 8, 0, 2, 3, 8, 5, 1, 2, 3]
    assert (7,) in proposal(suffix(nodes=1), text), "1 2 3 beats 2 3, though that was followed by 8 more often"
    assert (8,) in proposal(suffix(nodes=1, longest=2), text)
    assert proposal(suffix(shortest=4), text) == set()
    assert proposal(suffix(), [1, 2, 3, 4]) == set()


def test_trees_hold_the_likeliest_nodes_with_their_chances() -> None:
    text = [1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2]
    drafter = suffix(nodes=3, shortest=1)
    made = drafter.scored(host_view([text]), 3)
    assert made.chances is not None
    (tokens, parents), chances = made.trees[0], made.chances[0]
    assert chances == sorted(chances, reverse=True)
    assert all(0 < chances[n] <= chances[p] for n, p in enumerate(parents) if n)
    first = {tokens[n]: chances[n] for n, p in enumerate(parents) if p == 0}
    assert first[5] == max(first.values())
    wide = suffix(nodes=50, shortest=1).scored(host_view([text]), 50)
    assert wide.chances is not None
    tokens, parents = wide.trees[0]
    for node in range(len(tokens)):
        below = sum(wide.chances[0][child] for child, parent in enumerate(parents) if parent == node)
        assert below <= wide.chances[0][node] + 1e-9, "more than certain"


def test_what_is_less_likely_than_a_row_is_worth_is_left_out() -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2]
    drafter = suffix(nodes=6)
    made = drafter.scored(host_view([text]), 6)
    assert made.chances is not None
    least = sorted(made.chances[0])[len(made.chances[0]) // 2]
    for blind in (False, True):
        view = replace(batch_view([text]), min_accept_prob=least, may_look=not blind)
        drafter.prepare(host_view([text]), 1, 6)
        drafter.propose(view, 6, KeyedRng())
        drafter.prepare(host_view([text]), 1, 6)
        asked = drafter.propose(view, 6, KeyedRng())
        agree_with_parents(asked.tree)
        assert asked.survival is not None
        there = asked.tree.tokens >= 0
        assert sorted(asked.survival[there].tolist()) == sorted(c for c in made.chances[0] if c >= least)


@pytest.mark.parametrize("make", [suffix, lambda: CombinedDrafter([suffix(), NgramDrafter()], 9, 0.0)])
def test_limits_and_captured_trees(make) -> None:
    rng = random.Random(5)
    batch = [[rng.randrange(4) for _ in range(n)] for n in (3, 30, 60)]
    for limits in ({"nodes": 4}, {"depth": 2}, {"nodes": 0}, {"depth": 0}, {}):
        drafter = make()
        drafter.scored(host_view(batch), 9)  # chances are learnt from texts as they are read
        seen, blind = proposed(drafter, batch, 9, **limits), proposed(drafter, batch, 9, size=5, blind=True, **limits)
        assert [paths_of(seen, b) for b in range(3)] == [paths_of(blind, b) for b in range(3)]
        for b in range(3):
            paths = paths_of(seen, b)
            assert len(paths) <= limits.get("nodes", 9)
            assert all(len(path) <= limits.get("depth", 9) for path in paths)


def asking(seq_id: int, text: list[int], prompt: int, salt: str = "") -> HostView:
    view = host_view([text], params=(SamplingParams(cache_salt=salt),))
    return replace(view, seq_ids=(seq_id,), prompt_lengths=(prompt,))


def answered(drafter: HostDrafter, seq_id: int, text: list[int], prompt: int, salt: str = "") -> None:
    drafter.scored(asking(seq_id, text[:prompt], prompt, salt), drafter.max_nodes)
    drafter.scored(asking(seq_id, text, prompt, salt), drafter.max_nodes)
    drafter.release(seq_id)


def first_path(drafter: HostDrafter, seq_id: int, text: list[int], salt: str = "") -> list[int]:
    tokens, _ = drafter.scored(asking(seq_id, text, len(text), salt), drafter.max_nodes).trees[0]
    return tokens[1:]


@pytest.mark.parametrize("combined", [False, True])
def test_answers_are_shared_by_requests_of_one_salt_and_by_no_others(combined: bool) -> None:
    own = suffix(shared=4096)
    drafter = CombinedDrafter([own, NgramDrafter()], 9, 0.0) if combined else own
    answered(drafter, 1, [9, 8, 1, 2, 3, 4, 5], 2, "a")
    assert first_path(drafter, 2, [6, 1, 2], "a")[:3] == [3, 4, 5]
    assert first_path(drafter, 3, [6, 1, 2], "b") == []
    assert first_path(drafter, 4, [6, 1, 2]) == []
    answered(drafter, 5, [9, 8, 1, 2, 7, 7, 7], 2, "b")
    assert first_path(drafter, 6, [6, 1, 2], "a")[0] == 3
    assert first_path(drafter, 7, [6, 1, 2], "b")[0] == 7
    assert first_path(suffix(shared=0), 8, [6, 1, 2], "a") == []


def test_requests_without_room_for_drafts_are_not_read() -> None:
    drafter = suffix(shared=4096)
    drafter.scored(host_view([[1, 2, 1]], nodes=0), 9)
    assert drafter._readings == {}
    assert paths_of(proposed(drafter, [[1, 2, 1]], 1)) == {(2,)}
    drafter.scored(host_view([[1, 2, 1, 2, 3, 4]], nodes=0), 9)
    assert (3,) in paths_of(proposed(drafter, [[1, 2, 1, 2, 3, 4, 1, 2]], 9)), "it catches up"


def test_a_request_hears_of_answers_that_came_while_it_ran() -> None:
    drafter = suffix(shared=4096)
    assert first_path(drafter, 2, [6, 1, 2]) == []
    answered(drafter, 1, [9, 8, 1, 2, 3, 4, 5], 2)
    assert first_path(drafter, 2, [6, 1, 2])[:3] == [3, 4, 5]
    answered(drafter, 3, [9, 8, 1, 2, 3, 4, 6], 2)
    assert first_path(drafter, 2, [6, 1, 2, 3, 4])[0] in (5, 6)


def test_memory_stays_bounded_over_a_long_stream_of_requests() -> None:
    rng, size = random.Random(1), 2000
    drafter = CombinedDrafter([suffix(shared=size), NgramDrafter()], 6, 0.0)
    shared = drafter.sources[0].shared
    for seq_id in range(400):
        text = [rng.randrange(50) for _ in range(rng.randrange(3, 120))]
        answered(drafter, seq_id, text, 2, f"salt {rng.randrange(60)}")
        assert shared.held <= size
    assert len(shared._by_salt) <= size // OVERHEAD
    assert shared.held > size / 2, "hardly anything is kept"
    assert (drafter.sources[0]._readings, drafter._last, drafter.sources[1]._indices) == ({}, {}, {})
    assert all(len(calibration._records) < 60 for calibration in drafter._calibrations)


def test_what_was_not_used_longest_goes_first() -> None:
    shared = SharedTexts(4 * (OVERHEAD + 10))
    for salt in "abc":
        shared.add(salt, range(10))
    assert shared.of("a")
    shared.add("d", range(10))
    shared.add("e", range(10))
    assert [bool(shared.of(salt)) for salt in "abcde"] == [True, False, True, True, True]
    shared.add("e", range(10**6))
    assert shared.held <= shared.size
    assert shared.of("e"), "the end of a long answer is kept"
    nothing = SharedTexts(0)
    nothing.add("a", range(10))
    assert nothing.held == 0


class Sure(ScriptedDrafter):
    """Says the same always, as sure as it is told to be."""

    scores = True

    def __init__(self, path: list[int], chance: float) -> None:
        super().__init__(lambda tokens: [path], len(path))
        self.chance = chance

    def scored(self, view: HostView, nodes: int) -> HostTrees:
        trees = self.trees(view, nodes)
        return HostTrees(trees, [[self.chance**n for n in range(len(tokens))] for tokens, _ in trees])


def test_sources_are_merged_by_path_and_agreement_makes_likelier() -> None:
    drafter = CombinedDrafter([Sure([1, 2, 3], 0.5), Sure([1, 2, 4], 0.5), Sure([5], 0.25)], 5, 0.0)
    made = drafter.scored(host_view([[0]]), 5)
    assert made.chances is not None
    (tokens, parents), chances = made.trees[0], made.chances[0]
    assert (tokens, parents) == ([0, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 2, 0])
    assert chances == [1, 0.75, 0.75 * 0.75, 0.75 * 0.75 * 0.5, 0.75 * 0.75 * 0.5, 0.25]


def test_a_source_that_is_wrong_loses_its_place() -> None:
    right, wrong = Sure([1, 1], 0.5), Sure([2, 2], 0.9)
    drafter = CombinedDrafter([wrong, right], 1, 0.0)
    text = [0]
    assert leaves(proposal(drafter, text)) == {(2,)}
    for _ in range(20):
        text = [*text, 1]
        drafter.scored(host_view([text]), 1)
    assert leaves(proposal(drafter, text)) == {(1,)}
    made = drafter.scored(host_view([text]), 1)
    assert made.chances is not None
    assert made.chances[0][1] > 0.8, "what it says is measured"


def test_what_agreement_is_worth_is_measured() -> None:
    """Two sources that say the same always know no more than one."""
    drafter, text = CombinedDrafter([Sure([1], 0.5), Sure([1], 0.5)], 1, 0.0), [0]
    for i in range(400):
        made = drafter.scored(host_view([text]), 1)
        text = [*text, 1 + i % 2]
    assert made.chances is not None
    assert made.chances[0][1] == pytest.approx(0.5, abs=0.05)


def test_names_with_settings() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert is_lookup("combined:ngram+suffix,nodes=8")
    for spec in ("combined:ngram+suffix,nodes=8", "combined:sources=ngram+suffix,nodes=8"):
        made = build_lookup(spec, cpu)
        assert [type(source) for source in made.sources] == [NgramDrafter, SuffixDrafter]
        assert made.max_nodes == 8
    assert build_lookup("combined", gpu).max_nodes == build_lookup("suffix", gpu).max_nodes == 15
    assert build_lookup("suffix:least=0.5,shared=0", cpu).least == 0.5
    for spec in ("combined:suffix", "combined:suffix+suffix", "combined:suffix+eagle3", "suffix:nodes=0", "suffix:4"):
        with pytest.raises(InvalidRequest):
            build_lookup(spec, cpu)


@pytest.mark.parametrize(
    "settings", [{"nodes": 0}, {"shortest": 0}, {"shortest": 3, "longest": 2}, {"least": 1.0}, {"shared": -1}]
)
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="suffix drafter needs"):
        SuffixDrafter(**settings)


def test_a_combination_needs_several() -> None:
    one = NgramDrafter()
    for sources in ([], [one], [one, one]):
        with pytest.raises(ValueError, match="at least two"):
            CombinedDrafter(sources)
    with pytest.raises(ValueError, match="at least one node"):
        CombinedDrafter([one, NgramDrafter()], 0)
