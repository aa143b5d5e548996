"""Which device belongs to which server."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from personafl.core import rng
from personafl.core.split import listed
from personafl.data.allot import even_sizes
from personafl.data.federated import Clients, FederatedData
from personafl.errors import BadInput


@dataclass(frozen=True)
class Topology:
    """The server of each client, [clients], and of each server those who may take part, in ascending order."""

    home: Clients
    devices: tuple[Clients, ...]


def place(
    data: FederatedData, servers: int, members: Sequence[Sequence[str]] | None, active: int | None, seed: int
) -> Topology:
    """Give every client a server: as `members` has it by name, or evenly by (seed, client).

    Unseen clients have a server too, which sends them its model when they join. They may be named; those that are not
    are dealt evenly.
    """
    if members is None and servers > len(data.seen):
        raise BadInput(
            f"cloud.servers: {servers} servers, but only {len(data.seen)} clients take part in training, so that some "
            "server would be without devices; lower it"
        )
    home = np.full(data.clients, -1, dtype=np.int64)
    if members is None:
        home[data.seen] = _dealt(data.seen, servers, seed)
    else:
        _by_name(home, members, data)
    left = data.unseen[home[data.unseen] < 0]
    home[left] = _dealt(left, servers, seed)
    topology = Topology(home, tuple(data.seen[home[data.seen] == server] for server in range(servers)))
    _check_devices(topology, active)
    return topology


def _dealt(clients: Clients, servers: int, seed: int) -> Clients:
    """Return the server of each client: equally many for each, or one more."""
    order = np.argsort(rng.mix(seed, "servers", clients), kind="stable")
    dealt = np.empty(len(clients), dtype=np.int64)
    dealt[order] = np.repeat(np.arange(servers), even_sizes(len(clients), servers))
    return dealt


def _by_name(home: Clients, members: Sequence[Sequence[str]], data: FederatedData) -> None:
    for server, names in enumerate(members):
        for name in names:
            home[data.client_number(name, f"cloud.members[{server}]: there is")] = server
    left = data.seen[home[data.seen] < 0]
    if len(left):
        names = listed([data.client_names[client] for client in left])
        raise BadInput(f"cloud.members: {len(left)} clients are in no server ({names}); add them to one")


def _check_devices(topology: Topology, active: int | None) -> None:
    for server, devices in enumerate(topology.devices):
        if not len(devices):
            raise BadInput(
                f"cloud.members[{server}]: a server without devices, for all its clients are unseen ones; "
                "name some that take part in training"
            )
        if active is not None and active > len(devices):
            raise BadInput(
                f"cloud.active: {active} devices of each server, but server {server} (from 0) has only {len(devices)}; "
                "lower it"
            )
