"""From a recipe to a job: everything is checked and built, in the order in which it can fail soonest."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng, wire
from personafl.core.algorithm import Algorithm, untrained_upload
from personafl.core.batches import counted_samples
from personafl.data.federated import FederatedData
from personafl.data.inputs import as_seen
from personafl.errors import BadInput
from personafl.models import make_net_and_split
from personafl.recipe.recipe import Recipe
from personafl.runs.addressing import check_addressed
from personafl.runs.attack import make_attack, under_attack
from personafl.runs.given import NOTHING, Given
from personafl.runs.job import Job
from personafl.runs.learners import make_learners, make_method, use_hardware
from personafl.runs.private import check_sums, made_private
from personafl.runs.problems import Maker
from personafl.runs.profiles import deal
from personafl.runs.robust import check_held, favoured, held
from personafl.runs.samples import protected
from personafl.runs.secure import summed
from personafl.runs.start import make_start
from personafl.runs.tracking import check_tracking
from personafl.simulate.buffer import Buffer
from personafl.simulate.buffered import make_buffer
from personafl.simulate.cloud import make_cloud
from personafl.simulate.federation import Cloud, Federation
from personafl.simulate.workers.local import on_other_machines

_MOST_SAMPLES = 10**8  # that a client goes through in an update: a gigabyte of row numbers


def prepare(
    recipe: Recipe,
    data: FederatedData | None = None,
    given: Given = NOTHING,
    profiles: NDArray[np.int64] | None = None,
    make: Maker = make_net_and_split,
) -> Job:
    """Check a recipe against its data and build what the run needs; what is given replaces what the recipe names.

    `data` are the run's data where they are dealt already. `profiles` are the kinds of devices, [clients], where they
    are known and need not be dealt. `make` makes the network and its split; who prepares many runs need not have each
    network made again.
    """
    algorithm = _method(recipe, given.algorithm)
    device, dtype = use_hardware(recipe.engine)
    if device.type != "cpu" and on_other_machines():
        raise BadInput(f"engine.device: a Ray cluster trains on CPUs, not on {device.type}; set engine.device=cpu")
    data = _data(recipe, data or given.dealt(recipe), dtype)
    data, attack = under_attack(recipe, data, make_attack(recipe, data))
    cohort = recipe.federation.size(len(data.seen))
    if recipe.federation.sampling == "cyclic":
        recipe.federation.apart_in(len(data.seen))
    algorithm = summed(recipe, made_private(recipe, algorithm, data, cohort), data, cohort)
    algorithm = held(recipe, favoured(recipe, algorithm), len(data.seen))
    kinds = deal(recipe.devices, data, recipe.seed) if profiles is None else profiles
    cloud, buffer = _timing(recipe, data, algorithm)
    check_held(algorithm, cohort, cloud, buffer)
    own = given.model, make, given.loss, given.metrics
    who = make_learners(recipe, algorithm, data, kinds, device, dtype, *own)
    start = make_start(recipe, who.problems[0].net, data.moments, data.scale)
    federation = Federation(
        algorithm=algorithm,
        data=who.data,
        problems=who.problems,
        problem_of=who.problem_of,
        engines=who.engines,
        seed=who.seed,
        cohort=cohort,
        sampling=recipe.federation.sampling,
        weights=recipe.federation.weights,
        dtype=dtype,
        start=start,
        offline=recipe.federation.offline,
        cloud=cloud,
        buffer=buffer,
        workers=recipe.engine.workers if device.type == "cpu" else 1,
        attack=attack,
    )
    _check_work(federation)
    _rehearse(federation)
    return Job(recipe, protected(recipe, federation), given.names)


def _check_work(federation: Federation) -> None:
    """Fail if a client's rows of one update cannot be drawn at once."""
    rule, sizes = federation.algorithm.client, federation.data.train.sizes.max(keepdims=True, initial=1)
    for name, work in {**rule.phases, **rule.tuning}.items():
        samples = int(counted_samples(replace(work, least=None), sizes, np.zeros(1, dtype=np.uint64))[0])
        if samples > _MOST_SAMPLES:
            raise BadInput(
                f"training: a client goes through {samples:,} samples in an update (phase {name!r}), and at most "
                f"{_MOST_SAMPLES:,} are possible; lower its epochs or steps"
            )


def _rehearse(federation: Federation) -> None:
    """Have a client of each problem train no steps: a method that cannot do with its network or split says so here."""
    down, rule = wire.dense(federation.first_message()), federation.algorithm.client
    for problem in federation.problems:
        state = federation.learners.cast(rule.init(problem, down, rng.generator("shape")))
        check_sums(federation.algorithm, untrained_upload(rule, problem, down, state))


def _method(recipe: Recipe, algorithm: Algorithm | None) -> Algorithm:
    """Return the method; fail if the recipe asks for what it cannot do."""
    algorithm = make_method(recipe, algorithm)
    check_addressed(recipe, algorithm)
    recipe.federation.check_offline(algorithm)
    check_tracking(recipe.tracking)
    return algorithm


def _data(recipe: Recipe, data: FederatedData, dtype: torch.dtype) -> FederatedData:
    """Return the data as the networks see them."""
    data = as_seen(data, recipe.data, dtype)
    if recipe.evaluation.split != "test" and not len(data.validation.flat):
        raise BadInput("evaluation.split: there are no validation data to score on; set data.validation=0.2")
    return data


def _timing(recipe: Recipe, data: FederatedData, algorithm: Algorithm) -> tuple[Cloud | None, Buffer | None]:
    """Return the servers or the buffer of the recipe, if it has them: who waits for whom."""
    given = data, algorithm, recipe.training.build().work, recipe.seed
    cloud = None if recipe.cloud is None else make_cloud(recipe.cloud, *given)
    return cloud, None if recipe.buffer is None else make_buffer(recipe.buffer, *given)
