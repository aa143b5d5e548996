"""Our side: the simulator as a run uses it, with its store, its checks and its choice of strategy."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from work import FALL, PULL, Work, clients_of, start_of

from personafl.algorithms.ditto import ditto
from personafl.algorithms.fedalt import fedalt
from personafl.algorithms.fedavg import fedavg
from personafl.algorithms.scaffold import scaffold
from personafl.algorithms.training import Training
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.schedule import Constant, Exponential
from personafl.core.split import Split
from personafl.data.federated import Ragged, make_federated
from personafl.simulate.calibrate import calibrated
from personafl.simulate.engine import Engine
from personafl.simulate.federation import Federation
from personafl.simulate.hardware import keep_freed_memory
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

__all__ = ["Personafl"]

MEMORY = 2**30


class Personafl:
    """One simulation; a round is one of its steps."""

    methods = ("fedavg", "fedalt", "ditto", "scaffold")

    def __init__(self, work: Work, method: str, strategy: str = "auto", workers: int = 1) -> None:
        clients = clients_of(work)
        ends = np.cumsum([0, *(len(y) for _, y in clients)])
        data = make_federated(
            name="synthetic",
            x=torch.cat([x for x, _ in clients]),
            y=torch.cat([y for _, y in clients]),
            classes=work.classes,
            train=Ragged(np.arange(ends[-1]), ends),
            validation=Ragged.empty(len(clients)),
            test=Ragged.empty(len(clients)),
            seen=np.arange(len(clients)),
            unseen=np.arange(0),
            client_names=tuple(map(str, range(len(clients)))),
            label_names=tuple(map(str, range(work.classes))),
            vocabulary=work.classes if work.tokens else None,
        )
        optimizer = Sgd(lr=work.lr, schedule=Exponential(rate=FALL) if work.full else Constant(), **work.sgd())
        training = Training(work=Steps(epochs=work.epochs, batch=work.batch), optimizer=optimizer)
        algorithm = {
            "fedavg": lambda: fedavg(training),
            "fedalt": lambda: fedalt(training),
            "ditto": lambda: ditto(training, pull=PULL),
            "scaffold": lambda: scaffold(training),
        }[method]()
        keep_freed_memory()
        net = Net(start_of(work)).to(torch.device("cpu"), work.dtype)
        problem = Problem(net, cross_entropy, split=Split((f"{work.head}*",)))
        federation = Federation(
            algorithm=algorithm,
            data=data,
            problems=(problem,),
            problem_of=np.zeros(len(clients), dtype=np.int64),
            engines=(Engine.fitted(problem, strategy, MEMORY, torch.device("cpu"), bfloat16=work.bfloat16),),
            seed=0,
            cohort=len(clients),
            sampling="exact",
            weights="examples",
            dtype=work.dtype,
            workers=workers,
        )
        self.folder = tempfile.TemporaryDirectory()
        if strategy == "auto":
            federation, _ = calibrated(federation, MEMORY, Path(self.folder.name) / "engine.json")
        self.simulation = Simulation(federation, Store(Path(self.folder.name) / "states", MEMORY))
        self.number = 0

    def round(self) -> None:
        self.simulation.step(self.number)
        self.number += 1

    def result(self) -> dict[str, Tensor]:
        """Return the shared model, or the shared part of it."""
        message = self.simulation.down()
        shared: dict[str, Tensor] = message.shared if hasattr(message, "shared") else message.model
        return shared
