"""Every rule, every mixing and the attacks beside byzfl's, on random vectors in float64.

    pip install --no-deps --target /tmp/byzfl byzfl
    PYTHONPATH=/tmp/byzfl python benchmarks/byzfl_check.py [--seeds 20]

Prints the largest difference of each over sizes and seeds; fails above 10⁻⁶. byzfl imports torchvision and plotting
libraries that its rules do not use: others stand in for those that are not installed.

Its CAF and SMEA take one step of the power method from a random vector. Here that vector is the eigenvector itself,
from which the step is exact: else they are compared with chance. CAF is compared in its form, `removed_too`. Its
bucketing draws an order of its own, which is ours here. It has no Bulyan.

Its attacks are made of gradients, and here of updates, which are steps against them: so x are the one and −0.1 x the
other. The optimal ones are those of `byzantine_map.py`. They are compared by how far they move the result of byzfl's
clipping, mixing and trimmed mean from the mean of the honest: where harm hardly depends on the strength any more,
rounding decides on that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from byzantine_map import RATE, QuickAttack
from personafl.core import rng
from personafl.robust.choosing import Krum, Mda, Monna, MultiKrum, Smea
from personafl.robust.coordinates import Meamed, Median, TrimmedMean
from personafl.robust.mixing import Arc, Bucketing, Clip, NearestNeighbours
from personafl.robust.weighing import Caf, CenteredClipping, GeometricMedian, Mean
from personafl.simulate.attack import Attack

Array = NDArray[np.float64]
SIZES = [(7, 3, 2), (11, 20, 3), (12, 200, 1), (9, 2, 4)]  # n, d, f
LIMIT = 1e-6


def imported() -> Any:
    """Return byzfl's rules; None: it is not installed."""
    if importlib.util.find_spec("byzfl") is None:
        return None
    names = ("torchvision", "seaborn", "matplotlib", "matplotlib.pyplot")
    missing = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: mock.MagicMock() for name in missing})
    try:
        return importlib.import_module("byzfl")
    finally:
        for name in missing:
            del sys.modules[name]


@contextlib.contextmanager
def starting_from(vectors: Iterator[Array]) -> Iterator[None]:
    """Have the power method start from vectors that are given."""
    with mock.patch("numpy.random.randn", side_effect=vectors):
        yield


def directions_of_subsets(x: Array, f: int) -> Iterator[Array]:
    """Yield the direction of most spread of every set of n − f vectors."""
    for members in itertools.combinations(range(len(x)), len(x) - f):
        off = x[list(members)] - x[list(members)].mean(0)
        yield np.linalg.svd(off, full_matrices=False)[2][0]


def directions_of_filter(x: Array) -> Iterator[Array]:
    """Yield the direction of most spread in every step of the filter."""
    shares = np.ones(len(x))
    while True:
        off = x - shares @ x / shares.sum()
        direction = np.linalg.svd(np.sqrt(shares)[:, None] * off, full_matrices=False)[2][0]
        yield direction
        along = (off @ direction) ** 2
        shares = shares * (1 - along / along.max())


def pairs(byzfl: Any, n: int, f: int) -> dict[str, tuple[Callable[[Array], Any], Callable[[torch.Tensor], Any]]]:
    """Return what is compared, by name: byzfl's, and ours."""
    order = rng.permutations(np.array([n]), np.array([7], dtype=np.uint64))[0]

    def smea(x: Array) -> Any:
        with starting_from(directions_of_subsets(x, f)):
            return byzfl.SMEA(f)(x)

    def caf(x: Array) -> Any:
        with starting_from(directions_of_filter(x)):
            return byzfl.CAF(f)(x)

    def bucketing(x: Array) -> Any:
        with mock.patch("numpy.random.permutation", lambda given: given[order]):
            return byzfl.Bucketing(3)(x)

    return {
        "mean": (byzfl.Average(), Mean()),
        "median": (byzfl.Median(), Median(f=f)),
        "trimmed mean": (byzfl.TrMean(f), TrimmedMean(f=f)),
        "geometric median": (byzfl.GeometricMedian(0.1, 3), GeometricMedian(smoothing=0.1, steps=3)),
        "Krum": (byzfl.Krum(f), Krum(f=f)),
        "Multi-Krum": (byzfl.MultiKrum(f), MultiKrum(f=f)),
        "centered clipping": (byzfl.CenteredClipping(None, 3, 0.7), CenteredClipping(radius=0.7, steps=3)),
        "MDA": (byzfl.MDA(f), Mda(f=f)),
        "MoNNA": (byzfl.MoNNA(f, 2), Monna(f=f, trusted=2)),
        "Meamed": (byzfl.Meamed(f), Meamed(f=f)),
        "CAF": (caf, Caf(f=f, removed_too=True)),
        "SMEA": (smea, Smea(f=f)),
        "nearest neighbours": (byzfl.NNM(f), NearestNeighbours(f=f)),
        "bucketing": (bucketing, lambda x: Bucketing(size=3)(x, key=7)),
        "clipping": (byzfl.Clipping(1.5), Clip(norm=1.5)),
        "ARC": (byzfl.ARC(f), Arc(f=f)),
    }


