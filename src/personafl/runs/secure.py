"""From the section [secure] to a method whose uploads are summed as it says."""

from personafl.core.algorithm import Algorithm
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.recipe.secure import SecureSection
from personafl.secure.faults import Breach
from personafl.secure.fixed import Grid
from personafl.secure.graph import degree
from personafl.uploads.secure import in_fixed_point


def summed(recipe: Recipe, algorithm: Algorithm, data: FederatedData, cohort: int) -> Algorithm:
    """Return the method as [secure] has it, after [privacy]; fail if cohorts are too small for that."""
    section = recipe.secure
    if section is None:
        return algorithm
    check_cohort(section, cohort)
    if recipe.privacy is not None:  # clients round their uploads when they add noise
        return algorithm
    most = cohort if recipe.federation.sampling == "exact" else len(data.seen)
    examples = recipe.federation.weights == "examples"
    weight = float(data.train.sizes_of(data.seen).max()) if examples else 1.0
    return in_fixed_point(algorithm, Grid(most, weight, section.range))


def check_cohort(section: SecureSection, cohort: int) -> None:
    """Fail if so many clients cannot do with the dropouts and corrupt ones that a recipe allows."""
    least = section.survivors(cohort)
    if least > cohort:
        raise BadInput(
            f"secure.least: no sum of fewer than {least} clients is seen, and {cohort} take part in a round; "
            "raise federation.cohort"
        )
    try:
        degree(cohort, cohort - least, section.corrupted(cohort))
    except Breach as breach:
        raise BadInput(
            f"secure.dropouts: {breach.text}; lower it or secure.corrupt, or raise federation.cohort"
        ) from breach
