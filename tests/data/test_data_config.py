"""The [data] section and the command line's short form of a partition."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from personafl.data.config import DataConfig, Dirichlet, Users, parse_partition
from personafl.errors import BadInput


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("users", {"kind": "users"}),
        ("users:merge=3", {"kind": "users", "merge": 3}),
        ("dirichlet:alpha=0.1,clients=100", {"kind": "dirichlet", "alpha": 0.1, "clients": 100}),
        ("dirichlet: sizes = natural", {"kind": "dirichlet", "sizes": "natural"}),
        ("classes:clients=50,per_client=4", {"kind": "classes", "clients": 50, "per_client": 4}),
        ("diversity:labels=3,samples=600", {"kind": "diversity", "labels": 3, "samples": 600}),
        ("iid:", {"kind": "iid"}),
        ("quantity:alpha=1", {"kind": "quantity", "alpha": 1.0}),
    ],
)
def test_short_form(text: str, expected: dict[str, Any]) -> None:
    assert parse_partition(text) == expected
    config = DataConfig.model_validate({"partition": parse_partition(text)})
    assert config.partition is not None
    assert config.partition.kind == expected["kind"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dirichlt", "partition 'dirichlt' is unknown: did you mean 'dirichlet'"),
        ("", "partition '' is unknown: valid: classes"),
        ("dirichlet:alhpa=1", "has no key 'alhpa': did you mean 'alpha'"),
        ("iid:kind=users", "has no key 'kind'"),
        ("iid:clients", "'clients' needs a value"),
        ("iid:clients=", "'clients' needs a value"),
        ("iid:clients=many", "clients: Input should be a valid integer"),
        ("iid:clients=0", "clients: Input should be greater than or equal to 1"),
        ("dirichlet:alpha=-1", "alpha: Input should be greater than 0"),
        ("dirichlet:alpha=nan", "alpha: Input should be"),
        ("dirichlet:sizes=odd", "sizes: Input should be 'equal' or 'natural'"),
    ],
)
def test_bad_short_form(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        parse_partition(text)
    assert "\n" not in str(caught.value)


def test_config_is_frozen_and_strict() -> None:
    config = DataConfig.model_validate({"partition": {"kind": "users"}, "test": 0.3, "unseen": 0.1})
    assert isinstance(config.partition, Users)
    with pytest.raises(ValidationError):
        config.source = "other"  # type: ignore[misc]
    for wrong in (
        {"sauce": "digits"},
        {"test": "offical"},
        {"test": 0.0},
        {"test": 1.0},
        {"validation": 1.0},
        {"unseen": -1},
        {"unseen": 1.5},
        {"length": 0},
        {"partition": {"kind": "odd"}},
        {"partition": {"kind": "iid", "alpha": 1}},
    ):
        with pytest.raises(ValidationError):
            DataConfig.model_validate(wrong)


def test_counts_and_shares_of_unseen_keep_their_type() -> None:
    assert isinstance(DataConfig.model_validate({"unseen": 2}).unseen, int)
    assert isinstance(DataConfig.model_validate({"unseen": 0.2}).unseen, float)
    assert DataConfig.model_validate({"unseen": 0.0}).unseen == 0
    assert DataConfig(partition=Dirichlet(alpha=0.1)).model_dump()["partition"]["alpha"] == 0.1
