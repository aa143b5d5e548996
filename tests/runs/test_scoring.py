"""Scores of a simulation's models against a plain loop over clients."""

import numpy as np
import pytest
import torch

from personafl.algorithms import METHODS, Training
from personafl.core.batches import Steps
from personafl.core.losses import correct, cross_entropy
from personafl.core.optim import Sgd
from personafl.core.tree import Params
from personafl.runs.scoring import score
from personafl.runs.trying import SHARES, blend
from personafl.testing import Case, make_case

TRAINING = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1))


def outcomes(case: Case, params: Params, client: int) -> tuple[np.ndarray, np.ndarray]:
    """[samples] of the client's training data: right or not, and the loss."""
    rows = case.data.train[client]
    output = case.problem.net.apply(params, case.data.x[rows])
    return correct(output, case.data.y[rows]).numpy(), cross_entropy(output, case.data.y[rows]).numpy()


@pytest.mark.parametrize("method", ["fedalt", "ditto"])
def test_every_model_and_its_gains_by_a_plain_loop(method: str) -> None:
    """FedAlt's models have one body in common, Ditto's are whole; clients are asked for in an order of their own."""
    case = make_case(METHODS[method].build(TRAINING))
    clients = np.array([3, 0, 4, 2, 1])
    with case.simulation(chunk=2) as simulation:
        simulation.step(0)
        down, rule = simulation.down(), case.algorithm.client
        found = score(simulation, None, clients, {"validation": case.data.train, "test": case.data.test}, True)
        states = {int(c): simulation.states(0, down, np.array([c])) for c in clients}
    assert {name for name, _ in found.scores} == {"global", "personal", *(f"blend {share}" for share in SHARES)}
    for place, client in enumerate(clients.tolist()):
        own = torch.func.vmap(lambda state: rule.models(case.problem, down, state))(states[client])
        w, v = ({name: value[0] for name, value in own[model].items()} for model in ("global", "personal"))
        models = {"personal": v} | {f"blend {a}": {key: torch.lerp(w[key], v[key], a) for key in w} for a in SHARES}
        hits, losses = outcomes(case, w, client)
        for name, params in ({"global": w} | models).items():
            own_hits, own_losses = outcomes(case, params, client)
            scores = found.scores[name, "validation"]
            np.testing.assert_allclose(scores.accuracy[place], own_hits.mean(), rtol=1e-6)
            np.testing.assert_allclose(scores.loss[place], own_losses.mean(), rtol=1e-10)
            if name != "global":
                gain, sure = own_hits - hits, np.exp(-own_losses) - np.exp(-losses)
                np.testing.assert_allclose(found.gains[name].right[place], gain.sum(), atol=1e-6)
                np.testing.assert_allclose(found.gains[name].sure_squared[place], (sure**2).sum(), atol=1e-12)
                np.testing.assert_allclose(found.gains[name].right_sure[place], (gain * sure).sum(), atol=1e-7)


def test_a_blend_does_not_copy_what_clients_have_in_common() -> None:
    shared = {"body": torch.rand(1000), "head": torch.rand(3)}
    stacked = {"body": torch.rand(1000).expand(4, 1000), "head": torch.rand(4, 3)}
    found = blend(shared, stacked, 0.25)
    assert found["body"].untyped_storage().nbytes() == 4 * 1000
    for name, own in stacked.items():
        torch.testing.assert_close(found[name], 0.75 * shared[name] + 0.25 * own)
