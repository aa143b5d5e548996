"""FedPer: base layers shared, personalization layers personal, trained together.

M. G. Arivazhagan et al., *Federated Learning with Personalization Layers*, 2019, Algorithms 1 and 2. A network is base
layers W_B, then personalization layers W_P:

    client i:  (W_B, W_P,i) ← (W_B, W_P,i) − η ∇f_i(W_B, W_P,i),   SGD on both at once, W_P,i where it was left
    server:    W_B ← Σ_i p_i W_B,i

This is FedSim (`fedalt.py`: LocalSim) with the last layers personal: the output layer, unless model.personal says
otherwise; the paper tries one to four last layers or blocks.

Deviations: the paper has all clients in every round; W_P,i starts at the start model's personal part, the same for all,
while the paper lets every client draw its own. A newcomer trains W_P with W_B fixed (the paper has no newcomers).
"""

import dataclasses

from personafl.algorithms.averaging import PLAIN_MEAN
from personafl.algorithms.fedalt import fedsim
from personafl.algorithms.training import Count, Rate, Training
from personafl.core.algorithm import Algorithm
from personafl.core.optim import OptimizerSpec


def fedper(
    training: Training, *, tune_lr: Rate | None = None, tune_epochs: Count = 5, server: OptimizerSpec = PLAIN_MEAN
) -> Algorithm:
    """Shared base layers, personal output layer, trained together."""
    both = fedsim(training, tune_lr=tune_lr, tune_epochs=tune_epochs, server=server)
    return dataclasses.replace(both, name="fedper", personal="output")
