"""How a client trains and how a server steps: the fields that all methods share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from personafl.core.algorithm import ClientRule, Empty, Problem
from personafl.core.batches import Steps
from personafl.core.optim import LocalOptimizer, Sgd
from personafl.core.schedule import Count as Count
from personafl.core.schedule import Decay as Decay
from personafl.core.schedule import NonNegative as NonNegative
from personafl.core.schedule import Rate as Rate
from personafl.core.tree import Params

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Between:
    """Values of an option that are worth trying, drawn evenly or on a log scale; whole numbers if both ends are."""

    low: int | float
    high: int | float
    log: bool = True
    of_lr: float | None = None  # the ends are multiples of the training's learning rate; so many of it are the default


LIKE_LR = Between(0.03, 3.0, of_lr=1.0)  # above, most trials diverge


def tunes(**ranges: Between) -> Callable[[T], T]:
    """Declare which options of a method `compare --tune` tunes, beside the training's learning rate."""

    def declare(build: T) -> T:
        build.__dict__["tunes"] = ranges
        return build

    return declare


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

    def models(self, problem: Problem, down: Any, state: Any) -> dict[str, Params]:
        """Return the shared model and, where the state has one, the client's own."""
        own = {} if isinstance(state, Empty) else {"personal": state.model}
        return {"global": down.model, **own}
