"""Terms that methods add to a client's loss."""

from __future__ import annotations

from torch import Tensor

from personafl.core import tree
from personafl.core.tree import Params

__all__ = ["pull"]


def pull(w: Params, anchor: Params, strength: float) -> Tensor:
    """Return (strength/2)‖w − anchor‖²."""
    offset = tree.sub(w, anchor)
    return 0.5 * strength * tree.dot(offset, offset)
