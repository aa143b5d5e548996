"""Terms that methods add to a client's loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.tree import Params


def pull(w: Params, anchor: Params, strength: float) -> Tensor:
    """Return (strength/2)‖w − anchor‖²."""
    offset = tree.sub(w, anchor)
    return 0.5 * strength * tree.dot(offset, offset)


class Quadratic(NamedTuple):
    """The term ⟨slope, w⟩ + (strength/2)‖w − anchor‖² + (decay/2)‖w‖².

    The first two parts may be missing, also for some parameters. Its gradient is slope + strength·(w − anchor) +
    decay·w: training that is told so (`descend`) adds it to a step in few passes over w, where to differentiate an
    objective with the term in it takes many.
    """

    slope: Params | None = None
    anchor: Params | None = None
    strength: float = 0.0
    decay: float = 0.0

    def onto(self, gradient: Params, w: Params) -> Params:
        """Return a gradient with that of the term at w added."""
        return {name: self._onto(name, g, w[name]) for name, g in gradient.items()}

    def parts(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the slope and the anchor of one parameter."""
        return (self.slope or {}).get(name), (self.anchor or {}).get(name)

    def has(self, name: str) -> bool:
        """Say whether there is a term of one parameter."""
        return self.decay != 0 or any(part is not None for part in self.parts(name))

    def _onto(self, name: str, gradient: Tensor, value: Tensor) -> Tensor:
        slope, anchor = self.parts(name)
        if slope is not None:
            gradient = gradient + slope
        if anchor is not None:
            gradient = torch.add(gradient, value - anchor, alpha=self.strength)
        return torch.add(gradient, value, alpha=self.decay) if self.decay else gradient
