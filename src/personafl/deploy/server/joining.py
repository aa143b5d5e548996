"""From the updates that a round has taken to what a server's rule is given, and back to whose each of them was."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from personafl.core import tree, wire
from personafl.core.algorithm import Reduced
from personafl.core.tree import Tree
from personafl.data.federated import Clients
from personafl.deploy.server.history import Fates
from personafl.deploy.server.updates import Updates
from personafl.simulate.serverside import Roster, ServerSide
from personafl.uploads.robust import CLIPPED, FAR, LEFT_OUT, Robust


def joined(server: ServerSide, updates: Updates, taken: Mapping[int, str], likes: Sequence[Tree]) -> Reduced | None:
    """Join the updates that were taken, given their digests, one by one, in the order of a simulator that trains so.

    A rule that needs each of them is given them where they are: in the file, of which memory has what is looked at.
    """
    found: Reduced | None = None
    for which, numbers in _in_order(taken, server.roster):
        like, digests = wire.dense(likes[which]), {number: taken[number] for number in numbers.tolist()}
        sent: Iterable[tuple[int, Tree]]
        if server.rule.needs_each:
            sent = ((number, wire.from_named(named, like)) for number, named in updates.mapped(digests))
        else:
            sent = ((number, wire.decode(data, like)) for number, data in updates.read_all(digests))
        for number, upload in sent:
            dense = tree.map(lambda leaf: leaf.unsqueeze(0), wire.dense(upload))
            found = server.join(found, dense, np.array([number]))
    if found is None and server.rule.steps_alone:
        nobody = tree.map(lambda leaf: leaf.unsqueeze(0)[:0], wire.dense(likes[0]))
        found = server.join(None, nobody, np.zeros(0, dtype=np.int64))
    return found


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
