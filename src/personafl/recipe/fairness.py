"""The section [fairness] of a recipe: clients on which the shared model does badly count for more."""

from typing import Annotated, Any

from pydantic import Field

from personafl.errors import BadInput
from personafl.options import Strict


class FairnessSection(Strict):
    """q-FedAvg: clients count by their loss to the power of q."""

    q: Annotated[float, Field(ge=0, le=100)] = 1.0  # 0: as without it


def check_fairness(recipe: Any) -> None:
    """Fail if a recipe has it beside something that it cannot do with."""
    if recipe.fairness is None:
        return
    reasons = {
        "robust": "a rule takes uploads in another way",
        "privacy": "noise is for the mean of clipped uploads, and weights by losses give something else",
        "secure": "the loss of a single client is not seen",
        "cloud": "several servers have rounds of their own, and it is for one",
        "buffer": "an upload is discounted by how late it is, not by its loss",
        "deploy": "devices are processes, and it is simulated only",
    }
    for key, why in reasons.items():
        if getattr(recipe, key) is not None:
            raise BadInput(f"fairness: with [{key}] {why}; remove one of the two")
