"""Drawing minibatches where the data is: what `batches.draw` does, on a GPU. Equal batches, to the bit.

A GPU trains a thousand small clients in the time in which a host shuffles their data. So the host counts, and hashes
one key for each client and epoch; hashing and sorting the samples is left to the device.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.batches import Batches, Padding, Steps, counted_steps, draw

_MOST = 2**25  # places of all shuffles that are sorted at a time
_TOP = torch.iinfo(torch.int64)


def drawn(
    pool: tuple[Tensor, Tensor],
    rows: NDArray[np.int64],
    there: Tensor,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    work: Steps,
    keys: rng.Words,
    pace: rng.Words,
) -> Batches:
    """Draw as `batches.draw` does, where that is faster, and say what is known of the padding.

    `there` are the rows on the device of the pool.
    """
    device, largest = pool[0].device, int(sizes.max(initial=1))
    if device.type == "cpu":
        batches = draw(pool, rows, starts, sizes, work, keys, pace)
        return batches._replace(padding=padding_of(batches.real.numpy(), largest))
    # Elsewhere what is known is mostly the same in every round, for recordings (`fast.cuda_graphs`).
    taken = counted_steps(work, sizes, pace)
    known = Padding(gaps=bool((taken < taken.max(initial=0)).any()), most=round_number(largest))
    if device.type == "cuda" and fits_there(sizes, work, pace):
        return draw_there(pool, there, starts, sizes, work, keys, pace)._replace(padding=known)
    return draw(pool, rows, starts, sizes, work, keys, pace)._replace(padding=known)


def padding_of(real: NDArray[np.bool_], most: int) -> Padding:
    """Return what is known of stacked clients' batches of which these are real, [clients, steps, batch].

    `most` is how many samples a client has at most.
    """
    counts = real.sum(-1)
    if not counts.all():
        return Padding(most=most)
    widths = counts.max(0, initial=0)
    return Padding(False, tuple(widths.tolist()), tuple((counts == widths).all(0).tolist()), most)


def round_number(count: int) -> int:
    """Return the least of 0, 1, …, 7, 8, 12, 16, 24, 32, 48, … that is not below."""
    if count <= 8:
        return count
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power


def fits_there(sizes: NDArray[np.int64], work: Steps, pace: rng.Words) -> bool:
    """Say whether the shuffles fit memory as one block [clients, epochs, largest client]: not if sizes differ much."""
    return len(sizes) * _epochs(sizes, work, pace) * int(sizes.max(initial=1)) <= _MOST


def draw_there(
    pool: tuple[Tensor, Tensor],
    rows: Tensor,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    work: Steps,
    keys: rng.Words,
    pace: rng.Words,
) -> Batches:
    """Draw as `batches.draw` does, on the device of the pool and the rows."""
    device = pool[0].device

    there = functools.partial(tree.on, device)

    largest = int(sizes.max(initial=1))
    width = min(work.batch or largest, largest)
    taken = counted_steps(work, sizes, pace)
    count = int(taken.max(initial=0))
    epochs = np.arange(_epochs(sizes, work, pace))
    keys_there = there(rng.mix(rng.mix(keys[:, None], "epoch", epochs[None, :])).view(np.int64))
    size, steps = there(sizes)[:, None, None], there(taken)[:, None, None]
    order = _shuffles(keys_there, size, largest)  # [clients, epochs, largest]

    step = torch.arange(count, device=device)[None, :, None]
    per_epoch = ((size + width - 1) // width).clamp(min=1)
    position = step % per_epoch * width + torch.arange(width, device=device)  # [clients, steps, batch] in the shuffle
    real = (position < size) & (step < steps)
    place = torch.where(real, step // per_epoch * largest + position, 0)
    chosen = torch.where(real, order.flatten(1).gather(1, place.flatten(1)).reshape(place.shape), 0)
    return Batches(
        *pool,
        rows[there(np.where(sizes > 0, starts, 0))[:, None, None] + chosen],
        real,
        there(rng.mix(keys[:, None], "dropout", np.arange(count)[None, :]).view(np.int64)),
    )


def _epochs(sizes: NDArray[np.int64], work: Steps, pace: rng.Words) -> int:
    """Return how many epochs are begun at most; one where there is nothing to do."""
    largest = int(sizes.max(initial=1))
    per_epoch = np.maximum(-(-sizes // min(work.batch or largest, largest)), 1)
    return int((-(-counted_steps(work, sizes, pace) // per_epoch)).max(initial=1))


def _shuffles(keys: Tensor, size: Tensor, largest: int) -> Tensor:
    """Return a permutation of range(size) for each key [clients, epochs], as `rng.permutations` has it."""
    place = torch.arange(largest, device=keys.device)
    draws = rng.scramble((keys[..., None] ^ place) + rng.GOLDEN) ^ _TOP.min  # the order of unsigned numbers
    return draws.masked_fill(place >= size, _TOP.max).argsort(stable=True, dim=-1)
