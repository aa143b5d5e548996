"""Two structured splits of FedAlt/FedSim (K. Pillutla et al. 2022, Figures 1c and 2b), for feature vectors and images.

- additive: a shared and a personal head over one shared body, their predictions mixed or added;
- split_input: some features go through a personal embedding, the others through a shared one.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl.models.zoo import Size

Form = Literal["mixture", "sum"]


class PersonalHead(nn.Linear):
    """A linear head; of a mixture also t, with θ = σ(t) the weight of the shared head, ½ at the start."""

    mixture: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, mixed: bool) -> None:
        super().__init__(inputs, outputs)
        self.register_parameter("mixture", nn.Parameter(torch.zeros(())) if mixed else None)


class Additive(nn.Module):
    """A shared and a personal head over shared hidden layers, mixed by a learned weight or (form="sum") added.

    h(u, x) and hᵢ(vᵢ, x): features of a shared body go to a shared and a personal linear head.
    mixture: log(θ·softmax(shared) + (1 − θ)·softmax(personal)), normalised, so that its cross-entropy is the mixture's;
    sum: shared + personal, where the personal head fits the residual of the shared one (regression).
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, hidden: tuple[Size, ...] = (64,), form: Form = "mixture"
    ) -> None:
        super().__init__()
        widths = [prod(input_shape), *hidden]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.shared = nn.Linear(widths[-1], classes)
        self.personal = PersonalHead(widths[-1], classes, mixed=form == "mixture")
        self.parts = {"personal": ("personal.*",), "output": ("personal.*",)}

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, …] to log-probabilities, or sums of both heads, [batch, outputs]."""
        features = self.body(x)
        shared, personal = self.shared(features), self.personal(features)
        t = self.personal.mixture
        if t is None:
            total: Tensor = shared + personal
            return total
        return torch.logaddexp(
            functional.logsigmoid(t) + shared.log_softmax(-1), functional.logsigmoid(-t) + personal.log_softmax(-1)
        )


class SplitInput(nn.Module):
    """Personal embedding of the last `private` features beside a shared one of the others, then a shared head.

    scores = head(relu([W x_shared, Vᵢ x_private])) with x_private the last features of x.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, *, private: Size = 1, width: Size = 64, private_width: Size = 8
    ) -> None:
        super().__init__()
        inputs = prod(input_shape)
        if private >= inputs:
            raise ValueError(f"private = {private} leaves nothing shared of {inputs} features; lower it")
        self.at = inputs - private
        self.shared, self.personal = nn.Linear(self.at, width), nn.Linear(private, private_width)
        self.output = nn.Linear(width + private_width, classes)
        self.parts = {"personal": ("personal.*",), "input": ("personal.*",)}

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, …] to scores [batch, classes]."""
        flat = x.flatten(1)
        both = torch.cat([self.shared(flat[:, : self.at]), self.personal(flat[:, self.at :])], 1)
        scores: Tensor = self.output(functional.relu(both))
        return scores
