"""What methods share whose servers keep something of each client: rows by the clients' numbers, in ascending order.

A client has a row once the server has heard of it, so a server need not know beforehand who will come. What it draws
follows from the start.
"""

import hashlib
from typing import TypeVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.tree import Params

T = TypeVar("T")


def rows_of(known: Tensor, rows: T, clients: Tensor, fresh: T) -> T:
    """Return the rows [clients, …] of some clients; of those who have none, the fresh ones [clients, …]."""
    if not len(known):
        return fresh
    place = torch.searchsorted(known, clients).clamp(max=len(known) - 1)
    has = known[place] == clients

    def found(leaf: Tensor, new: Tensor) -> Tensor:
        return torch.where(has.reshape(-1, *[1] * (leaf.ndim - 1)), leaf[place], new)

    return tree.map(found, rows, fresh)


def with_rows(known: Tensor, rows: T, clients: Tensor, new: T) -> tuple[Tensor, T]:
    """Return whose rows there are, and the rows, with those of some clients replaced or added."""
    others = ~torch.isin(known, clients)
    whose = torch.cat([known[others], clients])
    order = whose.argsort()
    return whose[order], tree.map(lambda leaf, own: torch.cat([leaf[others], own])[order], rows, new)


def seed_of(values: Params) -> int:
    """Return a seed that follows from parameters, for whoever has no other: a drawn start tells runs apart."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in values.items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
