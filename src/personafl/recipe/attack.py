"""The section [attack] of a recipe: clients of a simulation that are hostile."""

from typing import Annotated, Literal

from pydantic import Field

from personafl.options import Strict

AttackKind = Literal[
    "label-flip",
    "label-noise",
    "sign-flip",
    "scale",
    "replace",
    "random",
    "free-rider",
    "inflate",
    "ipm",
    "alie",
    "optimal-ipm",
    "optimal-alie",
    "mimic",
    "infinity",
    "backdoor",
]


class AttackSection(Strict):
    """An attack: some clients, the same in every round, send what they should not. Only the others are scored."""

    kind: AttackKind = "sign-flip"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2  # of the clients that take part
    strength: Annotated[float, Field(ge=0)] | None = None  # what it is depends on the kind; None: 1, or as that has it
    target: Annotated[int, Field(ge=0)] = 0  # of a backdoor: the class that it is to give
