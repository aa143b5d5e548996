"""The reference of the Python interface, from the docstrings and signatures themselves."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import personafl

_KIND = inspect._ParameterKind
SECTIONS: dict[str, tuple[str, ...]] = {
    "Runs": ("run", "compare", "resume", "load", "RoundDone"),
    "Results": ("Result", "Comparison", "Best"),
    "Data and models before a run": ("FederatedData", "describe_data", "describe_model", "make_plan", "fit_device"),
    "Recipes and searches": ("Recipe", "make_recipe", "run_sweep"),
    "Models as files": ("export", "Exported", "load_model", "predict", "generate"),
    "Reports and listings": ("write_report", "watch_runs", "list_methods", "list_models", "list_datasets"),
    "Devices and servers": (
        *("deal", "make_authority", "issue_certificates", "revoke_certificates", "run_server", "run_coordinator"),
        *("run_device", "ask_status", "drop_device", "write_flower_app", "wait_times", "account_privacy"),
    ),
    "Papers": ("reproduce",),
    "Errors": ("PersonaError", "BadInput", "Failed", "Diverged", "Interrupted", "StorageFailed"),
}
# What each command is in Python. What serves devices runs until it is stopped, as a process of its own.
COMMANDS = {
    "run": "personafl.run",
    "compare": "personafl.compare",
    "resume": "personafl.resume",
    "show": "personafl.load",
    "report": "personafl.write_report",
    "watch": "personafl.watch_runs",
    "export": "personafl.export",
    "fit": "personafl.fit_device",
    "recipe": "personafl.make_recipe",
    "methods": "personafl.list_methods",
    "models": "personafl.list_models",
    "datasets": "personafl.list_datasets",
    "latency": "personafl.wait_times",
    "privacy": "personafl.account_privacy",
    "server": "personafl.run_server",
    "coordinator": "personafl.run_coordinator",
    "device": "personafl.run_device",
    "status": "personafl.ask_status",
    "drop": "personafl.drop_device",
    "backup": "personafl.api.operating.back_up",
    "predict": "personafl.predict",
    "flower": "personafl.write_flower_app",
    "reproduce": "personafl.reproduce",
    "sweep": "personafl.run_sweep",
    "plan": "personafl.make_plan",
    "clients": "personafl.Comparison.to_pandas",
    "model describe": "personafl.describe_model",
    "data describe": "personafl.describe_data",
    "data deal": "personafl.deal",
    "audit verify": "personafl.api.operating.verify_audit",
    "pki init": "personafl.make_authority",
    "pki issue": "personafl.issue_certificates",
    "pki revoke": "personafl.revoke_certificates",
}


def page() -> str:
    """Return the page: every public name with its signature and what it does, and a table of commands."""
    parts = ["# Python", "Everything here is imported from `personafl`; what is not listed may change without notice."]
    for title, names in SECTIONS.items():
        parts += [f"## {title}", *(part for name in names for part in _entry(name))]
    rows = "\n".join(f"| `personafl {command}` | `{name}` |" for command, name in COMMANDS.items())
    return "\n\n".join([*parts, "## Commands and functions", f"| command | in Python |\n|---|---|\n{rows}"]) + "\n"


def signatures() -> Iterator[str]:
    """Yield a line for every public name, and for each field and method of what runs return: what users rely on."""
    for name in sorted(personafl.__all__):
        thing = getattr(personafl, name)
        if not inspect.isclass(thing):
            yield f"{name}{_signature(thing)}"
            continue
        yield f"class {name}({', '.join(base.__name__ for base in thing.__bases__)})"
        if name in ("Recipe", "FederatedData", "Exported") or issubclass(thing, Exception):
            continue  # a recipe's keys have a page of their own, and data are made by us
        yield from (f"    {name}.{line}" for line in _fields(thing))
        yield from (f"    {name}.{method}{_signature(function)}" for method, function in _methods(thing))


def _entry(name: str) -> Iterator[str]:
    thing = getattr(personafl, name)
    if not inspect.isclass(thing):
        yield f"### `{name}`"
        yield f"```text\n{name}{_signature(thing, typed=True)}\n```"
        yield _text(thing)
        return
    yield f"### `{name}`"
    yield _text(thing)
    if dataclasses.is_dataclass(thing) and name not in ("FederatedData", "Exported"):
        yield "\n".join(f"- `{line}`" for line in _fields(thing))
    if name in SECTIONS["Results"]:
        for method, function in _methods(thing):
            yield f"```text\n{name}.{method}{_signature(function, typed=True)}\n```"
            yield _text(function)


def _fields(kind: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(kind):
        yield from (f"{field.name}: {_type(field.type)}" for field in dataclasses.fields(kind) if field.name != "given")
    for name, value in inspect.getmembers(kind, lambda value: isinstance(value, property)):
        if not name.startswith("_"):
            yield f"{name}: {inspect.signature(value.fget).return_annotation}"


def _methods(kind: Any) -> Iterator[tuple[str, Any]]:
    for name, value in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            yield name, value


def _signature(function: Any, typed: bool = False) -> str:
    """Return the arguments of a function and their defaults; with types, whose text differs between Pythons, for people."""
    given = inspect.signature(function)
    written: list[str] = []
    before = None
    for parameter in given.parameters.values():
        if parameter.name == "self":
            continue
        if before is _KIND.POSITIONAL_ONLY and parameter.kind is not before:
            written.append("/")
        if parameter.kind is _KIND.KEYWORD_ONLY and before not in (_KIND.KEYWORD_ONLY, _KIND.VAR_POSITIONAL):
            written.append("*")
        written.append(_parameter(parameter, typed))
        before = parameter.kind
    result = f" -> {_type(given.return_annotation)}" if typed else ""
    line = f"({', '.join(written)}){result}"
    if not typed or len(line) < 90:
        return line
    return "\n".join(["(", *(f"    {part}," for part in written), f"){result}"])


def _parameter(parameter: inspect.Parameter, typed: bool) -> str:
    stars = {_KIND.VAR_POSITIONAL: "*", _KIND.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = f": {_type(parameter.annotation)}" if typed else ""
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}{kind}{default}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _text(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")
