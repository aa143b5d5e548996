"""Client-level differential privacy for any method whose server averages changes.

H. B. McMahan et al., *Learning Differentially Private Recurrent Language Models*, ICLR 2018; G. Andrew et al.,
*Differentially Private Learning with Adaptive Clipping*, NeurIPS 2021. With Δ_i all that client i sends but its loss,
as one vector,

    sum:     S = Σ_i Δ_i · min(1, C/‖Δ_i‖) + N(0, (z_Δ C)² I)
    server:  as if S/m were the mean of the uploads; m is the expected size of a cohort, whoever came

One client more or less changes the sum before the noise by at most C. So what is sent down, and all that is made of it,
is as private as the Gaussian mechanism with noise multiplier z, once a round; with cohorts into which each client comes
by a coin of its own (`federation.sampling = "bernoulli"`), as that mechanism amplified by sampling. A round to which
nobody came takes its step too, of noise alone: that nobody came is not to be seen either.

What a client keeps costs nothing, however often it is trained: personal models and parts never leave the device, and
get no noise. They are made of the client's own data and of what was sent down.

The clip C is fixed, or follows the quantile γ of the norms:

    b̃ = ½ + (Σ_i (1[‖Δ_i‖ ≤ C] − ½) + N(0, σ_b²)) / m,   C ← C · exp(−η_C (b̃ − γ))

The counts' noise is σ_b = `noise`·m, and z_Δ = (z⁻² − (2σ_b)⁻²)^(−½), so that sum and count together are as private as
a Gaussian mechanism with z (their Theorem 1).

Mechanisms: "gaussian" is the above. "tree" and "banded" add noise that later rounds take back in part (DP-FTRL,
`privacy.correlated`), for cohorts in which a client comes back after b rounds at the earliest; they need a fixed clip.
"discrete" is "gaussian" in whole numbers (`privacy.discrete`): uploads are rounded to a grid of C·2⁻²⁴ inside of the
ball of radius C, sums are exact, and noise is discrete Gaussian.

Uploads count alike. Noise is drawn in float64 from a key (`privacy.noise`), of which a round's number is the site: a
round that is done again draws the same. On a server of real devices (`bound`), the site has the digest of the sum too,
and how often the run was taken back: the same noise is never added to two sums. There and for "discrete", "tree" and
"banded" it is drawn for each leaf by its name, of a generator that nobody without the key can tell from noise.

Deviation: but for "discrete", the guarantee is that of real numbers; sums and noise are rounded to float64 (I. Mironov,
*On Significance of the Least Significant Bits for Differential Privacy*, CCS 2012).
"""

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.core import rng, tree, wire
from personafl.core.algorithm import (
    Algorithm,
    ClientRule,
    Empty,
    Problem,
    Reduced,
    join,
    mean_dtypes,
    untrained_upload,
)
from personafl.core.tree import Params, Tree
from personafl.errors import BadInput
from personafl.privacy.clip import AdaptiveClip
from personafl.privacy.correlated import add, kept
from personafl.privacy.discrete import discrete_gaussians, rounded
from personafl.privacy.kinds import Mechanism
from personafl.privacy.noise import gaussians, gaussians_on
from personafl.uploads.around import AroundServer, refusal, sends_losses_alone, weighs_as_told

RADIUS = 2**24  # of the discrete mechanism's ball, in steps of its grid: sums of 2²⁹ clients are exact in float64


class Clipped(NamedTuple):
    """What is summed of an upload: all of it after clipping, and whether its norm was within the clip, less a half."""

    upload: Tree
    within: Tensor
    loss: Tensor


class Private(NamedTuple):
    """State of the server: the method's own, C, and what noise was made of that later rounds take back."""

    own: Tree
    clip: Tensor
    memory: Tree  # like an upload, with [kept, …] in float64 for each leaf; empty where nothing is taken back
    past: Tensor  # how often the run was taken back when that began, and how many rounds it has


