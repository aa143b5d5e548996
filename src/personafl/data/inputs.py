"""What networks see of samples: normalised by moments of the training data, and in training augmented.

With `normalize = "channel"` an image's channel c becomes (x_c − mean_c) / std_c. The moments are those of all pixels of
the training data of clients that train, m = Σx/n and s² = Σx²/n − m², from sums that clients can add up. Validation and
test data, newcomers and exported models are given the same numbers. A black pixel beyond an image's edge, which
augmentation shows, is normalised as all others are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from personafl.core.augment import UNCHANGED, Augment
from personafl.data.config import DataConfig, Moments
from personafl.data.federated import FederatedData
from personafl.errors import BadInput

_ROWS = 1024  # of samples that are added up at a time


class Sums(NamedTuple):
    """What the moments of pixels come from; those of several clients are joined by adding."""

    pixels: int  # in a channel
    total: Tensor  # [channels] float64
    squares: Tensor  # [channels] float64

    @classmethod
    def of(cls, images: Tensor) -> Sums:
        """Add up images [samples, channels, height, width]."""
        values, axes = images.to(torch.float64), (0, 2, 3)
        return cls(values.numel() // values.shape[1], values.sum(axes), values.square().sum(axes))

    def joined(self, other: Sums) -> Sums:
        """Return those of both."""
        return Sums(self.pixels + other.pixels, self.total + other.total, self.squares + other.squares)

    def moments(self) -> Moments:
        """Return mean and standard deviation; a channel that is the same everywhere is only centred."""
        mean = self.total / self.pixels
        std = (self.squares / self.pixels - mean.square()).clamp(min=0).sqrt()
        return Moments(mean=tuple(mean.tolist()), std=tuple(torch.where(std > 1e-6, std, 1.0).tolist()))


def moments_of(data: FederatedData) -> Moments:
    """Return the moments of the training data of clients that train."""
    _check_images(data, "normalize")
    rows = torch.from_numpy(data.train.of(data.seen))
    parts = (Sums.of(data.x[part]) for part in torch.split(rows, _ROWS))
    return functools.reduce(Sums.joined, parts).moments()


def normalized(images: Tensor, moments: Moments) -> Tensor:
    """Return (images − mean) / std, per channel: axis 1."""
    mean, std = (torch.tensor(values, dtype=images.dtype).reshape(-1, 1, 1) for values in (moments.mean, moments.std))
    return (images - mean).div_(std)


def as_seen(data: FederatedData, config: DataConfig, dtype: torch.dtype) -> FederatedData:
    """Return data as networks of a precision see them: as `normalize` and `augment` say, wherever the data are from."""
    x, moments, augment = data.x, None, UNCHANGED
    if config.normalize != "none":
        moments = moments_of(data) if config.normalize == "channel" else config.normalize
        _check_images(data, "normalize")
        if len(moments.mean) != x.shape[1]:
            raise BadInput(
                f"data.normalize.mean: has {len(moments.mean)} numbers, and the images of {data.name} have "
                f'{x.shape[1]} channels; give one for each, or data.normalize = "channel"'
            )
        x = normalized(x.to(dtype), moments)
    if config.augment is not None:
        _check_images(data, "augment")
        crop, shape = config.augment.crop, data.x.shape[1:]
        if crop >= min(shape[1:]):
            raise BadInput(
                f"data.augment.crop: {crop} is as much as the images of {data.name} have ({shape[1]}×{shape[2]}), so "
                f"that nothing of them might be seen; give at most {min(shape[1:]) - 1}"
            )
        augment = Augment(config.augment.flip, crop, () if moments is None else _black(moments, dtype))
    return dataclasses.replace(data, x=x, moments=moments, augment=augment)


def _black(moments: Moments, dtype: torch.dtype) -> tuple[float, ...]:
    """Return what becomes of a black pixel, to the bit."""
    black: list[float] = normalized(torch.zeros((1, len(moments.mean), 1, 1), dtype=dtype), moments).flatten().tolist()
    return tuple(black)


def _check_images(data: FederatedData, key: str) -> None:
    if data.x.ndim != 4 or not data.x.is_floating_point():
        kind = "texts" if data.vocabulary is not None else f"samples of shape {list(data.x.shape[1:])}"
        raise BadInput(
            f"data.{key}: is for images [channels, height, width], and {data.name} has {kind}; remove data.{key}"
        )
