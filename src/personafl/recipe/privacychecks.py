"""What the section [privacy] of a recipe cannot be beside, or needs."""

from typing import Any

from personafl.errors import BadInput
from personafl.privacy.kinds import CORRELATED


def check_combined(recipe: Any) -> None:
    """Fail if a recipe has privacy beside something that would break it."""
    if recipe.federation.weights != "uniform":
        raise BadInput('federation.weights: with [privacy] uploads count alike; set it to "uniform", or leave it out')
    for key in ("cloud", "buffer"):
        if getattr(recipe, key) is not None:
            raise BadInput(f"privacy: is for one server that waits for its cohort; remove [{key}]")
    if (recipe.privacy.mechanism == "distributed") != (recipe.secure is not None):
        _refuse_apart(recipe)
    _check_sampling(recipe)
    if recipe.pretrain.rounds:
        raise BadInput(
            "pretrain.rounds: what a model was trained on before is not covered by [privacy]; set pretrain.rounds=0, "
            "or start from a model that was trained on other data"
        )


def _refuse_apart(recipe: Any) -> None:
    """Fail: sums that are all that is seen have noise that clients add, and that is for such sums alone."""
    if recipe.secure is None:
        raise BadInput(
            'privacy.mechanism: "distributed" noise is in shares, of which one alone hides little; add [secure], so '
            'that sums are all that is seen, or set it to "gaussian"'
        )
    raise BadInput(
        f'privacy.mechanism: "{recipe.privacy.mechanism}" noise is a server\'s, which clips uploads and sees their sum '
        'before it; with [secure] it sees neither: set it to "distributed", or remove [secure]'
    )


def _check_sampling(recipe: Any) -> None:
    """Fail if cohorts are not drawn as what is claimed of them needs."""
    federation, mechanism, deployed = recipe.federation, recipe.privacy.mechanism, recipe.deploy is not None
    if mechanism == "distributed" and federation.sampling != "exact":
        raise BadInput(
            f'federation.sampling: with "distributed" noise who takes part is seen, so that nothing is claimed of '
            f'"{federation.sampling}" cohorts, and each has a share of a noise for so many; set it to "exact"'
        )
    if mechanism in CORRELATED and federation.sampling != "cyclic":
        raise BadInput(
            f"federation.sampling: {mechanism} noise needs rounds between a client's turns; "
            'set federation.sampling="cyclic", or privacy.mechanism="gaussian"'
        )
    if not deployed:
        return
    if federation.sampling == "bernoulli":
        raise BadInput(
            "federation.sampling: devices come when they can, so that a server cannot claim what coins would give; "
            'set it to "cyclic" with privacy.mechanism="banded", or to "exact"'
        )
    if isinstance(federation.cohort, float):
        raise BadInput(
            f"federation.cohort: with [privacy] sums are divided by it, and who enrols is not known; give a count, not "
            f"{federation.cohort:g}"
        )
    if mechanism == "distributed" and recipe.privacy.noise is None:
        raise BadInput(
            "privacy.noise: devices draw it, and must find it in the recipe; have it computed: personafl privacy "
            f"--mechanism distributed --epsilon {recipe.privacy.epsilon:g} --delta {recipe.privacy.delta:g} --rounds "
            f"{recipe.rounds}"
        )
    if federation.sampling == "cyclic" and federation.apart is None:
        raise BadInput(
            "federation.apart: say after how many rounds a device may take part again; no more than there are devices "
            f"for each of a cohort of {federation.cohort}, such as federation.apart=10"
        )
