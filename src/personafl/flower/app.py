"""The folder that `flwr run` takes: a recipe and two modules of two lines. All else is installed on each machine."""

import re
from pathlib import Path

import tomli_w

from personafl.api.calls import RecipeLike, as_recipe
from personafl.api.deployment import check_extra
from personafl.deploy.server.opening import check_moments, deployable
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.addressing import check_one_for_all
from personafl.runs.start import settled
from personafl.storage.files import storage

_PACKAGE = "personafl_app"
_SERVER = """from pathlib import Path

from personafl.flower import server_app

app = server_app(Path(__file__).with_name("recipe.toml"))
"""
_CLIENT = """from personafl.flower import client_app

app = client_app()
"""


def write_flower_app(recipe: RecipeLike, out: str | Path = "app") -> Path:
    """Write a recipe as a Flower app, for those who run a SuperLink, and return its folder."""
    check_extra(("flwr", "flwr", "flower"))
    write_app(settled(as_recipe(recipe)), Path(out))
    return Path(out)


def write_app(recipe: Recipe, out: Path) -> None:
    """Write the Flower app of a recipe to a new folder."""
    deployable(recipe)
    if recipe.federation.offline:
        raise BadInput("federation.offline: nodes are in contact with their SuperLink; remove it, or use personafl run")
    check_moments(recipe, "a Flower app")
    check_one_for_all(recipe.algorithm(), "a Flower app")
    if recipe.sample_privacy is not None:
        raise BadInput("sample_privacy: a Flower app does not have it; remove it, or use personafl server")
    if recipe.secure is not None:
        raise BadInput("secure: a Flower app's server sees single updates; remove it, or use personafl server")
    if out.exists():
        raise BadInput(f"--out {out}: is there already; choose another folder, or remove it")
    with storage(out):
        package = out / _PACKAGE
        package.mkdir(parents=True)
        (out / "pyproject.toml").write_text(tomli_w.dumps(_project(recipe)))
        (package / "__init__.py").write_text("")
        (package / "server.py").write_text(_SERVER)
        (package / "client.py").write_text(_CLIENT)
        (package / "recipe.toml").write_text(recipe.to_toml())


def _project(recipe: Recipe) -> dict[str, object]:
    """Return what Flower must know of an app. It has no dependencies: no machine shall install anything for it."""
    name = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-") or "recipe"
    app = {
        "publisher": "personafl",
        "components": {"serverapp": f"{_PACKAGE}.server:app", "clientapp": f"{_PACKAGE}.client:app"},
        "config": {"out": f"runs/{name}-flower", "authenticated": False},
    }
    return {
        "project": {
            "name": f"personafl-{name}",
            "version": "1.0.0",
            "description": f"{recipe.method.name} with personafl",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {"flwr": {"app": app}},
    }
