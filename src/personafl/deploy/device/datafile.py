"""A device's own data: a file that `personafl data deal` wrote for it, or any data set of its own.

A dealt file is safetensors: `x`, `y` and the rows of each split; in its metadata what the data are. It holds one
client's samples and nobody else's.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from personafl.core.reading import Reading
from personafl.data.config import DataConfig, Iid
from personafl.data.federated import FederatedData, Ragged, Split, make_federated
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.storage.seals import is_sealed

FORMAT = "personafl data 2"  # of a dealt file; those of version 0.1 have a 1 there, and no checksum
_FIRST = "personafl data 1"
ABOUT = ("name", "classes", "task", "vocabulary", "label_names")  # of the data, in its metadata
ME = 0  # the place of a device in its federation of one, whatever its number is
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class OwnData:
    """One device's data, as a federation of one client, `ME`; and the kind of device it is."""

    data: FederatedData
    profile: str | None
    note: str = ""  # what its owner should know


def load_own(source: str, number: int, recipe: Recipe) -> OwnData:
    """Read the data of the device with a number, and check that they are what the recipe is for."""
    section = recipe.deploy
    assert section is not None
    path = Path(source).expanduser()
    own = _dealt(path, number) if path.suffix == ".safetensors" else OwnData(_raw(source, number, recipe), None)
    for key in ("input_shape", "target_shape", "classes", "task"):
        found, wanted = getattr(own.data.shape, key), getattr(section, key)
        if found != wanted:
            raise BadInput(f"--data {source}: its {key} is {found}, the server's recipe has {wanted}")
    if section.vocabulary is not None and int(own.data.x.max()) >= section.vocabulary:
        raise BadInput(f"--data {source}: has tokens beyond the recipe's vocabulary of {section.vocabulary}")
    return own


def dealt_rows(path: Path, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of one split of a dealt file."""
    data = _dealt(path, 0).data
    rows = torch.from_numpy(data.rows(split)[0])
    return data.x[rows], data.y[rows]


def _dealt(path: Path, number: int) -> OwnData:
    try:
        checked = is_sealed(path.read_bytes())
        with safetensors.safe_open(path, framework="pt") as file:
            kept = file.metadata() or {}
            if kept.get("format") not in (FORMAT, _FIRST):
                raise BadInput(f"--data {path}: not a file that personafl data deal wrote")
            about: dict[str, Any] = json.loads(kept["about"])
            x, y, ends = (file.get_tensor(name) for name in ("x", "y", "ends"))
        if not checked and kept["format"] == FORMAT:
            raise ValueError("its checksum is gone")
    except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise BadInput(f"--data {path}: was damaged, or is no file of personafl ({error}); deal it again") from error
    bounds = [0, *ends.tolist()]
    splits = [np.arange(bounds[place], bounds[place + 1]) for place in range(3)]
    known = {"label_names": tuple(about["label_names"]), "reading": Reading.model_validate(about.get("reading", {}))}
    own = _alone(number, splits, x=x, y=y, **{key: about[key] for key in ABOUT} | known)
    dealt = about.get("number", number)
    other = f"--data {path}: was dealt to number {dealt}, and this device is number {number}; not the simulated run"
    return OwnData(own, about["profile"], "" if dealt == number else other)


def _raw(source: str, number: int, recipe: Recipe) -> FederatedData:
    """Read a data set of the device's own; test and validation data are held out as the recipe says."""
    from personafl.data.build import federate  # here, for a dealt file needs no source and no partition
    from personafl.data.sources import load_dataset

    assert recipe.deploy is not None
    options = recipe.data
    dataset = load_dataset(source, options.reading().model_copy(update={"who": "device"}))
    config = DataConfig(
        source=source, partition=Iid(clients=1), test=options.test, validation=options.validation, target=options.target
    )
    data = federate(dataset, config, recipe.seed)
    if data.classes > recipe.deploy.classes:
        raise BadInput(
            f"--data {source}: has {data.classes} classes, the server's recipe {recipe.deploy.classes}; say there "
            f"which label is which class, data.classes = [...]"
        )
    data = dataclasses.replace(data, classes=recipe.deploy.classes)
    own = {key: getattr(data, key) for key in ("x", "y", "reading", *ABOUT)}
    return _alone(number, [data.rows(split)[0] for split in SPLITS], **own)


def _alone(number: int, splits: list[Any], **content: Any) -> FederatedData:
    """Return data of one client, whose draws come from this number."""
    train, validation, test = (Ragged.from_lists([rows]) for rows in splits)
    if not len(splits[0]):
        raise BadInput("--data: there are no training samples")
    return make_federated(
        train=train,
        validation=validation,
        test=test,
        seen=np.array([ME]),
        unseen=np.zeros(0, dtype=np.int64),
        client_names=(str(number),),
        numbers=np.array([number], dtype=np.int64),
        **content,
    )
