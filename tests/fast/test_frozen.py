"""Reusing the features of a frozen part changes nothing, and happens where it can."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from personafl.algorithms import METHODS, Training
from personafl.core import tree
from personafl.core.algorithm import Problem
from personafl.core.batches import Batch, Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Adaptive, Sgd
from personafl.fast import frozen
from personafl.models import convolutional, personal_split, zoo
from personafl.simulate.engine import Strategy, gather
from personafl.simulate.trainer import bound
from personafl.testing import Case, make_case
from tiers import tiered

SHAPE = (1, 16, 16)
NETS = {
    "mlp": lambda: zoo.mlp(SHAPE, 10, hidden=(9,)),
    "mlp with dropout": lambda: zoo.mlp(SHAPE, 10, hidden=(9, 8), dropout=0.3),
    "cnn": lambda: zoo.cnn(SHAPE, 10, channels=(2, 3), hidden=6),
    "lenet": lambda: convolutional.lenet(SHAPE, 10),
    "resnet20": lambda: convolutional.resnet20(SHAPE, 10, width=4),
}
TRAINING = Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.1, momentum=0.9, clip=1.0))
ALGORITHMS = {
    "fedalt": METHODS["fedalt"].build(TRAINING),
    "fedalt with steps": METHODS["fedalt"].build(Training(work=Steps(steps=7, batch=5), optimizer=Adaptive(lr=0.01))),
    "fedrep": METHODS["fedrep"].build(TRAINING, head_epochs=3),
    "fedper": METHODS["fedper"].build(TRAINING),
    "finetune": METHODS["finetune"].build(TRAINING, part="personal"),
}


def case_of(algorithm: str, net: str, personal: str = "output") -> Case:
    """The laws' clients, whose sizes are unequal, with larger digits."""
    module = NETS[net]()
    problem = Problem(
        Net(NETS[net]).to(torch.device("cpu"), torch.float64), cross_entropy, split=personal_split(module, personal)
    )
    case = make_case(ALGORITHMS[algorithm], problem)
    return dataclasses.replace(
        case, data=dataclasses.replace(case.data, x=functional.interpolate(case.data.x.double(), scale_factor=2))
    )


def outcome(case: Case, strategy: Strategy) -> dict[str, Tensor]:
    """Everything after two rounds and fine-tuning."""
    rule = case.algorithm.client
    with case.simulation(strategy) as simulation:
        for number in range(2):
            simulation.step(number)
        fed, down, clients = simulation.federation, simulation.down(), case.data.seen
        data, states = gather(case.data, clients, rule.tuning, 1, 2), simulation.states(0, down, clients)
        tuned = fed.engines[0].train(bound(rule.personalize, case.problem), down, states, data)
        return tree.flatten((simulation.server, states, tuned))


CASES = list(itertools.product(ALGORITHMS, NETS, ["stacked", "sequential"]))
LARGE = ("lenet", "resnet20")
QUICK = [case for case in CASES if case[1] == "cnn" or (case[0] == "fedalt" and case[1] not in LARGE)]


@pytest.mark.parametrize(("algorithm", "net", "strategy"), tiered(CASES, QUICK))
def test_reuse_changes_nothing(algorithm: str, net: str, strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    case, reused, made = case_of(algorithm, net), [], frozen._reduced

    def watched(*arguments: object) -> object:
        reused.append(made(*arguments))  # type: ignore[arg-type]
        return reused[-1]

    monkeypatch.setattr(frozen, "_reduced", watched)
    found = outcome(case, strategy)
    assert any(batches is not None for batches in reused)
    monkeypatch.setattr(frozen, "halves_of", lambda *_: None)
    expected = outcome(case, strategy)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        torch.testing.assert_close(found[path], leaf, rtol=0, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize("algorithm", ["fedalt", "finetune"])
def test_a_personal_input_layer_reuses_nothing_where_it_is_trained(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only FedAlt's pass on the shared part has fixed layers below it: those of the client."""
    case, asked = case_of(algorithm, "mlp", "input"), []
    look = frozen.halves_of

    def watched(net: Net, trained: object, pool: Tensor) -> object:
        found = look(net, trained, pool)  # type: ignore[arg-type]
        asked.append((set(trained), found is not None))  # type: ignore[call-overload]
        return found

    monkeypatch.setattr(frozen, "halves_of", watched)
    outcome(case, "stacked")
    assert ({"1.weight", "1.bias"}, False) in asked
    assert all(divided == (names == {"3.weight", "3.bias"}) for names, divided in asked)


def test_no_sample_twice_or_too_large_features_reuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("fedalt", "mlp")
    down, _, data = case.one_client(2)  # 6 samples in batches of 4: steps of 4 and 2, twice
    divided = frozen.halves_of(case.problem.net, ["3.weight", "3.bias"], case.data.x)
    assert divided is not None

    def reduced(steps: int, width: int) -> object:
        batches = data.phases["personal"]
        batches = batches._replace(rows=batches.rows[:steps, :width], real=batches.real[:steps, :width])
        return frozen._reduced(divided, case.problem.net.parameters, down.shared, batches)  # type: ignore[arg-type]

    assert reduced(4, 4) is not None
    assert reduced(1, 4) is None
    assert reduced(0, 4) is None
    monkeypatch.setattr(frozen, "_COPIES", 0)
    assert reduced(4, 4) is None


def test_a_gradient_of_the_head_does_not_pass_through_the_body() -> None:
    """Reuse or not: multiply-adds are one pass forward, and the head's own backward."""
    net = Net(lambda: nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)))
    problem = Problem(net, cross_entropy)
    params = net.init(torch.Generator().manual_seed(0))
    fixed, part = ({name: params[name] for name in params if name[0] == layer} for layer in "02")
    batch = Batch(
        torch.rand(8, 100), torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.bool), torch.tensor(0)
    )
    with FlopCounterMode(display=False) as counter:
        torch.func.grad(problem.mean_loss_given(fixed))(part, batch)
    assert counter.get_total_flops() == 2 * 8 * (100 * 50 + 2 * 50 * 10)
