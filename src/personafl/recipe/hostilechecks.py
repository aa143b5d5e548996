"""What goes with hostile clients, and with rules that hold against them, and what does not."""

from typing import Any

from personafl.errors import BadInput
from personafl.recipe.robust import RobustSection


def check_robust(recipe: Any) -> None:
    """Fail if a recipe has a robust rule beside something that it cannot do with."""
    section = recipe.robust
    if section is None or section == RobustSection():  # the plain mean
        return
    reasons = {
        "secure": "single uploads are not seen, and a rule looks at each",
        "privacy": "noise is for the mean of clipped uploads, and a rule gives something else",
    }
    for key, why in reasons.items():
        if getattr(recipe, key) is not None:
            raise BadInput(f"robust: with [{key}] {why}; remove one of the two")
    _check_cloud(recipe.cloud, section.f)
    if not section.weighs and recipe.federation.weights != "uniform":
        raise BadInput(
            'federation.weights: robust rules count uploads alike; set it to "uniform", or leave it out, or use '
            'robust.rule="mean" with robust.clip and robust.most'
        )
    if section.rule != "mean" and recipe.federation.sampling == "bernoulli":
        raise BadInput(
            "federation.sampling: cohorts by coins may be too small for robust.f hostile uploads; set it to "
            '"exact" or "cyclic"'
        )
    if section.most is not None and not section.weighs:
        raise BadInput(
            'robust.most: is for robust.rule="mean" without robust.pre; other uploads count alike; remove it'
        )


def _check_cloud(cloud: Any, hostile: int | float) -> None:
    """Fail if the servers of a cloud cannot have the rule, each for its own devices."""
    if cloud is not None and isinstance(hostile, float):
        raise BadInput("robust.f: servers of a cloud differ in size; give a count for each of them, not a share")


def check_attack(recipe: Any) -> None:
    """Fail if a recipe has an attack beside something that it is not simulated with."""
    if recipe.attack is None:
        return
    for key in ("cloud", "buffer", "deploy"):
        if getattr(recipe, key) is not None:
            raise BadInput(f"attack: is simulated for one server that waits for its cohort; remove [{key}]")
    if recipe.evaluation.train:
        raise BadInput("evaluation.train: training data of hostile clients are not scored; remove it, or [attack]")
