"""Which devices a round begins with."""

from personafl.data.federated import Clients
from personafl.deploy.server.noise import Noise
from personafl.recipe.deploy import DeploySection
from personafl.recipe.recipe import Recipe
from personafl.simulate.cohort import draw_cohort


def select(
    recipe: Recipe, section: DeploySection, noise: Noise | None, everyone: Clients, round_: int
) -> tuple[Clients, int]:
    """Return the cohort of a round, and how many updates close it before its deadline."""
    federation, given = recipe.federation, recipe.federation.cohort
    if not len(everyone):  # whoever comes next is selected then
        return everyone, 1
    size = min(given, len(everyone)) if isinstance(given, int) else federation.size(len(everyone))
    selected = min(section.wanted(size), len(everyone))
    if federation.sampling == "cyclic" and noise is not None:
        cohort = noise.cohort(everyone, selected, round_)
        return cohort, min(size, len(cohort))  # of none: the round is over at once, and the next one's turns come
    cohort = draw_cohort(everyone, selected, federation.sampling, recipe.seed, round_)
    return cohort, len(cohort) if federation.sampling == "bernoulli" else min(size, len(cohort))
