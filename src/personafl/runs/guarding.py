"""What [sample_privacy] asks of a method, of a network and of data, and how often these are looked at."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from personafl.core import rng
from personafl.core.algorithm import ClientRule, only_by_gradients
from personafl.core.batches import Batch, Steps, counted_steps
from personafl.core.guard import Guard
from personafl.core.samples import guarded
from personafl.errors import BadInput
from personafl.recipe.privacy import check_moments
from personafl.recipe.recipe import Recipe
from personafl.recipe.sample_privacy import SamplePrivacySection
from personafl.simulate.trainer import Learners

_NO_PACE = np.zeros(1, dtype=np.uint64)


def check_protectable(recipe: Recipe, method: str, who: Learners) -> None:
    """Fail if clipped gradients and noise would not cover all that is made of samples."""
    check_by_gradients(method, who.rule)
    computed, scaled = who.data.moments is not None, who.data.scale is not None
    check_moments(recipe.data.normalize, recipe.data.scale, computed=computed, scaled=scaled, section="sample_privacy")
    _check_separable(who)


def check_by_gradients(method: str, rule: ClientRule) -> None:
    """Fail if a method looks at samples otherwise than is protected."""
    if not only_by_gradients(rule):
        raise BadInput(
            f"sample_privacy: {method} looks at samples otherwise than by one gradient of each minibatch, and "
            "that is all that clipping and noise protect; leave it out, or remove [sample_privacy]"
        )


def open_phases(section: SamplePrivacySection, rule: ClientRule) -> frozenset[str]:
    """Return the phases that are trained as they are."""
    kept = frozenset(rule.kept_phases) | frozenset(rule.tuning.keys() - rule.phases.keys())
    return frozenset() if section.personal else kept


def looks(works: Iterable[Steps], size: int, times: int, *, poisson: bool) -> Counter[float]:
    """Return how many steps look at a client's samples in so many rounds, by their rate of Poisson sampling."""
    found: Counter[float] = Counter()
    for work in works if size and times else ():
        sizes, most = np.array([size]), dataclasses.replace(work, least=None)
        steps, batch = int(counted_steps(most, sizes, _NO_PACE)[0]), min(work.batch or size, size)
        if poisson:
            found[batch / size] += times * steps
        else:  # a sample is in one minibatch of each pass, and each round begins with a new one
            found[1.0] += times * (-(-steps * batch // size) if work.epochs is None else work.most)
    return found


def _check_separable(who: Learners) -> None:
    """Fail if a network mixes samples, or has no gradient of each that torch can take."""
    for problem in who.problems:
        for objective in (problem.mean_loss, problem.personal_loss):
            if objective.net.batch_dependent:
                raise BadInput(
                    "model: its normalisation mixes the samples of a batch, so that no sample has a gradient of its "
                    'own to clip for [sample_privacy]; use GroupNorm or LayerNorm, or model.buffers = "shared"'
                )
            start = who.cast(objective.net.init(rng.generator("shape")))
            try:
                guarded(objective, start, _two_samples(who), _no_noise(who))
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise BadInput(
                    f"model: torch.func cannot take the gradient of each sample, as [sample_privacy] needs ({reason}); "
                    "use another network"
                ) from error


def _two_samples(who: Learners) -> Batch:
    x, y = who.data.samples(np.zeros(2, dtype=np.int64))
    x = x.to(who.dtype) if x.is_floating_point() else x
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    return Batch(x, y, torch.ones(2, dtype=torch.bool, device=x.device), key)


def _no_noise(who: Learners) -> Guard:
    one = torch.ones((), dtype=torch.float64, device=who.data.device)
    key = torch.zeros((), dtype=torch.int64, device=who.data.device)
    return Guard(one, 0 * one, one, key, one.bool())
