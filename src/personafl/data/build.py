"""From a source to a federated data set in one call: partition, test, validation, unseen clients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from personafl.core.rng import numpy_generator
from personafl.core.split import listed
from personafl.data import config as kinds
from personafl.data import partition
from personafl.data.config import DataConfig
from personafl.data.federated import FederatedData, Numbered, Ragged, make_federated
from personafl.data.holdout import deal_like, hold_out, hold_out_last
from personafl.data.sources import Dataset, load_dataset
from personafl.data.spelling import spelled
from personafl.errors import BadInput

Ints = NDArray[np.int64]
AUTO_TEST = 0.2


@dataclass(frozen=True, eq=False)
class _Clients:
    names: Sequence[str]
    train: Ragged
    test: Ragged
    notes: tuple[str, ...]


def load(config: DataConfig, seed: int) -> FederatedData:
    """Load the source that the config names and deal it to clients; the same config and seed give the same bits."""
    dataset = load_dataset(config.source, config.reading())
    return federate(dataset, config, seed)


def federate(dataset: Dataset, config: DataConfig, seed: int) -> FederatedData:
    """Deal a data set to clients.

    Test rows. `official`: the data's own test half. A number: that share of each client's rows, of either half.
    `auto`: the official half where it leaves every client with training and test rows, else a fifth of each client's
    official training rows (of all rows where there is no official half). With natural users the official half is a
    user's own test rows; with the other partitions it is dealt after each client's label mix. Validation rows are
    taken from the training rows. Unseen clients keep all three parts but never take part in training.

    Labels that are to be spelled (`target`) are dealt and stratified as labels.
    """
    y, classes, label_names = dataset.y, dataset.classes, dataset.label_names
    if config.target == "spelling":
        y, label_names = spelled(dataset)
        classes = len(label_names)
    how = config.partition or _usual(dataset)
    if config.test == "official" and dataset.split is None:
        raise BadInput(f"data.test = 'official': {dataset.name} has no test half; use 'auto' or a share such as 0.2")
    if isinstance(how, kinds.Users):
        clients = _natural(dataset, how, config, seed)
    else:
        clients = _synthetic(dataset, how, config, seed)
    train, validation = clients.train, Ragged.empty(len(clients.names))
    if config.validation > 0:
        _need(train, 2, clients.names, "training and validation", "a larger min_samples or no validation")
        train, validation = _hold_out(dataset, train, config.validation, seed, "validation")
    seen, unseen = _unseen(len(clients.names), config.unseen, seed)
    return make_federated(
        name=dataset.name,
        x=dataset.x,
        y=y,
        classes=classes,
        train=train,
        validation=validation,
        test=clients.test,
        seen=seen,
        unseen=unseen,
        client_names=clients.names,
        label_names=label_names,
        vocabulary=dataset.vocabulary,
        notes=(*dataset.notes, *_dealt(dataset, config, len(clients.names)), *clients.notes),
        task="ctc" if config.target == "spelling" else dataset.task,
        reading=dataset.reading,
    )


def _usual(dataset: Dataset) -> kinds.Partition:
    """Return how data are dealt where nobody says."""
    if dataset.user is not None:
        return kinds.Users()
    return kinds.Dirichlet() if dataset.task == "classification" else kinds.Iid()


def _dealt(dataset: Dataset, config: DataConfig, clients: int) -> Iterator[str]:
    """Yield what to know of who the clients are."""
    if clients == 1:
        yield "there is one client, so that nothing is shared: name users with data.user, or deal with data.partition"
    elif dataset.user is None and config.partition is None:
        how = "by labels (dirichlet)" if dataset.task == "classification" else "at random"
        yield f"nothing says whose samples these are: dealt to {clients:,} clients {how}; see data.user, data.partition"


def _natural(dataset: Dataset, how: kinds.Users, config: DataConfig, seed: int) -> _Clients:
    if dataset.user is None:
        raise BadInput(
            f"partition 'users': {dataset.name} does not name its users; "
            "use dirichlet, classes, diversity, iid or quantity"
        )
    rows, official, notes = _user_rows(dataset, config, how.merge)
    groups, members = partition.by_users(dataset.user[rows], how.merge, numpy_generator(seed, "merge users"))
    large = np.flatnonzero(groups.sizes >= config.min_samples)
    if len(large) < len(groups):
        small = np.flatnonzero(groups.sizes < config.min_samples)
        left_out = listed(["+".join(dataset.user_names[user] for user in members[client]) for client in small])
        count = f"{len(small)} client{'s' if len(small) > 1 else ''}"
        notes += (f"{count} with fewer than {config.min_samples} samples left out: {left_out}",)
    if how.clients is not None:
        if how.clients > len(large):
            raise BadInput(
                f"data.partition.clients = {how.clients}: {dataset.name} has {len(large)} clients with at least "
                f"{config.min_samples} samples; lower clients or min_samples"
            )
        large = np.sort(numpy_generator(seed, "take users").choice(large, how.clients, replace=False))
    if not len(large):
        most = f"has min_samples = {config.min_samples} samples, but at most {int(groups.sizes.max(initial=0))}"
        raise BadInput(
            f"partition 'users': no client of {dataset.name} {most}; lower min_samples or merge, or name "
            "another column with data.user"
        )
    names = tuple("+".join(dataset.user_names[user] for user in members[client]) for client in large)
    every = Ragged.from_lists(rows[groups[int(client)]] for client in large)
    if official:
        assert dataset.split is not None
        train, test = every.divided(dataset.split[every.flat] == 1)
        _need(train, 1, names, "training", "data.test = 'auto' or a share such as 0.2")
        _need(test, 1, names, "test", "data.test = 'auto' or a share such as 0.2")
        return _Clients(names, train, test, notes)
    return _held_out(dataset, every, names, notes, config, seed)


def _user_rows(dataset: Dataset, config: DataConfig, merge: int) -> tuple[Ints, bool, tuple[str, ...]]:
    """Return the rows that users bring, whether the official halves are used, and what to note."""
    every = np.arange(len(dataset.x))
    if dataset.split is None or isinstance(config.test, float):
        return every, False, ()
    if config.test == "official":
        return every, True, ()
    assert dataset.user is not None
    parts = np.bincount(2 * dataset.user + dataset.split, minlength=2 * (int(dataset.user.max()) + 1)).reshape(-1, 2)
    parts = parts[parts.sum(axis=1) >= (config.min_samples if merge == 1 else 1)]
    if len(parts) and (parts > 0).all():
        return every, True, ()
    note = (
        f"the official halves leave {int((parts == 0).any(axis=1).sum())} users without training or test samples; "
        f"instead {AUTO_TEST:.0%} of each client's own official training samples test it"
    )
    return np.flatnonzero(dataset.split == 0), False, (note,)


def _synthetic(dataset: Dataset, how: kinds.Partition, config: DataConfig, seed: int) -> _Clients:
    halves = dataset.split is not None and not isinstance(config.test, float)
    rows = np.flatnonzero(dataset.split == 0) if halves else np.arange(len(dataset.x))
    parts = _deal(dataset, rows, how, config, seed)
    parts = Ragged(rows[parts.flat], parts.offset)
    names = Numbered(len(parts))
    if not halves:
        return _held_out(dataset, parts, names, (), config, seed)
    label = _labels(dataset)
    classes = int(label.max()) + 1
    table = np.bincount(parts.owner * classes + label[parts.flat], minlength=len(parts) * classes)
    official = np.flatnonzero(dataset.split == 1)
    test, without = deal_like(table.reshape(len(parts), classes), label[official], numpy_generator(seed, "test half"))
    if not len(without):
        return _Clients(names, parts, Ragged(official[test.flat], test.offset), ())
    if config.test == "official":
        raise BadInput(
            f"client {without[0]} gets no test data: the {len(official)} official test samples of {dataset.name} do "
            f"not go round {len(parts)} clients with these labels; use fewer clients or data.test = 'auto'"
        )
    note = f"the official test half does not go round; instead {AUTO_TEST:.0%} of each client's own samples test it"
    return _held_out(dataset, parts, names, (note,), config, seed)


def _deal(dataset: Dataset, rows: Ints, how: kinds.Partition, config: DataConfig, seed: int) -> Ragged:
    rng = numpy_generator(seed, "partition", how.kind)
    minimum = max(config.min_samples, 3 if config.validation > 0 else 2)  # one sample for each part
    if isinstance(how, kinds.Users):
        raise TypeError("natural users are not dealt")
    if isinstance(how, kinds.Iid):
        return partition.iid(len(rows), how.clients, minimum, rng)
    if isinstance(how, kinds.Quantity):
        return partition.by_quantity(len(rows), how.clients, how.alpha, minimum, rng)
    if dataset.task != "classification":
        what = {"next-token": "tokens", "regression": "numbers", "multilabel": "sets of labels"}[dataset.task]
        raise BadInput(
            f"partition {how.kind!r} needs one label per sample, but {dataset.name} predicts {what}; "
            f"use users, iid or quantity"
        )
    label = _labels(dataset)[rows]
    if isinstance(how, kinds.Classes):
        return partition.by_classes(label, how.clients, how.per_client, how.samples, minimum, rng)
    if isinstance(how, kinds.Diversity):
        return partition.by_diversity(label, how.clients, how.labels, how.samples, minimum, rng)
    return partition.by_dirichlet(label, how.clients, how.alpha, how.sizes, minimum, rng)


def _held_out(
    dataset: Dataset, rows: Ragged, names: Sequence[str], notes: tuple[str, ...], config: DataConfig, seed: int
) -> _Clients:
    _need(rows, 2, names, "training and test", "min_samples = 2")
    fraction = config.test if isinstance(config.test, float) else AUTO_TEST
    train, test = _hold_out(dataset, rows, fraction, seed, "test")
    return _Clients(names, train, test, notes)


def _hold_out(dataset: Dataset, rows: Ragged, fraction: float, seed: int, what: str) -> tuple[Ragged, Ragged]:
    if dataset.task == "next-token":
        return hold_out_last(rows, fraction)
    return hold_out(rows, _labels(dataset), fraction, numpy_generator(seed, "hold out", what))


def _labels(dataset: Dataset) -> Ints:
    """One label per sample; tasks that have none to stratify by count as a single class."""
    if dataset.task != "classification":
        return np.zeros(len(dataset.y), dtype=np.int64)
    labels: Ints = dataset.y.numpy()
    return labels


def _unseen(clients: int, unseen: int | float, seed: int) -> tuple[Ints, Ints]:
    count = unseen if isinstance(unseen, int) else max(1, round(unseen * clients))
    if count >= clients:
        raise BadInput(f"data.unseen = {unseen}: there are {clients} clients and at least one must train; lower it")
    order = numpy_generator(seed, "unseen clients").permutation(clients)
    return np.sort(order[count:]), np.sort(order[:count])


def _need(rows: Ragged, least: int, names: Sequence[str], what: str, remedy: str) -> None:
    short = np.flatnonzero(rows.sizes < least)
    if len(short):
        first = short[0]
        more = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
        raise BadInput(
            f"client {names[first]!r}{more} has too few samples for {what} data ({rows.sizes[first]}); use {remedy}"
        )
