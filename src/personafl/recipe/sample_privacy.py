"""The section [sample_privacy] of a recipe: what one sample of a client more or less may change of what it makes."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from personafl.errors import BadInput
from personafl.options import Strict

Above = Annotated[float, Field(gt=0)]
SampleSampling = Literal["poisson", "epochs"]


class SamplePrivacySection(Strict):
    """Differential privacy of samples inside their clients: clipped gradients of samples, and noise in every step."""

    clip: Above = 1.0  # the largest norm of a sample's gradient
    noise: Above | None = None  # standard deviation of the sum's noise, in clips; None: each client's as epsilon asks
    epsilon: Above | None = None  # the most that a client may spend in the whole run; None: what the noise comes to
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    sampling: SampleSampling = "poisson"  # each sample by a coin of its own; epochs: shuffled, nothing is claimed
    personal: bool = True  # whether what a client keeps is covered too; else only what it sends

    @model_validator(mode="after")
    def _says_how_much(self) -> "SamplePrivacySection":
        if self.noise is None and self.epsilon is None:
            raise ValueError(
                "give sample_privacy.noise, such as 1.0, or sample_privacy.epsilon, for which noise is computed"
            )
        return self


def check_sample_privacy(recipe: Any) -> None:
    """Fail if a recipe has privacy of samples beside something that would break it."""
    if recipe.sample_privacy is None:
        return
    for key in ("cloud", "buffer"):
        if getattr(recipe, key) is not None:
            raise BadInput(f"sample_privacy: is for one server that waits for its cohort; remove [{key}]")
    if recipe.deploy is not None and recipe.sample_privacy.noise is None:
        raise BadInput(
            "sample_privacy.noise: on real devices it is a number, which they read in the recipe; set it to what "
            "personafl privacy computes for an epsilon, or remove [deploy]"
        )
    if recipe.federation.offline:
        raise BadInput("federation.offline: training without contact is not in the ledgers of [sample_privacy]; set 0")
    if recipe.training.class_weights == "balanced":
        raise BadInput(
            "training.class_weights: counts of classes are not covered by [sample_privacy]; give a number for each "
            "class, or leave it out"
        )
    if recipe.pretrain.rounds:
        raise BadInput(
            "pretrain.rounds: what a model was trained on before is not covered by [sample_privacy]; set "
            "pretrain.rounds=0, or start from a model that was trained on other data"
        )
