"""The section [compare] of a recipe."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from personafl.algorithms import METHODS
from personafl.options import Strict, checked
from personafl.recipe.method import find_method


class CompareSection(Strict):
    """What `personafl compare` runs: methods × seeds.

    `options.NAME` are a method's own options. `variants.NAME` names a changed recipe: its values replace the recipe's,
    and NAME can stand among the methods.
    """

    methods: tuple[str, ...] = ("fedavg", "local", "finetune", "ditto")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("methods", "seeds")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise ValueError("give at least one")
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice")
        return values

    def check(self) -> None:
        """Fail if a method or one of its options does not exist."""
        for name in self.methods:
            if name not in {*self.variants, *METHODS}:  # else it is there, and imported when it is asked for
                find_method(name, "compare.methods", self.variants)
        for name, options in self.options.items():
            checked(find_method(name, "compare.options"), options, f"compare.options.{name}")
