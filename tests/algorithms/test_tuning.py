"""Fine-tuning runs at the rate asked for: a schedule counts rounds, and there are none any more."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad

from personafl.algorithms import METHODS, Training
from personafl.core import rng, tree
from personafl.core.algorithm import Problem
from personafl.core.batches import Batch, Batches, Data, Steps
from personafl.core.losses import cross_entropy, divergence
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.prox import l1
from personafl.core.schedule import Constant, Exponential, Linear, Schedule, Step
from personafl.core.split import Split
from personafl.core.tree import Params
from personafl.simulate.engine import gather
from personafl.testing import Case, make_case

LR, ROUNDS, CLIENT = 0.3, 60, 1
SCHEDULES: dict[str, Schedule] = {
    "constant": Constant(),
    "step": Step(every=7, factor=0.3),
    "exponential": Exponential(rate=0.9),
    "linear": Linear(rounds=ROUNDS),  # 0 once the rounds are over
    "warm-up": Linear(rounds=ROUNDS * ROUNDS, warmup=1.0),  # 1/60
}
TUNING = [name for name in METHODS if METHODS[name].build(Training()).client.tuning]
ONE_EPOCH = {name: {"tune_epochs": 1} for name in TUNING} | {
    "local": {"alone_epochs": 1},
    "binaryrelax": {"alone_epochs": 1},
    "perfedavg": {"tune_epochs": 1, "inner_lr": LR},
    "pfedme": {"tune_epochs": 1, "inner_steps": 1},
    "fedslr": {"tune_epochs": 1, "sparsity": 0.02},
    "apfl": {"tune_epochs": 1, "mixing": 0.25},
    "qupel": {"tune_epochs": 1, "proximity": 0.25},
    "ifca": {},
    "fedem": {"tune_rounds": 1},
}
# Rates and widths that only an option brings in.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("quped", {"bits": 2, "penalty": 1e-3, "center_lr": 0.1, "full_precision": "none"}),
    ("apfl", {"adaptive": True}),
    ("fedslr", {"personal": "low-rank", "sparsity": 0.1}),
    ("finetune", {"part": "personal"}),
    ("fedalt", {"stateful": False}),
    ("fedalt", {"tune_lr": 0.07, "personal_lr": 0.02}),
]


def tuned(name: str, schedule: Schedule, **options: Any) -> tuple[Case, Any, Any, Any, Batch]:
    """Return the case, what a client is sent, its state before and after one full-batch epoch, and the batch."""
    net = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)))
    problem = Problem(net.to(torch.device("cpu"), torch.float64), cross_entropy, split=Split(("3.*",)))
    training = Training(work=Steps(epochs=1, batch=None), optimizer=Sgd(lr=LR, schedule=schedule))
    case = make_case(METHODS[name].build(training, **ONE_EPOCH[name] | options), problem)
    down, state, _ = case.one_client(CLIENT)
    state = state if name in ("fedspa", "ifca", "fedem") else tree.map(apart, state)  # so that penalties pull
    stacked = gather(case.data, np.array([CLIENT]), case.algorithm.client.tuning, 1, ROUNDS)
    phases = {key: Batches(b.pool_x, b.pool_y, b.rows[0], b.real[0], b.key[0]) for key, b in stacked.phases.items()}
    data = Data(phases, stacked.examples[0], stacked.round)
    after = case.algorithm.client.personalize(case.problem, down, state, data)
    return case, down, state, after, next(batch for batches in phases.values() for batch in batches.each())


def apart(leaf: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(leaf.shape, generator=rng.generator("apart", leaf.numel()), dtype=torch.float64)
    return leaf + 0.05 * noise if leaf.ndim else leaf


def stepped(w: Params, gradient: Params, rate: float = LR) -> Params:
    return tree.sub(w, tree.scale(gradient, rate))


def taught(case: Case, x: Params, w: Params, share: float, batch: Batch) -> torch.Tensor:
    scores, teacher = (case.problem.net.apply(model, batch.x, None, batch.key) for model in (x, w))
    own, distilled = cross_entropy(scores, batch.y).mean(), divergence(teacher, scores).mean()
    return (1 - share) * own + share * distilled


def by_hand(name: str, case: Case, down: Any, state: Any, batch: Batch) -> Params:
    """What one step makes of a client's own model (its own part of it)."""

    def slope(w: Params) -> Params:
        return grad(case.problem.mean_loss)(w, batch)

    if name in ("fedalt", "fedsim", "fedper", "fedrep", "lgfedavg", "fedbn"):  # v − lr ∇_v f(u, v)
        whole = slope(down.shared | state.personal)
        return stepped(state.personal, {key: whole[key] for key in state.personal})
    if name in ("fedpac", "fedbabu"):  # the head; FedBABU's is kept with the body
        whole = slope(down.shared | state.personal)
        tuned = stepped(state.personal, {key: whole[key] for key in state.personal})
        return tuned if name == "fedpac" else down.shared | tuned
    if name == "fedala":  # all of (θ, ψ̂)
        start = case.algorithm.client.models(case.problem, down, state)["personal"]
        return stepped(start, slope(start))
    if name in ("ifca", "fedem"):  # no step: a newcomer looks at the losses of all models
        return {"seen": looked(name, case, down, batch)}
    if name == "feddbe":  # s − lr Wᵀ ∇_b f: moving the features by s moves the outputs by W s
        return {"shift": stepped(state.shift, down.model["3.weight"].T @ slope(_shifted(down, state))["3.bias"])}
    if name in ("fedcp", "gpfl"):  # the head of the client's own network, the rest of which is as it was
        if name == "gpfl":
            state = state._replace(shares=torch.bincount(batch.y, minlength=10).double() / len(batch.y))
        model = case.algorithm.client.models(case.problem, down, state)["personal"]
        whole = grad(case.problem.personal_loss)(model, batch)
        return stepped(state.personal, {key: whole[key] for key in state.personal})
    if name == "fedproto":  # no prototype is known yet
        return stepped(state.model, slope(state.model))
    if name == "fedrod":  # φ − lr ∇_φ f(θ, ψ + φ)
        whole = slope(down.model | {key: down.model[key] + value for key, value in state.head.items()})
        return stepped(state.head, {key: whole[key] for key in state.head})
    if name in ("finetune", "perfedavg", "fedbcd", "pfedhn"):  # from w; FedBCD's pull is 0 at x = z
        return stepped(down.model, slope(down.model))
    if name == "fedbcdi":  # then one pull, γ = 0.5
        return stepped(down.model, slope(down.model), 0.5 * LR)
    if name == "pfedme":  # from θ = w, where the pull is 0
        return stepped(down.model, slope(down.model))
    if name in ("local", "binaryrelax", "fedfomo"):
        return stepped(state.model, slope(state.model))
    if name == "ditto":
        return stepped(state.model, tree.add(slope(state.model), tree.scale(tree.sub(state.model, down.model), 0.3)))
    if name == "mrmtl":  # λ = 1
        return stepped(state.model, tree.add(slope(state.model), tree.sub(state.model, down.model)))
    if name == "apfl":  # ∇_v f(αv + (1−α)w) = α ∇f
        mixture = tree.add(tree.scale(state.own, 0.25), tree.scale(down.model, 0.75))
        return stepped(state.own, slope(mixture), 0.25 * LR)
    if name == "fedspa":
        mask = {key: state.mask.get(key, torch.ones_like(value)) for key, value in down.model.items()}
        w = tree.map(torch.mul, down.model, mask)
        return stepped(w, tree.map(torch.mul, slope(w), mask))
    if name == "fedslr":  # S_{μ·lr}(p − lr ∇f(w + p))
        moved = stepped(state.own, slope(tree.add(down.model, state.own)))
        return {key: l1(value, 0.02 * LR) for key, value in moved.items()}
    if name == "qupel":  # λ_p = 0.25
        held = tree.scale(tree.sub(state.model, down.model), 0.25)
        return stepped(state.model, tree.add(slope(state.model), held))
    assert name in ("quped", "fml")
    share = {"quped": 0.25, "fml": 0.5}[name]
    return stepped(state.model, grad(lambda x: taught(case, x, down.model, share, batch))(state.model))


