"""Whether a method can do what a recipe's devices ask for, and which methods can."""

from collections.abc import Callable, Sequence

from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Algorithm
from personafl.errors import BadInput
from personafl.recipe.devices import DeviceSection


def check_method(devices: Sequence[DeviceSection], algorithm: Algorithm) -> None:
    """Fail if a profile asks for what the method cannot do."""
    asked: dict[str, tuple[str, Callable[[Algorithm], bool]]] = {
        "model": ("trains the shared network on every client", lambda able: able.own_networks),
        "bits": ("keeps every weight in full precision", lambda able: able.uses_bits),
        "rank": ("uses more of uploads than a mean of changes", lambda able: able.server.averages),
        "penalty": ("has no penalty that differs by device", lambda able: able.most_penalty is not None),
    }
    for index, device in enumerate(devices):
        for key, (what, can) in asked.items():
            if getattr(device, key) is not None and not can(algorithm):
                raise BadInput(_refusal(algorithm, what, f"devices[{index}].{key}", can))
        if device.penalty is not None and device.penalty > (algorithm.most_penalty or 0.0):
            raise BadInput(
                f"devices[{index}].penalty: {device.penalty:g} is above {algorithm.most_penalty:g}, the most that "
                f"{algorithm.name} allows; lower it"
            )


def methods_that(can: Callable[[Algorithm], bool]) -> list[str]:
    """Return the names of the methods that can do something."""
    return [name for name, method in METHODS.items() if can(method.build(Training()))]


def _refusal(algorithm: Algorithm, what: str, key: str, can: Callable[[Algorithm], bool]) -> str:
    able = methods_that(can)
    instead = f", use a method that can ({', '.join(able)})" if able else ""
    return (
        f"devices: {algorithm.name} {what} and has no use for {key}; remove it{instead}, "
        f"or in a comparison leave devices to the others: compare.variants.{algorithm.name}.devices = []"
    )
