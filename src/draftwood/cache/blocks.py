"""Pages and who owns them: reference counts, prefix sharing, eviction. Plain integers, no tensors.

A page is free, in use (counted), or resting: in use by no sequence, but its content is known and can be found again
until the room is needed. Only full pages of committed tokens are ever shared, so no sequence writes to a shared page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

Address = tuple[int | str, tuple[int, ...]]  # key of the page before (at the start: the salt), and the tokens


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

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError("a cache needs at least one page")
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

    def restore(self, previous: int | None, tokens: tuple[int, ...], salt: str = "") -> int | None:
        """The page that `find` would give, out of the tier, with one user; None if it is not there or has no room."""
        address = (salt if previous is None else self._key.get(previous, -1), tokens)
        if self.tier is None or address not in self._saved:
            return None
        self.tier.touch(self._saved[address])
        taken = self.take(1, previous)
        if taken is None:
            return None
        (page,) = taken
        if address not in self._saved:  # the page that made room here was all that the tier has room for
            self.give_back(page)
            return None
        key = self._no_longer_saved(address)
        self.tier.load(key, page)
        self._content[address], self._address[page], self._key[page] = page, address, key
        self._news.append(page)
        self.num_restored += 1
        return page

    def restored(self) -> list[int]:
        """Pages that were restored since this was asked last: only the target's part of them is as it was."""
        news, self._news = self._news, []
        return news

    def _forget(self, page: int) -> None:
        del self._content[self._address.pop(page)]
        del self._key[page]

    def find(self, previous: int | None, tokens: tuple[int, ...], salt: str = "") -> int | None:
        """The page that holds `tokens` right after page `previous`, if it is known.

        None: at the start of a text, among those with the same salt.
        """
        key = salt if previous is None else self._key.get(previous)
        return None if key is None else self._content.get((key, tokens))

    def share(self, page: int) -> None:
        """One more user of a page that `find` gave."""
        self._resting.pop(page, None)
        self._uses[page] += 1

    def remember(self, page: int, previous: int | None, tokens: tuple[int, ...], salt: str = "") -> None:
        """Let others with the same salt find a full page by its content. Of pages with the same, the first is found."""
        key = salt if previous is None else self._key.get(previous)
        if key is None or page in self._key or (key, tokens) in self._content:
            return
        self._content[(key, tokens)] = page
        self._address[page] = (key, tokens)
        if self.tier is not None and (key, tokens) in self._saved:  # it was made again: what follows it is still found
            self._key[page] = self._no_longer_saved((key, tokens))
            self.tier.drop(self._key[page])
            return
        self._key[page] = self._next_key
        self._next_key += 1

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
    salt: str = ""  # only texts with the same one share its pages


class PageTables:
    """Which pages every sequence holds. The host's half of a KV cache; `kv.py` is the device's half."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if page_size < 1:
            raise ValueError("a page must hold at least one token")
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self._tables: dict[int, Table] = {}

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

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        """Start a sequence with the longest prefix of `tokens` known under `salt`; returns how many of them that is.

        The last token always stays to be run: its logits are what the first step needs.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} is open already"
        table = self._tables[seq_id] = Table(salt=salt)
        previous: int | None = None
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            page = self._found(previous, tuple(tokens[start : start + self.page_size]), salt)
            if page is None:
                break
            table.pages.append(page)
            previous = page
        table.num_remembered = len(table.pages)
        table.num_cached = len(table.pages) * self.page_size
        return table.num_cached

    def _found(self, previous: int | None, tokens: tuple[int, ...], salt: str) -> int | None:
        """A page with one more user, on the device already or restored."""
        page = self.pool.find(previous, tokens, salt)
        if page is None:
            return self.pool.restore(previous, tokens, salt)
        self.pool.share(page)
        return page

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
            self.pool.remember(table.pages[i], table.pages[i - 1] if i else None, content, table.salt)
        table.num_remembered = max(full, table.num_remembered)

    def rewind(self, seq_id: int, num_cached: int) -> None:
        """Run the tokens from `num_cached` on once more: their logits are wanted again."""
        table = self._tables[seq_id]
        table.num_cached = min(table.num_cached, num_cached)

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

    def check(self) -> None:
        """Raise AssertionError unless every page is accounted for exactly."""
        held: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            assert len(set(table.pages)) == len(table.pages), f"sequence {seq_id} holds a page twice"
            assert table.num_cached <= len(table.pages) * self.page_size, f"sequence {seq_id} has tokens without pages"
            for page in table.pages:
                held[page] = held.get(page, 0) + 1
        self.pool.check(held)
