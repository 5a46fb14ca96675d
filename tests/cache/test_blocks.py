"""Pages: a state machine against a shadow store, and the corners one by one."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from draftwood.cache.blocks import PagePool, PageTables


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, grow, draft, shrink and go; a shadow of every slot says what it really holds.

    A page that is shared, evicted or handed out wrongly shows as a token in the shadow that its reader does not expect.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.tables = PageTables(num_pages=7, page_size=2)
        self.slots: dict[int, int] = {}  # slot -> token written last
        self.tokens: dict[int, list[int]] = {}
        self.next_id = 0

    def slot(self, seq: int, index: int) -> int:
        return self.tables.pages(seq)[index // 2] * 2 + index % 2

    def write(self, seq: int, start: int, end: int, tokens: list[int]) -> None:
        for i in range(start, end):
            self.slots[self.slot(seq, i)] = tokens[i]

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def open(self, tokens: list[int]) -> int:
        seq, self.next_id = self.next_id, self.next_id + 1
        cached = self.tables.open(seq, tokens)
        assert cached < len(tokens), "the last token must be run"
        self.tokens[seq] = list(tokens)
        return seq

    @rule(seq=sequences, chunk=st.integers(1, 6))
    def run_pending(self, seq: int, chunk: int) -> None:
        """A chunk of what is not cached yet."""
        start = self.tables.num_cached(seq)
        end = min(len(self.tokens[seq]), start + chunk)
        before = self.tables.pages(seq).copy()
        if not self.tables.reserve(seq, end):
            assert self.tables.pages(seq) == before, "a refusal must change nothing"
            assert -(-end // 2) - len(before) > self.tables.pool.num_available
            return
        self.write(seq, start, end, self.tokens[seq])
        self.tables.advance(seq, end, self.tokens[seq])

    @rule(seq=sequences, nodes=st.integers(1, 5), accepted=st.integers(0, 5), bonus=st.integers(0, 1))
    def draft_and_commit(self, seq: int, nodes: int, accepted: int, bonus: int) -> None:
        """A step with a tree: wrong guesses are written into its own slots, some become committed tokens."""
        tokens = self.tokens[seq]
        if self.tables.num_cached(seq) + 1 != len(tokens) or not self.tables.reserve(seq, len(tokens)):
            return
        start = len(tokens)
        self.write(seq, start - 1, start, tokens)
        nodes = nodes if self.tables.reserve(seq, start + nodes) else self.tables.room(seq) - start
        guesses = tokens + [1 - bonus] * nodes
        self.write(seq, start, start + nodes, guesses)
        accepted = min(accepted, nodes)
        tokens += [*guesses[start : start + accepted], bonus]
        self.tables.advance(seq, start + accepted, tokens)

    @rule(seq=sequences)
    def trim(self, seq: int) -> None:
        self.tables.trim(seq)
        assert len(self.tables.pages(seq)) == -(-self.tables.num_cached(seq) // 2)

    @rule(seq=consumes(sequences))
    def close(self, seq: int) -> None:
        self.tables.close(seq)
        del self.tokens[seq]

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.tables.check()

    @invariant()
    def everybody_reads_what_they_wrote(self) -> None:
        for seq, tokens in self.tokens.items():
            held = [self.slots[self.slot(seq, i)] for i in range(self.tables.num_cached(seq))]
            assert held == tokens[: len(held)]

    def teardown(self) -> None:
        for seq in self.tokens:
            self.tables.close(seq)
        self.tables.check()
        assert self.tables.pool.num_available == 7, "pages leaked"


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class ShadowTier:
    """Of the shadow store: what a page's slots hold."""

    def __init__(self, slots: dict[int, int], room: int) -> None:
        self.slots, self.room = slots, room
        self.kept: OrderedDict[int, list[int]] = OrderedDict()

    def save(self, page: int, key: int) -> int | None:
        dropped = self.kept.popitem(last=False)[0] if len(self.kept) == self.room else None
        self.kept[key] = [self.slots[2 * page], self.slots[2 * page + 1]]
        return dropped

    def load(self, key: int, page: int) -> None:
        self.slots[2 * page], self.slots[2 * page + 1] = self.kept.pop(key)

    def touch(self, key: int) -> None:
        self.kept.move_to_end(key)

    def drop(self, key: int) -> None:
        del self.kept[key]


class TieredMachine(CacheMachine):
    """The same, with room for few pages away from the device."""

    room = 3

    def __init__(self) -> None:
        super().__init__()
        self.tables.pool.tier = ShadowTier(self.slots, self.room)


class NarrowMachine(TieredMachine):
    """A page that makes room for a restored one may drop that."""

    room = 1


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNarrowMachine = NarrowMachine.TestCase
TestNarrowMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def filled(tables: PageTables, seq: int, tokens: list[int]) -> int:
    cached = tables.open(seq, tokens)
    assert tables.reserve(seq, len(tokens))
    tables.advance(seq, len(tokens), tokens)
    return cached


def test_a_known_prefix_is_shared_and_its_last_token_is_run_again() -> None:
    tables = PageTables(10, 4)
    assert filled(tables, 0, list(range(8))) == 0
    assert filled(tables, 1, list(range(8))) == 4, "the second page holds the last token, which must be run"
    assert filled(tables, 2, [*range(8), 9]) == 8
    assert tables.pages(2)[:2] == tables.pages(0)
    tables.check()


