"""FedBN: everything is shared but the normalisation layers.

X. Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*, ICLR 2021, Algorithm 1.

    client i:  w_i ← w_i − η ∇f_i(w_i),   SGD on all layers at once
    server:    per layer, w ← Σ_i p_i w_i unless it is a normalisation layer, which stays where it is

This is FedSim (`fedalt.py`: LocalSim) with the normalisation layers personal.

Deviation: in the paper the running statistics (mean, variance) of batch normalisation are personal as well as its
scale and shift. Here only scale and shift are; statistics follow model.buffers: each batch's own ("dropped") or fixed
ones ("shared"). GroupNorm and LayerNorm, which keep none, are personal in full. A newcomer trains its scales and shifts
with the rest fixed.
"""

import dataclasses

from personafl.algorithms.averaging import PLAIN_MEAN
from personafl.algorithms.fedalt import fedsim
from personafl.algorithms.training import Count, Rate, Training
from personafl.core.algorithm import Algorithm
from personafl.core.optim import OptimizerSpec


def fedbn(
    training: Training, *, tune_lr: Rate | None = None, tune_epochs: Count = 5, server: OptimizerSpec = PLAIN_MEAN
) -> Algorithm:
    """Personal normalisation layers, the rest shared, trained together."""
    both = fedsim(training, tune_lr=tune_lr, tune_epochs=tune_epochs, server=server)
    return dataclasses.replace(both, name="fedbn", personal="norms")
