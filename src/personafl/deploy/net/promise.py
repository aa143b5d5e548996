"""What a server says that a run's privacy comes to."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Promise(BaseModel):
    """What the rounds of a run tell of any client at most: (ε, δ), and what that rests on."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True)

    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    assumption: Annotated[str, Field(max_length=1000)]
