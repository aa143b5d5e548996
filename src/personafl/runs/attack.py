"""From the section [attack] to who is hostile, and to the data that those train on."""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng
from personafl.data.federated import FederatedData, Ragged
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


def under_attack(data: FederatedData, attack: Attack | None) -> FederatedData:
    """Return the data with what the hostile train on; they have nothing that they are scored on."""
    if attack is None:
        return data
    hostile = attack.hostile
    y = _relabelled(data, attack) if attack.kind in OF_LABELS else data.y
    note = f"{int(hostile.sum())} of {len(data.seen)} clients are hostile ({attack.kind}), and are not scored"
    return dataclasses.replace(
        data,
        y=y,
        validation=_without(data.validation, hostile),
        test=_without(data.test, hostile),
        notes=(*data.notes, note),
    )


def _relabelled(data: FederatedData, attack: Attack) -> torch.Tensor:
    """Return the labels, others for the training samples of the hostile."""
    if data.task != "classification":
        raise BadInput(f"attack.kind: {attack.kind!r} is for classes, and these data are of {data.task}; take another")
    own = np.unique(data.train.of(np.flatnonzero(attack.hostile)))
    others = [data.train.of(np.flatnonzero(~attack.hostile)), data.validation.flat, data.test.flat]
    if len(np.intersect1d(own, np.concatenate(others))):
        raise BadInput(f"attack.kind: {attack.kind!r} needs samples that no two clients share; take another partition")
    y = data.y.clone()
    if attack.kind == "label-flip":
        y[own] = data.classes - 1 - y[own]
    else:
        drawn = rng.numpy_generator(attack.seed, "hostile labels").integers(data.classes, size=len(own))
        y[own] = torch.from_numpy(drawn).to(y)
    return y


def _without(rows: Ragged, hostile: NDArray[np.bool_]) -> Ragged:
    """Return rows of clients, none for the hostile."""
    return rows.divided(hostile[rows.owner])[0]
