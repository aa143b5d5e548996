"""What protects single samples in training: how large each one's gradient may be, and the noise on their sum."""

from typing import NamedTuple

import torch
from torch import Tensor


class Guard(NamedTuple):
    """Differential privacy of samples, for the minibatches of a phase, or for one of them; see `core.samples`.

    What is drawn at random comes with it: the noise of a step is a function of its key.
    """

    clip: Tensor  # [] C
    noise: Tensor  # [] z, the noise's standard deviation over C
    size: Tensor  # [steps], of one step []: b, how many samples it is expected to have
    key: Tensor  # [steps], of one step []: of its noise; with one axis more if it is a secret, of four words
    taken: Tensor  # [steps], of one step []: a minibatch may be without samples, and is a step of noise

    def at(self, step: int) -> "Guard":
        """Return that of one minibatch."""
        return self._replace(size=self.size[step], key=self.key[step], taken=self.taken[step])

    def first(self, steps: int) -> "Guard":
        """Return that of the first minibatches."""
        return self._replace(size=self.size[:steps], key=self.key[:steps], taken=self.taken[:steps])

    def with_more(self, steps: int) -> "Guard":
        """Return it with further steps that are not taken, of stacked clients [clients, steps]."""
        pad = torch.nn.functional.pad
        size = pad(self.size, (0, steps), value=1.0)
        key = pad(self.key, (0, 0) * (self.key.ndim - 2) + (0, steps))
        return self._replace(size=size, key=key, taken=pad(self.taken, (0, steps)))
