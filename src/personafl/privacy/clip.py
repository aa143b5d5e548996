"""How large an upload may be where that is not given."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from personafl.core.schedule import FORBID_UNKNOWN


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A clip that follows a quantile of the uploads' norms."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_UNKNOWN
    start: Annotated[float, Gt(0)] = 0.1
    quantile: Annotated[float, Ge(0), Lt(1)] = 0.5  # γ
    rate: Annotated[float, Gt(0)] = 0.2  # η_C
    noise: Annotated[float, Gt(0)] = 0.05  # σ_b/m
