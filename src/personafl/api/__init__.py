"""The Python interface: what the command line does, one function each, with objects where a recipe would have names.

calls        what the arguments of a call mean
running      run, compare, resume, load
result       what runs found: tables, each client's model, predictions, more rounds
directories  what there is in the directories of runs
progress     who is told how far runs are; display: a terminal; shown: results as text and in a notebook
commands     the other commands: listings, descriptions, plans, sweeps, reports, …
deployment   certificates, servers, devices
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from personafl.api.calls import as_recipe
    from personafl.api.commands import (
        account_privacy,
        deal,
        describe_data,
        describe_model,
        fit_device,
        generate,
        list_datasets,
        list_methods,
        list_models,
        make_plan,
        make_recipe,
        predict,
        run_sweep,
        wait_times,
        watch_runs,
        write_report,
    )
    from personafl.api.deployment import (
        ask_status,
        drop_device,
        issue_certificates,
        make_authority,
        revoke_certificates,
        run_coordinator,
        run_device,
        run_server,
    )
    from personafl.api.directories import FailedRun, failed_in, notes_of, recipe_of, wants_pick, warnings_of
    from personafl.api.progress import Listeners, RoundDone
    from personafl.api.result import Best, Comparison, Result, finished_in, joined, results_of, rows_of
    from personafl.api.running import compare, load, resume, run
    from personafl.storage.rundir import run_path

_HOMES = {
    "personafl.api.calls": ("as_recipe",),
    "personafl.api.commands": (
        *("account_privacy", "deal", "describe_data", "describe_model", "fit_device", "generate", "list_datasets"),
        *("list_methods", "list_models", "make_plan", "make_recipe", "predict", "run_sweep", "wait_times"),
        *("watch_runs", "write_report"),
    ),
    "personafl.api.deployment": (
        *("ask_status", "drop_device", "issue_certificates", "make_authority", "revoke_certificates"),
        *("run_coordinator", "run_device", "run_server"),
    ),
    "personafl.api.directories": ("FailedRun", "failed_in", "notes_of", "recipe_of", "wants_pick", "warnings_of"),
    "personafl.api.progress": ("Listeners", "RoundDone"),
    "personafl.api.result": ("Best", "Comparison", "Result", "finished_in", "joined", "results_of", "rows_of"),
    "personafl.api.running": ("compare", "load", "resume", "run"),
    "personafl.storage.rundir": ("run_path",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Best",
    "Comparison",
    "FailedRun",
    "Listeners",
    "Result",
    "RoundDone",
    "account_privacy",
    "as_recipe",
    "ask_status",
    "compare",
    "deal",
    "describe_data",
    "describe_model",
    "drop_device",
    "failed_in",
    "finished_in",
    "fit_device",
    "generate",
    "issue_certificates",
    "joined",
    "list_datasets",
    "list_methods",
    "list_models",
    "load",
    "make_authority",
    "make_plan",
    "make_recipe",
    "notes_of",
    "predict",
    "recipe_of",
    "results_of",
    "resume",
    "revoke_certificates",
    "rows_of",
    "run",
    "run_coordinator",
    "run_device",
    "run_path",
    "run_server",
    "run_sweep",
    "wait_times",
    "wants_pick",
    "warnings_of",
    "watch_runs",
    "write_report",
]


# Loaded at first use: the listings of the command line need no torch.
def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'personafl.api' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
