"""Terms that methods add to a client's loss."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from personafl.core import tree
from personafl.core.tree import Params

__all__ = ["Quadratic", "pull"]


def pull(w: Params, anchor: Params, strength: float) -> Tensor:
    """Return (strength/2)‖w − anchor‖²."""
    offset = tree.sub(w, anchor)
    return 0.5 * strength * tree.dot(offset, offset)


class Quadratic(NamedTuple):
    """The term ⟨slope, w⟩ + (strength/2)‖w − anchor‖², either part of which may be missing.

    Its gradient is slope + strength·(w − anchor): training that is told so (`descend`) adds it to a step in one pass
    over w, where to differentiate an objective with the term in it takes many.
    """

    slope: Params | None = None
    anchor: Params | None = None
    strength: float = 0.0

    def gradient(self, w: Params) -> Params:
        """Return the gradient at w."""
        pulled = None if self.anchor is None else tree.scale(tree.sub(w, self.anchor), self.strength)
        if pulled is None or self.slope is None:
            return pulled or self.slope or tree.zeros_like(w)
        return tree.add(self.slope, pulled)
