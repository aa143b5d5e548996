"""Personalized federated learning: every client ends up with a model of its own.

import personafl
result = personafl.run({"method": {"name": "ditto"}, "rounds": 30})
result.table()
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from personafl.api import Comparison, compare, resume, run
    from personafl.errors import BadInput, Diverged, Interrupted, PersonaError, StorageFailed
    from personafl.exports.export import Exported, export
    from personafl.models.modelfile import load_model
    from personafl.recipe.recipe import Recipe
    from personafl.runs.result import Result

__all__ = [
    "BadInput",
    "Comparison",
    "Diverged",
    "Exported",
    "Interrupted",
    "PersonaError",
    "Recipe",
    "Result",
    "StorageFailed",
    "compare",
    "export",
    "load_model",
    "resume",
    "run",
]

__version__ = "0.1.0"


# Loaded at first use: torch takes seconds to import, and `personafl --help` needs none of it.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'personafl' has no attribute {name!r}")
    homes = {
        "Exported": "personafl.exports.export",
        "Recipe": "personafl.recipe.recipe",
        "Result": "personafl.runs.result",
        "export": "personafl.exports.export",
        "load_model": "personafl.models.modelfile",
    }
    errors = {"BadInput", "Diverged", "Interrupted", "PersonaError", "StorageFailed"}
    home = homes.get(name, "personafl.errors" if name in errors else "personafl.api")
    if name not in errors:
        importlib.import_module("personafl.system").check_system()
    return getattr(importlib.import_module(home), name)
