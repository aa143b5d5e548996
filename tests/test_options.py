"""Options of methods and models, and what is said about wrong ones."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from personafl.errors import BadInput
from personafl.options import checked, describe, explain


@dataclass(frozen=True, kw_only=True)
class Slow:
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    kind: Literal["slow"] = "slow"
    rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Fast:
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    kind: Literal["fast", "faster"] = "fast"
    rate: float = 0.5
    boost: int = 2
    inner: Slow = field(default_factory=Slow)


def build(
    positional: int,
    *,
    size: Annotated[int, Field(ge=1)] = 3,
    widths: tuple[int, ...] = (1, 2),
    word: str = "a",
    off: float | None = None,
    on: bool = True,
    pace: Slow | Fast = Fast(boost=5),  # noqa: B008
) -> None:
    pass


def test_describe_writes_defaults_as_a_recipe_would() -> None:
    assert describe(build) == 'size=3, widths=[1, 2], word="a", off, on=true, pace={boost=5}'
    assert describe(lambda: None) == ""

    def needing(*, source: str, rate: float = 0.5) -> None:
        pass

    assert describe(needing) == "source, rate=0.5"


def test_checked_returns_what_was_given_converted() -> None:
    assert checked(build, {}, "here") == {}
    given = {"widths": [4, 5], "pace": {"kind": "faster", "boost": 1}, "off": 1}
    assert checked(build, given, "here") == {"widths": (4, 5), "pace": Fast(kind="faster", boost=1), "off": 1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sise": 1}, "here.sise: unknown key; did you mean 'size'?"),
        ({"nam": 1}, "here.nam: unknown key; did you mean 'name'?"),
        ({"positional": 1}, "here.positional: unknown key; valid: name, off, on, pace, size, widths, word"),
        ({"size": 0}, "here.size: input should be greater than or equal to 1 (given: 0)"),
        ({"size": "x"}, "here.size: input should be a valid integer (given: 'x')"),
        ({"widths": 1}, "here.widths: input should be a list (given: 1)"),
        ({"widths": [1, "x"]}, "here.widths: input should be a valid integer (given: 'x')"),
        ({"pace": 1}, "here.pace: is a section, not a value (given: 1); write here.pace.kind=…"),
        ({"pace": {"boos": 1}}, "here.pace.boos: unknown key; did you mean 'boost'?"),
        ({"pace": {"kind": "fast", "rat": 1}}, "here.pace.rat: unknown key; did you mean 'rate'?"),
        ({"pace": {"kind": "slow", "boost": 1}}, "here.pace.boost: unknown key; valid: kind, rate"),
        ({"pace": {"kind": "slo"}}, "here.pace.kind: input should be 'slow', or 'fast' or 'faster' (given: 'slo')"),
        ({"pace": {"inner": {"rte": 1}}}, "here.pace.inner.rte: unknown key; did you mean 'rate'?"),
    ],
)
def test_what_is_wrong_in_one_line(given: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput) as error:
        checked(build, given, "here", beside=["name"])
    assert str(error.value) == message


class Tagged(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pace: Annotated[Slow | Fast, Field(discriminator="kind")] = Slow()
    count: int | Literal["all"] = 1
    named: dict[str, Slow] = Field(default_factory=dict)
    many: list[Slow] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pace": {"kind": "fat"}}, "pace.kind: no 'fat'; did you mean 'fast' or 'faster'?"),
        ({"pace": {"rate": 1}}, "pace: 'kind' is missing; valid: fast, faster, slow"),
        ({"pace": {"kind": "faster", "rte": 1}}, "pace.rte: unknown key; did you mean 'rate'?"),
        ({"pace": {"kind": "faster", "rate": "x"}}, "pace.rate: input should be a valid number (given: 'x')"),
        ({"count": "al"}, "count: input should be a valid integer, or 'all' (given: 'al')"),
        ({"named": {"own": {"rte": 1}}}, "named.own.rte: unknown key; did you mean 'rate'?"),
        ({"many": [{"rte": 1}]}, "many[0].rte: unknown key; did you mean 'rate'?"),
        ({"cont": 1}, "cont: unknown key; did you mean 'count'?"),
    ],
)
def test_places_are_keys_without_tags_and_class_names(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        Tagged.model_validate(given)
    assert str(explain(error.value, "", Tagged)) == message
