"""The section [engine] of a recipe."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from personafl.options import NonNegative, Positive, Strict


class EngineSection(Strict):
    """How the simulator works; none of it changes results beyond rounding."""

    strategy: Literal["auto", "graphs", "stacked", "sequential"] = "auto"
    device: str = "auto"  # auto: cuda if there is one
    dtype: Literal["float32", "float64", "tf32", "bfloat16"] = "float32"  # of products: tf32 (GPU) and bfloat16
    memory_mb: Positive = 1024  # for clients trained at the same time
    data_mb: Positive | None = None  # for data on a GPU; more are brought there by parts. None: half of what is free
    store_mb: Positive = 1024  # for personal states kept in memory; the others are on disk
    checkpoint_seconds: NonNegative = 10.0  # at most this much work is lost in a crash; 0: every round
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None  # of torch; None: torch decides
    workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = (
        "auto"  # processes that train, on a CPU; auto: one per core if it pays
    )

    @field_validator("device")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", value):
            raise ValueError("input should be auto, cpu, cuda, cuda:1, … or mps")
        return value
