"""Which parameters are personal: a declared part of one network, by name patterns."""

import fnmatch
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from personafl.core.tree import Params
from personafl.errors import BadInput

_SHOWN = 12  # names in an error message before it is shortened


@dataclass(frozen=True)
class Split:
    """Divides parameters into shared u and personal v: personal are the names that match one of the patterns.

    A pattern is a glob, case included (`head.*`), or a regular expression for the whole name (`re:blocks\\.[01]\\..*`).
    """

    personal: tuple[str, ...]

    def __post_init__(self) -> None:
        for pattern in self.personal:
            _compiled(pattern)

    def is_personal(self, name: str) -> bool:
        """Say whether a parameter stays on the device."""
        return _matches(self.personal, name)

    def divide(self, params: Params) -> tuple[Params, Params]:
        """Return (shared, personal)."""
        shared = {name: value for name, value in params.items() if not self.is_personal(name)}
        return shared, {name: value for name, value in params.items() if self.is_personal(name)}

    def check(self, names: list[str]) -> None:
        """Refuse a pattern that matches no parameter, and a split that leaves nothing shared."""
        for pattern in self.personal:
            if not any(_matches((pattern,), name) for name in names):
                raise BadInput(f"personal: pattern {pattern!r} matches no parameter; there are: {listed(names)}")
        if all(self.is_personal(name) for name in names):
            raise BadInput(
                f"personal: {list(self.personal)} makes every parameter personal; use method 'local', or some of: "
                f"{listed(names)}"
            )


def listed(names: Sequence[str]) -> str:
    """Write names for an error message: all of a few, the first and last of many."""
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:6])}, …, {', '.join(names[-4:])} ({len(names)} in all)"


@functools.lru_cache(maxsize=2**14)  # every update of every client divides the same names again
def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(_compiled(pattern).fullmatch(name) for pattern in patterns)


def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise BadInput(f"personal: {pattern!r} is no regular expression: {error}; mend it or use a glob") from None
