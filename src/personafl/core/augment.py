"""Images as training sees them: another window of each image every time, as often as not mirrored.

The image is framed by `crop` black pixels and a window of the image's own size is cut out, at one of (2·crop + 1)²
places that are equally likely; then it is mirrored with probability ½:

    seen[c, i, j] = framed[c, i + down, j′ + right],   j′ = j or width − 1 − j;   down, right ∈ {0, …, 2·crop}

That is torchvision's RandomCrop(size, padding=crop) and RandomHorizontalFlip. The draws are hashes of the step's key
and the sample's place in the minibatch, as those of dropout are: without state, on the device, and the same however
clients are run.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.core import rng, tree

_PURPOSE = int(rng.mix("augment").view("int64"))
_BITS = (1 << 28) - 1  # of a hash that choose a place: 2²⁸ is so many times 2·crop + 1 that all are as likely


@tree.constant
@dataclass(frozen=True)
class Augment:
    """What is done to images [channels, height, width]; by default nothing. True if it is something."""

    flip: bool = False
    crop: int = 0
    black: tuple[float, ...] = ()  # what a black pixel is in each channel; (): 0

    def __bool__(self) -> bool:
        return self.flip or self.crop > 0


UNCHANGED = Augment()


def augmented(images: Tensor, key: Tensor, how: Augment) -> Tensor:
    """Return images [..., batch, channels, height, width] as steps with these keys [...] see them."""
    batch, channels, height, width = images.shape[-4:]
    numbers = functools.partial(torch.arange, device=images.device)
    step = rng.scramble((key ^ _PURPOSE) + rng.GOLDEN).unsqueeze(-1)
    drawn = rng.scramble((step ^ numbers(batch)) + rng.GOLDEN).unsqueeze(-1)  # [..., batch, 1]
    rows, columns = numbers(height), numbers(width)
    if how.flip:
        columns = torch.where((drawn & 1).bool(), width - 1 - columns, columns)
    if how.crop:
        places = 2 * how.crop + 1
        rows = rows + ((drawn >> 8) & _BITS) % places - how.crop  # [..., batch, height] in the image, or beyond it
        columns = columns + ((drawn >> 36) & _BITS) % places - how.crop
    place = rows.clamp(0, height - 1).unsqueeze(-1) * width + columns.clamp(0, width - 1).unsqueeze(-2)
    shape = (*images.shape[:-2], height * width)
    seen = images.flatten(-2).gather(-1, place.flatten(-2).unsqueeze(-2).expand(shape)).reshape(images.shape)
    if not how.crop:
        return seen
    inside = _within(rows, height).unsqueeze(-1) & _within(columns, width).unsqueeze(-2)
    return torch.where(inside.unsqueeze(-3), seen, _black(images, how.black, channels))


def _within(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)


def _black(images: Tensor, values: tuple[float, ...], channels: int) -> Tensor:
    """Return black [channels, 1, 1], made where it is needed: nobody waits for numbers from the host."""
    parts = [torch.full((1, 1, 1), value, dtype=images.dtype, device=images.device) for value in values]
    return torch.cat(parts) if parts else torch.zeros((channels, 1, 1), dtype=images.dtype, device=images.device)
