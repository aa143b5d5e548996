"""The section [secure] of a recipe: of uploads nothing is seen but sums."""

import math
from typing import Annotated, Any

from pydantic import Field

from personafl.errors import BadInput
from personafl.options import Positive, Strict

Share = Annotated[float, Field(ge=0, lt=1)]


class SecureSection(Strict):
    """Secure aggregation: uploads are summed as integers of 32 bits, under masks that only the sum is without."""

    range: Annotated[float, Field(gt=0)] = 1.0  # the largest entry of an upload; what is beyond is cut to it
    dropouts: Share = 0.3  # of a cohort, that may be lost at any stage of a round
    corrupt: Share = 0.1  # of a cohort, that may tell a server all they know
    stage: Annotated[float, Field(gt=0)] = 60.0  # seconds that devices have for each of a round's stages after training
    least: Annotated[int, Positive, Field(ge=2)] = 3  # clients whose sum may be seen, whatever a cohort's size

    def survivors(self, clients: int) -> int:
        """Return the fewest of a cohort whose sum is opened."""
        return max(self.least, clients - math.floor(self.dropouts * clients + 1e-9))

    def corrupted(self, clients: int) -> int:
        """Return how many of a cohort may be corrupt."""
        return math.floor(self.corrupt * clients + 1e-9)

    def honest(self, clients: int) -> int:
        """Return how many of a cohort are in its sum for sure, and tell nobody what they know."""
        return self.survivors(clients) - self.corrupted(clients)


def check_secure(recipe: Any) -> None:
    """Fail if a recipe has secure sums beside something that needs single uploads."""
    if recipe.secure is None:
        return
    needs = {
        "cloud": "several servers have sums of their own devices, and it is for one",
        "buffer": "an upload is discounted by how late it is",
    }
    for key, why in needs.items():
        if getattr(recipe, key) is not None:
            raise BadInput(f"secure: single uploads are not seen, but with [{key}] {why}; remove one of the two")
    if recipe.uplink.form != "dense":
        raise BadInput(
            f'uplink.form: "{recipe.uplink.form}" is smaller because of what an upload has, which [secure] hides; '
            "remove [uplink]"
        )
