"""What stands between a method's client and what it receives and sends: a client rule around another one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from personafl.core.algorithm import ClientRule, Problem
from personafl.core.batches import Data, Steps
from personafl.core.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class AroundClient(ClientRule):
    """Base of client rules around another one: what is not said otherwise is that one's.

    But for `by_gradients`, which a rule with an `update` of its own says itself.
    """

    rule: ClientRule

    @property
    def phases(self) -> Mapping[str, Steps]:
        """As the method."""
        return self.rule.phases

    @property
    def tuning(self) -> Mapping[str, Steps]:
        """As the method."""
        return self.rule.tuning

    @property
    def uploads_of_state(self) -> tuple[str, ...]:  # type: ignore[override]
        """As the method."""
        return self.rule.uploads_of_state

    @property
    def kept_phases(self) -> tuple[str, ...]:  # type: ignore[override]
        """As the method."""
        return self.rule.kept_phases

    @property
    def uploads(self) -> type[Any]:
        """As the method: what is declared to leave the device."""
        return self.rule.uploads

    @property
    def offline(self) -> Callable[[Problem, Any, Data], Tree] | None:
        """As the method."""
        return self.rule.offline

    @property
    def introduce(self) -> Callable[[Problem, Any], Tree] | None:
        """As the method."""
        return self.rule.introduce

    @property
    def packed(self) -> Callable[[Problem, Any, Any], dict[str, tuple[Tree, ...]]] | None:
        """As the method."""
        return self.rule.packed

    def bits_of(self, problem: Problem) -> int | None:
        """As the method."""
        return self.rule.bits_of(problem)

    def expects(self, problem: Problem, start: Params) -> Tree:
        """As the method."""
        return self.rule.expects(problem, start)

    def init(self, problem: Problem, down: Any, generator: torch.Generator) -> Tree:
        """As the method."""
        return self.rule.init(problem, down, generator)

    def update(self, problem: Problem, down: Any, state: Any, data: Data) -> tuple[Tree, Tree]:
        """As the method."""
        return self.rule.update(problem, down, state, data)

    def personalize(self, problem: Problem, down: Any, state: Any, data: Data) -> Tree:
        """As the method."""
        return self.rule.personalize(problem, down, state, data)

    def models(self, problem: Problem, down: Any, state: Any) -> dict[str, Params]:
        """As the method."""
        return self.rule.models(problem, down, state)
