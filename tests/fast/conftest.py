"""All tests here compute in the fast ways, but where they say `plainly`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from personafl.fast.table import enabled


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with enabled():
        yield
