"""What a server makes of its recipe before anyone is there: can it be deployed, and what does an update look like."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core import rng
from personafl.core.algorithm import Problem, untrained_upload
from personafl.core.tree import Tree
from personafl.data.config import Moments
from personafl.data.federated import blank
from personafl.errors import BadInput
from personafl.recipe.deploy import DeploySection
from personafl.recipe.privacy import check_moments as check_private_moments
from personafl.recipe.recipe import Recipe
from personafl.recipe.robust import RobustSection
from personafl.runs.addressing import check_addressed
from personafl.runs.build import prepare
from personafl.runs.guarding import check_by_gradients
from personafl.runs.robust import held
from personafl.runs.secure import check_cohort
from personafl.simulate.federation import Federation
from personafl.storage.files import storage
from personafl.storage.rundir import Checkpoint, RunDirectory
from personafl.uploads.secure import check_summable

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
    if recipe.privacy is not None:
        check_private_moments(recipe.data.normalize, recipe.data.scale, computed=adds_sums(recipe), scaled=False)
    if recipe.sample_privacy is not None:
        normalize, scale, computed = recipe.data.normalize, recipe.data.scale, adds_sums(recipe)
        check_private_moments(normalize, scale, computed=computed, scaled=False, section="sample_privacy")
        check_by_gradients(recipe.method.name, recipe.algorithm().client)
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
    check_addressed(recipe, recipe.algorithm())
    if recipe.secure is not None:
        _check_secure(recipe, recipe.deploy)
    return recipe.deploy


def _check_secure(recipe: Recipe, section: DeploySection) -> None:
    """Fail if devices would show more than sums, or are too few for them."""
    assert recipe.secure is not None
    check_summable(recipe.algorithm())
    if adds_sums(recipe):
        raise BadInput(
            f'data.normalize: "auto" shows a server sums of each device\'s inputs; {_MOMENTS}, or use "none"'
        )
    cohort = recipe.federation.cohort
    check_cohort(recipe.secure, cohort if isinstance(cohort, int) else max(1, round(cohort * section.devices)))


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
    """Return what a recipe alone decides; in place of its clients, who are elsewhere, is one without data.

    Its server adds no noise yet: that needs a key (`noise`).
    """
    section = recipe.deploy
    assert section is not None
    data = blank(section, 1)
    engine = recipe.engine.model_copy(update={"device": "cpu"})
    alone = {"cohort": 1.0, "sampling": "exact", "apart": None, "offline": float(bool(recipe.federation.offline))}
    everyone = recipe.federation.model_copy(update=alone)
    devices = dict.fromkeys(("privacy", "sample_privacy", "secure"))  # theirs, or it needs a key
    own = {"engine": engine, "federation": everyone, "robust": RobustSection(), **devices}
    federation = prepare(recipe.model_copy(update=own), data, profiles=np.zeros(1, dtype=np.int64)).federation
    return dataclasses.replace(federation, algorithm=held(recipe, federation.algorithm, 1))


def upload_like(fed: Federation, problem: Problem) -> Tree:
    """Return what a client that has trained no steps sends, for its structure."""
    down, rule = fed.first_message(), fed.algorithm.client
    state = fed.learners.cast(rule.init(problem, down, rng.generator("shape")))
    return untrained_upload(rule, problem, down, state)


def standardised(recipe: Recipe, moments: Mapping[str, Any] | None) -> Recipe:
    """Return a recipe as devices are sent it, with the moments that their sums make, if they do."""
    if moments is None:
        return recipe
    data = recipe.data.model_copy(update={"normalize": Moments.model_validate(moments)})
    return recipe.model_copy(update={"data": data})


def kept_state(directory: RunDirectory, checkpoint: Checkpoint) -> bytes:
    """Return the server's state of a checkpoint, or fail with what can be done."""
    try:
        return directory.server_bytes(checkpoint)
    except BadInput as error:
        earlier = ", ".join(str(one.rounds) for one in checkpoint.before)
        raise BadInput(f"{error}; put a copy back{f', or --roll-back to {earlier}' if earlier else ''}") from error
