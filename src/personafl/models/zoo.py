"""Small networks that every method can use. Each takes the data's facts and its own keyword options."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


def linear(input_shape: Sequence[int], classes: int, *, zero: bool = False) -> nn.Module:
    """Softmax regression; `zero` starts all weights at 0, where a linear model need not break any symmetry."""
    layer = nn.Linear(prod(input_shape), classes)
    if zero:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def mlp(
    input_shape: Sequence[int],
    classes: int,
    *,
    hidden: tuple[Size, ...] = (64,),
    dropout: Share = 0.0,
    norm: bool = False,
) -> nn.Module:
    """Fully connected network with ReLU; `hidden` gives the widths, `norm` puts a LayerNorm after each ReLU."""
    width = prod(input_shape)
    layers = _dense(width, hidden, norm, dropout)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear([width, *hidden][-1], classes))


def _dense(width: int, hidden: tuple[int, ...], norm: bool, dropout: float = 0.0) -> list[nn.Module]:
    """Return hidden layers of these widths."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([width, *hidden]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), *([nn.LayerNorm(outputs)] if norm else [])]
        layers += [nn.Dropout(dropout)] if dropout else []
    return layers


def cnn(
    input_shape: Sequence[int],
    classes: int,
    *,
    channels: tuple[Size, ...] = (16, 32),
    hidden: Size = 64,
    norm: bool = False,
) -> nn.Module:
    """3×3 convolutions with ReLU and 2×2 pooling, one hidden layer; `norm` puts a GroupNorm after each.

    Each pair of convolution and pooling halves the image, so two, as here, need at least 4×4 pixels.
    """
    image_shape(input_shape, 2 ** len(channels))
    return _halving(nn.Conv2d, nn.MaxPool2d, 3, input_shape, classes, channels, hidden, norm)


def cnn1d(
    input_shape: Sequence[int],
    classes: int,
    *,
    channels: tuple[Size, ...] = (32, 64),
    hidden: Size = 64,
    norm: bool = False,
) -> nn.Module:
    """Convolutions over 5 points of time with ReLU and pooling of 2, one hidden layer; for series [channels, time].

    `norm` puts a GroupNorm after each pooling.
    """
    if len(input_shape) != 2 or input_shape[1] < 2 ** len(channels):
        raise ValueError(f"it is for series of at least {2 ** len(channels)} points, [channels, time]; use mlp")
    return _halving(nn.Conv1d, nn.MaxPool1d, 5, input_shape, classes, channels, hidden, norm)


def _halving(
    conv: type[nn.Conv1d | nn.Conv2d],
    pool: type[nn.MaxPool1d | nn.MaxPool2d],
    kernel: int,
    input_shape: Sequence[int],
    classes: int,
    channels: tuple[int, ...],
    hidden: int,
    norm: bool,
) -> nn.Module:
    """Return convolutions, each with pooling that halves the places, then dense layers."""
    layers: list[nn.Module] = []
    depth, *places = input_shape
    for wide in channels:
        layers += [conv(depth, wide, kernel, padding=kernel // 2), nn.ReLU(), pool(2)]
        # After the ReLU: what comes out of one has a mean, at which the next layer's steps would be too long.
        layers += [nn.GroupNorm(1, wide)] if norm else []
        depth, places = wide, [size // 2 for size in places]
    dense = [nn.Linear(depth * prod(places), hidden), *([nn.LayerNorm(hidden)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *dense, nn.Linear(hidden, classes))


def image_shape(input_shape: Sequence[int], least: int) -> tuple[int, int, int]:
    """Return (channels, height, width), or say that the data are no images of at least least × least pixels."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(f"it is for images of at least {least}×{least}, [channels, height, width]; use mlp")
    channels, height, width = input_shape
    return channels, height, width


class TextBag(nn.Module):
    """Bag of words: mean word embedding, hidden layers if there are any, and a linear layer, for labelled text.

    Token 0 is padding. `norm` puts a LayerNorm after the mean and after each ReLU, and embeddings start small: a mean
    over a text's words has a small gradient for each, and the norm makes it as large as the embeddings are small.
    """

    def __init__(
        self, vocabulary: int, classes: int, *, width: Size = 32, hidden: tuple[Size, ...] = (), norm: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        if norm:
            nn.init.normal_(self.embedding.weight, std=0.02)
        self.hidden = nn.Sequential(*_dense(width, hidden, norm))
        self.output = nn.Linear([width, *hidden][-1], classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to scores [batch, classes]."""
        words = (tokens > 0).unsqueeze(-1)
        total = (self.embedding(tokens) * words).sum(1)
        scores: Tensor = self.output(self.hidden(self.norm(total / words.sum(1).clamp(min=1))))
        return scores


class TextWindow(nn.Module):
    """Next token from the last `context` ones (Bengio et al. 2003), for text without labels.

    Their embeddings side by side, and one hidden layer. `norm` puts a LayerNorm before and after it, and embeddings
    start small, as in a bag. Its part `auto` is then these norms: the output layer has a row for each token, half of
    all weights, which a client of a few lines of text cannot learn.
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        context: Size = 8,
        width: Size = 8,
        hidden: Size = 128,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm_in = nn.LayerNorm(context * width) if norm else nn.Identity()
        if norm:
            nn.init.normal_(self.embedding.weight, std=0.1)
        self.hidden = nn.Linear(context * width, hidden)
        self.norm = nn.LayerNorm(hidden) if norm else nn.Identity()
        self.output = nn.Linear(hidden, classes)
        if norm:
            self.parts = {"auto": ("norm_in.*", "norm.*")}

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to scores [batch, length, classes]; place t sees tokens t − context < s ≤ t."""
        length = tokens.shape[1]
        padded = functional.pad(self.embedding(tokens), (0, 0, self.context - 1, 0))
        last = torch.cat([padded[:, start : start + length] for start in range(self.context)], dim=-1)
        scores: Tensor = self.output(self.norm(torch.relu(self.hidden(self.norm_in(last)))))
        return scores
