"""Small networks that every method can use. Each takes the data's facts and its own keyword options."""

from collections.abc import Sequence
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


def linear(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Softmax regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))


def mlp(
    input_shape: Sequence[int], classes: int, *, hidden: tuple[Size, ...] = (64,), dropout: Share = 0.0
) -> nn.Module:
    """Fully connected network with ReLU; `hidden` gives the widths."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = prod(input_shape)
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()] + ([nn.Dropout(dropout)] if dropout else [])
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes))


def cnn(
    input_shape: Sequence[int], classes: int, *, channels: tuple[Size, Size] = (16, 32), hidden: Size = 64
) -> nn.Module:
    """Two 3×3 convolutions with ReLU and 2×2 pooling, one hidden layer; images of at least 4×4."""
    depth, height, width = image_shape(input_shape, 4)
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(depth, first, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def image_shape(input_shape: Sequence[int], least: int) -> tuple[int, int, int]:
    """Return (channels, height, width), or say that the data are no images of at least least × least pixels."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(f"it is for images of at least {least}×{least}, [channels, height, width]; use mlp")
    channels, height, width = input_shape
    return channels, height, width


class TextBag(nn.Module):
    """Bag of words: mean word embedding and a linear layer, for labelled text.

    Token 0 is padding.
    """

    def __init__(self, vocabulary: int, classes: int, *, width: Size = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to scores [batch, classes]."""
        words = (tokens > 0).unsqueeze(-1)
        total = (self.embedding(tokens) * words).sum(1)
        scores: Tensor = self.output(total / words.sum(1).clamp(min=1))
        return scores


class TextWindow(nn.Module):
    """Next token from the last `context` ones (Bengio et al. 2003), for text without labels.

    Their embeddings side by side, and one hidden layer.
    """

    def __init__(
        self, vocabulary: int, classes: int, *, context: Size = 8, width: Size = 8, hidden: Size = 128
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(context * width, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to scores [batch, length, classes]; place t sees tokens t − context < s ≤ t."""
        length = tokens.shape[1]
        padded = functional.pad(self.embedding(tokens), (0, 0, self.context - 1, 0))
        last = torch.cat([padded[:, start : start + length] for start in range(self.context)], dim=-1)
        scores: Tensor = self.output(torch.relu(self.hidden(last)))
        return scores
