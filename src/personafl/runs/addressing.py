"""What a method whose server sends each client its own cannot be combined with: refused by name before any work.

Such a server keeps something of each client and joins uploads by whose they are. So it is one server that hears all of
a round and looks at each upload, and nothing stands between.
"""

from personafl.core.algorithm import Algorithm
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe
from personafl.recipe.robust import RobustSection

_WHY = {
    "cloud": "another server would not know them",
    "buffer": "a late upload was trained from a message that is no longer known",
    "privacy": "noise in a mean hides no client from what it is sent itself",
    "secure": "sums do not show whose uploads they are of",
    "robust": "a rule in place of the mean does not say whose uploads it took",
    "fairness": "other weights in a mean are not what it makes of uploads",
}


def check_addressed(recipe: Recipe, algorithm: Algorithm) -> None:
    """Fail if a recipe has what does not go with a method whose server sends each client its own."""
    if algorithm.server.address is None:
        return
    for key, why in _WHY.items():
        section = getattr(recipe, key)
        if section is not None and section != RobustSection():
            raise BadInput(
                f"{key}: {algorithm.name}'s server sends each client a message of its own, made of what it knows of "
                f"the client, and {why}; remove [{key}], or choose a method with one message for all"
            )


def check_one_for_all(algorithm: Algorithm, who: str) -> None:
    """Fail if whoever sends all clients the same is asked to run such a method."""
    if algorithm.server.address is not None:
        raise BadInput(
            f"method.name: {algorithm.name}'s server sends each client a message of its own, and {who} sends all the "
            "same; choose another method, or use personafl run or personafl server"
        )
