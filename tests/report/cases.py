"""Recipes of the runs that the tests of the page look at."""

from typing import Any

SMALL: dict[str, Any] = {
    "rounds": 4,
    "data": {
        "source": "digits",
        "validation": 0.2,
        "unseen": 2,
        "partition": {"kind": "dirichlet", "clients": 12, "alpha": 0.5},
    },
    "model": {"name": "mlp", "hidden": [12]},
    "evaluation": {"every": 1},
}
CLOUD = {"data": SMALL["data"] | {"unseen": 0}, "cloud": {"servers": 3, "active": 2}}
