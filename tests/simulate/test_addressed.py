"""Each client is sent its own, whoever trains it and with whom: by a method whose messages can be followed by hand."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from addressed import numbered
from personafl import api
from personafl.algorithms import METHODS
from personafl.core import wire
from personafl.errors import BadInput
from personafl.runs.scoring import score, tune
from personafl.simulate.cohort import draw_cohort
from personafl.simulate.ray.driver import RayWorkers
from personafl.simulate.simulator import Simulation
from personafl.simulate.workers.local import LocalWorkers, done_by
from personafl.storage.store import Store
from personafl.testing import check_algorithm, make_case
from simulate.inline_ray import RAY

ROUNDS, COHORT, SEEN = 4, 2, np.array([0, 1, 2, 4])  # client 3 never takes part


def test_the_method_is_lawful() -> None:
    check_algorithm(numbered())


def simulated(path: Path, **how: Any) -> Simulation:
    fed = make_case(numbered()).federation(how.pop("strategy", "stacked"), how.pop("chunk", 8))
    data = dataclasses.replace(fed.data, seen=SEEN, unseen=np.array([3]))
    made = Simulation(dataclasses.replace(fed, data=data, cohort=COHORT, **how), Store(path, 2**30))
    for number in range(ROUNDS):
        done = made.step(number)
        message = wire.size(made.broadcast())
        assert done.bytes_down <= COHORT * message
    return made


@pytest.mark.parametrize(
    "how", [{}, {"strategy": "sequential"}, {"chunk": 1}, {"workers": 2}, {"nodes": True}], ids=str
)
def test_in_every_way_of_training(how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers begin with their own number + 100, and all add up their own numbers; each upload is known by whose."""
    how = dict(how)
    if how.pop("nodes", False):
        monkeypatch.setitem(sys.modules, "ray", RAY)
        make: Callable[..., Any] = RayWorkers
        how["workers"] = 2
    else:
        make = LocalWorkers
    with done_by(make):
        made = simulated(tmp_path, **how)
        times = np.bincount(
            np.concatenate([draw_cohort(SEEN, COHORT, "exact", 1, number) for number in range(ROUNDS)]), minlength=20
        )
        assert 0 < (times > 0).sum() < len(SEEN)  # someone was never drawn
        assert made.server.times.tolist() == times.tolist()
        for client in range(5):
            assert (client in made.store) == (times[client] > 0)
            if times[client]:
                kept = made.store.get(client)
                assert kept["begun"].item() == client + 100
                assert kept["heard"].item() == client * times[client]
        tuned = Store(tmp_path / "tuned", 2**30)
        tune(made, tuned, np.arange(5), ROUNDS)
        for client in range(5):
            kept = tuned.get(client)
            told = client if client in SEEN else -1  # who may not take part is nobody in particular
            assert kept["heard"].item() == client * times[client] + 1000 * told
            begun = client + 100 if client in SEEN else -2
            assert kept["begun"].item() == begun
        scored = score(made, tuned, np.arange(5), {"test": made.federation.data.test}, blends=False)
        assert np.isfinite(scored.scores["personal", "test"].accuracy).all()
        made.workers.close()


SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"partition": {"kind": "dirichlet", "clients": 4}, "normalize": "none"},
    "model": {"name": "linear"},
    "training": {"steps": 1},
    "engine": {"threads": 1},
}
APART: dict[str, dict[str, Any]] = {
    "cloud": {"cloud": {"servers": 2}},
    "buffer": {"buffer": {"size": 2}},
    "privacy": {"privacy": {"epsilon": 5.0, "delta": 1e-3, "clip": 1.0}, "federation": {"weights": "uniform"}},
    "secure": {"secure": {}},
    "robust": {"robust": {"rule": "median"}, "federation": {"weights": "uniform"}},
    "fairness": {"fairness": {"q": 1.0}},
}


@pytest.mark.parametrize("method", ["pfedhn", "fedfomo"])
@pytest.mark.parametrize("key", APART)
def test_what_it_does_not_go_with_is_refused_by_name(key: str, method: str, tmp_path: Path) -> None:
    recipe = {**SMALL, "method": {"name": method}, **APART[key]}
    with pytest.raises(BadInput, match=rf"^{key}: {method}'s server sends each client a message of its own.*remove"):
        api.run(recipe, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    api.run({**recipe, "method": {"name": "fedavg"}}, out=tmp_path / "run")  # it is not refused for anything else


def test_who_needs_it_is_known() -> None:
    from personafl.algorithms import Training

    able = [name for name, method in METHODS.items() if method.build(Training()).server.address is not None]
    assert able == ["pfedhn", "fedfomo"]
