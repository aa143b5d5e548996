"""Every model learns with every part of it personal, one by one and stacked: the same numbers.

In a process of its own for each model, so that one that crashes, as torch's kernels may, is a failed test.
"""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.cases import CASES, data_of
from personafl.algorithms import METHODS, Training
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.optim import Sgd
from personafl.core.tasks import task_named
from personafl.models import make_net_and_split
from personafl.models.network import SharedNetwork
from personafl.runs.scoring import tune
from personafl.storage.store import Store
from personafl.testing import Case, close, everything
from tiers import tiered

TRAINING = Training(work=Steps(steps=2, batch=2), optimizer=Sgd(lr=0.1))
RULES: dict[str, dict[str, Any]] = {"fedalt": {}, "fedsim": {}, "finetune": {"part": "personal"}}
ANY = ("input", "output", "body", "adapter")
NORMED = (*ANY, "norms")
PARTS = dict.fromkeys(CASES, ANY) | {
    "linear": ("adapter",),
    **dict.fromkeys(("resnet18", "resnet20", "resnet32", "transformer", "speech"), NORMED),
    **dict.fromkeys(("additive", "split_input"), (*ANY, "personal")),
}


def outcome(case: Case, strategy: str, folder: Path) -> dict[str, Tensor]:
    """Return all states after a round; of a method that only fine-tunes parts, after that."""
    with case.simulation(strategy) as simulation:  # type: ignore[arg-type]
        if case.algorithm.name == "finetune":
            tune(simulation, tuned := Store(folder, 2**30), case.data.seen, 0)
            return {f"{client}/{path}": leaf for client in (0, 1) for path, leaf in tuned.get(client).items()}
        simulation.step(0)
        return everything(simulation)


def learn(name: str, said: Path) -> None:
    """Train a model in all ways; say in a file what is tried, and what went wrong."""
    given, options = CASES[name]
    x = given.x.double() if given.x.is_floating_point() else given.x
    data = data_of(x, given.y, given.vocabulary, given.task, clients=2)
    with open(said, "w", buffering=1) as log:
        try:
            for part in PARTS[name]:
                network = SharedNetwork(name=name, personal=part, adapter_size=2, **options)
                net, split = make_net_and_split(network, given)
                problem = Problem(net.to(torch.device("cpu"), torch.float64), task_named(data.task).loss, split=split)
                for method, told in RULES.items():
                    print(part, method, file=log)
                    case = Case(METHODS[method].build(TRAINING, **told), problem, data)
                    ways = [outcome(case, way, said.parent / way) for way in ("sequential", "stacked")]
                    close(*ways, 1e-9)
        except BaseException:
            traceback.print_exc(file=log)
            raise SystemExit(1) from None


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have torch load here, once, what every process would."""
    learn("linear", tmp_path_factory.mktemp("here") / "said")


@pytest.mark.parametrize("name", tiered(CASES, ["linear", "mlp", "cnn", "bag", "transformer", "split_input"]))
def test_every_part_learns(name: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    process = multiprocessing.get_context("fork").Process(target=learn, args=(name, said))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        process.start()
    process.join()
    assert process.exitcode == 0, f"ended with {process.exitcode} at:\n{said.read_text()}"
    assert said.read_text().split("\n") == [f"{part} {method}" for part in PARTS[name] for method in RULES] + [""]
