"""FedAvgM, FedAdam, FedYogi, FedAdagrad: FedAvg's clients, an optimizer at the server.

S. Reddi et al., *Adaptive Federated Optimization*, ICLR 2021, Algorithm 2; FedAvgM: T.-M. H. Hsu et al., *Measuring the
Effects of Non-Identical Data Distribution for Federated Visual Classification*, 2019.

    Δ = Σ_i p_i (w_i − w_t),  m ← β₁m + (1−β₁)Δ,  w_{t+1} = w_t + η·m/(√v + ε)
    FedAdagrad  v ← v + Δ²
    FedYogi     v ← v − (1−β₂)·Δ²·sign(v − Δ²)
    FedAdam     v ← β₂v + (1−β₂)Δ²
    FedAvgM     w_{t+1} = w_t + η·b,  b ← β·b + Δ

Deviation: FedAdam corrects the bias of m and v, as Adam does and as it is commonly run; v starts at 0 there, at ε² in
the other two.
"""

from personafl.algorithms.averaging import Averaging
from personafl.algorithms.fedavg import FedAvgClient
from personafl.algorithms.training import Between, Decay, Rate, Training, tunes
from personafl.core.algorithm import Algorithm
from personafl.core.optim import Adaptive, OptimizerSpec, Sgd


def _with_server(name: str, training: Training, optimizer: OptimizerSpec) -> Algorithm:
    return Algorithm(name, FedAvgClient(training=training), Averaging(optimizer=optimizer))


@tunes(server_lr=Between(0.1, 3.0))
def fedavgm(training: Training, *, server_lr: Rate = 1.0, server_momentum: Decay = 0.9) -> Algorithm:
    """FedAvg with momentum at the server."""
    return _with_server("fedavgm", training, Sgd(lr=server_lr, momentum=server_momentum))


@tunes(server_lr=Between(0.001, 0.3))
def fedadam(
    training: Training, *, server_lr: Rate = 0.01, b1: Decay = 0.9, b2: Decay = 0.999, eps: Rate = 1e-8
) -> Algorithm:
    """FedAvg with Adam at the server."""
    return _with_server("fedadam", training, Adaptive(optimizer="adam", lr=server_lr, b1=b1, b2=b2, eps=eps))


@tunes(server_lr=Between(0.001, 0.3))
def fedyogi(
    training: Training, *, server_lr: Rate = 0.01, b1: Decay = 0.9, b2: Decay = 0.99, eps: Rate = 1e-3
) -> Algorithm:
    """FedAvg with Yogi at the server."""
    return _with_server("fedyogi", training, Adaptive(optimizer="yogi", lr=server_lr, b1=b1, b2=b2, eps=eps))


@tunes(server_lr=Between(0.001, 0.3))
def fedadagrad(training: Training, *, server_lr: Rate = 0.01, b1: Decay = 0.0, eps: Rate = 1e-3) -> Algorithm:
    """FedAvg with Adagrad at the server."""
    return _with_server("fedadagrad", training, Adaptive(optimizer="adagrad", lr=server_lr, b1=b1, eps=eps))
