"""Client-level differential privacy of which no server is trusted with anything: clients add the noise themselves.

P. Kairouz, Z. Liu, T. Steinke, *The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation*, ICML 2021; `privacy.distributed` has the maths. Clients clip, round and add their share of the noise, and
of what they send the server sees the sum alone (`uploads.secure`):

    sum:     S = C/R · Σ_i (round(R/C · clipped Δ_i) + N_Z(0, σ²))
    server:  as if S/n were the mean of the uploads, n those who are in the sum

How many that are is seen. One client's changes, zero or not, are as private as the Gaussian mechanism with noise
multiplier z from whoever sees the sum, as long as h of its clients keep their shares to themselves. The loss is not
sent. The rule here computes that sum to the bit, with every upload and every share in the clear.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, Reduced, mean_dtypes
from personafl.privacy.distributed import Lattice, client_key, in_clips, lattice_for, length_of, sent
from personafl.uploads.private import Private, PrivateServer


@dataclass(frozen=True, kw_only=True)
class SharedNoiseServer(PrivateServer):
    """Server rule: another one's, which is given sums that clients have added noise to; it adds none."""

    steps_alone: ClassVar[bool] = False
    clients: int  # n, of a cohort
    honest: int  # h of them

    def lattice(self, upload: Any) -> Lattice:
        """Return the grid of uploads like this one."""
        return lattice_for(self.noise, self.clients, self.honest, length_of(upload))

    @property
    def join_from(self) -> Callable[[Private, Reduced | None, Any, Tensor, NDArray[Any], int], Reduced]:
        """Join what clients send of uploads, in units of the clip; the key of each is made of the one here."""
        return self._join_from

    def _join_from(
        self, state: Private, joined: Reduced | None, stacked: Any, _: Tensor, clients: NDArray[Any], round_: int
    ) -> Reduced:
        clip, first = float(state.clip), tree.map(lambda leaf: leaf[0], stacked)
        lattice, total = self.lattice(first), torch.zeros((), dtype=torch.int64)
        for row, number in enumerate(clients.tolist()):
            upload = tree.map(lambda leaf, row=row: leaf[row], stacked)
            total = total + sent(upload, clip, lattice, client_key(self.key, number), round_)
        losses = stacked.loss.to(torch.float64).sum()
        counted = torch.tensor(float(len(clients)), dtype=torch.float64, device=losses.device), len(clients)
        made = Reduced(in_clips(total, first, losses, lattice), *counted, mean_dtypes(stacked))
        return made if joined is None else joined.plus(made)

    def join(self, state: Private, joined: Reduced | None, stacked: Any, weights: Tensor) -> Reduced:
        """Fail: the noise of uploads is that of who sends them."""
        raise NotImplementedError("join_from is told whose uploads these are")

    def update(self, state: Private, uploads: Reduced, round_: int) -> Private:
        """Give the method the sum, in its own units."""
        clip = float(state.clip)
        total = tree.map(lambda leaf: leaf * clip, uploads.total)._replace(loss=uploads.total.loss)
        return state._replace(own=self.rule.update(state.own, uploads._replace(total=total), round_))


def shared(algorithm: Algorithm, clients: int, honest: int) -> Algorithm:
    """Return a private method with noise that is shared by clients; as it is, if nothing is sent."""
    server = algorithm.server
    if not isinstance(server, PrivateServer):
        return algorithm
    given = {field.name: getattr(server, field.name) for field in dataclasses.fields(server)}
    return dataclasses.replace(algorithm, server=SharedNoiseServer(**given, clients=clients, honest=honest))
