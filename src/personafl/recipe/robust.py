"""The section [robust] of a recipe: a server that holds while some of its clients are hostile."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from personafl.options import Positive, Strict
from personafl.robust.clip import RunningMedian

Above = Annotated[float, Field(gt=0)]
RuleName = Literal[
    "mean",
    "median",
    "trimmed-mean",
    "geometric-median",
    "krum",
    "multi-krum",
    "centered-clipping",
    "mda",
    "meamed",
    "caf",
    "smea",
    "bulyan",
]


class RobustSection(Strict):
    """Robust aggregation: one vector from uploads of which some may be hostile."""

    rule: RuleName = "mean"  # in place of the mean of uploads
    f: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=0.5)] = 0  # hostile uploads of a round, or share
    pre: tuple[Literal["nnm", "bucketing", "arc"], ...] = ()  # before the rule, in this order
    clip: Above | RunningMedian | None = None  # the largest norm of an upload, before all else; or how it is found
    most: Annotated[float, Field(gt=0, le=1)] | None = None  # of a round's weight that one upload has, by the mean
    bucket: Positive = 2  # uploads in a bucket
    smoothing: Above = 1e-6  # of the geometric median: the distance from which on nearer is alike
    radius: Above = 1.0  # of centered clipping
    steps: Positive = 8  # of the geometric median and centered clipping

    @property
    def weighs(self) -> bool:
        """Whether uploads may count by their samples."""
        return self.rule == "mean" and not self.pre

    def hostile(self, cohort: int) -> int:
        """Return f for cohorts of a size."""
        return self.f if isinstance(self.f, int) else math.floor(self.f * cohort + 1e-9)


def counted_alike_by_rules(values: Any) -> Any:
    """Return the values of a recipe, with uploads that count alike where its rule has it so and it does not say."""
    section = values.get("robust") if isinstance(values, dict) else None
    if not isinstance(section, dict) or (section.get("rule", "mean") == "mean" and not section.get("pre")):
        return values
    federation = values.get("federation")
    federation = federation if isinstance(federation, dict) else {}
    return {**values, "federation": {"weights": "uniform", **federation}} if "weights" not in federation else values
