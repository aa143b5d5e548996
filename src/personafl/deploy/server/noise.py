"""What [privacy] makes of a server's rounds: the key of its noise, what they have spent, and whose turn may come.

    noise.key        32 random bytes, for the owner's eyes alone; made when the run is created

Noise is drawn from the key, the round, how often the run was taken back and the digest of the sum that it is added to
(`uploads.private`). A server that was killed does the round again with the updates that its journal speaks of, which
was sealed before any noise was drawn, and so draws the same. A round that is done again after --roll-back draws anew,
for what was released before stays so, and is paid for twice. The lines `sealed` of the journal are the ledger.

Where updates are summed unseen, devices add the noise, and a server has no key: it keeps the ledger alone.
"""

import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core import rng
from personafl.core.algorithm import Algorithm
from personafl.core.tree import Tree
from personafl.data.federated import Clients
from personafl.deploy.net.promise import Promise
from personafl.errors import BadInput
from personafl.privacy.mechanisms import Accounted
from personafl.recipe.recipe import Recipe
from personafl.runs.private import Guarantee, charge, spent_by, with_noise
from personafl.simulate.cohort import draw_cohort
from personafl.simulate.federation import Federation
from personafl.storage.files import atomic_write, storage
from personafl.uploads.private import Private, PrivateServer

KEY_FILE = "noise.key"
KEY_BYTES = 32


def fresh_key() -> bytes:
    """Return a key that nobody knows."""
    return secrets.token_bytes(KEY_BYTES)


class Noise:
    """The noise of one server's run; all lines of its journal are heard, from the first."""

    def __init__(self, recipe: Recipe, path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
        section, federation = recipe.privacy, recipe.federation
        assert section is not None
        assert isinstance(federation.cohort, int)  # as the recipe was checked
        self._recipe, self._cohort = recipe, federation.cohort
        self.cyclic = federation.sampling == "cyclic"  # whether devices take turns, some rounds apart
        self._accounted = Accounted(mechanism=section.mechanism, delta=section.delta, apart=federation.apart or 1)
        self._algorithm: Algorithm | None = None
        self._rounds: dict[int, int] = {}  # how many were charged, by how often the run had been taken back
        self._turns: dict[int, int] = {}  # number -> its last round, since the run was taken back
        self.attempt = 0  # how often it was
        for entry in entries:
            self.hear(entry)
        shared = section.mechanism == "distributed"  # devices draw it, each from a key of its own
        self._key = b"" if shared else _key(path / KEY_FILE, known=bool(self._rounds))

    def hear(self, entry: Mapping[str, Any]) -> None:
        """Note a line of the journal."""
        if entry["event"] == "rolled_back":
            self.attempt += 1
            self._turns = {}
        elif entry["event"] == "sealed" and "privacy" in entry:
            self._rounds[self.attempt] = self._rounds.get(self.attempt, 0) + 1
            self._turns |= dict.fromkeys(entry["taken"], entry["round"])

    def private(self, federation: Federation) -> Federation:
        """Return a federation whose server adds noise."""
        made = with_noise(self._recipe, federation.algorithm, self._accounted, self._cohort, self._key)
        if isinstance(made.server, PrivateServer):
            server = dataclasses.replace(made.server, bound=True, attempt=self.attempt)
            made = dataclasses.replace(made, server=server)
        self._algorithm = made
        return dataclasses.replace(federation, algorithm=made)

    def charge(self, state: Tree) -> dict[str, Any]:
        """Return what a round's line says that it costs; nothing, where nothing is sent."""
        if not isinstance(state, Private) or not isinstance(self._made.server, PrivateServer):
            return {}
        return {"privacy": charge(self._made.server, self._accounted, float(state.clip))}

    @property
    def spent(self) -> Guarantee:
        """What all rounds so far come to, also those that were taken back."""
        return self._of(0)

    @property
    def is_spent(self) -> bool:
        """Whether one more round would be over the budget."""
        budget = self._recipe.privacy.epsilon if self._recipe.privacy is not None else None
        return budget is not None and self._of(1).epsilon > budget

    def promise(self) -> Promise:
        """Return what devices are told of it at the end."""
        spent = self.spent
        return Promise(epsilon=spent.epsilon, delta=spent.delta, assumption=spent.assumption)

    def facts(self) -> dict[str, Any]:
        """Return what a report says of it: nothing of the key."""
        spent, section = self.spent, self._recipe.privacy
        assert section is not None
        facts = {"epsilon": spent.epsilon, "delta": spent.delta, "budget": section.epsilon, "noise": spent.noise}
        return {**facts, "mechanism": section.mechanism, "assumption": spent.assumption, "roll_backs": self.attempt}

    def may(self, number: int, round_: int) -> bool:
        """Say whether a device's turn may come in a round."""
        last = self._turns.get(number)
        return not self.cyclic or last is None or round_ - last >= self._accounted.apart

    def cohort(self, everyone: Clients, size: int, round_: int) -> Clients:
        """Return whose turn it is: as in a simulation; who had it too recently is replaced by others, if there are any.

        So devices may come, leave, and miss their turns.
        """
        may = np.array([self.may(number, round_) for number in everyone.tolist()], dtype=bool)
        wanted = np.intersect1d(draw_cohort(everyone, size, "cyclic", self._recipe.seed, round_), everyone[may])
        others = np.setdiff1d(everyone[may], wanted)
        order = np.argsort(rng.mix(self._recipe.seed, "cohort", round_, others), kind="stable")
        return np.sort(np.concatenate([wanted, others[order[: size - len(wanted)]]]))

    def _of(self, more: int) -> Guarantee:
        counts = {**self._rounds, self.attempt: self._rounds.get(self.attempt, 0) + more}
        return _spent(self._made, self._accounted, tuple(counts.values()))

    @property
    def _made(self) -> Algorithm:
        assert self._algorithm is not None
        return self._algorithm


@lru_cache(maxsize=16)
def _spent(algorithm: Algorithm, accounted: Accounted, stretches: tuple[int, ...]) -> Guarantee:
    return spent_by(algorithm, accounted, stretches)


def _key(path: Path, *, known: bool) -> bytes:
    """Return the key that a run has, or make it one."""
    if not path.exists():
        if known:
            raise BadInput(
                f"{path}: was lost, and noise cannot be drawn again without it; put a copy back, or choose another "
                "--out"
            )
        atomic_write(path, fresh_key(), private=True)
    with storage(path):
        path.chmod(0o600)
        key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise BadInput(f"{path}: is damaged, for it has {len(key)} bytes and not {KEY_BYTES}; put a copy back")
    return key
