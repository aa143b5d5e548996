"""The devices of a server: who may enrol as what, and what their server knows of them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from personafl.deploy.net.codes import Code, Refused
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Hello
from personafl.recipe.devices import device_names
from personafl.recipe.recipe import Recipe
from personafl.simulate.serverside import Roster


@dataclass(frozen=True)
class Member:
    """An enrolled device."""

    number: int
    name: str
    samples: int
    profile: int  # of the recipe's devices
    left: bool = False


def enrolling(recipe: Recipe, identity: Identity, hello: Hello, known: Member | None) -> Member:
    """Return a device as the member that it becomes, or refuse it; `known` is who has its number already."""
    number, section, names = identity.number, recipe.deploy, device_names(recipe.devices)
    assert number is not None
    assert section is not None
    if (tuple(hello.input_shape), hello.classes) != (section.input_shape, section.classes):
        text = f"the recipe is for inputs {list(section.input_shape)} and {section.classes} classes"
        raise Refused(Code.OTHER_DATA, text)
    if not 1 <= hello.samples <= section.max_samples:
        raise Refused(Code.BAD_SAMPLES, f"a device has 1 to {section.max_samples} training samples")
    if names and hello.profile not in names:
        raise Refused(Code.BAD_PROFILE, f"say which kind of device it is: --profile {' or '.join(names)}")
    profile = names.index(hello.profile) if names and hello.profile else 0
    if known is not None and known.name != identity.name:
        raise Refused(Code.NUMBER_TAKEN, f"number {number} is {known.name}'s")
    if known is not None and (known.samples, known.profile) != (hello.samples, profile):
        raise Refused(Code.OTHER_DATA, f"{known.name} enrolled with {known.samples} samples and another profile")
    return Member(number, identity.name, hello.samples, profile)


def roster_of(members: Mapping[int, Member], base: Roster) -> Roster:
    """Return what a server knows of its devices: one number for each, however many samples it says it has."""
    clients = max(members, default=-1) + 1
    samples, kinds = np.zeros((2, clients), dtype=np.int64)
    for number, member in members.items():
        samples[number], kinds[number] = member.samples, member.profile
    staying = np.array(sorted(number for number, member in members.items() if not member.left), dtype=np.int64)
    return dataclasses.replace(base, seen=staying, samples=samples.take, problem_of=kinds)
