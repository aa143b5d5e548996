"""After training: which model a device keeps, and predictions from it. Nothing here needs the server.

The choice is the one of `evaluate.choice`, by the device's own validation data: it leaves the global model only for one
that is very likely no worse. Without validation data nothing shows that, and the global model is kept.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from personafl.core.reading import Reading
from personafl.data.sources import load_dataset
from personafl.deploy.device.datafile import ME, dealt_rows
from personafl.deploy.device.training import LocalClient
from personafl.errors import BadInput
from personafl.exports.card import Origin, facts_of, model_card
from personafl.models.generating import continuation, text_tokens
from personafl.models.modelfile import Card, blended, card_of, compacted, load_model, pack
from personafl.models.predicting import SUPPORTED, Predictions, output_names, predictions
from personafl.runs.result import chosen
from personafl.runs.scoring import Scored, score, tune
from personafl.runs.sizes import packed_models
from personafl.storage.files import atomic_write
from personafl.storage.store import Store

MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class Kept:
    """The model that a device keeps, and the test accuracies of all that it could choose from."""

    name: str
    file: Path
    accuracies: dict[str, float]


def keep_best(client: LocalClient, directory: Path) -> Kept:
    """Fine-tune if the recipe says so, choose among the models that a device has now, and write that one to a file."""
    side, recipe = client.side, client.recipe
    data, rule = side.learners.data, side.learners.rule
    me = np.array([ME])
    tuned = Store(directory / "tuned", 2**40)
    if rule.tuning and (recipe.finetune or not side.has_model(ME)):
        client.tunes()
        tune(side, tuned, me, recipe.rounds)
    validated = bool(len(data.validation.flat))
    splits = {"test": data.test} | ({"validation": data.validation} if validated else {})
    scored = score(side, tuned, me, splits, blends=validated)
    models = packed_models(side, tuned, ME, None)
    name = _choice(scored, recipe.evaluation.caution, models)
    accuracies = {model: float(s.accuracy[0]) for (model, split), s in scored.scores.items() if split == "test"}
    accuracies = {model: value for model, value in accuracies.items() if np.isfinite(value)}
    kind = "blend" if name.startswith("blend") else name
    parts = blended(models, float(name.removeprefix("blend "))) if kind == "blend" else compacted(models[name])
    whose = None if name == "global" else ME
    origin = Origin(recipe, side.learners, client.method, client.network)
    if name in accuracies:
        accuracies[kind] = accuracies[name]
    known = {model: value for model, value in accuracies.items() if model in ("global", "personal", "tuned", kind)}
    number = str(client.number)
    text = facts_of(origin, whose, parts, run=client.run, model=kind, whose=number, accuracies=known)
    if client.promise is not None:
        text |= {key: str(value) for key, value in client.promise.model_dump().items()}
    if client.protected is not None:
        text |= client.protected.facts()
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
def predict(model: Path, source: str) -> Predictions:
    """Apply the model that a device keeps to data: a file dealt to it (its test samples) or any data set."""
    file = _model_file(model)
    card = card_of(file)
    if card.task not in SUPPORTED:
        how = "continue a text with --prompt" if card.task == "next-token" else "use personafl.load_model in Python"
        raise BadInput(f"{file}: is for the task {card.task}; {how}")
    network = load_model(file)
    x, y = _samples(source, card.reading.model_copy(update={"who": "predict"}))
    if tuple(x.shape[1:]) != card.input_shape:
        raise BadInput(f"--data {source}: its inputs have shape {list(x.shape[1:])}, the model's {card.input_shape}")
    if card.vocabulary is None:
        x = x.to(torch.float64 if card.dtype == "float64" else torch.float32)
    found = predictions(network, x, card.task, output_names(card, card.reading))
    known = y.dtype == torch.int64 and bool((y >= 0).all()) if card.whole else y.is_floating_point()
    return dataclasses.replace(found, truth=y) if known else found


def generate(model: Path, prompt: str, most: int, temperature: float, seed: int) -> str:
    """Return how the language model that a device keeps continues a prompt; see `models.generating`."""
    file = _model_file(model)
    card = card_of(file)
    tokens = text_tokens(str(file), card, card.reading.tokenizer)
    length = card.input_shape[0]
    return continuation(load_model(file), tokens, prompt, length=length, most=most, temperature=temperature, seed=seed)


def _model_file(model: Path) -> Path:
    return model / MODEL_FILE if model.is_dir() else model


def _samples(source: str, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
    path = Path(source).expanduser()
    if path.suffix == ".safetensors":
        return dealt_rows(path, "test")
    dataset = load_dataset(source, reading)
    return dataset.x, dataset.y
