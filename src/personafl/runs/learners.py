"""From a recipe to what clients know, which is all that a device builds: nothing of a server or a simulation."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from personafl.core.algorithm import Algorithm
from personafl.core.losses import Loss, Metric
from personafl.data.federated import FederatedData
from personafl.models import make_net_and_split
from personafl.recipe.engine import EngineSection
from personafl.recipe.recipe import Recipe
from personafl.runs.problems import Maker, make_problems
from personafl.simulate.engine import Engine, largest_batch
from personafl.simulate.hardware import keep_freed_memory, named_device, placed, set_arithmetic
from personafl.simulate.trainer import Learners
from personafl.uploads.codecs import Whole


def make_method(recipe: Recipe, algorithm: Algorithm | None = None) -> Algorithm:
    """Return the method, with its uploads compressed, for what the recipe's devices ask for; fail if it cannot."""
    algorithm = algorithm or recipe.algorithm()
    if recipe.devices:
        from personafl.runs.abilities import check_method  # few recipes have kinds of devices
        from personafl.uploads.ranks import ranked

        check_method(recipe.devices, algorithm)
        algorithm = ranked(algorithm) if any(profile.rank for profile in recipe.devices) else algorithm
    if not isinstance(recipe.uplink, Whole):
        from personafl.uploads.uplink import compressed  # few devices have it

        algorithm = compressed(algorithm, recipe.uplink)
    return algorithm


def use_hardware(engine: EngineSection) -> tuple[torch.device, torch.dtype]:
    """Return where and in which precision the run computes, and set torch and the allocator accordingly."""
    device = named_device(engine.device)
    set_arithmetic(engine.dtype, device)
    if device.type == "cpu":
        keep_freed_memory()
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    return device, torch.float64 if engine.dtype == "float64" else torch.float32


def make_learners(
    recipe: Recipe,
    algorithm: Algorithm,
    data: FederatedData,
    kinds: NDArray[np.int64],
    device: torch.device,
    dtype: torch.dtype,
    model: nn.Module | None = None,
    make: Maker = make_net_and_split,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Learners:
    """Return the clients of a recipe, with data as networks see them; `kinds` says what device each has, [clients]."""
    data = placed(data, device, dtype, recipe.engine.data_mb)
    problems = make_problems(recipe, algorithm, data, model, make, device, dtype, loss, metrics)
    memory, low = recipe.engine.memory_mb * 2**20, recipe.engine.dtype == "bfloat16"
    batch, strategy = largest_batch(data, algorithm.client.phases), recipe.engine.strategy
    engines = tuple(Engine.fitted(each, strategy, memory, device, batch=batch, bfloat16=low) for each in problems)
    return Learners(algorithm.client, data, problems, kinds, engines, recipe.seed, dtype)
