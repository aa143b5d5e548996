"""GPFL by hand, in float64."""

import dataclasses

import numpy as np
import pytest
import torch

from head_by_hand import (
    INPUTS,
    LR,
    NET,
    PROBLEM,
    TARGETS,
    TRAINING,
    Arrays,
    X,
    arrays,
    drawn,
    full_batches,
    near,
    normed,
    other,
    relu,
    risks,
    stepped,
)
from personafl.algorithms.fedalt import Parts
from personafl.algorithms.gpfl import Guide, Known, gpfl
from personafl.core.heads import with_head
from personafl.core.split import Split
from personafl.errors import BadInput

SQUARES = ("scale", "shift")
GUIDE = drawn(
    7,
    classes=(4, 2),
    **dict.fromkeys(SQUARES, (2, 2)),
    **{f"{name}_bias": (2,) for name in SQUARES},
    **{f"{name}_norm": (2, 2) for name in SQUARES},
)
LAMBDA, MU = 0.6, 0.2
SHARES = np.array([1, 1, 3, 0]) / 5  # of the classes 0, 2, 2, 2, 1
HEADED = dataclasses.replace(PROBLEM, local_net=with_head(NET, PROBLEM.split, "valved"))


def down() -> Parts:
    body, head = PROBLEM.divide(other(1))
    return Parts(body | {f"guide/{name}": torch.from_numpy(GUIDE[name]) for name in Guide._fields}, head)


def valve(guide: Arrays, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """γ(h) and β(h): a layer norm of ReLU(A h + a) each."""
    parts = []
    for name in SQUARES:
        hidden = relu(guide[name] @ given + guide[f"{name}_bias"])
        parts.append(normed(hidden, *guide[f"{name}_norm"]))
    return parts[0], parts[1]


def opened(z: np.ndarray, guide: Arrays, given: np.ndarray) -> np.ndarray:
    gamma, beta = valve(guide, given)
    return relu(z * (1 + gamma) + beta)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of a vector that is 0 they are 0: three of the five samples are so after the valve."""
    first, second = (np.sqrt((part * part).sum(1, keepdims=True)) for part in (a, b))
    return (a / np.where(first.real > 0, first, 1)) @ (b / second).T


def test_two_steps_by_hand() -> None:
    """The conditions p_i = Σ α_c E_c and g = mean E_c, and E_y in the third term, are of E as received."""
    rule = gpfl(TRAINING, strength=LAMBDA, decay=MU).client
    start = down()
    state = rule.init(HEADED, start, torch.Generator())
    near(state.shares, np.full(4, 0.25))
    state, up = rule.update(HEADED, start, state, full_batches({"local": 2}))
    body, weight, bias = arrays(other(1))
    values = {"body": body, "weight": weight, "bias": bias} | {f"guide {name}": v for name, v in GUIDE.items()}
    own, common = SHARES @ GUIDE["classes"], GUIDE["classes"].mean(0)

    def loss(values: Arrays) -> np.ndarray:
        z = INPUTS @ values["body"].T
        guide = {name.removeprefix("guide "): value for name, value in values.items()}
        personal = risks(opened(z, guide, own) @ values["weight"].T + values["bias"])
        f = opened(z, guide, common)
        apart = f - GUIDE["classes"][TARGETS]
        return (personal + risks(cosines(f, guide["classes"])) + LAMBDA * np.sqrt((apart * apart).sum(1))).mean()

    losses = []
    for _ in range(2):
        losses.append(loss(values))
        after = stepped(loss, values, LR)
        values = {name: v - LR * MU * values[name] * name.startswith("guide") for name, v in after.items()}
    near(up.change["0.weight"], values["body"] - body)
    near(state.personal["1.weight"], values["weight"])
    near(state.personal["1.bias"], values["bias"])
    near(state.shares, SHARES)
    for name, value in GUIDE.items():
        near(up.change[f"guide/{name}"], values[f"guide {name}"] - value)
    near(up.loss, np.mean(losses))
    assert all(np.abs(values[f"guide {name}"] - value).max() > 1e-3 for name, value in GUIDE.items())


def test_the_personal_model_is_a_network_with_a_valved_head() -> None:
    start, head = down(), PROBLEM.divide(other(2))[1]
    models = gpfl(TRAINING).client.models(HEADED, start, Known(head, torch.from_numpy(SHARES)))
    assert models.keys() == {"personal"}
    body, weight, bias = arrays(start.shared | head)
    expected = opened(INPUTS @ body.T, GUIDE, SHARES @ GUIDE["classes"]) @ weight.T + bias
    near(HEADED.personal_net.apply(models["personal"], X), expected)


def test_a_client_without_samples_keeps_what_it_knows() -> None:
    start = down()
    state = Known(start.personal, torch.from_numpy(SHARES))
    data = full_batches({"local": 2})
    batches = data.phases["local"]
    idle = data._replace(phases={"local": batches._replace(real=torch.zeros_like(batches.real))})
    after, up = gpfl(TRAINING).client.update(HEADED, start, state, idle)
    near(after.shares, SHARES)
    assert not any(bool(value.any()) for value in up.change.values())


def test_embeddings_and_valve_start_as_torch_draws_them() -> None:
    """E ~ N(0, 1), A and a ~ U(±1/√2), the norms at 1 and 0; another start has others."""
    server = gpfl(TRAINING).server
    first, second = (server.broadcast(server.init(PROBLEM, other(seed), 1.0)).shared for seed in (1, 2))
    assert not torch.equal(first["guide/classes"], second["guide/classes"])
    assert not torch.equal(first["guide/scale"], first["guide/shift"])
    for name in SQUARES:
        assert float(first[f"guide/{name}"].abs().max()) <= 1 / np.sqrt(2)
        near(first[f"guide/{name}_norm"], np.array([[1.0, 1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("part", [("0.*",), ("1.bias",), ("0.*", "1.*")])
def test_a_part_that_is_no_layer_of_outputs_is_refused(part: tuple[str, ...]) -> None:
    problem = dataclasses.replace(PROBLEM, split=Split(part))
    with pytest.raises(BadInput, match=r"^model\.personal: gpfl uses what goes into the network's last linear layer"):
        gpfl(TRAINING).client.expects(problem, other(1))


def test_a_task_without_classes_is_refused() -> None:
    problem = dataclasses.replace(PROBLEM, data=PROBLEM.data.model_copy(update={"task": "regression"}))
    with pytest.raises(BadInput, match="gpfl has means of classes, and the task regression has none; use fedper"):
        gpfl(TRAINING).client.expects(problem, other(1))
