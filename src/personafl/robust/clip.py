"""How long an upload may be where that is not given."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from personafl.core.schedule import FORBID_UNKNOWN


@dataclass(frozen=True, kw_only=True)
class RunningMedian:
    """A clip that is so many times the median, over the last rounds, of each round's median norm."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    times: Annotated[float, Gt(0)] = 1.0
    rounds: Annotated[int, Ge(1)] = 10

    def blank(self) -> Tensor:
        """Return the medians before the first round, [rounds]; what there is not yet is −1."""
        return torch.full((self.rounds,), -1.0, dtype=torch.float64)

    def moved(self, medians: Tensor, norms: Tensor) -> tuple[float, Tensor]:
        """Return the clip of a round, given its norms, and the medians with its own as the last."""
        medians = torch.cat([medians[1:].cpu(), norms.cpu().quantile(0.5)[None]])
        return self.times * float(medians[medians >= 0].quantile(0.5)), medians
