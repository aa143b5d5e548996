"""What all sides of the comparison train: models in plain PyTorch, synthetic data of the usual shapes, how much work.

Needs torch alone, so that a peer's environment does not need personafl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["DECAY", "FALL", "METHODS", "MOMENTUM", "PULL", "WORKS", "Work", "clients_of", "start_of"]

METHODS = ("fedavg", "fedalt", "ditto", "scaffold")
PULL = 0.1  # Ditto's λ
MOMENTUM, DECAY, FALL = 0.9, 1e-4, 0.99  # of full training; the rate falls so from round to round


@dataclass(frozen=True, kw_only=True)
class Work:
    """A workload. Every client takes part in every round, so that rounds are equal work."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an input
    classes: int
    clients: int
    samples: tuple[int, int]  # fewest and most of a client; drawn uniformly
    batch: int | None  # None: all data
    epochs: int
    lr: float
    head: str  # parameters that are personal where a method has some: those with this prefix
    tokens: bool = False  # inputs are tokens below `classes`; the targets are the next ones
    dtype: torch.dtype = torch.float32
    bfloat16: bool = False  # products and convolutions round to it (torch's autocast)
    full: bool = False  # with momentum, weight decay and a schedule, not plain SGD

    def rate(self, number: int) -> float:
        """Return the learning rate of a round."""
        return self.lr * FALL**number if self.full else self.lr

    def sgd(self) -> dict[str, float]:
        """Return the options of torch's SGD, but for the rate; momentum starts anew in every round."""
        return {"momentum": MOMENTUM, "weight_decay": DECAY} if self.full else {}

    def checked(self) -> Work:
        """Return less work of the same kind whose result does not depend on the order of samples, nor on rounding."""
        return replace(self, clients=min(self.clients, 6), batch=None, epochs=2, dtype=torch.float64, bfloat16=False)

    def quick(self) -> Work:
        """Return less work of the same kind."""
        return replace(self, clients=max(2, self.clients // 5), epochs=1)


def tiny() -> nn.Module:
    """Softmax regression."""
    return nn.Sequential(nn.Linear(60, 10))


def mlp() -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def femnist() -> nn.Module:
    """Two 5×5 convolutions and two fully connected layers, as for FEMNIST."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 62),
    )


def cifar() -> nn.Module:
    """Two convolutions and three fully connected layers, as for CIFAR-10."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, 10),
    )


class _Block(nn.Module):
    """Two 3×3 convolutions with GroupNorm and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, after)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.around(x))


def resnet() -> nn.Module:
    """ResNet-20 with GroupNorm."""
    widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    blocks = [_Block(*width) for width in widths]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Transformer(nn.Module):
    """Two pre-norm layers of causal self-attention over characters, width 128, 4 heads."""

    def __init__(self, vocabulary: int = 90, length: int = 80, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place[: tokens.shape[-1]]
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm1"](x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in (q, k, v))
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            later = torch.ones(tokens.shape[-1], tokens.shape[-1], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
            x = x + layer["out"](mixed.transpose(-2, -3).flatten(-2))
            x = x + layer["down"](functional.gelu(layer["up"](layer["norm2"](x))))
        return self.head(x)


WORKS = {
    "tiny": Work(
        model=tiny, shape=(60,), classes=10, clients=1000, samples=(10, 50), batch=10, epochs=1, lr=0.1, head="0.bias"
    ),
    "mlp": Work(
        model=mlp, shape=(1, 28, 28), classes=10, clients=50, samples=(64, 192), batch=32, epochs=5, lr=0.05, head="3."
    ),
    "femnist": Work(
        model=femnist, shape=(1, 28, 28), classes=62, clients=10, samples=(40, 120), batch=20, epochs=1, lr=0.05,
        head="9.",
    ),
    "cifar": Work(
        model=cifar, shape=(3, 32, 32), classes=10, clients=10, samples=(50, 150), batch=25, epochs=1, lr=0.05,
        head="11.",
    ),
    "resnet": Work(
        model=resnet, shape=(3, 32, 32), classes=10, clients=5, samples=(50, 100), batch=25, epochs=1, lr=0.05,
        head="14.",
    ),
    "transformer": Work(
        model=Transformer, shape=(80,), classes=90, clients=10, samples=(16, 48), batch=10, epochs=1, lr=0.05,
        head="head.", tokens=True,
    ),
}  # fmt: skip


def clients_of(work: Work) -> list[tuple[Tensor, Tensor]]:
    """Return every client's inputs and targets; the same for all sides."""
    generator = torch.Generator().manual_seed(0)
    low, high = work.samples
    sizes = torch.randint(low, high + 1, (work.clients,), generator=generator).tolist()
    if work.tokens:
        texts = [torch.randint(work.classes, (n, work.shape[0] + 1), generator=generator) for n in sizes]
        return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]
    return [
        (
            torch.randn(n, *work.shape, generator=generator).to(work.dtype),
            torch.randint(work.classes, (n,), generator=generator),
        )
        for n in sizes
    ]


def start_of(work: Work) -> nn.Module:
    """Return the start model; the same for all sides."""
    torch.manual_seed(0)
    return work.model().to(work.dtype)
