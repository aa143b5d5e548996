"""What a device remembers of the tries to sum its update of a round, so that it is in one sum and no other, ever.

A device that signs keys for a try says by that that it has opened nothing of the round, and that it never will for an
earlier try: others rely on it (`secure.circle.Circle`). So tries are in order, it notes each before it makes keys, and
goes back to none. Before it sends a masked vector it notes who could open that.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from personafl.secure.circle import Circle


@dataclass(frozen=True)
class Tries:
    """The tries of a round that a device has taken part in."""

    round: int = -1
    attempt: str = ""  # the last one; later ones are larger
    masked: Mapping[str, Circle] = field(default_factory=dict)  # those in which its update was masked

    @property
    def reached(self) -> tuple[int, str, int]:
        """How far it is: of two memories the larger is the later."""
        return self.round, self.attempt, len(self.masked)

    def allow(self, round_: int, attempt: str) -> bool:
        """Say whether it may take part in a try: in the last one again, if nothing was masked in it."""
        return (round_, attempt) >= (self.round, self.attempt) and attempt not in self.masked

    def with_keys(self, round_: int, attempt: str) -> "Tries":
        """Return what is to be noted before keys are made for a try."""
        return Tries(round_, attempt, self.masked if round_ == self.round else {})

    def with_mask(self, circle: Circle) -> "Tries":
        """Return what is to be noted before the update is sent under the masks of the last try."""
        return Tries(self.round, self.attempt, {**self.masked, self.attempt: circle})

    def said(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, said: Mapping[str, Any] | None) -> "Tries":
        """Return it from JSON; from None, of a version that remembered nothing, an empty one."""
        if said is None:
            return cls()
        masked = {
            attempt: Circle(tuple(circle["neighbours"]), circle["threshold"])
            for attempt, circle in said["masked"].items()
        }
        return cls(said["round"], said["attempt"], masked)
