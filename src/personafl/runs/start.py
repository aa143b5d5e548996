"""Where a run starts from: weights that are drawn, or the global model of a finished run and what that saw."""

from pathlib import Path
from typing import Literal

from personafl.core import rng, wire
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.data.config import Moments
from personafl.errors import BadInput
from personafl.models.adapters import is_adapter
from personafl.recipe.recipe import Recipe
from personafl.storage.files import read_json
from personafl.storage.seals import read_sealed

START_FILE = "global.safetensors"  # of a run directory: the shared model that came out


def settled(recipe: Recipe) -> Recipe:
    """Return a recipe as a command takes it: anchored, and with inputs as its start saw them unless it says how."""
    recipe = recipe.anchored()
    if recipe.start is None:
        return recipe
    known = {"normalize": inputs_of(Path(recipe.start)), "scale": targets_of(Path(recipe.start)) or "auto"}
    found = {key: value for key, value in known.items() if getattr(recipe.data, key) == "auto"}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=found)})


def inputs_of(run: Path) -> Moments | Literal["auto", "none"]:
    """Return by what a run's inputs were standardised, as `data.normalize` has it; auto: its directory does not say."""
    file = run / "split.json"
    found = read_json(file).get("normalize", "auto") if file.exists() else "auto"
    return "none" if found is None else Moments(**found) if isinstance(found, dict) else "auto"


def targets_of(run: Path) -> Moments | None:
    """Return by what a regression's targets were standardised; None: it was none, or its directory does not say."""
    file = run / "split.json"
    found = read_json(file).get("scale") if file.exists() else None
    return None if found is None else Moments(**found)


def make_start(recipe: Recipe, net: Net, moments: Moments | None, scale: Moments | None) -> Params:
    """Return the weights of the shared network that the run starts from; its inputs are standardised by `moments`."""
    fresh = net.init(rng.generator(recipe.seed, "start"))
    if recipe.start is None:
        return fresh
    run = Path(recipe.start)
    start = _warm_start(run, fresh)
    if (before := inputs_of(run)) not in ("auto", moments or "none"):
        how = "as they are" if before == "none" else "standardised by other numbers"
        raise BadInput(f"start: the model of {run} saw inputs {how}; leave data.normalize out, then it is as there")
    if targets_of(run) not in (None, scale):
        raise BadInput(f"start: the model of {run} has targets of another scale; leave data.scale out")
    return start


def _warm_start(run: Path, fresh: Params) -> Params:
    """Return `fresh` with the global model of a finished run put in, by name; only adapters may be missing there."""
    path = run / START_FILE
    try:
        found = wire.decode_named(read_sealed(path, "begin anew"))
    except (OSError, BadInput) as error:
        raise BadInput(f"start: {path} cannot be read, or is damaged; give the directory of a finished run") from error
    if not found:
        raise BadInput(f"start: {run} has no global model to start from")
    wrong = sorted(name for name in found if name not in fresh or found[name].shape != fresh[name].shape)
    missing = sorted(name for name in fresh if name not in found and not is_adapter(name))
    if wrong or missing:
        names = ", ".join((wrong or missing)[:5])
        what = "does not fit this model" if wrong else "is missing there"
        raise BadInput(f"start: the model of {run} is another one: {names} {what}; use the same model as that run")
    return {name: found.get(name, value).to(value.dtype) for name, value in fresh.items()}
