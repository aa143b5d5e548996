"""The laws that every algorithm keeps, as a public suite: `check_algorithm(my_algorithm)`.

They are the whole contract: what simulator, workers, buffer, cloud, uplink, deployment, checkpoints, scores and exports
demand of a rule. Each law is a function of a `Case`: five clients of unequal size with real digits, a small network,
float64. Laws share what was trained for a case.
"""

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from personafl.core import tree, wire
from personafl.core.algorithm import (
    Algorithm,
    Problem,
    no_steps,
    packed,
    untrained_upload,
)
from personafl.core.net import Net
from personafl.core.tree import Tree
from personafl.errors import BadInput
from personafl.simulate.engine import Strategy
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from personafl.testing.case import TOLERANCE, Case, alike, close, everything, make_case, padded
from personafl.testing.serving import (
    a_mean_is_of_what_was_sent,
    a_server_may_be_one_of_several,
    each_is_sent_its_own,
    order_does_not_matter,
    who_averages_needs_the_mean_alone,
)
from personafl.uploads.codecs import TopEntries
from personafl.uploads.uplink import compressed


def check_algorithm(algorithm: Algorithm, problem: Problem | None = None) -> None:
    """Raise AssertionError, naming the law, if the algorithm breaks one."""
    case = make_case(algorithm, problem)
    for name, law in LAWS.items():
        try:
            law(case)
        except AssertionError as error:
            raise AssertionError(f"{algorithm.name} breaks the law {name!r}: {error}") from error


def messages_are_declared(case: Case) -> None:
    """A server sends what its clients expect, and `update` declares the NamedTuple that a client sends, with a loss."""
    rule = case.algorithm.client
    try:
        expected, uploads = rule.expects(case.problem, case.start), rule.uploads
    except BadInput as error:
        raise AssertionError(str(error)) from error
    down, upload = case.trained[1].given[0], case.trained[1].upload
    alike("the first broadcast", wire.dense(expected), "what the client expects", down)
    assert type(upload) is uploads, f"the upload is a {type(upload).__name__}, and {uploads.__name__} is declared"
    assert "loss" in uploads._fields, f"{uploads.__name__} has no loss"
    assert upload.loss.shape == (), f"the loss has shape {list(upload.loss.shape)}, and is one number"


def structure_is_known_before_training(case: Case) -> None:
    """No steps and many give states and uploads of one structure: stores, uplink and deployment rely on it."""
    rule, trained = case.algorithm.client, case.trained[1]
    down, state, _ = trained.given
    alike("a state after training", trained.state, "the first state", state)
    untrained = untrained_upload(rule, case.problem, down, state)
    alike("an upload without any step", untrained, "the upload", trained.upload)
    if rule.tuning:
        none = no_steps(case.problem, rule.tuning, torch.zeros(()).double())
        idle = rule.personalize(case.problem, down, state, none)
        alike("a state that no step tuned", idle, "a tuned state", _tuned(case))
    if rule.offline is not None:
        alone = rule.offline(case.problem, trained.state, case.drawn(1, rule.phases))
        alike("a state after training alone", alone, "the first state", state)


def stacked_equals_one_by_one(case: Case) -> None:
    """Two rounds give the same whether clients run stacked or one by one, all at once or in small chunks."""
    first, *others = case.outcomes.values()
    for other in others:
        close(first.end, other.end, TOLERANCE)


def shipped_equals_simulated(case: Case) -> None:
    """Messages and state survive the wire to the bit, and so does what is computed from them."""
    (down, state, data), here = case.trained[1].given, case.trained[1]
    received = wire.dense(wire.decode(wire.encode(down), down))
    kept = wire.decode(wire.encode(state), state)
    there = case.update(received, kept, data)
    close((here.state, here.upload), there, 0.0)
    close(here.upload, wire.decode(wire.encode(there[1]), wire.dense(here.upload)), 0.0)
    assert wire.size(here.upload) == len(wire.encode(here.upload)), "the size of an upload is not what is sent"


