"""FedProx: FedAvg whose clients are held to the shared model.

T. Li et al., *Federated Optimization in Heterogeneous Networks*, MLSys 2020, Algorithm 2.

    client i:  w_i ≈ argmin_w f_i(w) + (μ/2)‖w − w_t‖²,   by τ steps of SGD from w_t
    server:    w_{t+1} = Σ_i p_i w_i

Deviation: the paper samples clients with probability p_k and takes the plain mean; here cohorts are uniform and the
mean is weighted, as for every method.
"""

from personafl.algorithms.averaging import PLAIN_MEAN, Averaging
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.training import Between, NonNegative, Training, tunes
from personafl.core.algorithm import Algorithm
from personafl.core.optim import OptimizerSpec


@tunes(proximal=Between(0.001, 1.0))
def fedprox(training: Training, *, proximal: NonNegative = 0.1, server: OptimizerSpec = PLAIN_MEAN) -> Algorithm:
    """FedAvg with a proximal term that holds local training to the shared model."""
    client = FedAvgClient(training=training, proximal=proximal)
    return Algorithm("fedprox", client, Averaging(optimizer=server))
