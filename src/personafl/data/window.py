"""Samples on a device, a part at a time: for data that does not fit there.

The data stay in the host's memory. Before clients train, their samples are copied through pinned memory into a window
on the device, which takes the place of the whole there; the host goes on while they are on their way. The window stays
where it is, so what was recorded for it (`fast.cuda_graphs`) holds.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]


class Window:
    """Room on a device for so many samples at a time."""

    def __init__(self, x: Tensor, y: Tensor, samples: int, device: torch.device) -> None:
        self.samples = samples
        self.x, self.y = (torch.zeros(samples, *part.shape[1:], dtype=part.dtype, device=device) for part in (x, y))
        self.places = torch.arange(samples, device=device)

    def show(self, x: Tensor, y: Tensor, rows: Rows) -> None:
        """Bring samples of x and y to the first places; what was there before is gone."""
        for home, place in ((x, self.x), (y, self.y)):
            place[: len(rows)].copy_(_picked(home, rows, place.device), non_blocking=True)


def copied(home: Tensor, rows: Rows, device: torch.device) -> Tensor:
    """Return the samples of these rows, [*rows.shape, …], on a device."""
    if home.device == device:
        return home[torch.from_numpy(rows).to(device)]
    flat = _picked(home, rows.reshape(-1), device).to(device, non_blocking=True)
    return flat.reshape(*rows.shape, *home.shape[1:])


def _picked(home: Tensor, rows: Rows, device: torch.device) -> Tensor:
    """Return samples in the host's memory, from where a GPU can fetch them by itself."""
    picked = torch.empty(len(rows), *home.shape[1:], dtype=home.dtype, pin_memory=device.type == "cuda")
    return torch.index_select(home, 0, torch.from_numpy(rows), out=picked)
