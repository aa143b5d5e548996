"""How servers mix their models."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.errors import BadInput

Weights = NDArray[np.float64]
Matrix = tuple[tuple[float, ...], ...]  # row n: how much of each server's model is in server n's
Mixing = str | Matrix | tuple[Matrix, ...]
_TOLERANCE = 1e-9  # of a row's or column's sum


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


def among(weights: Weights, members: Sequence[int]) -> Weights:
    """Return how some of the servers mix while the others are away: doubly stochastic as the whole matrix is.

    What a server would have from, and give to, one that is away stays its own.
    """
    if len(members) == len(weights):
        return weights
    some = ((weights + weights.T) / 2)[np.ix_(members, members)]
    np.fill_diagonal(some, 0)
    return some + np.diag(1 - some.sum(axis=1))


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
