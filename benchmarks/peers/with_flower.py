"""Flower's simulation (`pip install flwr[simulation]`): clients in Ray's worker processes, one client to a core.

The simulation runs in a thread; its server waits before every round until it is asked for one.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import ray
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from loops import loss_of
from torch import Tensor
from work import Work, clients_of, start_of

__all__ = ["Flower"]

logging.getLogger("flwr").setLevel(logging.ERROR)
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where its workers find this module


class _Client(NumPyClient):  # type: ignore[misc]
    def __init__(self, work: Work, x: Tensor, y: Tensor) -> None:
        self.work, self.x, self.y = work, x, y
        torch.set_num_threads(1)

    def fit(self, parameters: Any, config: Any) -> Any:
        model, work = start_of(self.work), self.work
        for own, value in zip(model.parameters(), parameters, strict=True):
            own.data = torch.from_numpy(value.copy())
        optimizer = torch.optim.SGD(model.parameters(), lr=config["rate"], **work.sgd())
        for _ in range(work.epochs):
            for rows in torch.randperm(len(self.y)).split(work.batch or len(self.y)):
                optimizer.zero_grad()
                loss_of(work, model, self.x[rows], self.y[rows]).backward()
                optimizer.step()
        return [value.detach().numpy() for value in model.parameters()], len(self.y), {}


class _Waiting(FedAvg):  # type: ignore[misc]
    """FedAvg that starts a round when it is told to."""

    def __init__(self, start: Any, clients: int, work: Work) -> None:
        everyone = {"min_fit_clients": clients, "min_available_clients": clients}  # they are there one after the other
        super().__init__(
            fraction_evaluate=0.0,
            min_evaluate_clients=0,
            initial_parameters=start,
            on_fit_config_fn=lambda number: {"rate": work.rate(number - 1)},  # it counts from 1
            **everyone,
        )
        self.asked, self.answered, self.latest = threading.Semaphore(0), threading.Semaphore(0), start
        self.over = False

    def configure_fit(self, *arguments: Any, **named: Any) -> Any:
        self.asked.acquire()
        if self.over:
            raise SystemExit  # the way out of a simulation before its last round
        return super().configure_fit(*arguments, **named)

    def aggregate_fit(self, *arguments: Any, **named: Any) -> Any:
        result = super().aggregate_fit(*arguments, **named)
        self.latest = result[0]
        self.answered.release()
        return result


class Flower:
    """One simulation."""

    methods = ("fedavg",)

    def __init__(self, work: Work, method: str, workers: int = 1) -> None:
        clients = clients_of(work)
        self.model = start_of(work)
        values = [value.detach().numpy() for value in self.model.parameters()]
        self.strategy = _Waiting(ndarrays_to_parameters(values), len(clients), work)

        def client(context: Context) -> Any:
            return _Client(work, *clients[int(context.node_config["partition-id"])]).to_client()

        def server(context: Context) -> ServerAppComponents:
            return ServerAppComponents(strategy=self.strategy, config=ServerConfig(num_rounds=10**6))

        backend = {"init_args": {"num_cpus": workers}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        self.thread = threading.Thread(
            target=run_simulation,
            args=(ServerApp(server_fn=server), ClientApp(client_fn=client), len(clients)),
            kwargs={"backend_config": backend},
            daemon=True,
        )
        self.thread.start()

    def close(self) -> None:
        """End the simulation: another one in this process would wait for its workers."""
        self.strategy.over = True
        self.strategy.asked.release()
        self.thread.join()
        ray.shutdown()

    def round(self) -> None:
        self.strategy.asked.release()
        self.strategy.answered.acquire()

    def result(self) -> dict[str, Tensor]:
        """Return the shared model."""
        values = parameters_to_ndarrays(self.strategy.latest)
        names = [name for name, _ in self.model.named_parameters()]
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}
