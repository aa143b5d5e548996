"""The section [fairness] of a recipe: clients on which the shared model does badly count for more."""

from typing import Annotated

from pydantic import Field

from personafl.options import Strict


class FairnessSection(Strict):
    """q-FedAvg: clients count by their loss to the power of q."""

    q: Annotated[float, Field(ge=0, le=100)] = 1.0  # 0: as without it
