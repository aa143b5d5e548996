"""What a server makes of its recipe before anyone is there: can it be deployed, and what does an update look like."""

from pathlib import Path

import numpy as np

from personafl.core import rng
from personafl.core.algorithm import Problem, untrained_upload
from personafl.core.tree import Tree
from personafl.data.federated import blank
from personafl.errors import BadInput
from personafl.recipe.deploy import DeploySection
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.federation import Federation
from personafl.storage.files import storage
from personafl.storage.rundir import RunDirectory

_MOMENTS = (
    "give them (mean=[…] and std=[…] in data.normalize), or have personafl data deal write the recipe, which does"
)


def deployable(recipe: Recipe) -> DeploySection:
    """Return the recipe's `[deploy]`; fail if it asks for what only the simulator does."""
    if recipe.deploy is None:
        raise BadInput("deploy: missing; say what the data look like: deploy.input_shape=[1,8,8] deploy.classes=10")
    if recipe.cloud is not None:
        raise BadInput("cloud: its servers have a coordinator; say where it is: --coordinator HOST:PORT")
    for key, given in (("buffer", recipe.buffer), ("pretrain", recipe.pretrain.rounds)):
        if given:
            raise BadInput(f"{key}: a server and its devices do not have it; remove it, or use personafl run")
    if recipe.federation.offline:
        raise BadInput("federation.offline: devices are in contact with their server; remove it, or use personafl run")
    recipe.check_installed()
    if recipe.data.normalize == "channel":
        raise BadInput(f'data.normalize: a server has no data to take moments from; use "auto", or {_MOMENTS}')
    if recipe.training.class_weights == "balanced":
        raise BadInput("training.class_weights: a server has no labels to count; give a number for each class")
    if recipe.deploy.task == "regression" and recipe.data.scale == "auto":
        raise BadInput(
            "data.scale: a server has no targets to take moments from; give them, mean=[…] and std=[…], or have "
            "personafl data deal write the recipe, which does"
        )
    return recipe.deploy


def adds_sums(recipe: Recipe) -> bool:
    """Say whether a server makes the moments of inputs from sums that its devices send."""
    return recipe.data.normalize == "auto" and recipe.deploy is not None and recipe.deploy.vocabulary is None


def check_moments(recipe: Recipe, who: str) -> None:
    """Refuse a recipe without moments where nobody adds up sums of devices."""
    if adds_sums(recipe):
        raise BadInput(f'data.normalize: {who} does not add up sums of devices; {_MOMENTS}, or use "none"')


def open_directory(recipe: Recipe, path: Path) -> RunDirectory:
    """Return the directory of a run of a recipe, a new one or one that is continued."""
    text = recipe.to_toml()
    if not path.exists():
        return RunDirectory.create(path, {"recipe.toml": text}, 0o700)
    kept = path / "recipe.toml"
    if not kept.is_file() or Recipe.kept(kept).to_toml() != text:
        raise BadInput(f"{path}: is not a server's run of this recipe; choose another --out")
    with storage(path):
        path.chmod(0o700)  # version 0.1 left it open
    return RunDirectory(path)


def open_federation(recipe: Recipe) -> Federation:
    """Return what a recipe alone decides; in place of its clients, who are elsewhere, is one without data."""
    section = recipe.deploy
    assert section is not None
    data = blank(section, 1)
    engine = recipe.engine.model_copy(update={"device": "cpu"})
    everyone = recipe.federation.model_copy(update={"cohort": 1.0})
    recipe = recipe.model_copy(update={"engine": engine, "federation": everyone})
    return prepare(recipe, data, profiles=np.zeros(1, dtype=np.int64)).federation


def upload_like(fed: Federation, problem: Problem) -> Tree:
    """Return what a client that has trained no steps sends, for its structure."""
    down, rule = fed.first_message(), fed.algorithm.client
    state = fed.learners.cast(rule.init(problem, down, rng.generator("shape")))
    return untrained_upload(rule, problem, down, state)
