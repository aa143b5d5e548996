"""QuPeL: quantized personal models that are held to the shared one by a quadratic pull.

K. Ozkara et al., *QuPeL: Quantized Personalization with Applications to Federated Learning*, 2021. A baseline of QuPeD,
whose distillation it has not: all models have one architecture, and

    F_i(x, c, w) = f_i(x) + f_i(Q̃_c(x)) + (λ_p/2)‖x − w‖² + λ_t·R(x, c)

    client i, from w_i = w_t, for each minibatch:
        x, c as in QuPeD
        w_i ← w_i − η₃λ_p(w_i − x)    at the new x
    server:  w_{t+1} = mean of the new w_i

η₃ (`shared_lr`) is constant, as in pFedMe, whose step on w this is: plain, without decay, momentum or schedule. λ_p and
η₃ are those of QuPeD's comparison.
"""

import dataclasses

from personafl.algorithms.quped import Bits, Growth, Unit, quped
from personafl.algorithms.training import Between, Count, NonNegative, Rate, Training, tunes
from personafl.core.algorithm import Algorithm
from personafl.core.optim import Sgd


@tunes(proximity=Between(0.02, 2.0), penalty=Between(1e-7, 1e-3))
def qupel(
    training: Training,
    *,
    bits: Bits | None = None,
    proximity: Rate = 0.2,
    penalty: NonNegative = 1e-6,
    penalty_unit: Unit = "rounds",
    growth: Growth = 1.0,
    shared_lr: Rate = 0.5,
    freeze_after: Count | None = None,
    tune_epochs: Count = 5,
) -> Algorithm:
    """Quantized personal models held to the shared one by a quadratic pull."""
    alike = quped(
        training,
        bits=bits,
        penalty=penalty,
        penalty_unit=penalty_unit,
        growth=growth,
        freeze_after=freeze_after,
        tune_epochs=tune_epochs,
    )
    client = dataclasses.replace(
        alike.client,  # type: ignore[type-var]
        coupling="proximity",
        distillation=proximity,
        shared=Sgd(lr=shared_lr),
    )
    return Algorithm("qupel", client, alike.server, uses_bits=True)
