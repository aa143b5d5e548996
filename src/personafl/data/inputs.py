"""What networks see of samples: standardised by moments of the training data, and in training augmented.

Channel c of an image [channels, height, width] or a series [channels, time], or feature c of a row [features], becomes
(x_c − mean_c) / std_c. With `normalize = "auto"` the moments are those of the training data of clients that train,
from sums that clients can add up; a feature that never changes is only centred, and what is more than 10 standard
deviations away is brought to 10, so that a rare feature (a one in ten thousand zeros is 100 deviations away) does not
outweigh all others. Tokens stay as they are. `"channel"` is the same for images alone, and cuts nothing off. Validation
and test data, newcomers and exported models are given the same numbers. A black pixel beyond an image's edge, which
augmentation shows, is standardised as all others are.

The targets of a regression are standardised alike, so that a network's outputs begin where they should and a rate does
not depend on units; models that leave a run give numbers in the units of the data.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from personafl.core.augment import UNCHANGED, Augment
from personafl.data.config import DataConfig, Moments
from personafl.data.federated import FederatedData
from personafl.errors import BadInput


def normalized(x: Tensor, moments: Moments) -> Tensor:
    """Return (x − mean) / std, per channel: axis 1; no further from 0 than the moments say."""
    shape = (-1, *[1] * (x.ndim - 2))
    mean, std = (torch.tensor(values, dtype=x.dtype).reshape(shape) for values in (moments.mean, moments.std))
    z = (x - mean).div_(std)
    return z if moments.clip is None else z.clamp_(-moments.clip, moments.clip)


def as_seen(data: FederatedData, config: DataConfig, dtype: torch.dtype) -> FederatedData:
    """Return data as networks of a precision see them: as `normalize` and `augment` say, wherever the data are from."""
    x, moments, augment = data.x, moments_for(data, config), UNCHANGED
    if moments is not None:
        x = normalized(x.to(torch.promote_types(x.dtype, dtype)), moments).to(dtype)
    if config.augment is not None:
        _check_images(data, "augment")
        crop, shape = config.augment.crop, data.x.shape[1:]
        if crop >= min(shape[1:]):
            raise BadInput(
                f"data.augment.crop: {crop} is as much as the images of {data.name} have ({shape[1]}×{shape[2]}), so "
                f"that nothing of them might be seen; give at most {min(shape[1:]) - 1}"
            )
        augment = Augment(config.augment.flip, crop, () if moments is None else _black(moments, dtype))
    y, scale = data.y, scale_for(data, config)
    if not data.shape.whole:
        y = (y if scale is None else normalized(y.to(torch.float64), scale)).to(dtype)
    return dataclasses.replace(data, x=x, y=y, moments=moments, scale=scale, augment=augment)


def moments_for(data: FederatedData, config: DataConfig) -> Moments | None:
    """Return by what moments inputs are standardised; None: by none."""
    given = config.normalize
    if given == "none" or (given == "auto" and not data.x.is_floating_point()):
        return None
    if isinstance(given, str):
        from personafl.data.moments import moments_of  # here, for a device that is told its moments adds up nothing

        if given == "channel":
            _check_images(data, "normalize")
        return moments_of(data, given)
    if len(given.mean) != data.x.shape[1] or not data.x.is_floating_point():
        raise BadInput(
            f"data.normalize.mean: has {len(given.mean)} numbers, and {data.name} has {_kind(data)}; give one for each "
            f'of {data.x.shape[1]} {data.axis}s, or data.normalize = "auto" without a start'
        )
    return given


def scale_for(data: FederatedData, config: DataConfig) -> Moments | None:
    """Return by what moments the targets of a regression are standardised; None: it is none."""
    given = config.scale
    if data.task != "regression":
        if given != "auto":
            raise BadInput(f"data.scale: is for regression, and the task of {data.name} is {data.task}; remove it")
        return None
    if isinstance(given, str):
        from personafl.data.moments import scale_of  # here, for a device that is told its moments adds up nothing

        return scale_of(data)
    if len(given.mean) != data.classes:
        raise BadInput(
            f"data.scale.mean: has {len(given.mean)} numbers, and {data.name} has {data.classes} targets; give one each"
        )
    return given


def _black(moments: Moments, dtype: torch.dtype) -> tuple[float, ...]:
    """Return what becomes of a black pixel, to the bit."""
    black: list[float] = normalized(torch.zeros((1, len(moments.mean), 1, 1), dtype=dtype), moments).flatten().tolist()
    return tuple(black)


def _check_images(data: FederatedData, key: str) -> None:
    if data.x.ndim != 4 or not data.x.is_floating_point():
        raise BadInput(
            f"data.{key}: is for images [channels, height, width], and {data.name} has {_kind(data)}; remove data.{key}"
        )


def _kind(data: FederatedData) -> str:
    return "tokens" if not data.x.is_floating_point() else f"samples of shape {list(data.x.shape[1:])}"
