"""What stands between uploads and a method's server: a server rule around another one, which knows nothing of it."""

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from personafl.core.algorithm import Algorithm, Problem, Reduced, ServerRule
from personafl.core.tree import Params, Tree
from personafl.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class AroundServer(ServerRule):
    """Base of server rules around another one: what is not said otherwise is that one's.

    Whoever derives from it says what becomes of uploads, in `join`, and what the other is given for their mean; if it
    keeps more than the method's own state, also which part that is.
    """

    needs_each: ClassVar[bool] = True
    rule: ServerRule

    def init(self, problem: Problem, start: Params, population: float) -> Tree:
        """Start as the method does."""
        return self.rule.init(problem, start, population)

    def own(self, state: Any) -> Tree:
        """Return the method's own state."""
        found: Tree = state
        return found

    def broadcast(self, state: Any) -> Tree:
        """Send what the method sends."""
        return self.rule.broadcast(self.own(state))

    def update(self, state: Any, uploads: Reduced, round_: int) -> Tree:
        """Step as the method does."""
        return self.rule.update(state, uploads, round_)

    def weigh(self, problem: Problem, weights: NDArray[Any]) -> NDArray[Any]:
        """Weigh as the method does."""
        return self.rule.weigh(problem, weights)

    def told(self, state: Any) -> dict[str, float]:
        """Tell what the method tells."""
        return self.rule.told(self.own(state))


def sends_losses_alone(algorithm: Algorithm) -> bool:
    """Say whether clients send nothing that a server could do anything with."""
    return bool(algorithm.client.uploads._fields == ("loss",))


def weighs_as_told(algorithm: Algorithm) -> bool:
    """Say whether a method's uploads count as the recipe says."""
    return type(algorithm.server).weigh is ServerRule.weigh


def uses_mean_alone(algorithm: Algorithm) -> bool:
    """Say whether the mean of changes, weighed as the recipe says, is all that a method's server uses of uploads."""
    return algorithm.server.averages and not algorithm.server.needs_each and weighs_as_told(algorithm)


def refusal(algorithm: Algorithm, section: str, because: str) -> BadInput:
    """Return the error that a section of a recipe does not go with a method, which sends more than changes."""
    return BadInput(
        f"{section}: what {algorithm.name}'s clients send is more than changes whose mean is all that is used, and "
        f"{because}; leave it out, or remove [{section}]"
    )
