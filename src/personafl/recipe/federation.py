"""The section [federation] of a recipe."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from personafl.core.algorithm import Algorithm
from personafl.errors import BadInput
from personafl.options import Strict


class FederationSection(Strict):
    """Who takes part in a round, and how uploads are weighted."""

    cohort: int | float = 1.0  # clients per round: a count, or a share of the seen clients
    sampling: Literal["exact", "bernoulli", "cyclic"] = "exact"
    apart: Annotated[int, Field(ge=1)] | None = None  # of cyclic: rounds from a client's turn to its next, at least
    weights: Literal["examples", "uniform"] = "examples"
    offline: int | float = 0  # others that train without contact in a round: a count, or a share of the seen clients

    @model_validator(mode="after")
    def _turns(self) -> "FederationSection":
        if self.apart is not None and self.sampling != "cyclic":
            raise ValueError(
                'federation.apart: only clients who take turns are apart; set federation.sampling="cyclic"'
            )
        return self

    @field_validator("offline")
    @classmethod
    def _none_or_some(cls, value: int | float) -> int | float:
        if not 0 <= value <= (1 if isinstance(value, float) else value):
            raise ValueError("give a count, a share up to 1.0, or 0 for nobody")
        return value

    @field_validator("cohort")
    @classmethod
    def _count_or_share(cls, value: int | float) -> int | float:
        if not (value >= 1 if isinstance(value, int) else 0 < value <= 1):
            raise ValueError("give a count of at least 1, or a share above 0 and up to 1.0")
        return value

    def size(self, clients: int) -> int:
        """Return the cohort's size for a population."""
        for key in ("cohort", "offline"):
            value = getattr(self, key)
            if isinstance(value, int) and value > clients:
                raise BadInput(
                    f"federation.{key}: {value} clients a round, but only {clients} take part in training; "
                    "lower it, or give a share such as 0.5"
                )
        return self.cohort if isinstance(self.cohort, int) else max(1, round(self.cohort * clients))

    def apart_in(self, clients: int) -> int:
        """Return after how many rounds a client of a population comes back, at the earliest; fail if that is sooner."""
        possible = clients // self.size(clients)
        if self.apart is not None and self.apart > possible:
            raise BadInput(
                f"federation.apart: {clients} clients in cohorts of {self.size(clients)} come back after {possible} "
                f"round{'s' * (possible > 1)}; set it to {possible}, or lower federation.cohort"
            )
        return self.apart or possible

    def check_offline(self, algorithm: Algorithm) -> None:
        """Fail if clients are to train without contact under a method that does not say how."""
        if self.offline and algorithm.client.offline is None:
            raise BadInput(
                f"federation.offline: {algorithm.name}'s clients train only in contact; remove it (given: "
                f"{self.offline}), or in a comparison leave it to others: compare.variants.NAME.federation.offline"
            )
