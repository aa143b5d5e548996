"""A federation of least-squares problems, small enough to work by hand in numpy, float64."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from personafl.core.algorithm import Algorithm, Problem
from personafl.core.net import Net
from personafl.data.federated import Ragged, make_federated
from personafl.simulate.engine import Engine
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store

Vector = NDArray[np.float64]
SIZES = (3, 7, 5)
DIMENSION = 4


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs[:, 0] - targets) ** 2


@dataclass(frozen=True)
class LeastSquares:
    """f_i(w) = (1/2n_i) ‖X_i w − y_i‖²."""

    x: list[Vector]  # [n_i, d] per client
    y: list[Vector]
    start: Vector
    simulate: Callable[..., Simulation]

    def gradient(self, client: int, w: Vector) -> Vector:
        residual = self.x[client] @ w - self.y[client]
        return self.x[client].T @ residual / len(residual)

    def hessian(self, client: int) -> Vector:
        return self.x[client].T @ self.x[client] / len(self.x[client])

    def descend(
        self, client: int, w: Vector, lr: float, steps: int, anchor: Vector | None = None, pull: float = 0.0
    ) -> Vector:
        """Full-batch gradient descent on f_i + (pull/2)‖w − anchor‖²."""
        for _ in range(steps):
            extra = 0.0 if anchor is None else pull * (w - anchor)
            w = w - lr * (self.gradient(client, w) + extra)
        return w

    @property
    def weights(self) -> Vector:
        return np.array(SIZES) / sum(SIZES)


def shared(simulation: Simulation) -> Vector:
    return simulation.server.model["weight"][0].numpy()


def personal(simulation: Simulation, client: int) -> Vector:
    return simulation.store.get(client)["model/weight"][0].numpy()


def least_squares(folder: Path) -> LeastSquares:
    """Three clients with 3, 7 and 5 samples in 4 unknowns, who disagree."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(sum(SIZES), DIMENSION))
    y = generator.normal(size=sum(SIZES)) + np.repeat([0.0, 2.0, -1.0], SIZES)
    start = generator.normal(size=DIMENSION)
    module = nn.Linear(DIMENSION, 1, bias=False).double()
    module.load_state_dict({"weight": torch.from_numpy(start[None].copy())})
    simulate = simulator(folder, x, y, SIZES, Problem(Net(module), half_square))
    bounds = np.cumsum(SIZES)[:-1]
    return LeastSquares(np.split(x, bounds), np.split(y, bounds), start, simulate)


def simulator(
    folder: Path, x: Vector, y: Vector, sizes: tuple[int, ...], problem: Problem
) -> Callable[..., Simulation]:
    """Return what simulates an algorithm over clients that own consecutive rows of x and y."""
    clients = len(sizes)
    data = make_federated(
        name="least squares",
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=1,
        train=Ragged.from_lists(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])),
        validation=Ragged.empty(clients),
        test=Ragged.from_lists([[client] for client in range(clients)]),
        seen=np.arange(clients),
        unseen=np.zeros(0, dtype=np.int64),
        client_names=tuple("abcdefgh"[:clients]),
        label_names=("y",),
    )

    def simulate(algorithm: Algorithm, rounds: int, **changes: object) -> Simulation:
        settings: dict[str, object] = {
            "algorithm": algorithm,
            "data": data,
            "problems": (problem,),
            "problem_of": np.zeros(clients, dtype=np.int64),
            "engines": (Engine("stacked", 8),),
            "seed": 0,
            "cohort": clients,
            "sampling": "exact",
            "weights": "examples",
            "dtype": torch.float64,
        }
        store = Store(folder / f"states{len(list(folder.iterdir()))}", 2**20)
        simulation = Simulation(Federation(**{**settings, **changes}), store)  # type: ignore[arg-type]
        for number in range(rounds):
            simulation.step(number)
        return simulation

    return simulate
