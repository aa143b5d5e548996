"""What protects the samples of a device ([sample_privacy]): the key of its noise, and how often they were looked at.

    samples.key      32 random bytes, which nobody else has; made at the first start
    samples.jsonl    the ledger: a line for each training, durable before any noise is drawn

A line says of which round a training was, what it was made of (the digest of all that decides it: what the server sent,
the device's state, its data and the recipe), and how many steps looked at samples, by their rate of Poisson sampling.
Who is in a minibatch, and the noise, are drawn from the key, the phase, the round and how many other lines the round
had before. So a device that was killed draws the same again for the same, and that costs nothing; whatever else it is
asked to train in a round, because its server went back or lies, has noise of its own, and is paid for.
"""

import dataclasses
import hashlib
import importlib.util
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core import secret
from personafl.core.batches import Steps
from personafl.deploy.device.datafile import ME
from personafl.deploy.device.keeping import kept_key
from personafl.deploy.device.state import DeviceState, Entry
from personafl.errors import BadInput
from personafl.privacy.accounting import compose
from personafl.privacy.library import library
from personafl.recipe.recipe import Recipe
from personafl.runs.guarding import check_protectable, looks, open_phases
from personafl.simulate.protection import ALWAYS, Protection
from personafl.simulate.trainer import Learners
from personafl.storage.journal import Journal

KEY_FILE, LEDGER_FILE = "samples.key", "samples.jsonl"


class Samples:
    """The samples of a device: what was spent of their privacy, and what protects them."""

    def __init__(self, recipe: Recipe, method: str, who: Learners, state: DeviceState) -> None:
        section = recipe.sample_privacy
        assert section is not None
        assert section.noise is not None  # as the recipe was checked
        check_protectable(recipe, method, who)
        if section.epsilon is not None:
            library()  # a budget is the device's own to keep, and no server's to reckon
        self._section, self._noise, self._size = section, section.noise, int(who.data.train.sizes[ME])
        self._ledger = _opened(state.directory / LEDGER_FILE)
        self._lines: list[dict[str, Any]] = []
        self._ledger.follow(self._lines.append)
        known = bool(self._lines)
        if not known and (state.rounds or state.pending is not None):
            raise BadInput(
                f"{state.directory / LEDGER_FILE}: was lost, and what was spent of the samples' privacy is not known "
                "without it; put a copy back, or choose another --state, and the device begins like a newcomer"
            )
        self._key = kept_key(state.directory / KEY_FILE, known=known)
        self._always, self._attempt = _digest(recipe.to_toml().encode(), *_own(who)), 0
        self.protection = Protection(
            section.clip,
            np.full(who.data.clients, section.noise),
            np.full(who.data.clients, ALWAYS),
            section.sampling,
            open_phases(section, who.rule),
            self._secret,
        )
        self.epsilon = self._reckoned(self._spent)  # None: there is no accountant here

    def learners(self, who: Learners) -> Learners:
        """Return the device's client with its samples protected."""
        return dataclasses.replace(who, protection=self.protection)

    def begin(self, round_: int, phases: Mapping[str, Steps], message: bytes, state: Entry | None) -> None:
        """Note a training before it begins; if it is over the budget, it takes no step."""
        whole = [work for name, work in phases.items() if name not in self.protection.open]
        more = looks(whole, self._size, 1, poisson=self._section.sampling == "poisson")
        made_of = _digest(self._always, message, *_bytes(state or {})).hex()
        before = [line["made_of"] for line in self._lines if line["round"] == round_]
        self._attempt = before.index(made_of) if made_of in before else len(before)
        if more and made_of not in before:
            after, budget = self._reckoned(self._spent + more), self._section.epsilon
            if budget is not None and after is not None and after > budget:
                self.protection.until[ME] = round_
                return
            steps = sorted(more.items())
            self._ledger.write("trained", round=round_, attempt=self._attempt, made_of=made_of, steps=steps)
            self.epsilon = after
        self.protection.until[ME] = ALWAYS

    @property
    def steps(self) -> int:
        """How many steps, or whole passes where these count, have looked at samples."""
        return self._spent.total()

    def facts(self) -> dict[str, str]:
        """Return what a model card says of it."""
        if self.epsilon is None:
            return {}
        covers = "all" if self._section.personal else "sent"
        return {
            "sample_epsilon": str(self.epsilon),
            "sample_delta": str(self._section.delta),
            "sample_covers": covers,
        }

    @property
    def _spent(self) -> Counter[float]:
        found: Counter[float] = Counter()
        for line in self._lines:
            found.update(dict(line["steps"]))
        return found

    def _reckoned(self, steps: Counter[float]) -> float | None:
        if importlib.util.find_spec("dp_accounting") is None:
            return None
        return compose([(self._noise, rate, count) for rate, count in sorted(steps.items())], self._section.delta)

    def _secret(self, client: int, phase: str, round_: int) -> bytes:
        return drawn_from(self._key, phase, round_, self._attempt)


def drawn_from(key: bytes, phase: str, round_: int, attempt: int) -> bytes:
    """Return the key of a phase of a round, for coins and noise."""
    return secret.derived(key, f"samples/{phase}/{round_}/{attempt}")


def _opened(path: Path) -> Journal:
    try:
        return Journal(path)
    except BadInput as error:
        raise BadInput(str(error).replace("--out", "--state")) from error


def _own(who: Learners) -> list[bytes]:
    data = who.data
    rows = np.ascontiguousarray(data.train[ME])
    return [rows.tobytes(), *(part.cpu().contiguous().numpy().tobytes() for part in (data.x, data.y))]


def _bytes(state: Entry) -> list[bytes]:
    named = sorted(state.items())
    return [part for path, leaf in named for part in (path.encode(), leaf.contiguous().numpy().tobytes())]


def _digest(*parts: bytes) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()
