"""From the sections [robust] and [fairness] to a method whose uploads are taken by their rule."""

from typing import Any

from personafl.core.algorithm import Algorithm
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.recipe.robust import RobustSection
from personafl.robust.clip import RunningMedian
from personafl.robust.rule import Mix, Rule, check_size, fewest
from personafl.robust.table import MIXES, RULES
from personafl.simulate.buffer import Buffer
from personafl.simulate.federation import Cloud
from personafl.uploads.around import uses_mean_alone
from personafl.uploads.fair import made_fair
from personafl.uploads.robust import RobustServer, made_robust

# What servers of real devices do unless a recipe says otherwise.
ON_DEVICES = RobustSection(clip=RunningMedian(times=1.0, rounds=3), most=0.2)


def section_of(recipe: Recipe, algorithm: Algorithm) -> RobustSection | None:
    """Return what a recipe has for uploads, also where it does not say: servers of real devices clip them.

    It is the same whoever runs the recipe, so that the simulator has the numbers of these. None: the plain mean.
    """
    if recipe.robust is not None:
        return None if recipe.robust == RobustSection() else recipe.robust
    alone = all(part is None for part in (recipe.secure, recipe.privacy, recipe.buffer))
    return ON_DEVICES if recipe.deploy is not None and alone and uses_mean_alone(algorithm) else None


def held(recipe: Recipe, algorithm: Algorithm, clients: int) -> Algorithm:
    """Return the method as [robust] has it, for so many clients that may take part."""
    section = section_of(recipe, algorithm)
    if section is None:
        return algorithm
    hostile = section.hostile(_uploads(recipe, section, clients))
    how: dict[str, Any] = {"clip": section.clip, "most": section.most, "seed": recipe.seed}
    return made_robust(algorithm, rule=_rule(section, hostile), before=_before(section, hostile), **how)


def favoured(recipe: Recipe, algorithm: Algorithm) -> Algorithm:
    """Return the method as [fairness] has it."""
    section = recipe.fairness
    return algorithm if section is None else made_fair(algorithm, q=section.q, slope=1 / recipe.training.lr)


def least_updates(algorithm: Algorithm, recipe: Recipe) -> int:
    """Return how many updates a round of a server needs for its rule to hold; fail if it is planned with fewer."""
    server = algorithm.server
    if not isinstance(server, RobustServer):
        return 1
    assert recipe.deploy is not None
    planned = _size(recipe, recipe.deploy.devices)
    try:
        check_size(server.robust, server.before, planned)
    except BadInput as error:
        raise BadInput(f"{error} (deploy.devices is {recipe.deploy.devices})") from error
    return fewest(server.robust, server.before, planned)


def check_held(algorithm: Algorithm, cohort: int, cloud: Cloud | None, buffer: Buffer | None) -> None:
    """Fail if rounds of a simulation are too small for its rule; on a cloud those of any server."""
    if buffer is not None:
        cohort = buffer.size
    elif cloud is not None:
        cohort = cloud.section.active or min(map(len, cloud.topology.devices))
    check_uploads(algorithm, cohort)


def check_uploads(algorithm: Algorithm, uploads: int) -> None:
    """Fail if a round of so many uploads is too small for its rule."""
    server = algorithm.server
    if isinstance(server, RobustServer):
        check_size(server.robust, server.before, uploads)


def _uploads(recipe: Recipe, section: RobustSection, clients: int) -> int:
    """Return the uploads of a round, of which f may be a share; a server knows of `deploy.devices` before it begins."""
    size = _size(recipe, clients if recipe.deploy is None else recipe.deploy.devices)
    if recipe.deploy is not None and section.f and not section.hostile(size):
        raise BadInput(
            f"robust.f: a share {section.f:g} of the {size} updates that a round is planned with is nobody; set "
            "deploy.devices or federation.cohort to how many take part, or robust.f to a count"
        )
    return size


def _size(recipe: Recipe, clients: int) -> int:
    if recipe.buffer is not None:
        return recipe.buffer.size
    cohort = recipe.federation.cohort
    return cohort if isinstance(cohort, int) else max(1, round(cohort * clients))


def _rule(section: RobustSection, hostile: int) -> Rule:
    """Return the rule against so many."""
    own: dict[str, dict[str, Any]] = {
        "geometric-median": {"smoothing": section.smoothing, "steps": section.steps},
        "centered-clipping": {"radius": section.radius, "steps": section.steps},
    }
    return RULES[section.rule](f=hostile, **own.get(section.rule, {}))


def _before(section: RobustSection, hostile: int) -> tuple[Mix, ...]:
    """Return what is done before it."""
    own: dict[str, dict[str, Any]] = {"bucketing": {"size": section.bucket}}
    return tuple(MIXES[name](f=hostile, **own.get(name, {})) for name in section.pre)
