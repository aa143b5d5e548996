"""Which parameters are personal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from personafl.core.split import Split, listed
from personafl.errors import BadInput

NAMES = ["body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("patterns", "personal"),
    [
        (("head.*",), ["head.weight", "head.bias"]),
        (("*.bias",), ["body.0.bias", "head.bias"]),
        (("body.0.*", "head.bias"), ["body.0.weight", "body.0.bias", "head.bias"]),
        (("HEAD.*",), []),
        ((r"re:body\.\d\.weight",), ["body.0.weight", "body.1.weight"]),
        (("re:body", "re:.*bias"), ["body.0.bias", "head.bias"]),
        ((), []),
    ],
)
def test_divide_by_patterns(patterns: tuple[str, ...], personal: list[str]) -> None:
    """Personal are the names that match a glob, case included; the rest is shared; both keep the order."""
    params = {name: torch.tensor(float(i)) for i, name in enumerate(NAMES)}
    shared, own = Split(patterns).divide(params)
    assert list(own) == personal
    assert list(shared) == [name for name in NAMES if name not in personal]


@settings(max_examples=40, deadline=None)
@given(st.sets(st.sampled_from([*NAMES, "*", "*.weight", "body.*", "?ead.*", "nothing"])))
def test_divide_is_a_partition(patterns: set[str]) -> None:
    """shared ∪ personal is everything, each name in exactly one, and is_personal says which."""
    params = {name: torch.tensor(float(i)) for i, name in enumerate(NAMES)}
    split = Split(tuple(sorted(patterns)))
    shared, own = split.divide(params)
    assert not shared.keys() & own.keys()
    assert shared | own == params
    assert all(split.is_personal(name) for name in own)
    assert not any(split.is_personal(name) for name in shared)


def test_check_refuses_what_matches_nothing_or_everything() -> None:
    """A pattern without a match is a typo; a split without a shared part is local training."""
    Split(("head.*",)).check(NAMES)
    Split(()).check(NAMES)
    with pytest.raises(BadInput, match=r"pattern 'haed\.\*' matches no parameter; there are: body\.0\.weight"):
        Split(("head.*", "haed.*")).check(NAMES)
    with pytest.raises(BadInput, match="makes every parameter personal"):
        Split(("body.*", "head.*")).check(NAMES)


def test_a_regular_expression_is_checked_when_the_split_is_made() -> None:
    with pytest.raises(BadInput, match=r"personal: 're:\(head' is no regular expression: missing \)"):
        Split(("re:(head",))


def test_many_names_are_shortened() -> None:
    names = [f"layers.{i}.weight" for i in range(40)]
    message = r"there are: layers\.0\.weight, .*layers\.5\.weight, …, layers\.36.*layers\.39\.weight \(40 in all\)$"
    with pytest.raises(BadInput, match=message):
        Split(("head",)).check(names)
    with pytest.raises(BadInput, match=r"makes every parameter personal; .*layers\.0\.weight, "):
        Split(("*",)).check(names)
    assert listed(names[:12]) == ", ".join(names[:12])
