"""Which cases of a test belong to which tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrized test, of which all but the quick ones are for `make test-system`."""
    given = list(cases)
    assert set(quick) <= set(given), "a quick case is none of the cases"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id="-".join(map(str, case)) if isinstance(case, tuple) else str(case),
            marks=() if case in quick else pytest.mark.system,
        )
        for case in given
    ]
