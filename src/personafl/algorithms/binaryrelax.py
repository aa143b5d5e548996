"""BinaryRelax: train alone with weights that are drawn to a scaled grid ever more strongly, then lie on it.

P. Yin et al., *BinaryRelax: A Relaxation Approach for Training Deep Neural Networks with Quantized Weights*, SIAM J.
Imaging Sciences 2018. A baseline of QuPeD. A client keeps float weights y; the network runs with x near their
quantization Q(y), and the gradient found there moves y:

    y ← y − η ∇f_i(x),    x = (λ_t Q(y) + y) / (λ_t + 1),    λ_t = relax·growth^t in round t
    x = Q(y)              from round `freeze_after` on
    Q(y) = α·s, the nearest point of a scaled grid: s in {±1, ±3, … ±(2^bits − 1)} per weight, one α per tensor

With 1 bit Q(y) = mean|y|·sign(y) is exact. With more, α and s are found in turns (the paper's way for many bits), five
times. Which weights are quantized is as in QuPeD; without bits none are. The personal model is Q(y). Nothing is shared.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from personafl.algorithms import quantize
from personafl.algorithms.local import LocalClient, NoServer
from personafl.algorithms.personal import Personal, fine_tuning
from personafl.algorithms.quantize import FullPrecision
from personafl.algorithms.quped import Bits
from personafl.algorithms.training import Between, Count, Rate, Training, tunes
from personafl.core.algorithm import Algorithm, Empty, Problem
from personafl.core.batches import Batch, Batches
from personafl.core.descend import descend
from personafl.core.tree import Params, Tree

Growth = Annotated[float, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class BinaryRelaxClient(LocalClient):
    """Client rule: train y alone, through the relaxed weights."""

    bits: int | None = None  # where the problem does not say
    full_precision: FullPrecision = "ends"
    relax: float = 1.0
    growth: float = 1.02
    freeze_after: int | None = None

    def models(self, problem: Problem, down: Empty, state: Personal) -> dict[str, Params]:
        """Return Q(y)."""
        centers = self._grids(problem, state.model)
        return {"personal": state.model | {name: quantize.hard(state.model[name], c) for name, c in centers.items()}}

    def packed(self, problem: Problem, down: Empty, state: Personal) -> dict[str, tuple[Tree, ...]]:
        """Return Q(y) with its codes in as many bits as they need."""
        centers = self._grids(problem, state.model)
        return {"personal": (state.model | {name: quantize.pack(state.model[name], c) for name, c in centers.items()},)}

    def bits_of(self, problem: Problem) -> int | None:
        """Return the device's, or the method's for all."""
        return problem.bits or self.bits

    def _grids(self, problem: Problem, y: Params) -> Params:
        """Return the points of the scaled grid for each quantized weight."""
        bits = self.bits_of(problem)
        names = quantize.quantizable(problem.personal_net.shapes, self.full_precision) if bits else ()
        return {name: on_grid(y[name], bits or 0) for name in names}

    def _train(
        self, problem: Problem, start: Params, batches: Batches, training: Training, round_: Tensor
    ) -> tuple[Params, Tensor]:
        frozen = round_ >= (torch.inf if self.freeze_after is None else self.freeze_after)
        strength = self.relax * self.growth**round_
        share = torch.where(frozen, 1.0, strength / (strength + 1))

        def relaxed(y: Params) -> Params:
            fixed = {name: value.detach() for name, value in y.items()}
            moves = {
                name: share * (quantize.hard(fixed[name], c) - fixed[name])
                for name, c in self._grids(problem, fixed).items()
            }
            # The move is a constant to autograd: the gradient in y is the one at x.
            return {name: value + moves[name] if name in moves else value for name, value in y.items()}

        def objective(y: Params, batch: Batch) -> Tensor:
            return problem.personal_loss(relaxed(y), batch)

        return descend(objective, start, batches, training.optimizer.at(round_))


def on_grid(y: Tensor, bits: int) -> Tensor:
    """Return α·{−(2^bits − 1), …, −1, 1, …, 2^bits − 1}, with an α that brings its points near the entries of y."""
    top = 2**bits - 1
    levels = torch.arange(-top, top + 1, 2, dtype=y.dtype, device=y.device)
    scale = 2 * y.abs().mean() / (top + 1)  # exact for 1 bit
    for _ in range(5 if bits > 1 else 0):
        signs = quantize.hard(y, levels * scale) / scale
        scale = (y * signs).sum() / (signs * signs).sum()
    grid: Tensor = levels * scale
    return grid


@tunes(relax=Between(0.1, 10.0))
def binaryrelax(
    training: Training,
    *,
    bits: Bits | None = None,
    full_precision: FullPrecision = "ends",
    relax: Rate = 1.0,
    growth: Growth = 1.02,
    freeze_after: Count | None = None,
    alone_epochs: Count = 20,
) -> Algorithm:
    """Every client trains alone, with weights that are drawn to a scaled grid of few values."""
    client = BinaryRelaxClient(
        training=training,
        alone=fine_tuning(training, epochs=alone_epochs),
        bits=bits,
        full_precision=full_precision,
        relax=relax,
        growth=growth,
        freeze_after=freeze_after,
    )
    return Algorithm("binaryrelax", client, NoServer(), own_networks=True, uses_bits=True)
