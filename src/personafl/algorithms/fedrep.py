"""FedRep: a shared representation under personal heads; first the head, then the body.

L. Collins et al., *Exploiting Shared Representations for Personalized Federated Learning*, ICML 2021, Algorithm 1. A
network is a representation φ (the body) and a head h_i:

    client i:  h_i ← h_i − η ∇_h f_i(h_i, φ_t),   τ_h steps from the last h_i with the received body φ_t fixed;
               then  φ_i ← φ_i − η ∇_φ f_i(h_i⁺, φ_i),   τ_φ steps from φ_t with the new head h_i⁺ fixed
    server:    φ_{t+1} = mean_S(φ_i)

This is FedAlt (`fedalt.py`: LocalAlt) with the head personal and much more work on it. The head is the output layer,
unless model.personal says otherwise. head_epochs is τ_h: 10, common in the paper's experiments; training.epochs (or
steps) is τ_φ, 1 or 5 there.

Deviations: uploads are weighted as the recipe says, `federation.weights = "uniform"` is the paper's; h_i starts at the
start model's head, the same for all. A newcomer trains its head with φ_T fixed, as the paper's new clients do.
"""

import dataclasses

from personafl.algorithms.averaging import PLAIN_MEAN
from personafl.algorithms.fedalt import fedalt
from personafl.algorithms.training import Count, Rate, Training
from personafl.core.algorithm import Algorithm
from personafl.core.optim import OptimizerSpec


def fedrep(
    training: Training,
    *,
    head_epochs: Count = 10,
    head_lr: Rate | None = None,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 10,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """Personal heads on a shared body: first the head, then the body under the new head."""
    alternating = fedalt(
        training,
        personal_lr=head_lr,
        personal_epochs=head_epochs,
        tune_lr=tune_lr,
        tune_epochs=tune_epochs,
        server=server,
    )
    return dataclasses.replace(alternating, name="fedrep", personal="output")
