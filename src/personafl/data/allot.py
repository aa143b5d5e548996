"""Integer tables with given margins: how many samples of each class each client receives, and which ones.

Every partitioner and the test half use these. A table T is [clients, classes]; T[i, c] samples of class c go
to client i; the column sums may not exceed what the class has.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from personafl.data.federated import Ragged

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]


def even_sizes(total: int, parts: int) -> Ints:
    """Cut total into parts that differ by at most one."""
    return np.diff(np.arange(parts + 1) * total // parts)


def apportion(weight: Ints, total: int, cap: Ints) -> Ints:
    """Share total units in proportion to weight, none above its cap; needs sum(cap) >= total."""
    if cap.sum() < total:
        raise ValueError(f"caps of {cap.sum()} in all cannot hold {total}")
    low, high = 0.0, float(total + 1)
    for _ in range(80):
        scale = (low + high) / 2
        if np.minimum(cap, np.floor(scale * weight)).sum() <= total:
            low = scale
        else:
            high = scale
    share: Ints = np.minimum(cap, np.floor(low * weight).astype(np.int64))
    while (rest := total - int(share.sum())) > 0:
        short = np.flatnonzero(share < cap)
        nearest = short[np.argsort(share[short] - low * weight[short], kind="stable")]
        share[nearest[:rest]] += 1
    return share


def fill(size: Ints, preference: Reals, supply: Ints, rng: np.random.Generator) -> Ints:
    """Draw size[i] samples for client i from its label preferences until the classes run out.

    Each pass draws every client's open places at once; a class asked for more than it has is shared among
    the askers by a fair draw and closes, and the rest ask again among the open classes. So it ends after at most
    classes + 1 passes. A client none of whose preferred classes is open takes what there is.
    """
    table = np.zeros(preference.shape, dtype=np.int64)
    need, left = size.copy(), supply.copy()
    while need.any():
        weight = np.nan_to_num(preference) * (left > 0)
        mass = weight.sum(axis=1)
        weight[mass < 1e-200] = left
        demand = rng.multinomial(need, weight / weight.sum(axis=1, keepdims=True))
        for label in np.flatnonzero(demand.sum(axis=0) > left):
            demand[:, label] = rng.multivariate_hypergeometric(demand[:, label], left[label], method="marginals")
        table += demand
        need -= demand.sum(axis=1)
        left -= demand.sum(axis=0)
    return table


def spread(table: Reals, size: Ints, supply: Ints) -> Reals:
    """Scale rows and columns until row i sums to size[i] and no column exceeds its supply (Sinkhorn's scaling).

    Of all tables with these margins the limit is the nearest in relative entropy, so that it keeps the skew; cells
    that are 0 stay 0. The rows are exact, the columns as near as 300 passes bring them.
    """
    for _ in range(300):
        table = table * np.minimum(1.0, supply / np.maximum(table.sum(axis=0), 1e-200))
        table = table * (size / np.maximum(table.sum(axis=1), 1e-200))[:, None]
        if (table.sum(axis=0) <= supply + 1e-9).all():
            break
    return table


def round_table(expected: Reals, row: Ints, column: Ints, *, cell: int = 1) -> tuple[Ints, Ints]:
    """Round a real table to integers with row sums `row` and column sums of at most `column`.

    Every cell becomes floor(expected) plus up to `cell`, and a cell that is 0 stays 0. Such a rounding is an integral
    flow from classes to clients, found by maximum flow; it exists whenever `expected` itself meets the margins.
    Returns the table and the units each row lacks: none where it succeeded, all where even the floors exceed a column.
    """
    clients, classes = expected.shape
    table = np.floor(expected + 1e-9).astype(np.int64)
    if (table.sum(axis=0) > column).any():
        return table, row
    need = np.maximum(row - table.sum(axis=1), 0)
    left = column - table.sum(axis=0)
    i, c = np.nonzero((expected - table > 1e-9) if cell == 1 else (expected > 0))
    sink = 1 + classes + clients
    tail = np.concatenate([np.zeros(classes), 1 + c, 1 + classes + np.arange(clients)])
    head = np.concatenate([1 + np.arange(classes), 1 + classes + i, np.full(clients, sink)])
    capacity = np.concatenate([left, np.full(len(i), cell), need])
    used = capacity > 0
    graph = csr_array(
        (capacity[used].astype(np.int32), (tail[used].astype(np.int32), head[used].astype(np.int32))),
        shape=(sink + 1, sink + 1),
    )
    flow = maximum_flow(graph, 0, sink).flow.tocsr()
    added = np.asarray(flow[1 : 1 + classes, 1 + classes : sink].toarray()).T.astype(np.int64)
    return table + added, need - added.sum(axis=1)


def label_sets(slots: Ints, clients: int, rng: np.random.Generator) -> Ints:
    """Give every client the same number k of distinct labels, label c to slots[c] clients: [clients, k].

    Needs slots <= clients and sum(slots) = k · clients. Dealing the labels in turn is such an assignment; random
    exchanges between random pairs of clients, which keep both conditions, then mix it.
    """
    per_client = int(slots.sum()) // clients
    chosen = np.repeat(np.arange(len(slots)), slots).reshape(per_client, clients).T.copy()
    half = clients // 2
    for _ in range(40 * per_client):
        pairs = rng.permutation(clients)[: 2 * half].reshape(2, half)
        mine, theirs = chosen[pairs[0]], chosen[pairs[1]]
        p, q = rng.integers(per_client, size=(2, half))
        at = np.arange(half)
        give, take = mine[at, p], theirs[at, q]
        allowed = ~(mine == take[:, None]).any(axis=1) & ~(theirs == give[:, None]).any(axis=1)
        chosen[pairs[0][allowed], p[allowed]] = take[allowed]
        chosen[pairs[1][allowed], q[allowed]] = give[allowed]
    return chosen


def deal_rows(table: Ints, label: Ints, rng: np.random.Generator) -> Ragged:
    """Choose the rows: table[i, c] random rows of class c for client i, no row twice."""
    clients, classes = table.shape
    order = rng.permutation(len(label))
    order = order[np.argsort(label[order], kind="stable")]
    supply = np.bincount(label, minlength=classes)
    place = np.arange(len(label)) - np.repeat(np.cumsum(supply) - supply, supply)  # position inside its class
    dealt = order[place < np.repeat(table.sum(axis=0), supply)]
    owner = np.repeat(np.tile(np.arange(clients), classes), table.T.ravel())
    return Ragged.from_owner(dealt, owner, clients)
