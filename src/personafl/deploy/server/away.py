"""Which devices train without contact in which rounds, where a recipe has that (federation.offline)."""

from collections.abc import Iterable, Mapping

import numpy as np

from personafl.deploy.net.messages import MOST_ALONE
from personafl.recipe.recipe import Recipe
from personafl.simulate.cohort import draw_offline


class Away:
    """The rounds of each device without contact; those before its last update are of no use any more."""

    def __init__(self, recipe: Recipe, known: Mapping[int, list[int]], latest: Mapping[int, tuple[int, str]]) -> None:
        self._wanted, self._seed = recipe.federation.offline, recipe.seed
        since = {number: latest[number][0] for number in known if number in latest}
        self._rounds = {number: [at for at in known[number] if at > since[number]] for number in since}

    @property
    def any(self) -> bool:
        """Whether the recipe has such rounds at all."""
        return bool(self._wanted)

    def drawn(self, members: Iterable[int], active: Iterable[int], known: Iterable[int], number: int) -> list[int]:
        """Return who of a server's members trains alone in a round, as the simulator draws it: who was in contact."""
        everyone, taking = (np.array(sorted(some), dtype=np.int64) for some in (members, active))
        chosen = draw_offline(everyone, taking, self._wanted, self._seed, number) if self._wanted else everyone[:0]
        return sorted(set(chosen.tolist()) & set(known))

    def note(self, numbers: Iterable[int], round_: int) -> None:
        """Let devices know of a round, when they ask."""
        for number in numbers:
            self._rounds.setdefault(number, []).append(round_)

    def back(self, number: int) -> None:
        """Note that a device was in contact."""
        self._rounds.pop(number, None)

    def of(self, number: int) -> list[int]:
        """Return the rounds of a device since it was in contact, no more than a message has room for."""
        return self._rounds.get(number, [])[:MOST_ALONE]
