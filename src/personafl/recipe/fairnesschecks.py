"""What goes with weights by losses, and what does not."""

from typing import Any

from personafl.errors import BadInput


def check_fairness(recipe: Any) -> None:
    """Fail if a recipe has it beside something that it cannot do with."""
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
