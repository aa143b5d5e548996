"""The section [privacy] of a recipe: what one client more or less may change of what is sent to others."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from personafl.errors import BadInput
from personafl.options import Strict
from personafl.privacy.clip import AdaptiveClip
from personafl.privacy.kinds import CORRELATED, Mechanism

Above = Annotated[float, Field(gt=0)]


class PrivacySection(Strict):
    """Differential privacy of clients: clipped uploads, and noise on their sum."""

    mechanism: Mechanism = "gaussian"
    clip: Above | AdaptiveClip = AdaptiveClip()  # the largest norm of an upload; or how it is found
    noise: Above | None = None  # standard deviation of the sum's noise, in clips; None: as epsilon asks for
    epsilon: Above | None = None  # the most that the whole run may spend; None: whatever the noise comes to
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5

    @model_validator(mode="after")
    def _says_how_much(self) -> "PrivacySection":
        if self.noise is None and self.epsilon is None:
            raise ValueError("give privacy.noise, such as 1.0, or privacy.epsilon, for which the noise is computed")
        if self.mechanism in CORRELATED and isinstance(self.clip, AdaptiveClip):
            raise ValueError(
                f"privacy.clip: {self.mechanism} noise is taken back in later rounds, which must have the same clip; "
                "give a number, such as 0.5"
            )
        if self.mechanism == "distributed" and isinstance(self.clip, AdaptiveClip):
            raise ValueError(
                "privacy.clip: devices clip their updates themselves, and nobody sees norms to move it by; give a "
                "number, such as 0.5"
            )
        return self


def counted_alike(values: Any) -> Any:
    """Return the values of a recipe, with uploads that count alike where it has privacy and does not say."""
    if not (isinstance(values, dict) and values.get("privacy") is not None):
        return values
    federation = values.get("federation")
    federation = federation if isinstance(federation, dict) else {}
    return {**values, "federation": {"weights": "uniform", **federation}} if "weights" not in federation else values


def check_privacy(recipe: Any) -> None:
    """Fail if a recipe has privacy beside something that would break it."""
    if recipe.privacy is not None:
        from personafl.recipe.privacychecks import check_combined  # here, for most devices have none

        check_combined(recipe)


def check_moments(normalize: Any, scale: Any, *, computed: bool, scaled: bool, section: str = "privacy") -> None:
    """Fail if what networks see was standardised by sums over clients' data, which a section does not cover."""
    found: list[tuple[str, Any, bool]] = [("normalize", normalize, computed), ("scale", scale, scaled)]
    for key, given, used in found:
        if used and isinstance(given, str):
            none = 'data.normalize="none", or ' if key == "normalize" else ""
            raise BadInput(
                f"data.{key}: {given!r} adds up what clients have, which [{section}] does not cover; set {none}"
                f"data.{key}={{mean=[…], std=[…]}} to what is known of such data"
            )