def padding_is_inert(case: Case) -> None:
    """Steps and samples that are only padding change nothing."""
    (down, state, data), trained = case.trained[1].given, case.trained[1]
    more = data._replace(phases={name: padded(batches) for name, batches in data.phases.items()})
    close((trained.state, trained.upload), case.update(down, state, more), TOLERANCE)


def arguments_are_not_changed(case: Case) -> None:
    """No rule writes into what it is given, and the same arguments give the same bits."""
    for trained in case.trained:
        close(trained.before, trained.given, 0.0)
    first = case.trained[1]
    close((first.state, first.upload), case.update(*first.given), 0.0)
    for outcome in case.outcomes.values():
        close(*outcome.start, 0.0)


def a_copy_is_as_good(case: Case) -> None:
    """Workers and the nodes of a cluster have copies of the rules: what these hold can be copied, and copies are equal.

    So a rule keeps nothing from one client or round to the next; that is what states are for.
    """
    for rule in (case.algorithm.client, case.algorithm.server):
        try:
            copy.deepcopy(rule)
        except Exception as error:
            raise AssertionError(f"{type(rule).__name__} cannot be copied: {error}") from error
    first = case.trained[1]
    other = dataclasses.replace(case, algorithm=copy.deepcopy(case.algorithm))
    close(wire.dense((first.state, first.upload)), wire.dense(other.update(*tree.map(torch.clone, first.before))), 0.0)


def state_survives_a_checkpoint(case: Case) -> None:
    """Two rounds in one go equal one round, a save and a load, and another round, to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "states", 2**30)
        before = Simulation(case.federation(), store)
        before.step(0)
        server, index = wire.encode(before.server), store.flush()
        after = Simulation(case.federation(), Store(Path(folder) / "states", 2**30, index), server)
        after.step(1)
        close(case.outcomes["stacked", 8].end, everything(after), 0.0)


def only_declared_fields_leave(case: Case) -> None:
    """An upload is of tensors, and none of them is part of the state that stays on the device."""
    _, _, state, upload = case.trained[1]
    assert all(isinstance(leaf, Tensor) for leaf in tree.leaves(upload)), "the upload has something that is no tensor"
    for path, leaf in tree.flatten(upload).items():
        if path.split("/")[0] in case.algorithm.client.uploads_of_state:
            continue
        for own, kept in tree.flatten(state).items():
            same = leaf.shape == kept.shape and leaf.numel() > 1 and torch.equal(leaf, kept)
            assert not same, f"{path} of the upload is {own} of the client's state"


def uploads_can_be_compressed(case: Case) -> None:
    """Of an upload in a compact form, what is sent and what is left are the whole."""
    codec = TopEntries(keep=0.25)
    small = dataclasses.replace(case, algorithm=compressed(case.algorithm, codec))
    (down, state, data), upload = small.one_client(), tree.flatten(wire.dense(case.trained[1].upload))
    kept, sent = small.update(down, state, data)
    found = tree.flatten(wire.dense(sent))
    close(upload, found | {path: found[path] + left for path, left in kept.error.items()}, TOLERANCE)


def models_fit_their_networks(case: Case) -> None:
    """Models are global or personal, fit their networks, are there from the first state on, stack, and are what is
    packed; a client that was fine-tuned has one of its own.
    """
    rule, trained = case.algorithm.client, case.trained[1]
    down, first, _ = trained.given
    nets = {"global": case.problem.net, "personal": case.problem.personal_net}
    models = rule.models(case.problem, down, trained.state)
    assert models.keys() == rule.models(case.problem, down, first).keys(), "training makes or takes away a model"
    assert models.keys() <= nets.keys(), f"unknown models {sorted(models)}"
    states = [trained.state, *([_tuned(case)] if rule.tuning else [])]
    assert "personal" in rule.models(case.problem, down, states[-1]) or not rule.tuning, (
        "a tuned client has no personal model"
    )
    for state in states:
        models = rule.models(case.problem, down, state)
        for name, params in models.items():
            shapes = {key: value.shape for key, value in params.items()}
            assert shapes == nets[name].shapes, f"the {name} model does not fit its network"
        for name, parts in packed(rule, case.problem, down, state).items():
            whole = functools.reduce(tree.add, map(wire.dense, parts))
            close(models[name], whole, TOLERANCE)
        if tree.leaves(state) and "personal" in models:
            stacked = vmap(lambda one: rule.models(case.problem, down, one)["personal"])(tree.stack([state, state]))
            close(tree.stack([models["personal"]] * 2), stacked, TOLERANCE)


def devices_get_what_is_declared(case: Case) -> None:
    """Who takes networks, bits or penalties of clients' own trains with them, and returns models that have them."""
    algorithm, rule = case.algorithm, case.algorithm.client
    if not (algorithm.own_networks or algorithm.uses_bits or algorithm.most_penalty is not None):
        return
    layers = [nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 10)]
    net = Net(nn.Sequential(*layers)).to(torch.device("cpu"), torch.float64)
    nets: dict[str, Any] = {"local_net": net} if algorithm.own_networks else {"net": net}
    bits = 2 if algorithm.uses_bits else None
    penalty = None if algorithm.most_penalty is None else min(0.5, algorithm.most_penalty)
    other = dataclasses.replace(case, problem=dataclasses.replace(case.problem, bits=bits, penalty=penalty, **nets))
    down, state, data = other.one_client()
    state, _ = other.update(down, state, data)
    model = rule.models(other.problem, down, state)["personal"]
    shapes = {name: value.shape for name, value in model.items()}
    assert shapes == net.shapes, "the personal model does not fit its network"
    found = rule.bits_of(other.problem)
    assert found == bits, f"its own model has {found} bits, and was asked for {bits}"
    if bits is not None:
        fewest = min(len(set(value.flatten().tolist())) for value in model.values() if value.ndim > 1)
        assert fewest <= 2**bits, f"no weight of its own model has {bits} bits: all have {fewest} values and more"


