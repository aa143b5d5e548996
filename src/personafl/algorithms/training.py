"""How a client trains and how a server steps: the fields that all methods share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from personafl.core.algorithm import ClientRule
from personafl.core.batches import Steps
from personafl.core.optim import LocalOptimizer, Sgd

# Limits of options, which recipes are checked against.
Count = Annotated[int, Ge(1)]
Rate = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Decay = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One client's local work in a round: how much data it sees, and the optimizer, made anew every round."""

    work: Steps = field(default_factory=lambda: Steps(epochs=1))
    optimizer: LocalOptimizer = field(default_factory=Sgd)


@dataclass(frozen=True, kw_only=True)
class OnePassClient(ClientRule):
    """Base of client rules that make one pass of local training a round."""

    training: Training = field(default_factory=Training)

    @property
    def phases(self) -> Mapping[str, Steps]:
        """One pass of local training."""
        return {"local": self.training.work}


@dataclass(frozen=True, kw_only=True)
class TunedClient(ClientRule):
    """Base of client rules that make a newcomer's own model in one pass, and with `finetune` go on with everyone's."""

    tune: Training = field(default_factory=Training)

    @property
    def tuning(self) -> Mapping[str, Steps]:
        """The pass of fine-tuning."""
        return {"tune": self.tune.work}
