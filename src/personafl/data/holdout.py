"""Test and validation rows: held out of a client's own rows, or dealt from an official test half."""

import numpy as np
from numpy.typing import NDArray

from personafl.data.allot import deal_rows, round_table
from personafl.data.federated import Ragged

Ints = NDArray[np.int64]


def hold_out(rows: Ragged, label: Ints, fraction: float, rng: np.random.Generator) -> tuple[Ragged, Ragged]:
    """Split each client's rows into (kept, held out), stratified by label; needs two rows per client.

    Client i loses t_i = round(fraction · n_i) rows, at least 1 and at most n_i - 1. With its rows sorted by label (in
    random order inside a label), row j is held out when ⌊(j + 1) t_i / n_i + u_i⌋ > ⌊j t_i / n_i + u_i⌋, u_i uniform:
    exactly t_i rows, and of each label its share of t_i rounded up or down.
    """
    owner, size = rows.owner, rows.sizes
    order = np.lexsort((rng.random(len(owner)), label[rows.flat], owner))
    out = _held(size, fraction)[owner].astype(np.float64)
    # Multiples of 2⁻²⁰ keep the sums exact, so that the count is exact too.
    start = (rng.integers(2**20, size=len(size)) / 2**20)[owner]
    place = np.arange(len(owner)) - rows.offset[owner]
    taken = np.floor((place + 1) * out / size[owner] + start) > np.floor(place * out / size[owner] + start)
    return Ragged(rows.flat[order], rows.offset).divided(taken)


def hold_out_last(rows: Ragged, fraction: float) -> tuple[Ragged, Ragged]:
    """Split off the last rows of each client: text is tested on what comes after the text trained on."""
    owner, size = rows.owner, rows.sizes
    place = np.arange(len(owner)) - rows.offset[owner]
    return rows.divided(place >= (size - _held(size, fraction))[owner])


def deal_like(train: Ints, label: Ints, rng: np.random.Generator) -> tuple[Ragged, Ints]:
    """Deal test rows, none twice, so that each client's label mix is that of its train table [clients, classes].

    Client i should have E_ic = T_ic · min(U_c / S_c, U / S) rows of class c, where T is the train table, S its column
    sums and U the test rows there are; a client owed less than one row is owed one. The table is E rounded with row
    sums max(1, ⌊Σ_c E_ic⌋). Returns the rows and the clients left without any.
    """
    clients, classes = train.shape
    supply = np.bincount(label, minlength=classes)
    rate = np.minimum(supply / np.maximum(train.sum(axis=0), 1), supply.sum() / max(int(train.sum()), 1))
    expected = train * np.minimum(rate, 1.0)
    owed = expected.sum(axis=1)
    expected *= np.maximum(1.0, 1.0 / np.maximum(owed, 1e-12))[:, None]
    row = np.maximum(1, np.floor(owed + 1e-9)).astype(np.int64)
    mixed = rng.permutation(clients)  # the flow favours early rows
    wanted = np.minimum(supply, np.ceil(expected.sum(axis=0) - 1e-9).astype(np.int64))
    table, lacking = round_table(expected[mixed], row[mixed], wanted)
    if lacking.any():
        table, _ = round_table(expected[mixed], row[mixed], supply, cell=int(row.max()))
    # Where the test half is too small for clients owed one row each, what was rounded may exceed it.
    if (table.sum(axis=0) > supply).any():
        return Ragged.empty(clients), np.arange(clients)
    ordered = np.empty_like(table)
    ordered[mixed] = table
    return deal_rows(ordered, label, rng), np.flatnonzero(ordered.sum(axis=1) == 0)


def _held(size: Ints, fraction: float) -> Ints:
    held: Ints = np.clip(np.rint(fraction * size).astype(np.int64), 1, size - 1)
    return held
