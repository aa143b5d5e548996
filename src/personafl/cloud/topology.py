"""Which device belongs to which server, and how servers mix their models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.core import rng
from personafl.core.split import listed
from personafl.data.allot import even_sizes
from personafl.data.federated import Clients, FederatedData
from personafl.errors import BadInput

Weights = NDArray[np.float64]
Matrix = tuple[tuple[float, ...], ...]  # row n: how much of each server's model is in server n's
Mixing = str | Matrix | tuple[Matrix, ...]
_TOLERANCE = 1e-9  # of a row's or column's sum


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


def full(servers: int) -> Weights:
    """Return the mean of all: every entry 1/N."""
    return np.full((servers, servers), 1 / servers)


def ring(servers: int) -> Weights:
    """Return the mean of a server and its two neighbours on a ring; of fewer than four servers, of all."""
    if servers < 4:
        return full(servers)
    one = np.eye(servers)
    return (one + np.roll(one, 1, axis=1) + np.roll(one, -1, axis=1)) / 3


def matrices(mixing: Mixing, servers: int) -> tuple[Weights, ...]:
    """Return the matrices that rounds use in turn."""
    if isinstance(mixing, str):
        return ({"full": full, "ring": ring}[mixing](servers),)
    several = mixing if isinstance(mixing[0][0], tuple) else (mixing,)
    return tuple(np.array(matrix, dtype=np.float64) for matrix in several)


def check_mixing(mixing: Mixing, servers: int) -> None:
    """Fail if a matrix is not doubly stochastic, and say where."""
    if isinstance(mixing, str):
        return
    several = bool(mixing) and bool(mixing[0]) and isinstance(mixing[0][0], tuple)
    each: Any = mixing if several else (mixing,)
    for index, matrix in enumerate(each):
        _check_matrix(matrix, servers, f"cloud.mixing[{index}]" if several else "cloud.mixing")


def _check_matrix(matrix: Sequence[Sequence[float]], servers: int, where: str) -> None:
    widths = [len(row) for row in matrix]
    if odd := [index for index, width in enumerate(widths) if width != len(matrix)]:
        raise BadInput(
            f"{where}: is not square: {len(matrix)} rows, but row {odd[0]} (from 0) has {widths[odd[0]]} entries"
        )
    if len(matrix) != servers:
        raise BadInput(
            f"{where}: is {len(matrix)}×{len(matrix)}, but there are {servers} servers; give a row per server"
        )
    weights = np.array(matrix, dtype=np.float64)
    if not (weights >= 0).all():
        row, column = np.argwhere(~(weights >= 0))[0]
        entry = f"row {row}, column {column} (from 0) is {weights[row, column]:g}"
        raise BadInput(f"{where}: {entry}; it must be 0 or more")
    for name, sums in (("row", weights.sum(axis=1)), ("column", weights.sum(axis=0))):
        for index, total in enumerate(sums):
            if not abs(total - 1) <= _TOLERANCE:
                raise BadInput(
                    f"{where}: is not doubly stochastic: {name} {index} (from 0) sums to {total:.10g}; make it 1"
                )