def other_targets_are_learned_or_refused(case: Case) -> None:
    """Numbers and sets of labels train as classes do, stacked as one by one; or `expects` refuses the task by name."""
    for task in ("regression", "multilabel"):
        other = case.with_task(task)
        if (refused := _refusal(other)) is not None:
            assert task in refused, f"it refuses {task}, and does not name it: {refused}"
            continue
        try:
            one, *others = (_first_round(other, strategy) for strategy in ("stacked", "sequential"))
        except (RuntimeError, ValueError, IndexError) as error:
            message = f"{task}: {type(error).__name__}: {error}; learn it, or refuse it in `expects` with BadInput"
            raise AssertionError(message) from error
        for each in others:
            close(one, each, TOLERANCE)
        wrong = [path for path, leaf in one.items() if not bool(torch.isfinite(leaf.double()).all())]
        assert not wrong, f"{task}: {wrong[0]} is not finite"


def _refusal(case: Case) -> str | None:
    try:
        case.algorithm.client.expects(case.problem, case.start)
    except BadInput as refusal:
        return str(refusal)
    return None


def _first_round(case: Case, strategy: Strategy) -> dict[str, Tensor]:
    with case.simulation(strategy) as simulation:
        simulation.step(0)
        return everything(simulation)


def _tuned(case: Case) -> Tree:
    """Return a fresh client's state after fine-tuning."""
    rule, (down, state, _) = case.algorithm.client, case.trained[1].given
    return rule.personalize(case.problem, down, state, case.drawn(1, rule.tuning))


LAWS: dict[str, Callable[[Case], None]] = {
    law.__name__: law
    for law in (
        messages_are_declared,
        structure_is_known_before_training,
        stacked_equals_one_by_one,
        shipped_equals_simulated,
        order_does_not_matter,
        each_is_sent_its_own,
        a_mean_is_of_what_was_sent,
        padding_is_inert,
        arguments_are_not_changed,
        a_copy_is_as_good,
        state_survives_a_checkpoint,
        only_declared_fields_leave,
        uploads_can_be_compressed,
        a_server_may_be_one_of_several,
        who_averages_needs_the_mean_alone,
        models_fit_their_networks,
        devices_get_what_is_declared,
        other_targets_are_learned_or_refused,
    )
}
