"""Who has which of a recipe's devices.

All draws come from (seed, client), so every method of a comparison sees the same devices, and a run repeats.
"""

from collections.abc import Sequence

import numpy as np

from personafl.core import rng
from personafl.core.split import listed
from personafl.data.federated import Clients, FederatedData
from personafl.errors import BadInput
from personafl.recipe.devices import TOLERANCE, DeviceSection


def deal(devices: Sequence[DeviceSection], data: FederatedData, seed: int) -> Clients:
    """Return the number of each client's profile, [clients]; 0 for all where there are no profiles."""
    profile = np.full(data.clients, -1 if devices else 0, dtype=np.int64)
    sizes = data.train.sizes
    if devices and devices[0].way == "share":
        for group in (data.seen, data.unseen):
            profile[group] = _by_share([device.share or 0.0 for device in devices], group, seed)
    for index, device in enumerate(devices):
        if device.way == "samples":
            profile[device.holds(sizes)] = index
    for index, device in enumerate(devices):  # last: a name goes before a size
        for name in device.clients or ():
            profile[data.client_number(name, f"devices[{index}].clients: there is")] = index
    _check_dealt(devices, data, profile)
    return profile


def _by_share(shares: Sequence[float], group: Clients, seed: int) -> Clients:
    """Deal clients by shares: the numbers by largest remainder (ties: the earlier profile), who by (seed, client)."""
    exact = np.array(shares) * len(group)
    counts = np.floor(exact + TOLERANCE).astype(np.int64)
    last = np.argsort(np.round(counts - exact, 9), kind="stable")[: len(group) - int(counts.sum())]
    counts[last] += 1
    dealt = np.empty(len(group), dtype=np.int64)
    dealt[np.argsort(rng.mix(seed, "devices", group), kind="stable")] = np.repeat(np.arange(len(shares)), counts)
    return dealt


def _check_dealt(devices: Sequence[DeviceSection], data: FederatedData, profile: Clients) -> None:
    members = np.concatenate([data.seen, data.unseen])
    left = members[profile[members] < 0]
    if len(left):
        sizes = data.train.sizes[left]
        names = listed([data.client_names[client] for client in left])
        raise BadInput(
            f"devices: {len(left)} of {len(members)} clients are in no entry ({names}; they have {sizes.min()} to "
            f"{sizes.max()} training samples); add an entry with their names or sizes"
        )
    for index, device in enumerate(devices):
        if not (profile[members] == index).any():
            keys = {"share": "share", "clients": "clients"}
            key = keys.get(device.way, "min_samples" if device.min_samples is not None else "max_samples")
            sizes = data.train.sizes[members]
            have = (
                f"of {len(members)} clients" if device.way == "share" else f"they have {sizes.min()} to {sizes.max()}"
            )
            raise BadInput(
                f"devices[{index}].{key}: no client gets this device ({have}); change it, or remove the entry"
            )
