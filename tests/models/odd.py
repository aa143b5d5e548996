"""Modules that torch.func cannot batch, or that write where others read: what users bring. Inputs are [batch, 2, 5]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Odd(nn.Module):
    """Layers for every method: a first one, one to quantize, a norm, and a last one."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(10, 6)
        self.middle, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, classes)

    def features(self, x: Tensor) -> Tensor:
        """Return [batch, 6]."""
        return self.first(x.flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.middle(self.features(x)))))


class Gru(Odd):
    """Reads 5 points of time, of 2 channels each."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__(classes)
        self.first = nn.GRU(2, 6, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        return self.first(x.transpose(1, 2))[0][:, -1]


class Lstm(Gru):
    """The same in two layers."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__(classes)
        self.first = nn.LSTM(2, 6, 2, batch_first=True)


class Branch(Odd):
    """Goes one way or the other."""

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        return h if x.mean() > 0 else -h


class Item(Odd):
    """Looks at a number, of the first sample of a batch."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1 + x[0, 0, 0].item())


class Mask(Odd):
    """Writes into some places, nobody knows how many."""

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x).clone()
        h[h < 0] = h[h < 0] * 0.1
        return h


class Numpy(Odd):
    """Leaves torch for a moment."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1 + float(x.detach().numpy().std()))


class Writes(Odd):
    """Changes its inputs, and activations, in place."""

    def features(self, x: Tensor) -> Tensor:
        x += 1
        return super().features(x).relu_()


class Keeps(Odd):
    """Keeps what it saw, to be looked at."""

    seen: Any = None

    def features(self, x: Tensor) -> Tensor:
        self.seen = super().features(x)
        return torch.relu(self.seen)


ODD: dict[str, type[Odd]] = {each.__name__: each for each in (Gru, Lstm, Branch, Item, Mask, Numpy, Writes, Keeps)}


def gru(classes: int) -> Gru:
    """Return a network as a factory does."""
    return Gru(classes)
