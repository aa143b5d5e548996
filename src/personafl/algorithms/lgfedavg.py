"""LG-FedAvg: local representations under a shared top.

P. P. Liang et al., *Think Locally, Act Globally: Federated Learning with Local and Global Representations*, 2020,
Algorithm 1. The reverse of FedPer: client i has its own representation ℓ_i, and everyone the same model g above it.

    client i:  (ℓ_i, g_i) ← (ℓ_i, g_i) − η ∇f_i(ℓ_i, g_i),   SGD on both at once from the last ℓ_i and the received g
    server:    g ← Σ_i p_i g_i

This is FedSim (`fedalt.py`: LocalSim) with the body personal. The body is everything but the output layer, unless
model.personal says otherwise; so little is sent.

Deviations: ℓ_i starts at the start model's body, the same for all (a recipe's `start` or `pretrain` makes it a trained
one, as the paper's experiments have it); the paper's auxiliary losses on ℓ_i (self-supervised, adversarial) are left
out. A newcomer trains its body with g fixed; the paper lets it vote with all the others' models.
"""

import dataclasses

from personafl.algorithms.averaging import PLAIN_MEAN
from personafl.algorithms.fedalt import fedsim
from personafl.algorithms.training import Count, Rate, Training
from personafl.core.algorithm import Algorithm
from personafl.core.optim import OptimizerSpec


def lgfedavg(
    training: Training, *, tune_lr: Rate | None = None, tune_epochs: Count = 5, server: OptimizerSpec = PLAIN_MEAN
) -> Algorithm:
    """Personal body, shared output layer, trained together."""
    both = fedsim(training, tune_lr=tune_lr, tune_epochs=tune_epochs, server=server)
    return dataclasses.replace(both, name="lgfedavg", personal="body")
