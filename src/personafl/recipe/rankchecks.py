"""What does not go with adapters of several ranks, beside which recipes have `devices.rank`."""

from typing import Any

from personafl.errors import BadInput


def check_ranks(recipe: Any) -> None:
    """Fail if devices have ranks of their own in a recipe with secure sums, or with noise in every step."""
    for index, device in enumerate(recipe.devices):
        if device.rank is None:
            continue
        if recipe.secure is not None:
            why = "an upload is smaller because of what it has, which [secure] hides"
        elif recipe.sample_privacy is not None:
            why = "[sample_privacy] adds noise to the rows of adapters that such a device does not have"
        else:
            continue
        raise BadInput(f"devices[{index}].rank: {why}; remove it")
