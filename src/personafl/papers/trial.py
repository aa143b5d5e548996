"""Whether a preset can start: its data are dealt where they are, and every network is built, without computing.

Networks are built on torch's `meta` device, where tensors have shapes and no numbers, so that large ones take no time.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from personafl.core.net import Net
from personafl.core.reading import Reading
from personafl.core.shape import DataShape
from personafl.core.split import Split
from personafl.data.build import federate
from personafl.data.config import DataConfig
from personafl.data.federated import FederatedData, blank
from personafl.data.inputs import as_seen
from personafl.data.sources import Dataset as Samples
from personafl.data.sources import load_dataset
from personafl.errors import BadInput
from personafl.models import make_net_and_split
from personafl.models.network import SharedNetwork
from personafl.papers.catalog import Dataset
from personafl.papers.preset import Preset
from personafl.papers.settings import UNKNOWN
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.job import Job

_MANY = 1000  # clients, where only the data would say


@dataclass(frozen=True)
class Trial:
    """What came of it."""

    data: str  # what was dealt, or why it was not
    facts: dict[str, dict[str, Any]]  # of each run: what no recipe says, by key
    problems: tuple[str, ...]  # why it cannot start


def try_start(preset: Preset, recipe: Recipe, source: str | Path | None) -> Trial:
    """Deal the data of `source` (None: they are not here) for every seed, and prepare every run."""
    needed = preset.paper.datasets.get(preset.setting.at(preset.size).dataset)
    problems: list[str] = []
    data, said, whole = None, UNKNOWN, False
    if source is not None:
        config = recipe.data.model_copy(update={"source": str(source)})
        said, whole = _described(config, needed)
        try:
            data, *_ = [_dealt(config, seed) for seed in recipe.compare.seeds]
            said = f"{said}, dealt to {data.clients:,} client{'s' if data.clients > 1 else ''}"
        except BadInput as error:
            said = f"{said}, cannot be dealt: {error}"
            problems += [said] if whole else []
    known = _known(data if whole else None)
    if data is None:
        if needed is None:  # the digits, which are always here
            return Trial(said, {}, tuple(problems))
        data = _shape(needed, recipe.data)
        if recipe.data.validation:  # which only dealt data have
            tested = recipe.evaluation.model_copy(update={"split": "test"})
            recipe = recipe.model_copy(update={"evaluation": tested})
    facts: dict[str, dict[str, Any]] = {}
    for run in preset.runs:
        try:
            facts[run] = known | _sizes(_prepared(recipe.for_method(run, recipe.compare.seeds[0]), data))
        except Exception as error:  # whatever it is, it would end the run, and the others are still to be looked at
            problems.append(f"{run} cannot start: {type(error).__name__}: {error}")
    return Trial(said, facts, tuple(problems))


def lacking(preset: Preset, recipe: Recipe) -> str | None:
    """Say so if the recipe's data are a part of what the preset needs."""
    said, whole = _described(recipe.data, preset.paper.datasets.get(preset.setting.at(preset.size).dataset))
    return None if whole else f"{preset.name} is for the whole data set; {said}"


def _prepared(run: Recipe, data: FederatedData) -> Job:
    """Prepare a run, after its pre-training."""
    if (before := run.for_pretraining()) is not None:
        _prepared(before, data)
    as_seen(blank(data.shape, 1), run.data, torch.float32)  # one sample for one client
    plain = run.data.model_copy(update={"normalize": "none", "augment": None})  # there are no pixels to take moments of
    run = run.model_copy(update={"data": plain})
    if data.task == "ctc":  # its targets are looked at, so it is tried on real inputs
        return prepare(run, dataclasses.replace(data, x=torch.zeros(2, *data.x.shape[1:])), make=_network)
    engine = run.engine.model_copy(update={"device": "meta"})
    with torch.device("meta"):
        return prepare(run.model_copy(update={"engine": engine}), data, make=_network)


_made: dict[str, tuple[Net, Split | None]] = {}


def _network(network: SharedNetwork, data: FederatedData, module: nn.Module | None) -> tuple[Net, Split | None]:
    """Make a network once for all data of a shape."""
    key = repr((network, data.shape))
    if key not in _made:
        _made[key] = make_net_and_split(network, data, module)
    return _made[key]


def _sizes(job: Job) -> dict[str, int]:
    problem = job.federation.problems[0]
    sizes = {"model.parameters": problem.net.parameters}
    if problem.split is not None:
        personal = [shape for name, shape in problem.net.shapes.items() if problem.split.is_personal(name)]
        sizes["model.personal_parameters"] = sum(shape.numel() for shape in personal)
    return sizes


def _known(data: FederatedData | None) -> dict[str, Any]:
    """Return what the deal says of clients, as the least and the most."""
    keys = ("data.client.train", "data.client.test", "data.client.labels")
    if data is None:
        return dict.fromkeys(("data.clients", *keys), UNKNOWN)
    counts = [data.train.sizes, data.test.sizes]
    if data.task == "classification":
        counts.append((data.counts() > 0).sum(axis=1))
    return {"data.clients": data.clients, **dict(zip(keys, map(_range, counts), strict=False))}


def _range(counts: NDArray[np.int64]) -> int | tuple[int, int]:
    least, most = int(counts.min()), int(counts.max())
    return least if least == most else (least, most)


def _described(config: DataConfig, needed: Dataset | None) -> tuple[str, bool]:
    """Return what a file has, and whether that is the whole data set."""
    name, samples = Path(config.source).name, len(_labels(config)[0].y)
    if needed is None or needed.samples is None or samples >= needed.samples:
        return f"{name}: {samples:,} samples", True
    return f"{name}: only {samples:,} of {needed.samples:,} samples", False


def _dealt(config: DataConfig, seed: int) -> FederatedData:
    """Deal data whose inputs have a shape and no content."""
    samples, shape, kind = _labels(config)
    data = federate(samples, config, seed)
    return dataclasses.replace(data, x=torch.empty(len(samples.y), *shape, dtype=kind, device="meta"))


def _labels(config: DataConfig) -> tuple[Samples, tuple[int, ...], torch.dtype]:
    """Return a data set without its inputs, and their shape and kind."""
    return _loaded(config.source, config.reading().model_dump_json())


@functools.lru_cache(maxsize=16)
def _loaded(source: str, reading: str) -> tuple[Samples, tuple[int, ...], torch.dtype]:
    samples = load_dataset(source, Reading.model_validate_json(reading))
    shape, kind = tuple(samples.x.shape[1:]), samples.x.dtype
    return dataclasses.replace(samples, x=torch.empty(len(samples.x), 0)), shape, kind


def _shape(needed: Dataset, config: DataConfig) -> FederatedData:
    """Return data of the shape that a data set has, without content, dealt to as many clients as the recipe says."""
    text = not needed.shape
    shape = needed.shape or (config.length,)
    targets = {"classification": (), "next-token": shape, "ctc": (1,)}[needed.task]
    clients = getattr(config.partition, "clients", None) or _MANY
    like = DataShape(
        input_shape=shape,
        classes=needed.classes or config.vocabulary,
        task=needed.task,
        target_shape=targets,
        vocabulary=config.vocabulary if text else None,
    )
    data = blank(like, clients)
    return dataclasses.replace(data, x=data.x.to("meta"))
