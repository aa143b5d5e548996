"""Noise that later rounds take back: what it leaves in sums, what a client moves, and what is kept."""

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from personafl.privacy.accounting import epsilon, trees_epsilon
from personafl.privacy.correlated import MOST_BANDS, Correlated, add, bands_of, coefficients, kept
from personafl.privacy.mechanisms import Accounted

Matrix = NDArray[np.float64]


def noises(mechanism: Correlated, apart: int, rounds: int) -> Matrix:
    """Return n as a matrix of z, by giving round t the t-th unit vector as its draw."""
    memory = torch.zeros(kept(mechanism, apart), rounds, dtype=torch.float64)
    rows = []
    for step, drawn in enumerate(torch.eye(rounds, dtype=torch.float64)):
        noise, memory = add(mechanism, apart, step, memory, drawn)
        rows.append(noise)
    return torch.stack(rows).numpy()


def prefix(rounds: int) -> Matrix:
    return np.tril(np.ones((rounds, rounds)))


def patterns(rounds: int, apart: int) -> list[tuple[int, ...]]:
    """Return all sets of rounds of a client that are `apart` apart at least, brute force."""
    sets = itertools.chain.from_iterable(itertools.combinations(range(rounds), n) for n in range(1, rounds + 1))
    return [one for one in sets if all(b - a >= apart for a, b in itertools.pairwise(one))]


