"""Drafts from suffix automata, and several drafters' trees as one, against brute force."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from draftwood.drafters.automaton import MOST, NOWHERE, SuffixAutomaton
from draftwood.drafters.points import HostDrafter
from draftwood.drafters.suffix import OVERHEAD, SharedTexts, SuffixDrafter
from draftwood.protocols import HostView
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from test_host_drafters import agree_with_parents, batch_view, host_view, paths_of, proposal, proposed


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


def test_limits_and_captured_trees() -> None:
    rng = random.Random(5)
    batch = [[rng.randrange(4) for _ in range(n)] for n in (3, 30, 60)]
    for limits in ({"nodes": 4}, {"depth": 2}, {"nodes": 0}, {"depth": 0}, {}):
        drafter = suffix()
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


def test_answers_are_shared_by_requests_of_one_salt_and_by_no_others() -> None:
    drafter = suffix(shared=4096)
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
    drafter = suffix(nodes=6, shared=size)
    for seq_id in range(400):
        text = [rng.randrange(50) for _ in range(rng.randrange(3, 120))]
        answered(drafter, seq_id, text, 2, f"salt {rng.randrange(60)}")
        assert drafter.shared.held <= size
    assert len(drafter.shared._by_salt) <= size // OVERHEAD
    assert drafter.shared.held > size / 2, "hardly anything is kept"
    assert drafter._readings == {}


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


@pytest.mark.parametrize(
    "settings", [{"nodes": 0}, {"shortest": 0}, {"shortest": 3, "longest": 2}, {"least": 1.0}, {"shared": -1}]
)
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="suffix drafter needs"):
        SuffixDrafter(**settings)