@dataclass(frozen=True, kw_only=True)
class PrivateServer(AroundServer):
    """Server rule: another one's, which is given a noisy sum of clipped uploads."""

    steps_alone: ClassVar[bool] = True
    clip: float | AdaptiveClip
    noise: float  # z
    cohort: float  # m
    key: bytes
    mechanism: Mechanism = "gaussian"
    apart: int = 1  # b
    client: ClientRule | None = None  # whose uploads noise that is taken back is like
    bound: bool = False  # to the sum: noise is another one if that is
    attempt: int = 0  # how often the run was taken back

    def init(self, problem: Problem, start: Params, population: float) -> Private:
        """Start as the method does, with the first clip."""
        clip = self.clip.start if isinstance(self.clip, AdaptiveClip) else self.clip
        own = self.rule.init(problem, start, population)
        past = torch.tensor([self.attempt, 0], dtype=torch.int64)
        return Private(own, torch.tensor(clip, dtype=torch.float64), self._blank(problem, own), past)

    def _blank(self, problem: Problem, own: Tree) -> Tree:
        """Return what is kept before the first round."""
        if self.mechanism not in ("tree", "banded") or self.client is None:
            return Empty()
        down, size = wire.dense(self.rule.broadcast(own)), kept(self.mechanism, self.apart)
        state = self.client.init(problem, down, rng.generator("shape"))
        like = wire.dense(untrained_upload(self.client, problem, down, state))
        return tree.map(lambda leaf: torch.zeros(size, *leaf.shape, dtype=torch.float64), like)

    def own(self, state: Private) -> Tree:
        """Return the method's own state."""
        return state.own

    def join(self, state: Private, joined: Reduced | None, stacked: Any, weights: Tensor) -> Reduced:
        """Join uploads after clipping, of which each counts once."""
        clip, sent = _there(state.clip, weights.device), stacked._replace(loss=torch.zeros_like(stacked.loss))
        norms = _norms(sent)
        whole = self.mechanism == "discrete"
        factors = torch.ones_like(norms) if whole else (clip / norms).clamp(max=1)  # of nothing infinite, and so 1
        beside = (norms <= clip).to(torch.float64) - 0.5, stacked.loss
        before = (None, None) if joined is None else _apart(joined)
        changes = join(before[0], _whole(sent, clip) if whole else sent, factors)
        rest = join(before[1], beside, torch.ones_like(norms))
        total, dtypes = Clipped(changes.total, *rest.total), Clipped(mean_dtypes(sent), *rest.dtypes)
        return Reduced(total, rest.weight, rest.clients, dtypes)

    def update(self, state: Private, uploads: Reduced, round_: int) -> Private:
        """Give the method the noisy sum, and move the clip."""
        sums, dtypes = uploads.total, uploads.dtypes
        site, cohort = self._site(sums, round_), torch.tensor(self.cohort, dtype=torch.float64)
        if self.mechanism in ("tree", "banded"):
            noisy, memory, past = self._correlated(state, sums.upload, site)
        else:
            noisy, memory, past = self._alone(state.clip, sums.upload, site), state.memory, state.past
        total = noisy._replace(loss=sums.loss)
        given = Reduced(total, cohort.to(sums.loss.device), uploads.clients, dtypes.upload)
        clip = self._moved(state.clip, sums.within, site)
        return Private(self.rule.update(state.own, given, round_), clip, memory, past)

    def told(self, state: Private) -> dict[str, float]:
        """Return C, and what the method tells."""
        return {"clip": float(state.clip), **super().told(state)}

    def _alone(self, clip: Tensor, sums: Tree, site: str) -> Any:
        """Return the sums with noise that is of this round alone."""
        named = tree.flatten(sums)
        if self.mechanism == "discrete":
            sigma, step = math.ceil(self._of_sums() * RADIUS), float(clip) / RADIUS
            noisy = {name: (leaf + self._whole(f"{site}/{name}", leaf, sigma)) * step for name, leaf in named.items()}
        else:
            scale = self._of_sums() * clip
            drawn = self._drawn_all(site, named, scale)
            noisy = {name: leaf + drawn[name] for name, leaf in named.items()}
        return tree.unflatten(sums, noisy)

    def _correlated(self, state: Private, sums: Tree, site: str) -> tuple[Any, Tree, Tensor]:
        """Return the sums with noise that later rounds take back, what is kept for that, and of how many rounds.

        A run that was taken back begins anew with it: what the rounds since have released stays released.
        """
        named, memory, steps = tree.flatten(sums), tree.flatten(state.memory), int(state.past[1])
        if int(state.past[0]) != self.attempt:
            memory, steps = {name: torch.zeros_like(leaf) for name, leaf in memory.items()}, 0
        scale, noisy = self.noise * state.clip, {}
        for name, leaf in named.items():
            drawn = gaussians(self.key, f"{site}/{name}", leaf.numel()).reshape(leaf.shape)
            assert self.mechanism in ("tree", "banded")
            noise, memory[name] = add(self.mechanism, self.apart, steps, memory[name].cpu(), drawn)
            noisy[name] = leaf + (noise * scale.cpu()).to(leaf.device)
        past = torch.tensor([self.attempt, steps + 1], dtype=torch.int64)
        return tree.unflatten(sums, noisy), tree.unflatten(state.memory, memory), past

    def _site(self, sums: Tree, round_: int) -> str:
        """Return where noise is drawn from: another place for every round, and where it is bound for every sum."""
        if not self.bound:
            return str(round_)
        found = hashlib.sha256()
        for name, leaf in tree.flatten(sums).items():
            found.update(f"{name}\0{leaf.numel()}\0".encode())
            found.update(leaf.detach().cpu().contiguous().numpy().tobytes())
        return f"{round_}.{self.attempt}.{found.hexdigest()}"

    def _moved(self, clip: Tensor, within: Tensor, site: str) -> Tensor:
        """Return the clip of the next round."""
        if not isinstance(self.clip, AdaptiveClip):
            return clip
        spread, site, within = self.clip.noise * self.cohort, f"{site}/within the clip", within.cpu()
        if self.mechanism == "discrete":  # twice the count is whole, and moves by 1
            count = within + self._whole(site, within, math.ceil(2 * spread)) / 2
        else:
            count = within + self._drawn(site, within, torch.tensor(spread))
        share = 0.5 + count / self.cohort
        return clip * torch.exp(-self.clip.rate * (share - self.clip.quantile))

    def _of_sums(self) -> float:
        """Return z_Δ."""
        if not isinstance(self.clip, AdaptiveClip):
            return self.noise
        return 1 / math.sqrt(self.noise**-2 - (2 * self.clip.noise * self.cohort) ** -2)

    def _drawn_all(self, site: str, named: dict[str, Tensor], scale: Tensor) -> dict[str, Tensor]:
        """Return the noise of all leaves: a simulation's is drawn at once, and where they are."""
        if self.bound:
            return {name: self._drawn(f"{site}/{name}", leaf, scale) for name, leaf in named.items()}
        device, sizes = next(iter(named.values())).device, [leaf.numel() for leaf in named.values()]
        parts = gaussians_on(device, self.key, site, sum(sizes)).mul_(_there(scale, device)).split_with_sizes(sizes)
        return {name: part.reshape(leaf.shape) for (name, leaf), part in zip(named.items(), parts, strict=True)}

    def _drawn(self, site: str, leaf: Tensor, scale: Tensor) -> Tensor:
        drawn = gaussians(self.key, site, leaf.numel()).reshape(leaf.shape) * scale.cpu()
        return drawn.to(leaf.device)

    def _whole(self, site: str, leaf: Tensor, sigma: int) -> Tensor:
        drawn = discrete_gaussians(self.key, site, leaf.numel(), sigma).reshape(leaf.shape)
        return drawn.to(torch.float64).to(leaf.device)


