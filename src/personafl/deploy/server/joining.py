"""From the updates that a round has taken to what a server's rule is given, and back to whose each of them was."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from personafl.core import tree, wire
from personafl.core.algorithm import Reduced
from personafl.core.tree import Tree
from personafl.data.federated import Clients
from personafl.deploy.server.history import Fates
from personafl.deploy.server.updates import Updates
from personafl.simulate.serverside import Roster, ServerSide
from personafl.uploads.robust import CLIPPED, FAR, LEFT_OUT, Robust


def joined(
    server: ServerSide, updates: Updates, taken: Mapping[int, str], likes: Sequence[Tree], round_: int
) -> Reduced | None:
    """Join a round's updates that were taken, given their digests, in the order of a simulator that trains one by one.

    A rule that looks at each of them does that where they are: in the file, of which memory has what is looked at.
    """
    found: Reduced | None = None
    order = [(which, number) for which, group in _in_order(taken, server.roster) for number in group.tolist()]
    numbers = np.array([number for _, number in order], dtype=np.int64)
    kept = _Kept(updates, taken, order, [wire.dense(like) for like in likes])
    if order and (found := server.collected(kept, numbers)) is not None:
        return found
    sent = iter(kept) if server.rule.needs_each else kept.read()
    for number, upload in zip(numbers, sent, strict=True):
        found = server.join(found, upload, np.array([number]), round_)
    if found is None and server.rule.steps_alone:
        nobody = tree.map(lambda leaf: leaf.unsqueeze(0)[:0], wire.dense(likes[0]))
        found = server.join(None, nobody, np.zeros(0, dtype=np.int64), round_)
    return found


class _Kept(Sequence[Tree]):
    """Updates that were taken, dense and [1, …] each: in the file, as often as they are looked at."""

    def __init__(
        self, updates: Updates, taken: Mapping[int, str], order: Sequence[tuple[int, int]], likes: Sequence[Tree]
    ) -> None:
        self._updates, self._digests, self._order, self._likes = updates, taken, order, likes
        self._looked: set[int] = set()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: Any) -> Any:
        """Return one, to be let go of before the next; or a slice of them, which are held together."""
        if isinstance(place, slice):
            whole = self._updates.whole()
            return [self._at(each, whole) for each in range(len(self))[place]]
        return self._at(place, None)

    def _at(self, place: int, whole: memoryview | None) -> Tree:
        which, number = self._order[place]
        named = self._updates.mapped(number, self._digests[number], number in self._looked, whole)
        self._looked.add(number)
        return _one(wire.from_named(named, self._likes[which]))

    def read(self) -> Iterator[Tree]:
        """Yield them as they are read into memory; the next one is meanwhile."""
        read = self._updates.read_all({number: self._digests[number] for _, number in self._order})
        for (which, _), (_, data) in zip(self._order, read, strict=True):
            yield _one(wire.decode(data, self._likes[which]))


def _one(upload: Tree) -> Tree:
    return tree.map(lambda leaf: leaf.unsqueeze(0), wire.dense(upload))


def fates(state: Tree, taken: Iterable[int], roster: Roster) -> Fates:
    """Return what became of the last round's updates, and whose they were, as a server's state has it."""
    numbers = [number for _, group in _in_order(taken, roster) for number in group.tolist()]
    if not isinstance(state, Robust) or len(state.fates) != len(numbers):
        return Fates()
    met = dict(zip(numbers, state.fates.tolist(), strict=True))

    def whose(*kinds: int) -> tuple[int, ...]:
        return tuple(sorted(number for number, kind in met.items() if kind in kinds))

    return Fates(whose(CLIPPED, FAR), whose(FAR), whose(LEFT_OUT))


def _in_order(taken: Iterable[int], roster: Roster) -> Iterator[tuple[int, Clients]]:
    """Yield devices as their updates are joined: by the problems that they solve, and then by their numbers."""
    numbers = np.array(sorted(taken), dtype=np.int64)
    kinds = roster.problem_of(numbers)
    for which in np.unique(kinds).tolist():
        yield which, numbers[kinds == which]
