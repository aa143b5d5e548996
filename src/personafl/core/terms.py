"""Terms that methods add to a client's loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.tree import Params

__all__ = ["Quadratic", "pull"]


def pull(w: Params, anchor: Params, strength: float) -> Tensor:
    """Return (strength/2)‖w − anchor‖²."""
    offset = tree.sub(w, anchor)
    return 0.5 * strength * tree.dot(offset, offset)


class Quadratic(NamedTuple):
    """The term ⟨slope, w⟩ + (strength/2)‖w − anchor‖², either part of which may be missing, also for some parameters.

    Its gradient is slope + strength·(w − anchor): training that is told so (`descend`) adds it to a step in one pass
    over w, where to differentiate an objective with the term in it takes many.
    """

    slope: Params | None = None
    anchor: Params | None = None
    strength: float = 0.0

    def gradient(self, w: Params) -> Params:
        """Return the gradient at w."""
        return {name: self._at(name, value) for name, value in w.items()}

    def parts(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the slope and the anchor of one parameter."""
        return (self.slope or {}).get(name), (self.anchor or {}).get(name)

    def has(self, name: str) -> bool:
        """Say whether there is a term of one parameter."""
        return any(part is not None for part in self.parts(name))

    def _at(self, name: str, value: Tensor) -> Tensor:
        slope, anchor = self.parts(name)
        pulled = None if anchor is None else self.strength * (value - anchor)
        if pulled is None:
            return torch.zeros_like(value) if slope is None else slope
        return pulled if slope is None else slope + pulled