def test_equal_pages_after_different_beginnings_are_not_confused() -> None:
    tables = PageTables(10, 2)
    filled(tables, 0, [1, 1, 5, 5, 0])
    assert tables.open(1, [2, 2, 5, 5, 0]) == 0


def test_a_finished_sequence_rests_until_its_room_is_needed_last_pages_first() -> None:
    tables = PageTables(4, 2)
    filled(tables, 0, [1, 2, 3, 4, 5])
    tables.close(0)
    assert tables.pool.num_available == 4
    assert tables.open(1, [1, 2, 3, 4, 9]) == 4, "its pages are found again"
    tables.close(1)
    filled(tables, 2, [7, 7, 7, 7, 7])
    tables.close(2)
    assert tables.open(3, [1, 2, 3, 4, 9]) == 2, "the end of the old prefix went first"


def test_a_prefix_is_found_after_others_took_its_pages() -> None:
    tables = PageTables(3, 2)
    slots: dict[int, int] = {}
    tables.pool.tier = ShadowTier(slots, 10)
    text = [1, 2, 3, 4, 5]
    filled(tables, 0, text)
    slots |= {2 * page + i: text[2 * n + i] for n, page in enumerate(tables.pages(0)[:2]) for i in range(2)}
    tables.close(0)
    filled(tables, 1, [7, 7, 7, 7, 7])
    slots |= {2 * page + i: 7 for page in tables.pages(1) for i in range(2)}
    assert tables.pool.num_saved == 2
    tables.close(1)
    assert tables.open(2, text, salt="another") == 0, "a salt keeps prefixes apart, wherever they are"
    tables.close(2)
    assert tables.open(3, text) == 4
    assert tables.pool.num_restored == 2
    assert [slots[2 * page + i] for page in tables.pages(3) for i in range(2)] == text[:4]
    tables.check()


def test_pages_follow_each_other_where_they_can() -> None:
    tables = PageTables(16, 2)
    for seq in (0, 1):
        tables.open(seq, [seq])
        tables.reserve(seq, 2)
    for length in (4, 6, 8):
        for seq in (0, 1):
            assert tables.reserve(seq, length)
    for seq in (0, 1):
        first = tables.pages(seq)[0]
        assert tables.pages(seq) == list(range(first, first + 4)), "two growing sequences keep out of each other's way"


def test_more_than_there_is_is_refused_whole() -> None:
    pool = PagePool(3)
    assert pool.take(4) is None
    assert pool.num_available == 3
    taken = pool.take(3)
    assert taken is not None
    assert sorted(taken) == [0, 1, 2]


def test_giving_back_twice_is_an_error() -> None:
    pool = PagePool(1)
    assert pool.take(1) == [0]
    pool.give_back(0)
    with pytest.raises(ValueError, match="more often than taken"):
        pool.give_back(0)


@pytest.mark.parametrize("make", [lambda: PagePool(0), lambda: PageTables(4, 0)])
def test_sizes_must_be_positive(make) -> None:
    with pytest.raises(ValueError, match="at least one"):
        make()


def test_the_integrity_check_notices_a_lost_page() -> None:
    tables = PageTables(4, 2)
    filled(tables, 0, [1, 2, 3])
    tables.pages(0).pop()
    with pytest.raises(AssertionError):
        tables.check()


def test_unknown_sequences_hold_nothing() -> None:
    tables = PageTables(4, 2)
    assert tables.num_cached(9) == 0
    assert tables.room(9) == 0
    tables.close(9)
    tables.check()


class Shelf:
    """A tier with room for so many pages."""

    def __init__(self, room: int) -> None:
        self.room, self.kept = room, dict[int, int]()

    def save(self, page: int, key: int) -> int | None:
        self.kept[key] = page
        if len(self.kept) <= self.room:
            return None
        oldest = next(iter(self.kept))
        del self.kept[oldest]
        return oldest

    def load(self, key: int, page: int) -> None:
        del self.kept[key]

    def touch(self, key: int) -> None:
        self.kept[key] = self.kept.pop(key)

    def drop(self, key: int) -> None:
        del self.kept[key]


def test_evicted_pages_come_back_or_are_made_again() -> None:
    pool = PagePool(2)
    shelf = pool.tier = Shelf(room=4)
    first = pool.take(2)
    assert first is not None
    start = pool.remember(first[0], "", (1, 2))
    behind = pool.remember(first[1], start, (3, 4))
    for page in reversed(first):
        pool.give_back(page)
    pages = pool.take(2)  # both had to go
    assert pages is not None
    assert set(shelf.kept) == {start, behind}
    assert pool.find("", (1, 2)) is None
    assert pool.restore("", (1, 2), None) is None, "no page is free"
    assert pool.remember(pages[0], "", (1, 2)) == start, "made again, it has the key that what follows knows"
    assert set(shelf.kept) == {behind}
    pool.give_back(pages[1])
    back = pool.restore(start, (3, 4), pages[0])
    assert back == (pages[1], behind)
    assert not shelf.kept
    assert pool.restored() == [pages[1]]
    assert pool.restored() == []
    pool.check(dict.fromkeys(pages, 1))
