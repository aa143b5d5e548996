"""FedPer, FedRep, LG-FedAvg, FedBN: FedSim or FedAlt (`fedalt.py`) with certain layers personal.

Which ones they are is each method's default; model.personal may say otherwise. In all of them the personal part starts
at the start model's, the same for all; a newcomer trains its own with the shared part fixed. Uploads are weighted as
the recipe says.

FedPer: M. G. Arivazhagan et al., *Federated Learning with Personalization Layers*, 2019, Algorithms 1 and 2. A network
is base layers W_B, then personalization layers W_P:

    client i:  (W_B, W_P,i) ← (W_B, W_P,i) − η ∇f_i(W_B, W_P,i),   SGD on both at once, W_P,i where it was left
    server:    W_B ← Σ_i p_i W_B,i

LocalSim with the output layer personal; the paper tries one to four last layers or blocks. Deviations: the paper has
all clients in every round, and lets every client draw its own W_P. It has no newcomers.

FedRep: L. Collins et al., *Exploiting Shared Representations for Personalized Federated Learning*, ICML 2021, Algorithm
1. A network is a representation φ (the body) and a head h_i:

    client i:  h_i ← h_i − η ∇_h f_i(h_i, φ_t),   τ_h steps from the last h_i with the received body φ_t fixed;
               then  φ_i ← φ_i − η ∇_φ f_i(h_i⁺, φ_i),   τ_φ steps from φ_t with the new head h_i⁺ fixed
    server:    φ_{t+1} = mean_S(φ_i)

LocalAlt with the output layer personal and much more work on it. head_epochs is τ_h: 10, common in the paper's
experiments; training.epochs (or steps) is τ_φ, 1 or 5 there. `federation.weights = "uniform"` is the paper's. Its new
clients train their heads with φ_T fixed, as newcomers do here.

LG-FedAvg: P. P. Liang et al., *Think Locally, Act Globally: Federated Learning with Local and Global Representations*,
2020, Algorithm 1. The reverse of FedPer: client i has its own representation ℓ_i, and everyone the model g above it.

    client i:  (ℓ_i, g_i) ← (ℓ_i, g_i) − η ∇f_i(ℓ_i, g_i),   SGD on both at once from the last ℓ_i and the received g
    server:    g ← Σ_i p_i g_i

LocalSim with the body personal, everything but the output layer; so little is sent. A recipe's `start` or `pretrain`
makes the common start a trained one, as the paper's experiments have it. Deviations: its auxiliary losses on ℓ_i
(self-supervised, adversarial) are left out; it lets a newcomer vote with all the others' models.

FedBN: X. Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*, ICLR 2021, Alg. 1.

    client i:  w_i ← w_i − η ∇f_i(w_i),   SGD on all layers at once
    server:    per layer, w ← Σ_i p_i w_i unless it is a normalisation layer, which stays where it is

LocalSim with the normalisation layers personal. Deviation: in the paper the running statistics (mean, variance) of
batch normalisation are personal as well as its scale and shift. Here only scale and shift are; statistics follow
model.buffers: each batch's own ("dropped") or fixed ones ("shared"). GroupNorm and LayerNorm, which keep none, are
personal in full.
"""

import dataclasses

from personafl.algorithms.averaging import PLAIN_MEAN
from personafl.algorithms.fedalt import fedalt, fedsim
from personafl.algorithms.training import LIKE_LR, Between, Count, Rate, Training, tunes
from personafl.core.algorithm import Algorithm
from personafl.core.optim import OptimizerSpec


def fedper(
    training: Training, *, tune_lr: Rate | None = None, tune_epochs: Count = 5, server: OptimizerSpec = PLAIN_MEAN
) -> Algorithm:
    """Shared base layers, personal output layer, trained together."""
    both = fedsim(training, personal_lr=training.optimizer.lr, tune_lr=tune_lr, tune_epochs=tune_epochs, server=server)
    return dataclasses.replace(both, name="fedper", personal="output")


@tunes(head_epochs=Between(1, 20), head_lr=LIKE_LR)
def fedrep(
    training: Training,
    *,
    head_epochs: Count = 3,
    head_lr: Rate | None = None,
    tune_lr: Rate | None = None,
    tune_epochs: Count = 10,
    server: OptimizerSpec = PLAIN_MEAN,
) -> Algorithm:
    """Personal heads on a shared body: first the head, then the body under the new head."""
    alternating = fedalt(
        training,
        personal_lr=head_lr or training.optimizer.lr,
        personal_epochs=head_epochs,
        tune_lr=tune_lr,
        tune_epochs=tune_epochs,
        server=server,
    )
    return dataclasses.replace(alternating, name="fedrep", personal="output")


def lgfedavg(
    training: Training, *, tune_lr: Rate | None = None, tune_epochs: Count = 5, server: OptimizerSpec = PLAIN_MEAN
) -> Algorithm:
    """Personal body, shared output layer, trained together."""
    both = fedsim(training, personal_lr=training.optimizer.lr, tune_lr=tune_lr, tune_epochs=tune_epochs, server=server)
    return dataclasses.replace(both, name="lgfedavg", personal="body")


def fedbn(
    training: Training, *, tune_lr: Rate | None = None, tune_epochs: Count = 5, server: OptimizerSpec = PLAIN_MEAN
) -> Algorithm:
    """Personal normalisation layers, the rest shared, trained together."""
    both = fedsim(training, personal_lr=training.optimizer.lr, tune_lr=tune_lr, tune_epochs=tune_epochs, server=server)
    return dataclasses.replace(both, name="fedbn", personal="norms")