def _there(value: Tensor, device: torch.device) -> Tensor:
    """Return a number where sums are: a copy of it would wait for all that a GPU has to do before."""
    return value if value.device == device else torch.full_like(value, float(value), device=device)


def _norms(stacked: Tree) -> Tensor:
    """Return the norm of each client's upload, in float64."""
    leaves = [leaf.unsqueeze(-1).flatten(1) for leaf in tree.leaves(stacked)]
    if leaves[0].is_cuda:
        each = torch.stack([torch.linalg.vector_norm(leaf, dim=1, dtype=torch.float64) for leaf in leaves])
        joined: Tensor = torch.linalg.vector_norm(each, dim=0)
        return joined
    squares = torch.zeros(len(leaves[0]), dtype=torch.float64)
    for leaf in leaves:
        doubled = leaf.new_empty(leaf.shape[1:], dtype=torch.float64)  # one for all: a CPU takes long to find memory
        for client, row in enumerate(leaf):
            squares[client] += torch.dot(doubled.copy_(row), doubled)
    return squares.sqrt()


def _apart(joined: Reduced) -> tuple[Reduced, Reduced]:
    """Return the clipped changes, and what counts without a clip."""
    total, dtypes, counted = joined.total, joined.dtypes, (joined.weight, joined.clients)
    rest = Reduced((total.within, total.loss), *counted, (dtypes.within, dtypes.loss))
    return Reduced(total.upload, *counted, dtypes.upload), rest


def _whole(sent: Tree, clip: Tensor) -> Tree:
    """Return uploads as whole numbers, in steps of the grid: each as one vector in the ball."""
    named = tree.flatten(sent)
    rows = torch.cat([leaf.unsqueeze(-1).flatten(1).to(torch.float64) for leaf in named.values()], 1)
    numbers, whole, begin = rounded(rows, clip, RADIUS).to(torch.float64), {}, 0
    for name, leaf in named.items():
        end = begin + math.prod(leaf.shape[1:])
        whole[name], begin = numbers[:, begin:end].reshape(leaf.shape), end
    return tree.unflatten(sent, whole)


def private(
    algorithm: Algorithm,
    *,
    clip: float | AdaptiveClip,
    noise: float,
    cohort: float,
    key: bytes,
    mechanism: Mechanism = "gaussian",
    apart: int = 1,
) -> Algorithm:
    """Return the method with a server that releases nothing but noisy sums; as it is, if nothing is sent but losses."""
    if sends_losses_alone(algorithm):
        return algorithm
    if not algorithm.server.averages or not weighs_as_told(algorithm):
        raise refusal(algorithm, "privacy", "a clipped one would not be what its client believes it sent")
    if isinstance(clip, AdaptiveClip) and noise >= 2 * clip.noise * cohort:
        most = 2 * clip.noise * cohort
        raise BadInput(
            f"privacy.clip.noise: counts with {clip.noise:g} of a cohort of {cohort:g} as noise leave none of a noise "
            f"multiplier of {noise:g} to the sums; raise it above {math.ceil(1e3 * noise / (2 * cohort)) / 1e3:g}, "
            f"or lower privacy.noise below {most:g}"
        )
    client = algorithm.client if mechanism in ("tree", "banded") else None
    how: dict[str, Any] = {"mechanism": mechanism, "apart": apart, "client": client}
    server = PrivateServer(rule=algorithm.server, clip=clip, noise=noise, cohort=cohort, key=key, **how)
    return dataclasses.replace(algorithm, server=server)
