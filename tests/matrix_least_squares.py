"""Least squares in a matrix, f_i(W) = (1/2n_i) ‖X_i Wᵀ − Y_i‖², small enough to work by hand in numpy, float64."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from least_squares import simulator
from personafl.core import wire
from personafl.core.algorithm import Problem
from personafl.core.net import Net
from personafl.simulate.simulator import Simulation

Matrix = NDArray[np.float64]
SIZES = (6, 9, 5, 8)
CLIENTS = range(len(SIZES))
ROWS, COLUMNS = 4, 5


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).sum(-1)


@dataclass(frozen=True)
class MatrixLeastSquares:
    x: list[Matrix]  # [n_i, columns] per client
    y: list[Matrix]  # [n_i, rows]
    start: Matrix
    simulate: Callable[..., Simulation]

    def gradient(self, client: int, w: Matrix) -> Matrix:
        residual = self.x[client] @ w.T - self.y[client]
        return residual.T @ self.x[client] / len(residual)

    def loss(self, client: int, w: Matrix) -> float:
        return 0.5 * float(((self.x[client] @ w.T - self.y[client]) ** 2).sum()) / len(self.y[client])

    def smoothness(self) -> float:
        """The largest L of the clients."""
        return max(float(np.linalg.eigvalsh(x.T @ x / len(x))[-1]) for x in self.x)


def model(simulation: Simulation) -> Matrix:
    """The shared model that clients receive now."""
    return simulation.down().model["weight"].numpy()


def kept(simulation: Simulation, client: int, path: str) -> Matrix:
    return simulation.store.get(client)[path].numpy()


def svt(matrix: Matrix, width: float) -> Matrix:
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u * np.maximum(s - width, 0)) @ v


def soft(matrix: Matrix, width: float) -> Matrix:
    return np.sign(matrix) * np.maximum(np.abs(matrix) - width, 0)


def matrix_least_squares(folder: Path) -> MatrixLeastSquares:
    """Four clients who share a matrix of rank 2 and each add something of their own."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(sum(SIZES), COLUMNS))
    common = generator.normal(size=(ROWS, 2)) @ generator.normal(size=(2, COLUMNS))
    bounds = np.cumsum(SIZES)[:-1]
    inputs = np.split(x, bounds)
    own = [common + 0.5 * generator.normal(size=(ROWS, COLUMNS)) for _ in SIZES]
    targets = [part @ w.T + 0.1 * generator.normal(size=(len(part), ROWS)) for part, w in zip(inputs, own, strict=True)]
    start = 0.5 * generator.normal(size=(ROWS, COLUMNS))
    module = nn.Linear(COLUMNS, ROWS, bias=False).double()
    module.load_state_dict({"weight": torch.from_numpy(start.copy())})
    simulate = simulator(folder, x, np.concatenate(targets), SIZES, Problem(Net(module), half_squares))
    return MatrixLeastSquares(inputs, targets, start, simulate)


def factored(simulation: Simulation) -> bool:
    """Whether the shared weight is sent as factors."""
    return isinstance(simulation.broadcast().model["weight"], wire.Factored)
