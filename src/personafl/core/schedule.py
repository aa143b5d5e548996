"""Learning-rate factors over rounds. Each is a function of the round alone, so a resumed run needs no state.

Factors are float64 whatever the round's dtype, so that a rate is never rounded to less than the weights' precision.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

# Limits of options, which recipes are checked against.
Count = Annotated[int, Ge(1)]
Rate = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Decay = Annotated[float, Ge(0), Lt(1)]
FORBID_UNKNOWN = {"extra": "forbid"}  # a recipe that misspells a field must fail, not lose it


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Factor 1."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    kind: Literal["constant"] = "constant"

    def __call__(self, round_: Tensor) -> Tensor:
        """Return the factor of a round."""
        return torch.ones_like(round_, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Exponential:
    """Factor rate^t."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    kind: Literal["exponential"] = "exponential"
    rate: Rate = 0.99

    def __call__(self, round_: Tensor) -> Tensor:
        """Return the factor of a round."""
        return self.rate ** round_.to(torch.float64)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Factor multiplied by `factor` after every `every` rounds."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    kind: Literal["step"] = "step"
    every: Count = 10
    factor: Rate = 0.5

    def __call__(self, round_: Tensor) -> Tensor:
        """Return the factor of a round."""
        return self.factor ** torch.floor(round_.to(torch.float64) / self.every)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Linear from 0 to 1 over the first `warmup` share of the rounds, then linear to 0 at the end.

    Round t (from 0) of T: (t+1)/(warmup·T) while that is below 1, else (T−t)/(T−warmup·T), at most 1.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    kind: Literal["linear"] = "linear"
    rounds: Annotated[int, Ge(0)]
    warmup: Annotated[float, Ge(0), Le(1)] = 0.1

    def __call__(self, round_: Tensor) -> Tensor:
        """Return the factor of a round."""
        round_, peak = round_.to(torch.float64), self.warmup * self.rounds
        up = (round_ + 1) / max(peak, 1e-9)
        down = (self.rounds - round_) / max(self.rounds - peak, 1e-9)
        return torch.minimum(up, down).clamp(0.0, 1.0)


Schedule = Constant | Exponential | Step | Linear
