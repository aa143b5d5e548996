"""From the sections [robust] and [fairness] to a method whose uploads are taken by their rule."""

from typing import Any

import torch

from personafl.algorithms.fair import made_fair
from personafl.algorithms.robust import made_robust
from personafl.core.algorithm import Algorithm
from personafl.recipe.recipe import Recipe
from personafl.recipe.robust import RobustSection
from personafl.robust.rule import Mix, Rule, mixing, parts_of
from personafl.robust.table import MIXES, RULES


def held(recipe: Recipe, algorithm: Algorithm, cohort: int) -> Algorithm:
    """Return the method as [robust] has it; fail if cohorts are too small for its rule."""
    section = recipe.robust
    if section is None:
        return algorithm
    rule, before = _rule(section, cohort), _before(section, cohort)
    how: dict[str, Any] = {"clip": section.clip, "most": section.most, "seed": recipe.seed}
    made = made_robust(algorithm, rule=rule, before=before, **how)
    _check_cohort(rule, before, cohort)
    return made


def favoured(recipe: Recipe, algorithm: Algorithm) -> Algorithm:
    """Return the method as [fairness] has it."""
    section = recipe.fairness
    return algorithm if section is None else made_fair(algorithm, q=section.q, slope=1 / recipe.training.lr)


def _rule(section: RobustSection, cohort: int) -> Rule:
    """Return the rule for cohorts of a size."""
    own: dict[str, dict[str, Any]] = {
        "geometric-median": {"smoothing": section.smoothing, "steps": section.steps},
        "centered-clipping": {"radius": section.radius, "steps": section.steps},
    }
    return RULES[section.rule](f=section.hostile(cohort), **own.get(section.rule, {}))


def _before(section: RobustSection, cohort: int) -> tuple[Mix, ...]:
    """Return what is done before it."""
    own: dict[str, dict[str, Any]] = {"bucketing": {"size": section.bucket}}
    return tuple(MIXES[name](f=section.hostile(cohort), **own.get(name, {})) for name in section.pre)


def _check_cohort(rule: Rule, before: tuple[Mix, ...], cohort: int) -> None:
    """Fail if a round of so many uploads is too small: sizes alone decide, so nothing is in the vectors."""
    rule.check(cohort)
    if before:
        blank = torch.zeros(cohort + int(rule.from_centre), 1)
        mixing(rule, lambda: parts_of(blank), cohort, before, 0)
