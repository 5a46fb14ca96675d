"""Places for the states of recurrent layers: one for each open sequence, the others for snapshots. No tensors.

A page of keys is of no use to another sequence without the states at its end. So states are copied where prompts end
and where texts part, by the name of the prefix they stand behind, and a sequence that begins with that prefix begins
with the copy. Snapshots have whatever places sequences leave, and give way to them, the one used longest ago first.
"""

from __future__ import annotations

from collections import OrderedDict


class StatePlaces:
    """`count` places, and the copies among them that the device has yet to make."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))[::-1]
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # name of a prefix -> place, used longest ago first
        self._copies: list[tuple[int, int]] = []

    @property
    def num_snapshots(self) -> int:
        """Prefixes whose states are known."""
        return len(self._snapshots)

    def take(self) -> int:
        """A place for a sequence."""
        place = self._spare()
        if place is None:
            raise ValueError(f"no more than {self.count} sequences can be open: every place for states is taken")
        return place

    def give_back(self, place: int) -> None:
        """The sequence is closed."""
        self._free.append(place)

    def _spare(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None

    def knows(self, name: int) -> bool:
        """Whether there is a snapshot behind a prefix."""
        return name in self._snapshots

    def restore(self, name: int, place: int) -> None:
        """Begin the sequence at `place` with a snapshot."""
        self._snapshots.move_to_end(name)
        self._copies.append((self._snapshots[name], place))

    def save(self, name: int, place: int) -> None:
        """Keep the state at `place` as it is now, if it is not known and there is room."""
        if name in self._snapshots:
            self._snapshots.move_to_end(name)
        elif (spare := self._spare()) is not None:
            self._snapshots[name] = spare
            self._copies.append((place, spare))

    def forget(self, name: int) -> None:
        """A page is gone that the prefix needs."""
        place = self._snapshots.pop(name, None)
        if place is not None:
            self._free.append(place)

    def copies(self) -> list[tuple[int, int]]:
        """From where to where, to be made one after the other before the next forward; each is told once."""
        copies, self._copies = self._copies, []
        return copies

    def check(self, held: list[int]) -> None:
        """Raise AssertionError unless every place is free, held by a sequence, or a snapshot."""
        places = sorted([*self._free, *self._snapshots.values(), *held])
        assert places == list(range(self.count)), f"places for states are lost or shared: {places}"
