"""Which parameters are personal: a declared part of one network, by name patterns."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from personafl.core.tree import Params
from personafl.errors import BadInput

__all__ = ["Split"]


@dataclass(frozen=True)
class Split:
    """Divides parameters into shared u and personal v: personal are the names that match a pattern (glob)."""

    personal: tuple[str, ...]

    def is_personal(self, name: str) -> bool:
        """Say whether a parameter stays on the device."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.personal)

    def divide(self, params: Params) -> tuple[Params, Params]:
        """Return (shared, personal)."""
        shared = {name: value for name, value in params.items() if not self.is_personal(name)}
        return shared, {name: value for name, value in params.items() if self.is_personal(name)}

    def check(self, names: list[str]) -> None:
        """Refuse a pattern that matches no parameter, and a split that leaves nothing shared."""
        for pattern in self.personal:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise BadInput(f"personal: pattern {pattern!r} matches no parameter; there are: {', '.join(names)}")
        if all(self.is_personal(name) for name in names):
            raise BadInput(f"personal: {list(self.personal)} makes every parameter personal; use method 'local'")
