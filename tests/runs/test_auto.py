"""The network that "auto" stands for, and every method with it: two rounds on a few samples of each kind of data."""

import functools
from itertools import product
from pathlib import Path

import pytest
import torch

from models.cases import data_of
from personafl.algorithms import METHODS
from personafl.core import tree
from personafl.core.net import Net
from personafl.core.split import Split
from personafl.models import make_net_and_split
from personafl.models.network import SharedNetwork
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from tiers import HEART, tiered

LABELS = torch.arange(12) % 3


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(12, *shape, generator=torch.Generator().manual_seed(0))


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 3, (12, *shape), generator=torch.Generator().manual_seed(0))


KINDS = {
    "images": data_of(_values(1, 4, 4), LABELS, clients=2),
    "series": data_of(_values(2, 4), LABELS, clients=2),
    "table": data_of(_values(5), LABELS, clients=2),
    "labelled text": data_of(_tokens(6), LABELS, vocabulary=3, clients=2),
    "text": data_of(_tokens(6), _tokens(6), vocabulary=3, clients=2),
}


def _net(kind: str, network: SharedNetwork, *_: object) -> tuple[Net, Split | None]:
    """Make each network once: the same for every method with the same personal part."""
    return _made(kind, network.model_dump_json())


@functools.cache
def _made(kind: str, network: str) -> tuple[Net, Split | None]:
    return make_net_and_split(SharedNetwork.model_validate_json(network), KINDS[kind])


@pytest.mark.parametrize(
    ("method", "kind"),
    tiered(product(METHODS, KINDS), {*product(HEART - {"scaffold"}, KINDS), *product(METHODS, ["table"])}),
)
def test_every_method_takes_the_network_for_every_kind_of_data(method: str, kind: str, tmp_path: Path) -> None:
    given = {
        "rounds": 2,
        "method": {"name": method},
        "training": {"batch": 6},
        "engine": {"workers": 1, "strategy": "sequential", "device": "cpu"},
    }
    federation = prepare(Recipe.parse(given), data=KINDS[kind], make=functools.partial(_net, kind)).federation
    simulation = Simulation(federation, Store(tmp_path / "states", 2**30))
    for number in range(2):
        simulation.step(number)
    leaves = [*tree.leaves(simulation.server)]
    for client in range(2):
        leaves += simulation.store.get(client).values() if client in simulation.store else []
    assert leaves
    assert all(leaf.isfinite().all() for leaf in leaves)
