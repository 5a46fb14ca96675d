"""Pages and who owns them: reference counts, prefix sharing, eviction. Plain integers, no tensors.

A page is free, in use (counted), or resting: in use by no sequence, but its content is known and can be found again
until the room is needed. Only full pages of committed tokens are ever shared, so no sequence writes to a shared page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftwood.cache.state_places import StatePlaces

Key = int | str  # names a prefix: everything up to a page's end; at the start of a text it is the salt
Address = tuple[Key, tuple[int, ...]]  # the prefix before a page, and the page's tokens


class PageWatcher(Protocol):
    """Hears which pages can be found by their content."""

    def stored(self, key: int, before: Key, tokens: tuple[int, ...]) -> None:
        """A full page of committed tokens behind the prefix `before`; `key` names the prefix with it."""
        ...

    def removed(self, key: int) -> None:
        """Its room was needed."""
        ...


class Tier(Protocol):
    """Where pages go that have to make room, by the key of their content."""

    def save(self, page: int, key: int) -> int | None:
        """Keep what a page holds; returns the key of what had to go for it, if something had to."""
        ...

    def load(self, key: int, page: int) -> None:
        """Put what is kept into a page, and keep it no longer."""
        ...

    def touch(self, key: int) -> None:
        """What has this key goes last."""
        ...

    def drop(self, key: int) -> None:
        """Keep it no longer."""
        ...


class PagePool:
    """A fixed number of pages. Prefixes are found by their exact tokens, never by a hash that could collide."""

    def __init__(self, num_pages: int, on_forget: Callable[[int], None] = lambda key: None) -> None:
        if num_pages < 1:
            raise ValueError("a cache needs at least one page")
        self._on_forget = on_forget  # called with the key of a prefix that can no longer be found
        self.tier: Tier | None = None
        self._saved: dict[Address, int] = {}  # what the tier keeps -> its key
        self._saved_at: dict[int, Address] = {}  # the same, by key
        self.num_saved = self.num_restored = 0  # pages, so far
        self._news: list[int] = []  # pages that were restored
        self.num_pages = num_pages
        self._uses = [0] * num_pages
        self._free = set(range(num_pages))
        self._resting: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._content: dict[Address, int] = {}
        self._address: dict[int, Address] = {}  # page -> its entry in _content
        self._key: dict[int, int] = {}  # page -> a name for "this page after exactly these pages"
        self._next_key = 1
        self.watcher: PageWatcher | None = None

    @property
    def num_available(self) -> int:
        """Pages that could be handed out now, resting ones included."""
        return len(self._free) + len(self._resting)

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """`count` pages with one user each, or None (and nothing taken) if there are not enough.

        Follows `after` without a gap where it can: attention on a CPU then reads a sequence in place.
        """
        if count > self.num_available:
            return None
        pages: list[int] = []
        for _ in range(count):
            after = self._choose(after)
            self._claim(after)
            pages.append(after)
        return pages

    def _choose(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free:
            return after + 1
        if self._free:
            return self._start_of_widest_gap()
        return next(iter(self._resting))

    def _start_of_widest_gap(self) -> int:
        """Where a new run has most room to grow; half-way in if a run may be growing into the gap's start."""
        best_start, best_length, start = 0, 0, None
        for page in range(self.num_pages + 1):
            if page in self._free:
                start = page if start is None else start
            elif start is not None:
                if page - start > best_length:
                    best_start, best_length = start, page - start
                start = None
        return best_start if best_start == 0 else best_start + best_length // 2

    def _claim(self, page: int) -> None:
        if page in self._resting:
            del self._resting[page]
            self._save(page)
            self._forget(page)
        else:
            self._free.remove(page)
        self._uses[page] = 1

    def _save(self, page: int) -> None:
        """Its key names the content as long as the tier keeps it, so that what follows it is still found."""
        if self.tier is None:
            return
        address, key = self._address[page], self._key[page]
        self._saved[address], self._saved_at[key] = key, address
        self.num_saved += 1
        dropped = self.tier.save(page, key)
        if dropped is not None:
            del self._saved[self._saved_at.pop(dropped)]

    def _no_longer_saved(self, address: Address) -> int:
        key = self._saved.pop(address)
        del self._saved_at[key]
        return key

    def restore(self, key: Key, tokens: tuple[int, ...], after: int | None) -> tuple[int, int] | None:
        """What `find` would give, out of the tier, with one user; None if it is not there or has no room. The page
        follows `after` where it can.
        """
        address = (key, tokens)
        if self.tier is None or address not in self._saved:
            return None
        self.tier.touch(self._saved[address])
        taken = self.take(1, after)
        if taken is None:
            return None
        (page,) = taken
        if address not in self._saved:  # the page that made room here was all that the tier has room for
            self.give_back(page)
            return None
        own = self._no_longer_saved(address)
        self.tier.load(own, page)
        self._content[address], self._address[page], self._key[page] = page, address, own
        self._news.append(page)
        self.num_restored += 1
        if self.watcher is not None:
            self.watcher.stored(own, key, tokens)
        return page, own

    def restored(self) -> list[int]:
        """Pages that were restored since this was asked last: only the target's part of them is as it was."""
        news, self._news = self._news, []
        return news

    def _forget(self, page: int) -> None:
        del self._content[self._address.pop(page)]
        key = self._key.pop(page)
        self._on_forget(key)
        if self.watcher is not None:
            self.watcher.removed(key)

    def find(self, key: Key, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """The page that holds `tokens` right behind the prefix `key`, if it is known, and the longer prefix's key."""
        page = self._content.get((key, tokens))
        return None if page is None else (page, self._key[page])

    def share(self, page: int) -> None:
        """One more user of a page that `find` gave."""
        self._resting.pop(page, None)
        self._uses[page] += 1

    def remember(self, page: int, key: Key, tokens: tuple[int, ...]) -> int:
        """Let others find a full page behind a prefix; returns the longer prefix's key.

        Of pages with the same content, the first is found. No key is ever used again: one whose page is gone finds
        nothing any more, unless the tier keeps it.
        """
        known = self._content.get((key, tokens))
        if known is None:
            self._content[(key, tokens)] = known = page
            self._address[page] = (key, tokens)
            self._key[page] = self._new_key((key, tokens))
            if self.watcher is not None:
                self.watcher.stored(self._key[page], key, tokens)
        return self._key[known]

    def _new_key(self, address: Address) -> int:
        if self.tier is not None and address in self._saved:  # it was made again: what follows it is still found
            key = self._no_longer_saved(address)
            self.tier.drop(key)
            return key
        self._next_key += 1
        return self._next_key - 1

    def give_back(self, page: int) -> None:
        """One user less. A page without users rests if its content is known, else it is free."""
        if self._uses[page] < 1:
            raise ValueError(f"page {page} is given back more often than taken")
        self._uses[page] -= 1
        if self._uses[page] == 0:
            if page in self._key:
                self._resting[page] = None
            else:
                self._free.add(page)

    def check(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless `held` (page -> users) and the pool's own books agree."""
        for page in range(self.num_pages):
            states = (page in self._free, page in self._resting, self._uses[page] > 0)
            assert sum(states) == 1, f"page {page} is in {sum(states)} states: {states}"
            assert self._uses[page] == held.get(page, 0), (
                f"page {page}: {self._uses[page]} uses, {held.get(page, 0)} users"
            )
            assert page not in self._free or page not in self._key, f"free page {page} can still be found"
        assert self._content == {v: k for k, v in self._address.items()}, "content index and addresses differ"
        assert set(self._address) == set(self._key), "a page has a name but no content, or the reverse"
        assert self._saved == {v: k for k, v in self._saved_at.items()}, "saved contents and their keys differ"
        assert not self._saved_at.keys() & set(self._key.values()), "a content is on the device and away"


@dataclass(slots=True)
class Table:
    """One sequence's pages, in order, and how many of its tokens they hold."""

    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_remembered: int = 0  # leading pages that others can find
    key: Key = ""  # of those pages; at first the salt: only texts with the same one share pages
    state: int | None = None  # place of its states, where the model has recurrent layers
    stops: list[int] = field(default_factory=list)  # lengths at which its states are to be saved, rising


class PageTables:
    """Which pages every sequence holds. The host's half of a KV cache; `kv.py` is the device's half."""

    def __init__(self, num_pages: int, page_size: int, num_states: int = 0) -> None:
        if page_size < 1:
            raise ValueError("a page must hold at least one token")
        self.states = StatePlaces(num_states) if num_states else None  # where a model has recurrent layers
        self.pool = PagePool(num_pages, self._forget_state)
        self.page_size = page_size
        self._tables: dict[int, Table] = {}

    def keep_states(self, count: int) -> None:
        """Sequences have places for states from now on."""
        if self._tables:
            raise ValueError("sequences are open that have no place for states")
        self.states = StatePlaces(count)

    def _forget_state(self, key: int) -> None:
        if self.states is not None:
            self.states.forget(key)

    @property
    def capacity(self) -> int:
        """Tokens the whole cache can hold."""
        return self.pool.num_pages * self.page_size

    def __contains__(self, seq_id: int) -> bool:
        """Whether the sequence is open."""
        return seq_id in self._tables

    def num_cached(self, seq_id: int) -> int:
        """Leading tokens of the sequence that need no forward any more."""
        table = self._tables.get(seq_id)
        return table.num_cached if table else 0

    def room(self, seq_id: int) -> int:
        """Tokens the pages it holds can hold."""
        table = self._tables.get(seq_id)
        return len(table.pages) * self.page_size if table else 0

    def pages(self, seq_id: int) -> list[int]:
        """Its pages in order."""
        return self._tables[seq_id].pages

    def state(self, seq_id: int) -> int | None:
        """Where its state lies, if the model has recurrent layers."""
        return self._tables[seq_id].state

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        """Start a sequence with the longest prefix of `tokens` known under `salt`; returns how many of them that is.

        The last token always stays to be run: its logits are what the first step needs.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} is open already"
        table, key = Table(key=salt), salt
        if self.states is not None:
            table.state = self.states.take()
        self._tables[seq_id] = table
        found: list[tuple[int, int]] = []
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            page = self._found(key, tuple(tokens[start : start + self.page_size]), found)
            if page is None:
                break
            found.append(page)
            key = page[1]
        shared = self._with_state(table, found, len(tokens))
        for page, _ in reversed(found[len(shared) :]):
            self.pool.give_back(page)
        table.pages = [page for page, _ in shared]
        table.key = shared[-1][1] if shared else salt
        table.num_remembered = len(table.pages)
        table.num_cached = len(table.pages) * self.page_size
        return table.num_cached

    def _found(
        self, key: Key, tokens: tuple[int, ...], before: list[tuple[int, int]]
    ) -> tuple[int, int] | None:  # fmt: skip
        """A page with one more user, on the device already or restored, and the key of the prefix with it."""
        known = self.pool.find(key, tokens)
        if known is None:
            return self.pool.restore(key, tokens, before[-1][0] if before else None)
        self.pool.share(known[0])
        return known

    def _with_state(self, table: Table, found: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
        """The pages up to the last one with a snapshot at its end, where states are kept.

        More are wanted where the text parts from one that is known, and at its last full page.
        """
        states = self.states
        if states is None or table.state is None:
            return found
        last = next((i for i in range(len(found), 0, -1) if states.knows(found[i - 1][1])), 0)
        if last:
            states.restore(found[last - 1][1], table.state)
        wanted = {len(found), (length - 1) // self.page_size}
        table.stops = sorted(pages * self.page_size for pages in wanted if pages > last)
        return found[:last]

    def piece_end(self, seq_id: int, end: int) -> int:
        """Where a piece of its text that could reach to `end` has to end: where states are saved, if that is before."""
        table = self._tables[seq_id]
        return next((stop for stop in table.stops if table.num_cached < stop < end), end)

    def reserve(self, seq_id: int, length: int) -> bool:
        """Make room for `length` tokens in all; False, and nothing changed, if there are too few pages."""
        table = self._tables[seq_id]
        missing = -(-length // self.page_size) - len(table.pages)
        if missing <= 0:
            return True
        pages = self.pool.take(missing, table.pages[-1] if table.pages else None)
        if pages is None:
            return False
        table.pages += pages
        return True

    def advance(self, seq_id: int, num_cached: int, tokens: Sequence[int]) -> None:
        """The first `num_cached` tokens are now in the pages; full pages become findable by content."""
        table = self._tables[seq_id]
        assert table.num_cached <= num_cached <= self.room(seq_id), (
            table.num_cached,
            num_cached,
            self.room(seq_id),
        )
        table.num_cached = num_cached
        full = min(num_cached, len(tokens)) // self.page_size
        for i in range(table.num_remembered, full):
            content = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
            table.key = self.pool.remember(table.pages[i], table.key, content)
        table.num_remembered = max(full, table.num_remembered)
        self._save_states(table)

    def _save_states(self, table: Table) -> None:
        if table.num_cached in table.stops and table.num_remembered * self.page_size == table.num_cached:
            assert self.states is not None
            assert table.state is not None
            assert isinstance(table.key, int)
            self.states.save(table.key, table.state)
        table.stops = [stop for stop in table.stops if stop > table.num_cached]

    def trim(self, seq_id: int) -> None:
        """Give back the pages that hold nothing committed: room a draft tree had asked for."""
        pages = self._tables[seq_id].pages
        while len(pages) > -(-self._tables[seq_id].num_cached // self.page_size):
            self.pool.give_back(pages.pop())

    def close(self, seq_id: int) -> None:
        """Give all its pages back, last first, so that eviction eats a prefix from its end. Unknown ids are fine."""
        table = self._tables.pop(seq_id, None)
        for page in reversed(table.pages if table else []):
            self.pool.give_back(page)
        if self.states is not None and table is not None and table.state is not None:
            self.states.give_back(table.state)

    def check(self) -> None:
        """Raise AssertionError unless every page is accounted for exactly."""
        held: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            assert len(set(table.pages)) == len(table.pages), f"sequence {seq_id} holds a page twice"
            assert table.num_cached <= len(table.pages) * self.page_size, f"sequence {seq_id} has tokens without pages"
            for page in table.pages:
                held[page] = held.get(page, 0) + 1
        self.pool.check(held)
        if self.states is not None:
            self.states.check([table.state for table in self._tables.values() if table.state is not None])