class Upload(NamedTuple):
    change: torch.Tensor
    loss: torch.Tensor


def forged(made: type[Attack], x: torch.Tensor, f: int, **how: Any) -> torch.Tensor:
    """Return what f hostile clients send, as a gradient, where x are the gradients of the honest."""
    many = len(x) + f
    change = -RATE * torch.cat([x, torch.zeros(f, x.shape[1], dtype=x.dtype)])
    attack = made(hostile=np.arange(many) >= len(x), seed=0, **how)
    ((_, sent),) = attack.sent([(np.arange(many), Upload(change, torch.zeros(many)))], 0, lambda _: ())
    return sent.change[-1] / -RATE  # type: ignore[attr-defined, no-any-return]


def attacks(byzfl: Any, f: int) -> dict[str, tuple[Callable[[Array], Any], Callable[[torch.Tensor], Any]]]:
    """Return attacks that are compared, by name: byzfl's, and ours."""
    rule, before = byzfl.TrMean(f), [byzfl.Clipping(), byzfl.NNM(f)]
    known = {
        "rule": TrimmedMean(f=f),
        "before": (Clip(norm=2.0 * RATE), NearestNeighbours(f=f)),
        "strength": 1e9,
        "stride": 1,
        "sign": -1.0,
    }

    def harm(x: Array, sent: Array) -> Array:
        both = np.concatenate([x, np.repeat(sent[None], f, axis=0)])
        return np.asarray(np.linalg.norm(rule(before[1](before[0](both))) - x.mean(0)))

    def theirs(kind: Any) -> Callable[[Array], Any]:
        return lambda x: harm(0.1 * x, kind(rule, before, f=f)(0.1 * x))

    def ours(kind: str) -> Callable[[torch.Tensor], Any]:
        def found(x: torch.Tensor) -> torch.Tensor:
            sent = forged(QuickAttack, 0.1 * x, f, kind=kind, **known)
            return torch.from_numpy(harm(0.1 * x.numpy(), sent.numpy()))

        return found

    return {
        "sign flip": (byzfl.SignFlipping(), lambda x: forged(Attack, x, f, kind="ipm", strength=1.0)),
        "IPM": (byzfl.InnerProductManipulation(2.0), lambda x: forged(Attack, x, f, kind="ipm", strength=2.0)),
        "ALIE": (byzfl.ALittleIsEnough(1.5), lambda x: forged(Attack, x, f, kind="alie", strength=-1.5)),
        "mimicry": (byzfl.Mimic(0), lambda x: forged(Attack, x, f, kind="mimic", strength=1.0)),
        "optimal IPM": (theirs(byzfl.Optimal_InnerProductManipulation), ours("optimal-ipm")),
        "optimal ALIE": (theirs(byzfl.Optimal_ALittleIsEnough), ours("optimal-alie")),
    }


def differences(byzfl: Any, seeds: int) -> dict[str, float]:
    """Return the largest difference of each over sizes and seeds."""
    most: dict[str, float] = {}
    for (n, d, f), seed in itertools.product(SIZES, range(seeds)):
        x = np.random.default_rng((n, d, f, seed)).normal(size=(n, d)) + 0.3
        x[0] *= 3
        for name, (theirs, ours) in (pairs(byzfl, n, f) | attacks(byzfl, f)).items():
            found = np.asarray(theirs(x.copy())) - ours(torch.from_numpy(x)).numpy()
            most[name] = max(most.get(name, 0.0), float(np.abs(found).max()))
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    byzfl = imported()
    if byzfl is None:
        raise SystemExit(
            "byzfl is not installed: pip install --no-deps --target /tmp/byzfl byzfl; PYTHONPATH=/tmp/byzfl"
        )
    found = differences(byzfl, parser.parse_args().seeds)
    for name, most in found.items():
        print(f"{name:20s} {most:.1e}")
    if max(found.values()) > LIMIT:
        raise SystemExit(f"some differ by more than {LIMIT:g}")


if __name__ == "__main__":
    main()
