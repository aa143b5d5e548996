"""After training: which model a device keeps, and predictions from it. Nothing here needs the server.

The choice is the one of `evaluate.choice`, by the device's own validation data: it leaves the global model only for one
that is very likely no worse. Without validation data nothing shows that, and the global model is kept.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core.reading import Reading
from personafl.data.sources import load_dataset
from personafl.deploy.device.datafile import dealt_rows
from personafl.deploy.device.training import LocalClient
from personafl.errors import BadInput
from personafl.exports.card import Origin, facts_of, model_card
from personafl.models.modelfile import Card, blended, card_of, compacted, load_model, pack
from personafl.runs.result import chosen
from personafl.runs.scoring import Scored, score, tune
from personafl.runs.sizes import packed_models
from personafl.storage.files import atomic_write
from personafl.storage.store import Store

MODEL_FILE = "model.safetensors"
_BATCH = 1024


@dataclass(frozen=True)
class Kept:
    """The model that a device keeps, and the test accuracies of all that it could choose from."""

    name: str
    file: Path
    accuracies: dict[str, float]


@dataclass(frozen=True)
class Predicted:
    """Predicted labels, and the true ones where the data have any."""

    labels: NDArray[np.int64]
    truth: NDArray[np.int64] | None
    names: tuple[str, ...]  # of all classes

    @property
    def classes(self) -> list[str]:
        """The names of the predicted classes."""
        return [self.names[label] for label in self.labels]

    @property
    def accuracy(self) -> float | None:
        """The share that is right."""
        return None if self.truth is None else float((self.labels == self.truth).mean())


def keep_best(client: LocalClient, directory: Path) -> Kept:
    """Fine-tune if the recipe says so, choose among the models that a device has now, and write that one to a file."""
    side, recipe = client.side, client.recipe
    data, rule = side.learners.data, side.learners.rule
    me = np.array([client.number])
    tuned = Store(directory / "tuned", 2**40)
    if rule.tuning and (recipe.finetune or not side.has_model(client.number)):
        tune(side, tuned, me, recipe.rounds)
    validated = bool(len(data.validation.flat))
    splits = {"test": data.test} | ({"validation": data.validation} if validated else {})
    scored = score(side, tuned, me, splits, blends=validated)
    models = packed_models(side, tuned, client.number, None)
    name = _choice(scored, recipe.evaluation.caution, models)
    accuracies = {model: float(s.accuracy[0]) for (model, split), s in scored.scores.items() if split == "test"}
    accuracies = {model: value for model, value in accuracies.items() if np.isfinite(value)}
    kind = "blend" if name.startswith("blend") else name
    parts = blended(models, float(name.removeprefix("blend "))) if kind == "blend" else compacted(models[name])
    whose = None if name == "global" else client.number
    origin = Origin(recipe, side.learners, client.method, client.network)
    if name in accuracies:
        accuracies[kind] = accuracies[name]
    known = {model: value for model, value in accuracies.items() if model in ("global", "personal", "tuned", kind)}
    number = str(client.number)
    text = facts_of(origin, whose, parts, run=client.run, model=kind, whose=number, accuracies=known)
    file = directory / MODEL_FILE
    atomic_write(file, pack(parts, text))
    atomic_write(file.with_suffix(".md"), model_card(Card.model_validate(text), file).encode())
    return Kept(name, file, known)


def _choice(scored: Scored, caution: float, models: dict[str, Any]) -> str:
    names, picks = chosen(scored, caution)
    if names:
        return names[int(picks[0])]
    own = "tuned" if "tuned" in models else "personal"
    return "global" if "global" in models and (scored.chooses[0] or own not in models) else own


@torch.no_grad()
def predict(model: Path, source: str) -> Predicted:
    """Apply the model that a device keeps to data: a file dealt to it (its test samples) or any data set."""
    file = model / MODEL_FILE if model.is_dir() else model
    card = card_of(file)
    if card.task != "classification":
        raise BadInput(f"{file}: is for the task {card.task}; use personafl.load_model in Python")
    network = load_model(file)
    x, y = _samples(source, card.reading.model_copy(update={"who": "predict"}))
    if tuple(x.shape[1:]) != card.input_shape:
        raise BadInput(f"--data {source}: its inputs have shape {list(x.shape[1:])}, the model's {card.input_shape}")
    if card.vocabulary is None:
        x = x.to(torch.float64 if card.dtype == "float64" else torch.float32)
    labels = [network(x[start : start + _BATCH]).argmax(-1) for start in range(0, len(x), _BATCH)]
    names = card.reading.classes or tuple(str(number) for number in range(card.classes))
    return Predicted(torch.cat(labels).numpy(), y.numpy() if bool((y >= 0).all()) else None, names)


def _samples(source: str, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
    path = Path(source).expanduser()
    if path.suffix == ".safetensors":
        return dealt_rows(path, "test")
    dataset = load_dataset(source, reading)
    return dataset.x, dataset.y
