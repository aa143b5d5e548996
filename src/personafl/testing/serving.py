"""The laws of server rules: what they send, and what they make of uploads."""

import numpy as np
import torch

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Reduced, given, reduce
from personafl.core.tree import Tree
from personafl.simulate.cloud import mixed
from personafl.testing.case import SIZES, TOLERANCE, Case, alike, close


def order_does_not_matter(case: Case) -> None:
    """The server steps to the same state in whatever order uploads arrive and are joined."""
    rule, server = case.algorithm.server, case.outcomes["stacked", 8].start[0]
    if rule.join_from is not None:
        whole, joined = _joined(case, [0, 1, 2, 3, 4]), _joined(case, [3], [0], [4, 2], [1])
    else:
        uploads, weights = _uploads(case), torch.tensor(SIZES, dtype=torch.float64)
        whole = reduce(tree.stack(uploads), weights)
        parts = [reduce(tree.stack([upload]), weights[[i]]) for i, upload in enumerate(uploads)]
        joined = parts[3].plus(parts[0]).plus(parts[4].plus(parts[2])).plus(parts[1])
    close(rule.update(server, whole, 0), rule.update(server, joined, 0), TOLERANCE)


def _joined(case: Case, *groups: list[int]) -> Reduced:
    """Return what a rule that is told whose uploads it joins makes of those of all clients, group by group."""
    rule, server = case.algorithm.server, case.outcomes["stacked", 8].start[0]
    uploads, joined = _uploads(case), None
    for group in groups:
        stacked = tree.stack([uploads[client] for client in group])
        weights = torch.tensor([SIZES[client] for client in group], dtype=torch.float64)
        assert rule.join_from is not None
        joined = rule.join_from(server, joined, stacked, weights, np.array(group), 0)
    assert joined is not None
    return joined


def each_is_sent_its_own(case: Case) -> None:
    """What a server sends some clients of their own are fields of its broadcast, the same whoever else is sent some.

    A server that does so looks at each upload, with whose it is; the global model is not of what is anyone's own.
    """
    rule = case.algorithm.server
    assert rule.join_from is None or rule.needs_each, "it has join_from, and does not say needs_each"
    if rule.address is None:
        return
    assert not rule.averages, "it sends each client its own, and says that it only averages changes of what it sent"
    _check_addressed(case, case.server)
    _check_addressed(case, case.outcomes["stacked", 8].server)


def _check_addressed(case: Case, state: Tree) -> None:
    """Fail unless what a server sends some clients, also those that it never heard of, is as it should be."""
    rule, client, everyone = case.algorithm.server, case.algorithm.client, np.array([3, len(SIZES) + 100, 0, 4, 1])
    assert rule.address is not None
    common, together = rule.broadcast(state), rule.address(state, everyone)
    undeclared = sorted(set(together) - set(type(common)._fields))
    assert not undeclared, f"{undeclared[0]} is addressed, and is no field of {type(common).__name__}"
    for row, number in enumerate(everyone.tolist()):
        own = tree.take(together, row)
        close(own, tree.take(rule.address(state, np.array([number])), 0), TOLERANCE)
        alike("what a client is sent", given(common, own), "the broadcast", common)
    one = given(wire.dense(common), tree.take(together, 0))
    kept = client.init(case.problem, one, rng.generator(1, "init", 3))
    shared, seen = (client.models(case.problem, down, kept).get("global", {}) for down in (wire.dense(common), one))
    close(shared, seen, 0.0)


def a_mean_is_of_what_was_sent(case: Case) -> None:
    """What a server averages is Σ n_i·up_i / Σ n_i, field by field: real numbers as precise as they are sent.

    A server that is told whose uploads it joins may make of them what it likes.
    """
    if case.algorithm.server.join_from is not None:
        return
    sent = [tree.flatten(upload) for upload in _uploads(case)]
    weights = torch.from_numpy(case.federation().roster.weights_of(np.arange(len(SIZES)))).double()
    for key in (("stacked", 8), ("sequential", 2)):
        for path, mean in tree.flatten(case.outcomes[key].heard.mean()).items():
            first, rows = sent[0][path], torch.stack([one[path].double() for one in sent])
            wanted = first.dtype if first.is_floating_point() else torch.float64
            assert mean.dtype == wanted, f"the mean of {path} is {mean.dtype}, and was sent as {first.dtype}"
            expected = torch.tensordot(weights, rows, dims=1) / weights.sum()
            gap = (mean.double() - expected).abs().max().item() if mean.numel() else 0.0
            allowed = TOLERANCE + 8 * torch.finfo(wanted).eps * rows.abs().max().item() if mean.numel() else 0.0
            assert gap <= allowed, f"the mean of {path} differs by {gap:.3g}"


def a_server_may_be_one_of_several(case: Case) -> None:
    """A state can be mixed with those of other servers, and stepped then; one that steps again keeps its structure.

    A server that sends each client its own is alone.
    """
    rule, first = case.algorithm.server, case.outcomes["stacked", 8]
    if rule.address is not None:
        return
    states = [first.server, rule.init(case.problem, case.start, 7.0)]
    mean, own = mixed(states, np.array([0.5, 0.5]), 0), wire.dense(first.server)  # compact forms do not survive mixing
    alike("a mixed state", wire.dense(mean), "a server's state", own)
    alike("the state after it was mixed", wire.dense(rule.update(mean, first.heard, 2)), "a server's state", own)
    rule.broadcast(mean)
    if rule.again is not None:
        alike("the state after another step", wire.dense(rule.again(mean)), "a server's state", own)
    if rule.admit is not None:
        alike("the state with another client", wire.dense(rule.admit(mean, 1.0, None)), "a server's state", own)


def who_averages_needs_the_mean_alone(case: Case) -> None:
    """A server that declares that it averages steps by the mean of changes, whatever their weight and number.

    So a buffer may discount late ones. Where nothing changed, nothing moves.
    """
    rule, (start, _), heard = case.algorithm.server, *case.outcomes["stacked", 8][:2]
    if not rule.averages:
        return
    twice = heard._replace(total=tree.scale(heard.total, 2), weight=2 * heard.weight, clients=9)
    close(rule.update(start, heard, 0), rule.update(start, twice, 0), TOLERANCE)
    none = heard._replace(total=tree.scale(heard.total, 0))
    before, after = (wire.dense(rule.broadcast(state)) for state in (start, rule.update(start, none, 0)))
    close(before, after, TOLERANCE)


def _uploads(case: Case) -> list[Tree]:
    return [wire.dense(trained.upload) for trained in case.trained]