def looked(name: str, case: Case, down: Any, batch: Batch) -> torch.Tensor:
    """IFCA's cluster, or FedEM's weights after a step from 1/3; its E-step by hand is in test_clusters."""
    count = {"ifca": 4, "fedem": 3}[name]
    models = [{key: value[k] for key, value in down.model.items()} for k in range(count)]
    scores = [case.problem.net.apply(model, batch.x) for model in models]
    losses = torch.stack([cross_entropy(each, batch.y) for each in scores], -1)
    if name == "ifca":
        return torch.eye(count).double()[losses.mean(0).argmin()]
    return torch.softmax(-losses, -1).mean(0)


def _shifted(down: Any, state: Any) -> Params:
    return down.model | {"3.bias": down.model["3.bias"] + down.model["3.weight"] @ state.shift}


def own(state: Any) -> Params:
    """The part of a tuned state that `by_hand` gives."""
    for field in ("member", "weights"):
        if hasattr(state, field):
            return {"seen": getattr(state, field)}
    if hasattr(state, "shift"):
        return {"shift": state.shift}
    return next(getattr(state, field) for field in ("model", "personal", "own", "head") if hasattr(state, field))


def difference(a: Params, b: Params) -> float:
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max()) for key in a)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", TUNING)
def test_a_full_batch_epoch_is_one_step_at_the_rate_given(name: str, schedule: str) -> None:
    case, down, before, after, batch = tuned(name, SCHEDULES[schedule])
    expected = by_hand(name, case, down, before, batch)
    assert difference(own(after), expected) < 1e-12


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_no_rate_or_width_of_fine_tuning_follows_the_schedule(name: str, options: dict[str, Any]) -> None:
    """All leaves of the tuned state, centers and mixing weights too, are those of a constant schedule."""
    expected = tree.flatten(tuned(name, Constant(), **options)[3])
    for schedule in SCHEDULES.values():
        centers = {"center_schedule": schedule} if "center_lr" in options else {}
        found = tree.flatten(tuned(name, schedule, **options | centers)[3])
        assert all(torch.equal(found[path], leaf) for path, leaf in expected.items())
