"""Gradients that tell little of any one sample: differential privacy of samples, step by step.

M. Abadi et al., *Deep Learning with Differential Privacy*, CCS 2016 (DP-SGD). With g_j the gradient of the objective on
sample j alone, over all trained parameters as one vector, and r that of what the objective has without any sample,

    g = (Σ_j (g_j − r) · min(1, C/‖g_j − r‖) + N(0, (zC)² I)) / b + r

b is the number of samples that a minibatch is expected to have, whoever came. One sample more or less moves the sum by
at most C. What does not look at data (r; a `Quadratic` term, weight decay and prox, which `descend` adds later) is
outside the clip, and costs nothing. A sample whose gradient is not finite counts as none.

Each sample is a minibatch of its own here: whatever a network does with a batch, no sample sees another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from personafl.core import rng, secret
from personafl.core.batches import Batch
from personafl.core.guard import Guard
from personafl.core.losses import MeanLoss
from personafl.core.seam import replaceable
from personafl.core.tree import Params


def guarded(
    objective: Callable[[Params, Batch], Tensor], params: Params, batch: Batch, guard: Guard
) -> tuple[Params, Tensor]:
    """Return g, and the mean over the real samples of the objective, which is not protected."""
    free = None if isinstance(objective, MeanLoss) else _without_samples(objective, params, batch)
    sums, values = clipped_sums(objective, params, batch, guard.clip, free)
    gradient = noisy_mean(sums, guard)
    if free is not None:
        gradient = {name: value + free[name] for name, value in gradient.items()}
    return gradient, torch.where(batch.real, values, 0.0).sum() / batch.real.sum().clamp(min=1)


@replaceable
def noisy_mean(sums: Params, guard: Guard) -> Params:
    """Return (Σ + N(0, (zC)² I)) / b of sums: the noise of all parameters, by their names, is one draw."""
    noise = gaussians(guard.key, sum(total.numel() for total in sums.values()), next(iter(sums.values())).dtype)
    found, at = Params(), 0
    for name in sorted(sums):
        total = sums[name]
        drawn = noise[at : at + total.numel()].reshape(total.shape)
        at += total.numel()
        scale = (guard.noise * guard.clip).to(total.dtype)
        found[name] = (total + scale * drawn.to(total.dtype)) / guard.size.to(total.dtype)
    return found


@replaceable
def clipped_sums(
    objective: Callable[[Params, Batch], Tensor], params: Params, batch: Batch, clip: Tensor, free: Params | None
) -> tuple[Params, Tensor]:
    """Return Σ_j of the clipped g_j − r over the real samples j, and the objective on each sample [batch]."""

    def on_one(own: Params, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        real = torch.ones(1, dtype=torch.bool, device=x.device)
        return objective(own, Batch(x.unsqueeze(0), y.unsqueeze(0), real, key))

    keys = sample_keys(batch)
    each, values = vmap(grad_and_value(on_one), in_dims=(None, 0, 0, 0))(params, batch.x, batch.y, keys)
    if free is not None:
        each = {name: value - free[name] for name, value in each.items()}
    squares = [value.flatten(1).square().sum(1) if value.ndim > 1 else value.square() for value in each.values()]
    factors, counts = clip_factors(torch.stack(squares).sum(0), clip, batch.real)

    def summed(value: Tensor) -> Tensor:
        shape = [-1] + [1] * (value.ndim - 1)
        return (torch.where(counts.reshape(shape), value, 0.0) * factors.to(value.dtype).reshape(shape)).sum(0)

    return {name: summed(value) for name, value in each.items()}, values


def clip_factors(squares: Tensor, clip: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return what gradients with these squared norms [batch] are multiplied with, and which of them count."""
    norms = squares.sqrt()
    counts = real & torch.isfinite(norms)
    return torch.where(counts, (clip.to(norms.dtype) / norms).clamp(max=1), 0.0), counts  # of norm 0 infinite: 1


def sample_keys(batch: Batch) -> Tensor:
    """Return a key for each sample's own draws (dropout), [batch]."""
    return rng.scramble(batch.key + torch.arange(batch.real.shape[-1], device=batch.key.device))


def _without_samples(objective: Callable[[Params, Batch], Tensor], params: Params, batch: Batch) -> Params:
    """Return r: at a minibatch of which no sample is real, and none is the client's."""
    none = Batch(
        torch.zeros_like(batch.x[:1]),
        torch.zeros_like(batch.y[:1]),
        torch.zeros(1, dtype=torch.bool, device=batch.real.device),
        torch.zeros_like(batch.key),
    )
    found: Params = grad(objective)(params, none)
    return found


def gaussians(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` standard Gaussians by a key: [] is the seed's, and no secret; [4] are the words of one that is."""
    if key.is_cuda and not key.ndim:
        return rng.gaussians(key.reshape(1), count, dtype)[0]
    found: Tensor = _OnHost.apply(key, count, dtype)  # type: ignore[no-untyped-call]
    return found


class _OnHost(torch.autograd.Function):
    """Numbers of one key, or of each one's where clients are stacked: the same ones."""

    @staticmethod
    def forward(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return gaussians_of_each(key.unsqueeze(0), count, dtype).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Noise has no gradient."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], key: Tensor, count: int, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        return gaussians_of_each(key.movedim(in_dims[0], 0), count, dtype), 0


def gaussians_of_each(keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers of each key [keys] or [keys, 4], [keys, count], where the keys are."""
    if keys.is_cuda and keys.ndim == 1:
        return rng.gaussians(keys, count, dtype)
    if keys.ndim == 2:
        rows = [secret.gaussians(row.numpy().tobytes(), count) for row in keys.cpu()]
        return torch.stack(rows).to(keys.device, dtype)
    numbers, generator = torch.empty(len(keys), count, dtype=dtype), torch.Generator()
    for row, key in zip(numbers, keys.tolist(), strict=True):
        generator.manual_seed(key & (2**32 - 1))  # it takes 32 bits: 12 more say where it begins
        torch.rand((key >> 32) & (2**12 - 1), generator=generator)
        row.normal_(generator=generator)
    return numbers
