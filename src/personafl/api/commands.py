"""The other commands of the command line as functions: each calls what its command calls."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personafl.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from personafl.api.calls import RecipeLike
    from personafl.data.federated import FederatedData
    from personafl.exports.fit import Fit
    from personafl.exports.memory import Memory
    from personafl.latency.waiting import Waiting
    from personafl.models.predicting import Predictions
    from personafl.plan.estimate import Plan
    from personafl.privacy.answers import Answer
    from personafl.recipe.recipe import Recipe
    from personafl.runs.given import Given
    from personafl.sweep.search import Sweep
    from personafl.sweep.study import Trial


def list_methods() -> list[dict[str, str]]:
    """Return the methods: name, summary, paper and options of each, as `personafl methods` lists them."""
    from personafl.algorithms import METHODS

    return [
        {"name": name, "summary": method.summary, "paper": method.paper, "options": method.options}
        for name, method in METHODS.items()
    ]


def list_models() -> list[dict[str, str]]:
    """Return the models: name, summary and options of each, as `personafl models` lists them."""
    from personafl.models import MODELS
    from personafl.options import describe

    return [
        {"name": name, "summary": (build.__doc__ or "").splitlines()[0], "options": describe(build)}
        for name, build in MODELS.items()
    ]


def list_datasets() -> list[dict[str, str]]:
    """Return the kinds of data that are read from files: what to write for each, as `personafl datasets` lists them."""
    from personafl.data.sources import SOURCES

    return [{"name": s.name, "summary": s.summary, "write": s.usage, "paper": s.paper} for s in SOURCES]


def make_recipe(
    recipe: RecipeLike | None = None,
    *,
    data: str | Path | None = None,
    method: str | Mapping[str, Any] | None = None,
    methods: str | Sequence[str] | None = None,
    model: str | Mapping[str, Any] | None = None,
    user: str | None = None,
    label: str | None = None,
    partition: str | Mapping[str, Any] | None = None,
    rounds: int | None = None,
    seeds: int | Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return a whole recipe, with all its keys; `to_toml()` is what `personafl recipe` prints."""
    from personafl.api.calls import method_key, methods_of, seeds_of

    changes = {**method_key(method, None), "rounds": rounds}
    changes |= {"compare.methods": methods_of(methods), "compare.seeds": seeds_of(seeds)}
    given = {"data": data, "recipe": recipe, "model": model, "user": user, "label": label, "partition": partition}
    whole, objects = _understood(None, given | {"settings": settings}, changes)
    if objects.names:
        raise BadInput(f"{objects.names[0]}: a recipe has names and paths, and this is an object; give its path")
    return whole


@dataclass(frozen=True, repr=False)
class Description:
    """What clients have: `data`, as they are dealt, `notes` on them, and all of it as text and in a notebook."""

    data: FederatedData
    notes: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from personafl.report.svg import safe

        lines = "".join(f"<li>{safe(note)}</li>" for note in self.notes)
        return f"{self.data._repr_html_()}<ul>{lines}</ul>"


