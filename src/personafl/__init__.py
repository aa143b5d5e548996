"""Personalized federated learning: every client ends up with a model of its own.

import personafl
result = personafl.run(data, method="ditto", label="activity", user="person")
result.predict("anna", new_rows)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # isort: off
    from personafl.api.commands import account_privacy, deal, describe_data, describe_model, fit_device, generate
    from personafl.api.commands import list_datasets, list_methods
    from personafl.api.commands import list_models, make_plan, make_recipe, predict, run_sweep, wait_times, watch_runs
    from personafl.api.deployment import ask_status, drop_device, issue_certificates, make_authority
    from personafl.api.deployment import revoke_certificates, run_coordinator, run_device, run_server
    from personafl.flower.app import write_flower_app
    from personafl.api import RoundDone, write_report
    from personafl.api.result import Best, Comparison, Result
    from personafl.api.running import compare, load, resume, run
    from personafl.data.federated import FederatedData
    from personafl.errors import BadInput, Diverged, Failed, Interrupted, PersonaError, StorageFailed
    from personafl.exports.export import Exported, export
    from personafl.models.modelfile import load_model
    from personafl.papers.repeat import reproduce
    from personafl.recipe.recipe import Recipe

_ERRORS = ["BadInput", "Diverged", "Failed", "Interrupted", "PersonaError", "StorageFailed"]
__all__ = ["BadInput", "Diverged", "Failed", "Interrupted", "PersonaError", "StorageFailed", "compare", "resume", "run"]
__all__ += ["Best", "Comparison", "FederatedData", "Recipe", "Result", "RoundDone", "load", "predict", "run_sweep"]
__all__ += ["describe_data", "describe_model", "generate", "list_datasets", "list_methods", "list_models", "make_plan"]
__all__ += ["Exported", "deal", "export", "fit_device", "load_model", "make_recipe", "wait_times", "watch_runs"]
__all__ += ["ask_status", "issue_certificates", "make_authority", "reproduce", "revoke_certificates", "run_coordinator"]
__all__ += ["account_privacy", "drop_device", "run_device", "run_server", "write_flower_app", "write_report"]

__version__ = "0.1.0"
_HOMES = dict.fromkeys(_ERRORS, "errors") | dict.fromkeys(("Exported", "export"), "exports.export")
_HOMES |= {"FederatedData": "data.federated", "Recipe": "recipe.recipe", "load_model": "models.modelfile"}
_HOMES |= {"reproduce": "papers.repeat", "write_flower_app": "flower.app"}


# Loaded at first use: torch takes seconds to import, and `personafl --help` needs none of it.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'personafl' has no attribute {name!r}")
    home = _HOMES.get(name, "api")
    if home != "errors":
        importlib.import_module("personafl.system").check_system()
    return getattr(importlib.import_module(f"personafl.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
