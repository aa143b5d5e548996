"""A loop in the manner of FedJAX (`pip install jax`): clients one after another, each step one compiled function.

FedJAX's default backend does the same; it is not used itself because it does not run on current versions of JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor, nn
from work import DECAY, MOMENTUM, Work, clients_of, start_of

__all__ = ["FedJAXStyle"]

Layer = Callable[[dict[str, Any], Any], Any]


class FedJAXStyle:
    """FedAvg; networks that are sequences of the usual layers."""

    methods = ("fedavg",)
    works = ("tiny", "mlp", "femnist", "cifar")

    def __init__(self, work: Work, method: str) -> None:
        jax.config.update("jax_enable_x64", work.dtype == torch.float64)
        self.work = work
        self.clients = [(x.numpy(), y.numpy()) for x, y in clients_of(work)]
        module = start_of(work)
        self.params = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}
        layers = [_layer(f"{place}.", layer) for place, layer in enumerate(module)]  # type: ignore[arg-type]
        self.generator = np.random.default_rng(0)

        def loss(params: dict[str, Any], x: Any, y: Any) -> Any:
            for layer in layers:
                x = layer(params, x)
            return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()

        def step(params: dict[str, Any], momenta: dict[str, Any], rate: Any, x: Any, y: Any) -> Any:
            gradient = jax.grad(loss)(params, x, y)
            if work.full:
                momenta = {name: MOMENTUM * momenta[name] + g + DECAY * params[name] for name, g in gradient.items()}
                gradient = momenta
            return {name: value - rate * gradient[name] for name, value in params.items()}, momenta

        self.step, self.number = jax.jit(step), 0

    def round(self) -> None:
        total = {name: jnp.zeros_like(value) for name, value in self.params.items()}
        samples, rate, zeros = sum(len(y) for _, y in self.clients), self.work.rate(self.number), total
        for x, y in self.clients:
            params, size = self.params, self.work.batch or len(y)
            momenta = zeros if self.work.full else {}
            for _ in range(self.work.epochs):
                order = self.generator.permutation(len(y))
                for start in range(0, len(y), size):
                    rows = order[start : start + size]
                    params, momenta = self.step(params, momenta, rate, x[rows], y[rows])
            total = {name: value + params[name] * (len(y) / samples) for name, value in total.items()}
        self.params = jax.block_until_ready(total)
        self.number += 1

    def result(self) -> dict[str, Tensor]:
        """Return the shared model."""
        return {name: torch.from_numpy(np.array(value)) for name, value in self.params.items()}


def _layer(name: str, module: nn.Module) -> Layer:
    """Return a layer of torch as a function of parameters and inputs."""
    if isinstance(module, nn.Linear):
        return lambda p, x: x @ p[f"{name}weight"].T + p[f"{name}bias"]
    if isinstance(module, nn.Conv2d):
        size: Any = module.padding
        around = [(side, side) for side in size]
        return lambda p, x: (
            lax.conv_general_dilated(x, p[f"{name}weight"], (1, 1), around) + p[f"{name}bias"][:, None, None]
        )
    if isinstance(module, nn.MaxPool2d):
        return lambda p, x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    if isinstance(module, nn.ReLU):
        return lambda p, x: jax.nn.relu(x)
    if isinstance(module, nn.Flatten):
        return lambda p, x: x.reshape(len(x), -1)
    raise ImportError(f"{type(module).__name__} is not translated")
