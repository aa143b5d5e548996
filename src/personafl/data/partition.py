"""Ways of dealing samples to clients. Each is a pure function from labels (or users) to rows per client.

Rows are positions 0 … samples - 1 of the labels given; no row is dealt twice.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from personafl.data.allot import apportion, deal_rows, even_sizes, fill, label_sets, round_table, spread
from personafl.data.federated import Ragged
from personafl.errors import BadInput

Ints = NDArray[np.int64]


def iid(samples: int, clients: int, minimum: int, rng: np.random.Generator) -> Ragged:
    """Deal all rows at random; sizes differ by at most one."""
    _check_room(samples, clients, minimum)
    return _cut(rng.permutation(samples), even_sizes(samples, clients))


def by_quantity(samples: int, clients: int, alpha: float, minimum: int, rng: np.random.Generator) -> Ragged:
    """Deal all rows at random in sizes minimum + Multinomial(rest, p), p ~ Dirichlet(α)."""
    _check_room(samples, clients, minimum)
    share = _dirichlet(alpha, clients, 1, rng)[0]
    sizes = minimum + rng.multinomial(samples - clients * minimum, share)
    return _cut(rng.permutation(samples), sizes)


def by_users(user: Ints, merge: int, rng: np.random.Generator) -> tuple[Ragged, tuple[tuple[int, ...], ...]]:
    """Make each user, or each random group of `merge` users (QuPeD's FEMNIST), a client.

    Returns the rows and the users of each client. The users left when the last group is not full are left out.
    """
    present, index = np.unique(user, return_inverse=True)
    clients = len(present) // merge
    group = np.arange(len(present)) if merge == 1 else rng.permutation(len(present)) // merge
    owner = group[index]
    kept = np.flatnonzero(owner < clients)
    member = np.argsort(group, kind="stable")[: clients * merge].reshape(clients, merge)
    users = tuple(tuple(int(u) for u in present[row]) for row in member)
    return Ragged.from_owner(kept, owner[kept], clients), users


def by_classes(
    label: Ints, clients: int, per_client: int, samples: int | None, minimum: int, rng: np.random.Generator
) -> Ragged:
    """Give each client exactly `per_client` random classes and the same number of rows of each (QuPeD).

    Each client receives (samples // per_client) rows of each of its classes; without `samples`, the most that all
    clients can have. Rows that do not fit these equal portions are left out.
    """
    supply = np.bincount(label)
    _check_labels(supply, per_client, "per_client")
    _check_room(len(label), clients, max(minimum, per_client))
    portion = _largest_portion(supply, clients, per_client)
    if samples is not None:
        if samples // per_client > portion or samples < per_client:
            raise BadInput(
                f"data.partition.samples = {samples}: {clients} clients with {per_client} classes each can have "
                f"{per_client} to {portion * per_client} samples; choose one of these or fewer clients"
            )
        portion = samples // per_client
    if portion * per_client < max(minimum, 1):
        raise BadInput(
            f"data.partition.clients = {clients}: {per_client} classes for each leave {portion * per_client} samples "
            f"per client, below min_samples = {minimum}; lower clients, per_client or min_samples"
        )
    slots = apportion(supply, clients * per_client, np.minimum(clients, supply // portion))
    support = _support(label_sets(slots, clients, rng), len(supply))
    return deal_rows(support * portion, label, rng)


def by_diversity(
    label: Ints, clients: int, labels: int, samples: int | None, minimum: int, rng: np.random.Generator
) -> Ragged:
    """Give each client exactly `samples` rows of exactly `labels` labels (FedBCD's "diversity").

    Unlike `by_classes`, a client's labels need not be equally frequent, so that all rows can be used (100 devices with
    600 digits each use all of MNIST). Without `samples`: all // clients, or the next lower size that can be dealt.
    """
    supply = np.bincount(label)
    _check_labels(supply, labels, "labels")
    least = max(minimum, labels)
    most = len(label) // clients if samples is None else samples
    _check_room(len(label), clients, max(least, most))
    room = np.minimum(clients, supply)  # the clients that can have a row of each label
    if room.sum() < clients * labels:
        raise BadInput(
            f"data.partition.labels = {labels}: the rarer labels do not go round {clients} clients; "
            "lower labels or clients"
        )
    slots = apportion(supply, clients * labels, room)
    support = _support(label_sets(slots, clients, rng), len(supply))
    table = _diverse_table(support, most, supply)
    if table is None and samples is None:
        table = _diverse_table(support, least, supply)
        while table is not None and most - least > 1:  # least can be dealt, most cannot
            size = (least + most) // 2
            trial = _diverse_table(support, size, supply)
            least, most, table = (least, size, table) if trial is None else (size, most, trial)
    if table is None:
        raise BadInput(
            f"data.partition.samples = {most}: {clients} clients with {labels} labels each cannot all have so many of "
            f"the {len(label)} samples; lower samples or clients, or leave samples out"
        )
    return deal_rows(table, label, rng)


def _diverse_table(support: NDArray[np.bool_], size: int, supply: Ints) -> Ints | None:
    """Return a table with row sums `size` that is positive just where support is, as even as possible, or None."""
    slots, labels = support.sum(axis=0), support.sum(axis=1)
    if (size < labels).any() or (slots > supply).any():
        return None
    rest = size - labels  # one row of every label is set aside, so that rounding never loses a label
    expected = spread(support * (rest / labels)[:, None], rest, supply - slots)
    for cell in (1, size):
        table, lacking = round_table(expected, rest, supply - slots, cell=cell)
        if not lacking.any():
            return table + support
    return None


def by_dirichlet(
    label: Ints, clients: int, alpha: float, sizes: Literal["equal", "natural"], minimum: int, rng: np.random.Generator
) -> Ragged:
    """Deal all rows with Dirichlet(α) label skew; every client has at least `minimum` rows, and it always ends.

    equal: client i draws its label mix p_i ~ Dirichlet(α) over the classes, sizes differ by at most one (Hsu et al.
    2019, used by FedSLR); the mixes are scaled to what the classes have, then drawn from. natural: class c draws its
    spread over the clients, q_c ~ Dirichlet(α), so sizes vary too; clients below the minimum are filled up, after
    their own preferences, with rows of the largest.
    """
    _check_room(len(label), clients, minimum)
    supply = np.bincount(label)
    if sizes == "equal":
        preference = _dirichlet(alpha, len(supply), clients, rng)
        size = rng.permutation(even_sizes(len(label), clients))
        preference = spread(preference * size[:, None], size, supply)
        return deal_rows(fill(size, preference, supply, rng), label, rng)
    preference = _dirichlet(alpha, clients, len(supply), rng).T
    columns = [rng.multinomial(n, q) for n, q in zip(supply, preference.T, strict=True)]
    return deal_rows(_raise_to_minimum(np.stack(columns, axis=1), preference, minimum, rng), label, rng)


def _raise_to_minimum(table: Ints, preference: NDArray[np.float64], minimum: int, rng: np.random.Generator) -> Ints:
    size = table.sum(axis=1)
    lacking = np.maximum(minimum - size, 0)
    poor, rich = np.flatnonzero(lacking), np.flatnonzero(size > minimum)
    kept = size[rich] - _cut_the_largest(size[rich] - minimum, int(lacking.sum()))
    table = table.copy()
    pool = np.zeros(table.shape[1], dtype=np.int64)
    for client, keep in zip(rich, kept, strict=True):
        if keep < size[client]:
            stays = rng.multivariate_hypergeometric(table[client], keep, method="marginals")
            pool += table[client] - stays
            table[client] = stays
    table[poor] += fill(lacking[poor], preference[poor], pool, rng)
    return table


def _cut_the_largest(spare: Ints, amount: int) -> Ints:
    """Take `amount` in all from `spare`, always from the largest: returns what each gives."""
    low, high = 0, int(spare.max(initial=0))  # the highest level at which cutting yields the amount
    while low < high:
        level = (low + high + 1) // 2
        if np.maximum(spare - level, 0).sum() >= amount:
            low = level
        else:
            high = level - 1
    given = np.maximum(spare - low, 0)
    excess = int(given.sum()) - amount
    given[np.flatnonzero(given)[:excess]] -= 1
    return given


def _largest_portion(supply: Ints, clients: int, per_client: int) -> int:
    low, high = 0, int(supply.max())  # largest q with Σ_c min(clients, ⌊supply_c / q⌋) ≥ clients · per_client
    while low < high:
        q = (low + high + 1) // 2
        if np.minimum(clients, supply // q).sum() >= clients * per_client:
            low = q
        else:
            high = q - 1
    return low


def _dirichlet(alpha: float, size: int, draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw Dirichlet(α, …, α), [draws, size]; where α is so small that all weights vanish, one entry takes all."""
    share = rng.dirichlet(np.full(size, alpha), draws)
    broken = ~np.isclose(share.sum(axis=1), 1.0)
    share[broken] = np.eye(size)[rng.integers(size, size=int(broken.sum()))] if broken.any() else 0.0
    return share


def _support(chosen: Ints, classes: int) -> NDArray[np.bool_]:
    support = np.zeros((len(chosen), classes), dtype=bool)
    np.put_along_axis(support, chosen, True, axis=1)
    return support


def _cut(rows: Ints, sizes: Ints) -> Ragged:
    return Ragged.from_owner(rows, np.repeat(np.arange(len(sizes)), sizes), len(sizes))


def _check_room(samples: int, clients: int, minimum: int) -> None:
    if clients * max(minimum, 1) > samples:
        raise BadInput(
            f"data.partition.clients = {clients}: {samples} samples cannot give every client {max(minimum, 1)}; "
            f"use at most {samples // max(minimum, 1)} clients or fewer samples per client"
        )


def _check_labels(supply: Ints, wanted: int, key: str) -> None:
    if wanted > (present := int((supply > 0).sum())):
        raise BadInput(f"data.partition.{key} = {wanted}: the data have only {present} classes; use at most {present}")
