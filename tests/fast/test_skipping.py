"""What holds for no client is not computed, and results are those of the definition to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from personafl.core import tree
from personafl.core.seam import using
from personafl.fast.table import enabled


class Costly:
    """Doubles x, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        self.asked += 1
        return {"x": 2 * x}


def chosen(costly: Costly, condition: Tensor, x: Tensor) -> Tensor:
    return tree.when(condition, lambda: costly(x), {"x": x})["x"]


@pytest.mark.parametrize(("holds", "asked"), [(True, 1), (False, 0)])
def test_a_client_alone_computes_it_only_where_it_holds(holds: bool, asked: int) -> None:
    costly, x = Costly(), torch.tensor([1.0, 3.0])
    with enabled():
        found = chosen(costly, torch.tensor(holds), x)
    assert costly.asked == asked
    assert torch.equal(found, 2 * x if holds else x)


@pytest.mark.parametrize(("holds", "asked"), [([False, True, False], 1), ([False] * 3, 0)])
def test_stacked_clients_compute_it_where_it_holds_for_one(holds: list[bool], asked: int) -> None:
    costly, x = Costly(), torch.arange(6.0).reshape(3, 2)
    with enabled():
        found = vmap(lambda c, row: chosen(costly, c, row))(torch.tensor(holds), x)
    assert costly.asked == asked
    assert torch.equal(found, torch.where(torch.tensor(holds).unsqueeze(1), 2 * x, x))


def test_without_the_table_it_is_always_computed() -> None:
    costly = Costly()
    with using({}):
        chosen(costly, torch.tensor(False), torch.ones(2))
    assert costly.asked == 1


def test_what_cannot_be_looked_at_is_computed() -> None:
    """Under a gradient of torch.func, and on a device that is not waited for."""
    costly = Costly()
    with enabled():
        slope = grad(lambda x: chosen(costly, x.sum() > 100, x).sum())(torch.ones(2))
        nowhere = chosen(costly, torch.tensor(False, device="meta"), torch.ones(2, device="meta"))
    assert costly.asked == 2
    assert torch.equal(slope, torch.ones(2))
    assert nowhere.device.type == "meta"
