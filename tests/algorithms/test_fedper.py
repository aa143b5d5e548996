"""FedPer, FedRep, LG-FedAvg and FedBN against their equations, worked in numpy, and which part each makes personal."""

import numpy as np
import pytest
import torch
from torch import nn

from least_squares import LeastSquares, half_square
from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Algorithm, Problem
from personafl.core.batches import Steps
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.split import Split
from personafl.core.tree import flatten
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.simulator import Simulation

LR, STEPS, HEAD = 0.05, 3, 4
TRAINING = Training(work=Steps(steps=STEPS, batch=None), optimizer=Sgd(lr=LR))
CLIENTS = range(3)
NAMES = ("fedper", "fedrep", "lgfedavg", "fedbn")


class BodyAndHead(nn.Module):
    """hᵀ(b ⊙ x): the gradient of each part is a multiple of the other, so it matters which values are used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Parameter(torch.empty(4)), nn.Linear(4, 1, bias=False)
        nn.init.normal_(self.body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body * x)
        return result


def simulate(problem: LeastSquares, algorithm: Algorithm, rounds: int, personal: str):
    torch.manual_seed(3)
    module = BodyAndHead().double()
    body, head = module.body.detach().numpy().copy(), module.head.weight.detach()[0].numpy().copy()
    parts = Problem(Net(module), half_square, split=Split((personal,)))
    return body, head, problem.simulate(algorithm, rounds, problems=(parts,))


def shared_of(simulation: Simulation, name: str) -> np.ndarray:
    return simulation.server.shared.model[name].numpy().reshape(-1)


def own(simulation: Simulation, client: int, name: str) -> np.ndarray:
    return simulation.store.get(client)[f"personal/{name}"].numpy().reshape(-1)


def both_gradients(problem: LeastSquares, i: int, body: np.ndarray, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With w = b ⊙ h: ∂f/∂b = ∇f(w) ⊙ h and ∂f/∂h = ∇f(w) ⊙ b."""
    g = problem.gradient(i, body * head)
    return g * head, g * body


@pytest.mark.parametrize(("name", "personal"), [("fedper", "head.*"), ("lgfedavg", "body"), ("fedbn", "head.*")])
def test_joint_training_by_hand(problem: LeastSquares, name: str, personal: str) -> None:
    """Both parts step at once, with gradients at the same point and one rate; the server averages the shared part."""
    body, head, simulation = simulate(problem, METHODS[name].build(TRAINING), 2, personal)
    bodies, heads = [body] * 3, [head] * 3
    for _ in range(2):
        for i in CLIENTS:
            for _ in range(STEPS):
                in_body, in_head = both_gradients(problem, i, bodies[i], heads[i])
                bodies[i], heads[i] = bodies[i] - LR * in_body, heads[i] - LR * in_head
        shared = heads if personal == "body" else bodies
        shared[:] = [sum(p * end for p, end in zip(problem.weights, shared, strict=True))] * 3
    kept, sent = ("body", "head.weight") if personal == "body" else ("head.weight", "body")
    np.testing.assert_allclose(shared_of(simulation, sent), shared[0], atol=1e-12)
    for i in CLIENTS:
        np.testing.assert_allclose(own(simulation, i, kept), (bodies if personal == "body" else heads)[i], atol=1e-12)


def test_fedrep_by_hand(problem: LeastSquares) -> None:
    """τ_h steps on the head with φ_t fixed; then τ_φ on the body from φ_t under the new head, which does not move.

    With a head of its own rate. The body under the old head, and the head moving with the body (FedPer), are both
    worked too, and are something else.
    """
    algorithm = METHODS["fedrep"].build(TRAINING, head_epochs=HEAD, head_lr=0.03)
    body, start, simulation = simulate(problem, algorithm, 2, "head.*")
    heads = [start] * 3
    for _ in range(2):
        ends, stale = [], []
        for i in CLIENTS:
            before = heads[i]
            for _ in range(HEAD):
                heads[i] = heads[i] - 0.03 * both_gradients(problem, i, body, heads[i])[1]
            local = wrong = body
            for _ in range(STEPS):
                local = local - LR * both_gradients(problem, i, local, heads[i])[0]
                wrong = wrong - LR * both_gradients(problem, i, wrong, before)[0]
            ends.append(local)
            stale.append(wrong)
        body, under_old = (sum(p * e for p, e in zip(problem.weights, end, strict=True)) for end in (ends, stale))
    found = shared_of(simulation, "body")
    np.testing.assert_allclose(found, body, atol=1e-12)
    assert np.abs(found - under_old).max() > 1e-3
    for i in CLIENTS:
        np.testing.assert_allclose(own(simulation, i, "head.weight"), heads[i], atol=1e-12)
    _, _, fedper = simulate(problem, METHODS["fedper"].build(TRAINING), 2, "head.*")
    assert np.abs(found - shared_of(fedper, "body")).max() > 1e-3


def test_fedreps_head_has_its_own_amount_of_work() -> None:
    phases = METHODS["fedrep"].build(TRAINING).client.phases
    assert list(phases) == ["personal", "local"]
    assert (phases["personal"].epochs, phases["personal"].steps) == (3, None)
    assert phases["local"] == TRAINING.work


def personal_names(method: str, **model: object) -> set[str]:
    data = {"source": "digits", "partition": {"kind": "classes", "clients": 8, "per_client": 4}}
    recipe = Recipe.parse({"data": data, "model": {"name": "mlp", **model}, "method": {"name": method}})
    federation = prepare(recipe).federation
    split, names = federation.problems[0].split, federation.problems[0].net.shapes
    assert split is not None
    server = federation.algorithm.server
    down = server.broadcast(server.init(federation.problems[0], federation.start, federation.roster.population))
    kept = federation.algorithm.client.init(federation.problems[0], down, torch.Generator())
    assert {path.removeprefix("personal/") for path in flatten(kept)} == set(filter(split.is_personal, names))
    return set(filter(split.is_personal, names))


@pytest.mark.parametrize(
    ("method", "model", "expected"),
    [
        ("fedper", {}, {"3.weight", "3.bias"}),
        ("fedrep", {}, {"3.weight", "3.bias"}),
        ("lgfedavg", {}, {"1.weight", "1.bias"}),
        ("fedper", {"personal": "input"}, {"1.weight", "1.bias"}),
        ("fedbn", {"personal": "*.bias"}, {"1.bias", "3.bias"}),
    ],
)
def test_each_method_has_its_part_unless_the_recipe_names_another(
    method: str, model: dict[str, object], expected: set[str]
) -> None:
    assert personal_names(method, **model) == expected


def test_fedbn_keeps_the_normalisation_layers() -> None:
    names = personal_names("fedbn", name="resnet20", width=4)
    assert len(names) == 2 * (1 + 2 * 9 + 2)
    assert all("norm" in name or "skip.1" in name for name in names)


def test_fedbn_says_that_a_network_has_no_norms() -> None:
    with pytest.raises(BadInput, match=r"model\.personal: 'norms' matches no parameter .*no normalisation layers"):
        personal_names("fedbn")


@pytest.mark.parametrize("name", NAMES)
def test_a_method_is_called_by_its_name(name: str) -> None:
    assert METHODS[name].build(TRAINING).name == name
