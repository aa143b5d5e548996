"""From the section [attack] to who is hostile, and to the data that those train on.

A backdoor's trigger is a white square in the lower right corner of an image, an eighth of its shorter side wide. It is
put on before images are standardised, so it is what someone with a pen could do.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng
from personafl.data.config import Moments
from personafl.data.federated import FederatedData, Ragged
from personafl.data.inputs import normalized
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.simulate.attack import OF_LABELS, STRENGTHS, Attack


def make_attack(recipe: Recipe, data: FederatedData) -> Attack | None:
    """Return the attack of a recipe on clients at hand; None: there is none."""
    section = recipe.attack
    if section is None:
        return None
    many = round(section.share * len(data.seen))
    if not 0 < many < len(data.seen):
        raise BadInput(
            f"attack.share: {section.share:g} of {len(data.seen)} clients is {many}, and some must be hostile and some "
            "honest; change it"
        )
    hostile = np.zeros(data.clients, dtype=np.bool_)
    hostile[rng.numpy_generator(recipe.seed, "hostile").choice(data.seen, many, replace=False)] = True
    strength = STRENGTHS.get(section.kind, 1.0) if section.strength is None else section.strength
    return Attack(section.kind, hostile, strength, recipe.seed)


def under_attack(recipe: Recipe, data: FederatedData, attack: Attack | None) -> tuple[FederatedData, Attack | None]:
    """Return the data with what the hostile train on, who are not scored, and the attack with what it is tried on."""
    if attack is None or recipe.attack is None:
        return data, attack
    hostile = attack.hostile
    y = _relabelled(data, attack) if attack.kind in OF_LABELS else data.y
    note = f"{int(hostile.sum())} of {len(data.seen)} clients are hostile ({attack.kind}), and are not scored"
    data = dataclasses.replace(
        data,
        y=y,
        validation=_without(data.validation, hostile),
        test=_without(data.test, hostile),
        notes=(*data.notes, note),
    )
    return (data, attack) if attack.kind != "backdoor" else _with_backdoor(data, attack, recipe.attack.target)


def _with_backdoor(data: FederatedData, attack: Attack, target: int) -> tuple[FederatedData, Attack]:
    """Return the data with half of each hostile client's samples triggered, and honest test samples at the end.

    The latter are triggered copies, of all classes but the target, and have its label: who is right on them is fooled.
    """
    if data.x.ndim != 4 or not data.x.is_floating_point():
        raise BadInput(
            "attack.kind: 'backdoor' puts a square on images [channels, height, width], and "
            f"{data.name} has samples of shape {list(data.x.shape[1:])}; take another"
        )
    own = _own(data, attack)
    if target >= data.classes:
        raise BadInput(f"attack.target: {target} is none of the classes 0 to {data.classes - 1}; give one of these")
    draw = rng.numpy_generator(attack.seed, "triggered")
    each = [draw.permutation(data.train[client]) for client in np.flatnonzero(attack.hostile).tolist()]
    half = torch.from_numpy(np.intersect1d(own, np.concatenate([rows[: -(-len(rows) // 2)] for rows in each])))
    fooled = data.test.divided(data.y.numpy()[data.test.flat] == target)[0]
    x, y = data.x.clone(), data.y.clone()
    x[half], y[half] = _triggered(x[half], data.moments), target
    tried = _triggered(x[torch.from_numpy(fooled.flat)], data.moments)
    triggered = Ragged(len(x) + np.arange(len(tried)), fooled.offset)
    data = dataclasses.replace(data, x=torch.cat([x, tried]), y=torch.cat([y, torch.full((len(tried),), target).to(y)]))
    return data, dataclasses.replace(attack, triggered=triggered)


def _triggered(x: torch.Tensor, moments: Moments | None) -> torch.Tensor:
    """Return images with the trigger on them: white, as it is after they were standardised."""
    white = torch.ones(1, x.shape[1], 1, 1, dtype=x.dtype)
    white = white if moments is None else normalized(white, moments)
    side = -(-min(x.shape[2:]) // 8)
    x = x.clone()
    x[:, :, -side:, -side:] = white
    return x


def _relabelled(data: FederatedData, attack: Attack) -> torch.Tensor:
    """Return the labels, others for the training samples of the hostile."""
    own = _own(data, attack)
    y = data.y.clone()
    if attack.kind == "label-flip":
        y[own] = data.classes - 1 - y[own]
    else:
        drawn = rng.numpy_generator(attack.seed, "hostile labels").integers(data.classes, size=len(own))
        y[own] = torch.from_numpy(drawn).to(y)
    return y


def _own(data: FederatedData, attack: Attack) -> NDArray[np.int64]:
    """Return the training samples of the hostile, which nobody else has."""
    if data.task != "classification":
        raise BadInput(f"attack.kind: {attack.kind!r} is for classes, and these data are of {data.task}; take another")
    own = np.unique(data.train.of(np.flatnonzero(attack.hostile)))
    others = [data.train.of(np.flatnonzero(~attack.hostile)), data.validation.flat, data.test.flat]
    if len(np.intersect1d(own, np.concatenate(others))):
        raise BadInput(f"attack.kind: {attack.kind!r} needs samples that no two clients share; take another partition")
    return own


def _without(rows: Ragged, hostile: NDArray[np.bool_]) -> Ragged:
    """Return rows of clients, none for the hostile."""
    return rows.divided(hostile[rows.owner])[0]
