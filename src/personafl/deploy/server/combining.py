"""What a coordinator computes: the models of servers after a mix."""

import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from personafl.core import tree, wire
from personafl.core.algorithm import Reduced
from personafl.core.tree import Tree
from personafl.deploy.server.agreement import Sum, Whole, sum_like
from personafl.errors import Diverged
from personafl.recipe.cloud import CloudSection
from personafl.simulate.cloud import mixed, stepped, without_own
from personafl.simulate.federation import Federation, mixing_of
from personafl.simulate.serverside import Roster

Models = tuple[Tree, ...]  # one for all servers, or of each what it was last sent


class Combining:
    """The mixes of a cloud. `like` is what a server hands in, for its structure."""

    def __init__(self, base: Federation, cloud: CloudSection) -> None:
        self._base, self._cloud, self._server = base, cloud, base.serving()
        total, self._dtypes = sum_like(base)
        state = self._server.state
        own = Whole(wire.dense(state), total) if cloud.iterations > 1 else without_own(state)
        self.like: Tree = total if cloud.shared else own

    def first(self, weights: Sequence[int]) -> Models:
        """Return the models before the first round, given what the devices of each server weigh together."""
        servers, base = np.arange(len(weights)), self._base.roster
        given = np.array(weights, dtype=np.int64)
        roster = Roster(servers, given.take, np.zeros_like, base.problems, "examples", base.rule)
        self._server = self._base.serving(roster)
        if self._cloud.shared:
            return (self._server.state,)
        if self._cloud.iterations > 1:
            return tuple(wire.dense(self._base.serving(roster.of(one)).state) for one in servers.reshape(-1, 1))
        return (without_own(self._server.state),) * len(servers)

    def combined(self, models: Models, round_: int, parts: Mapping[int, tuple[Tree, int]]) -> Models | None:
        """Return the models after a mix of what servers hand in, of so many devices; None: they are not finite."""
        members, handed = tuple(parts), [part for part, _ in parts.values()]
        counts = [count for _, count in parts.values()]
        try:
            if self._cloud.shared:
                uploads = functools.reduce(Reduced.plus, self._uploads(handed, counts))
                after = tuple(self._stepped([models[0]], [uploads], np.ones((1, 1)), round_))
            else:
                made = dict(zip(members, self._each(members, round_, handed, counts), strict=True))
                after = tuple(made.get(server, before) for server, before in enumerate(models))
        except Diverged:
            return None
        leaves = [leaf for leaf in tree.leaves(after) if leaf.is_floating_point()]
        return after if all(bool(leaf.isfinite().all()) for leaf in leaves) else None

    def _each(self, members: Sequence[int], round_: int, handed: list[Tree], counts: list[int]) -> Iterable[Tree]:
        """Return what each of some servers is sent: its mix, or its state after several mixes and steps."""
        mixing = mixing_of(self._cloud, members, round_)
        if self._cloud.iterations == 1:
            return [mixed(handed, row, place) for place, row in enumerate(mixing)]
        uploads = self._uploads([own.sum for own in handed], counts)
        return map(wire.dense, self._stepped([own.state for own in handed], uploads, mixing, round_))

    def _stepped(
        self, states: list[Tree], uploads: list[Reduced], mixing: NDArray[np.float64], round_: int
    ) -> Sequence[Tree]:
        return stepped(self._server, states, uploads, mixing, round_, self._cloud.iterations)

    def _uploads(self, sums: list[Sum], counts: list[int]) -> list[Reduced]:
        return [Reduced(*own, count, self._dtypes) for own, count in zip(sums, counts, strict=True)]
