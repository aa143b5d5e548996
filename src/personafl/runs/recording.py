"""What a run writes down of its models: their scores and forms, during training and at the end."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.core import rng
from personafl.evaluate.summary import summarize
from personafl.recipe.recipe import Recipe
from personafl.runs.checkpoints import Run
from personafl.runs.scoring import Scored, score
from personafl.runs.sizes import observe


def score_all(run: Run, final: bool) -> dict[str, Scored]:
    """Score some seen clients on test data; at the end everyone, also on validation data if there are any.

    A recipe may leave the test data unread, have validation data scored every time, and training data too.
    """
    data, recipe = run.job.federation.data, run.job.recipe
    blind = recipe.evaluation.split == "validation"
    splits = {"validation": data.validation} if blind else {"test": data.test}
    choice = final and not blind and bool(len(data.validation.flat))
    if choice or recipe.evaluation.split == "both":
        splits["validation"] = data.validation
    if recipe.evaluation.train:
        splits["train"] = data.train
    attack = run.job.federation.attack
    if attack is not None and attack.triggered is not None and not blind:
        splits["backdoor"] = attack.triggered
    groups = {"seen": data.seen, "unseen": data.unseen} if final else {"seen": _some(data.seen, recipe)}
    tuned = run.tuned if final else None
    return {
        name: _with_success(score(run.simulation, tuned, members, splits, blends=choice))
        for name, members in groups.items()
        if len(members)
    }


def _with_success(scored: Scored) -> Scored:
    """Return scores with how often a backdoor succeeds, if there is one, as a metric of each model on test data."""
    found = dict(scored.scores)
    for (model, split), tried in scored.scores.items():
        if split == "backdoor":
            known = found[model, "test"]
            found[model, "test"] = replace(known, metrics={**known.metrics, "backdoor": tried.accuracy})
            del found[model, split]
    return replace(scored, scores=found)


def _some(clients: NDArray[np.int64], recipe: Recipe) -> NDArray[np.int64]:
    """Return the clients that are scored during training, in ascending order."""
    if len(clients) <= recipe.evaluation.clients:
        return clients
    generator = rng.numpy_generator(recipe.seed, "scored clients")
    return np.sort(generator.choice(clients, recipe.evaluation.clients, replace=False))


def record_scores(run: Run, number: int, time: float | None) -> float:
    """Score after a round, `number`; return the accuracy of the last model: personal if there is one, else global."""
    accuracy = 0.0
    for clients, scored in score_all(run, final=False).items():
        run.warn(number, run.alarms.scored(number, _some(run.job.federation.data.seen, run.job.recipe), scored.scores))
        for (model, split), scores in sorted(scored.scores.items()):
            summary = summarize(scores.accuracy, scores.loss, scores.samples, scores.metrics)
            whose = {"clients": clients, "model": model, "split": split}
            run.record({"event": "score", **_when(number, time), **summary.facts(), **whose})
            whole = split == "test" or (split, run.job.recipe.evaluation.split) == ("validation", "validation")
            accuracy = summary.accuracy if whole else accuracy  # "global" sorts before "personal"
    record_forms(run, number, time)
    return accuracy


def record_forms(run: Run, number: int, time: float | None) -> None:
    """Record what the personal models have become."""
    for facts in observe(run.simulation, run.job.federation.data.seen):
        run.directory.record({"event": "form", **_when(number, time), **facts})


def _when(number: int, time: float | None) -> dict[str, Any]:
    return {"number": number} if time is None else {"number": number, "time": time}