@pytest.mark.parametrize("apart", [1, 2, 3, 5, 8])
def test_a_tree_leaves_one_noise_for_each_bit(apart: int) -> None:
    """The variance of a prefix sum: the ones of its length in base 2, of this tree, and what ended trees left."""
    rounds = 11
    left = (prefix(rounds) @ noises("tree", apart, rounds)) ** 2
    expected = [t // apart * apart.bit_count() + (t % apart + 1).bit_count() for t in range(rounds)]
    np.testing.assert_allclose(left.sum(1), expected, atol=1e-12)


def test_nodes_of_a_tree_cover_their_rounds() -> None:
    """What is released is a matrix of node sums plus the nodes: a client of one round is in log₂ b + 1 of them."""
    decode = prefix(8) @ noises("tree", 8, 8)  # of nodes; each is drawn in the round that ends it
    sums = np.linalg.lstsq(decode, prefix(8), rcond=None)[0]
    np.testing.assert_allclose(decode @ sums, prefix(8), atol=1e-9)
    np.testing.assert_allclose(sums[3], [1, 1, 1, 1, 0, 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(sums[5], [0, 0, 0, 0, 1, 1, 0, 0], atol=1e-9)
    assert (sums**2).sum(0).max() <= math.log2(8) + 1 + 1e-9


@pytest.mark.parametrize("apart", [1, 2, 3, 7])
def test_bands_factorise_prefix_sums(apart: int) -> None:
    """B·C = A, C is banded Toeplitz with columns of norm 1 at most, and n = C⁻¹ z."""
    rounds = 9
    inverse = noises("banded", apart, rounds)
    c = np.linalg.inv(inverse)
    series = np.array(coefficients(bands_of(apart)))
    by_hand = sum(value * np.eye(rounds, k=-i) for i, value in enumerate(series)) / np.linalg.norm(series)
    np.testing.assert_allclose(c, by_hand, atol=1e-12)
    np.testing.assert_allclose((prefix(rounds) @ inverse) @ c, prefix(rounds), atol=1e-12)
    assert np.linalg.norm(c, axis=0).max() == pytest.approx(1.0)


def test_coefficients_are_those_of_the_square_root() -> None:
    """Without a band, C² is the matrix of prefix sums."""
    rounds = 12
    root = sum(value * np.eye(rounds, k=-i) for i, value in enumerate(coefficients(rounds)))
    np.testing.assert_allclose(root @ root, prefix(rounds), atol=1e-12)


@pytest.mark.parametrize(("apart", "rounds"), [(1, 5), (2, 9), (3, 10), (4, 11)])
def test_a_client_moves_banded_sums_by_the_root_of_its_rounds(apart: int, rounds: int) -> None:
    """Over all patterns, and all signs of its updates: √⌈T/b⌉ at most, which is what is accounted for."""
    c = np.linalg.inv(noises("banded", apart, rounds))
    worst = 0.0
    for pattern in patterns(rounds, apart):
        for signs in itertools.product((-1.0, 1.0), repeat=len(pattern)):
            worst = max(worst, float(np.linalg.norm(c[:, list(pattern)] @ np.array(signs))))
    often = math.ceil(rounds / apart)
    assert worst <= math.sqrt(often) + 1e-12
    assert worst > math.sqrt(often - 1)
    accounted = Accounted(mechanism="banded", delta=1e-5, apart=apart)
    assert accounted.epsilon(2.0, [rounds]) == epsilon(2.0, often, 1e-5)


def test_sums_of_many_rounds_have_less_noise_than_alone() -> None:
    """At the same privacy, 64 rounds with turns 16 apart: each client in 4 of them."""
    accounted = {name: Accounted(mechanism=name, delta=1e-5, apart=16) for name in ("banded", "tree", "gaussian")}  # type: ignore[arg-type]
    left = {"gaussian": prefix(64)} | {
        name: prefix(64) @ noises(name, 16, 64)  # type: ignore[arg-type]
        for name in ("banded", "tree")
    }
    errors = {name: accounted[name].noise_for(4.0, 64) * math.sqrt((left[name] ** 2).sum() / 64) for name in left}
    assert errors["banded"] < errors["tree"] < errors["gaussian"]
    assert errors["banded"] < errors["gaussian"] / 3


def test_many_bands_are_cut() -> None:
    assert kept("banded", 500) == MOST_BANDS - 1
    assert np.linalg.norm(np.linalg.inv(noises("banded", 500, 40)), axis=0).max() == pytest.approx(1.0)


def test_stretches_all_count() -> None:
    """A run that was taken back pays for what it had released, and for a tree or a turn that was begun."""
    delta = 1e-5
    tree, banded = (Accounted(mechanism=name, delta=delta, apart=4) for name in ("tree", "banded"))  # type: ignore[arg-type]
    assert banded.epsilon(3.0, [5, 3]) == epsilon(3.0, 3, delta)
    assert tree.epsilon(3.0, [5, 3]) == pytest.approx(trees_epsilon(3.0, [(4, 1), (1, 1), (3, 1)], delta))
    assert tree.epsilon(3.0, [8]) == pytest.approx(trees_epsilon(3.0, [(4, 2)], delta))
    gaussian = Accounted(mechanism="gaussian", delta=delta)
    assert gaussian.epsilon(3.0, [5, 3]) == gaussian.epsilon(3.0, [8])
    assert all(one.epsilon(3.0, []) == one.epsilon(3.0, [0]) == 0 for one in (tree, banded, gaussian))


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_discrete_noise_is_accounted_for_at_whole_orders(rate: float) -> None:
    """Against the formula of its Rényi divergence, by hand; never below what distributions say of real noise."""
    noise, rounds, delta = 1.3, 40, 1e-5
    best = math.inf
    for order in range(2, 200):
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + (k * math.log(rate) + (order - k) * math.log1p(-rate) if rate < 1 else (0.0 if k == order else -math.inf))
            + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
        ]  # fmt: skip
        divergence = rounds * float(np.logaddexp.reduce(terms)) / (order - 1)
        best = min(best, divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    found = Accounted(mechanism="discrete", delta=delta, rate=rate).epsilon(noise, [rounds])
    assert found >= best - 1e-9  # its orders are some of these
    assert found == pytest.approx(best, rel=0.01)
    assert found > Accounted(mechanism="gaussian", delta=delta, rate=rate).epsilon(noise, [rounds])