def describe_data(
    data_or_recipe: Any = None,
    /,
    *,
    data: Any = None,
    recipe: RecipeLike | None = None,
    user: Any = None,
    label: str | None = None,
    partition: str | Mapping[str, Any] | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Description:
    """Return who holds what, and what to know of the data before training on them; arguments are those of `run`."""
    from rich.console import Console

    from personafl.data.advice import advice
    from personafl.data.describe import describe

    given = {"data": data, "recipe": recipe, "user": user, "label": label, "partition": partition, "settings": settings}
    whole, objects = _understood(data_or_recipe, given, {"seed": seed})
    dealt = objects.dealt(whole)
    console = Console(file=io.StringIO(), width=100, color_system=None, force_terminal=False, force_jupyter=False)
    describe(dealt, console, whole.data)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return Description(dealt, (*dealt.notes, *advice(dealt, whole.data)), text)


@dataclass(frozen=True)
class ModelDescription:
    """The tensors of a network, which of them are personal, and what memory a client's training needs."""

    tensors: pd.DataFrame
    memory: Memory


def describe_model(
    data_or_recipe: Any = None,
    /,
    *,
    data: Any = None,
    recipe: RecipeLike | None = None,
    model: nn.Module | str | Mapping[str, Any] | None = None,
    user: Any = None,
    label: str | None = None,
    method: str | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ModelDescription:
    """Return which tensors of a model are personal, and what memory training needs; arguments are those of `run`."""
    import pandas as pd

    from personafl.api.calls import method_key
    from personafl.exports.memory import training_memory
    from personafl.runs.build import prepare

    given = {"data": data, "recipe": recipe, "model": model, "user": user, "label": label, "settings": settings}
    whole, objects = _understood(data_or_recipe, given, method_key(method, None))
    job = prepare(whole, given=objects)
    problem = job.federation.problems[0]
    rows = [
        {
            "tensor": name,
            "shape": tuple(shape),
            "parameters": shape.numel(),
            "personal": problem.split is not None and problem.split.is_personal(name),
        }
        for name, shape in problem.net.shapes.items()
    ]
    return ModelDescription(pd.DataFrame(rows), training_memory(job))


def make_plan(recipe: RecipeLike, *, out: str | Path = "runs", **arguments: Any) -> Plan:
    """Estimate time, memory, disk and bytes of a comparison or run, by a few rounds on this machine.

    Further arguments are those of `make_recipe`; with `method` it is one run. `out` is where the runs would be.
    """
    from personafl.plan.estimate import make_plan as estimate

    whole = make_recipe(recipe, **arguments)
    return estimate(whole.alone() if arguments.get("method") is not None else whole, Path(out))


def run_sweep(
    recipe: RecipeLike,
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    listener: Callable[[Trial, int, int], None] | None = None,
    **arguments: Any,
) -> Sweep:
    """Try values for keys of a recipe, as its section sweep says, and write the best recipe by validation data.

    Further arguments are those of `make_recipe`. A directory `out` that a sweep was begun in is continued.
    `listener(trial, done, of)` is told when a trial is over.
    """
    from personafl.recipe.sweep import SWEEP_FILE
    from personafl.storage.rundir import claim_name
    from personafl.sweep.search import resume_sweep, sweep

    whole = make_recipe(recipe, **arguments)
    path = Path(out) if out is not None else claim_name(Path("runs"), f"{whole.name}-sweep")
    if (path / SWEEP_FILE).exists():
        return resume_sweep(path, jobs=jobs, listener=listener)
    return sweep(whole, path, jobs=jobs, listener=listener)


def write_report(*paths: str | Path, out: str | Path | None = None) -> Path:
    """Write one page with all that runs found, and return its path; several runs must be of one split."""
    from personafl.report.page import write_page
    from personafl.storage.rundir import PAGE_FILE

    found = _paths(paths)
    return write_page(found, Path(out) if out is not None else Path(PAGE_FILE) if len(found) > 1 else None)


def watch_runs(*paths: str | Path) -> None:
    """Show runs in progress, of this or another process, until they are over."""
    from rich.console import Console

    from personafl.report.load import load
    from personafl.report.watch import watch

    found = _paths(paths)
    load(found)  # fail before anything is shown
    watch(found, Console())


def fit_device(
    recipe: RecipeLike | None = None,
    *,
    max_bytes: int | str,
    max_memory: int | str | None = None,
    models: str | None = None,
    bits: str | None = None,
    **arguments: Any,
) -> Fit:
    """Find the largest network, and its bits per weight, that fit on a device; sizes are as "100k" or in bytes.

    Further arguments are those of `make_recipe`; `models` and `bits` are written as for `personafl fit`.
    """
    from personafl.exports.fit import Limits, fit, parse_bits, parse_models, parse_size

    memory = None if max_memory is None else parse_size(str(max_memory), "max_memory")
    limits = Limits(bytes=parse_size(str(max_bytes), "max_bytes"), memory=memory)
    named = None if models is None else parse_models(models)
    return fit(make_recipe(recipe, **arguments), limits, named, None if bits is None else parse_bits(bits))


def predict(model: str | Path, data: str | Path) -> Predictions:
    """Predict with a model file that `export` or a device wrote, for a file of data; see also `Result.predict`."""
    from personafl.deploy.device.serving import predict as apply

    return apply(Path(model), str(data))


def generate(model: str | Path, prompt: str, *, tokens: int = 100, temperature: float = 0.0, seed: int = 0) -> str:
    """Continue a prompt with a model file of a language model; see also `Result.generate`, which says how."""
    from personafl.deploy.device.serving import generate as apply

    return apply(Path(model), prompt, tokens, temperature, seed)


def deal(recipe: RecipeLike | None = None, *, out: str | Path = "dealt", **arguments: Any) -> list[Path]:
    """Write each client's data to a file of its own, for devices, and beside them the recipe that their server needs.

    Further arguments are those of `make_recipe`. Returns the files.
    """
    from personafl.deploy.device.dealing import deal as write

    return write(make_recipe(recipe, **arguments), Path(out))[1]


def wait_times(
    servers: int = 10,
    *,
    latency: str | None = None,
    trace: str | Path | None = None,
    devices: int | None = None,
    active: int | None = None,
    arrival: str | None = None,
    step: str | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Waiting:
    """Return how long it takes until the first B of some servers are ready, and how many to wait for.

    `latency` is the law of a server's round, as in "weibull:shape=2,scale=1"; see `personafl latency`.
    """
    from personafl.latency.waiting import analyse, round_times

    file = None if trace is None else Path(trace)
    times, _ = round_times(
        latency, file, devices=devices, active=active, arrival=arrival, step=step, steps=steps, seed=seed
    )
    return analyse(times, servers, seed=seed)


def account_privacy(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise: float | None = None,
    rounds: int | None = None,
    rate: float | None = None,
    mechanism: str = "gaussian",
    trees: int | None = None,
    apart: int | None = None,
    accountant: str | None = None,
) -> Answer:
    """Return what rounds with noise promise to each client: of the first four arguments give three.

    `noise` is the multiplier. With `rate` cohorts are Poisson samples, without it nothing is claimed of them.
    `mechanism` is "gaussian"; "discrete", which is the same in whole numbers; "distributed",
    which devices add to sums that are all that is seen; "tree" (DP-FTRL), `rounds` being those of
    each of its `trees`; or "banded", where a client may take part again after `apart` rounds. `accountant` is "pld" or
    "rdp". Numbers err to the safe side; see `personafl privacy`.
    """
    from personafl.privacy.answers import answer

    return answer(
        epsilon=epsilon,
        delta=delta,
        noise=noise,
        rounds=rounds,
        rate=rate,
        mechanism=mechanism,
        trees=trees,
        apart=apart,
        accountant=accountant,
    )


def _paths(paths: Sequence[str | Path]) -> list[Path]:
    from personafl.api.calls import path_of

    if not paths:
        raise BadInput("paths: give the directories of runs or comparisons")
    return [path_of(path, "paths") for path in paths]


def _understood(first: Any, given: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[Recipe, Given]:
    from personafl.api.calls import Objects, understood

    names = ("data", "recipe", "user", "label", "partition", "settings")
    objects = Objects(given.get("model"), given.get("algorithm"))
    return understood(first, objects=objects, **{name: given.get(name) for name in names}, changes=changes)
