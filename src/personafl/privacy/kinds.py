"""Names of noise, for those who need not know what it costs (`privacy.mechanisms`): devices among them."""

from typing import Literal

Mechanism = Literal["gaussian", "discrete", "tree", "banded", "distributed"]
MECHANISMS: tuple[Mechanism, ...] = ("gaussian", "discrete", "tree", "banded", "distributed")
CORRELATED = ("tree", "banded")
EXCESS = 2.0**-40  # what a round of distributed noise is off from one Gaussian, τd, at most (`privacy.distributed`)
