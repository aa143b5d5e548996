"""Federated Mutual Learning: a shared and a personal model, of whatever architecture, that teach each other.

T. Shen et al., *Federated Mutual Learning*, 2020. A baseline of QuPeD, of which it is the full-precision form but for
the step on w, which also learns from labels and has x as its teacher:

    client i, from w_i = w_t, for each minibatch:
        x   ← x − η₁ ∇_x[(1−λ_p) f_i(x) + λ_p KL(w_i ‖ x)]
        w_i ← w_i − η₃ ∇_w[(1−λ_p) f_i(w) + λ_p KL(x ‖ w)]    at the new x
    server:  w_{t+1} = mean of the new w_i

The paper weighs the labels by α in the one and by β in the other; here both are 1 − λ_p (`distillation`), as QuPeD's
comparison has them "similar to our use of λ_p". Both models learn from labels, and both steps have the training's
weight decay and schedule.
"""

import dataclasses

from personafl.algorithms.quped import Share, quped
from personafl.algorithms.training import Between, Count, Rate, Training, tunes
from personafl.core.algorithm import Algorithm


@tunes(distillation=Between(0.05, 0.95, log=False))
def fml(
    training: Training, *, distillation: Share = 0.5, shared_lr: Rate | None = None, tune_epochs: Count = 5
) -> Algorithm:
    """A shared and a personal model, of whatever architecture, that teach each other."""
    lr, decay = shared_lr or training.optimizer.lr, training.optimizer.weight_decay
    alike = quped(training, distillation=distillation, shared_lr=lr, shared_decay=decay, tune_epochs=tune_epochs)
    client = dataclasses.replace(alike.client, coupling="mutual")  # type: ignore[type-var]
    return Algorithm("fml", client, alike.server, own_networks=True)
