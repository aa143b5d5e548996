"""Training every model with every part of it personal: what `test_trained_parts` does in processes of its own."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

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
