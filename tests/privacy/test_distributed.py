"""Shares of noise: how far their sum is from one Gaussian, what that costs, how much they are, and that none wraps."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.errors import BadInput
from personafl.privacy.distributed import (
    EXCESS,
    LEAST_RADIUS,
    MOST,
    WRAPPED,
    Lattice,
    client_key,
    in_clips,
    lattice_for,
    length_of,
    sent,
    tau,
    wrapping,
)
from personafl.privacy.mechanisms import Accounted
from personafl.privacy.noise import make_key

KEY = make_key(5)
WIDE = 60  # the pmf is summed from −WIDE to WIDE


class Upload(NamedTuple):
    change: dict[str, Tensor]
    loss: Tensor


def upload(size: int = 6, scale: float = 1.0, seed: int = 0) -> Upload:
    row = scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return Upload({"a": row[:2], "b": row[2:].reshape(2, -1)}, torch.tensor(0.5))


def pmf(sigma2: float) -> NDArray[np.float64]:
    weights = np.exp(-(np.arange(-WIDE, WIDE + 1) ** 2) / (2 * sigma2))
    return weights / weights.sum()


def summed(shares: int, sigma: float) -> NDArray[np.float64]:
    """Return the pmf of a sum of discrete Gaussians, by convolution."""
    found = pmf(sigma**2)
    for _ in range(shares - 1):
        found = np.convolve(found, pmf(sigma**2))
    middle = len(found) // 2
    return found[middle - WIDE : middle + WIDE + 1]


@pytest.mark.parametrize("shares", [2, 3, 6])
@pytest.mark.parametrize("sigma", [0.5, 0.7, 1.0])
def test_a_sum_is_no_further_from_one_gaussian_than_tau(shares: int, sigma: float) -> None:
    """At all points where both can be computed; τ is 10 Σ_k exp(−2π²σ² k/(k + 1))."""
    near = slice(WIDE - 12, WIDE + 13)
    off = np.abs(np.log(summed(shares, sigma)[near] / pmf(shares * sigma**2)[near])).max()
    assert off <= tau(shares, sigma) + 1e-12
    assert tau(2, sigma) == pytest.approx(10 * math.exp(-(math.pi**2) * sigma**2))
    assert tau(3, sigma) == pytest.approx(tau(2, sigma) + 10 * math.exp(-4 / 3 * math.pi**2 * sigma**2))
    assert tau(1, sigma) == 0


@pytest.mark.parametrize(("shares", "sigma"), [(2, 0.5), (4, 0.7), (3, 1.5)])
@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("moved", [1, 2])
def test_divergences_are_within_the_bound(shares: int, sigma: float, order: int, moved: int) -> None:
    """D_α of the sum and of the sum moved, by brute force: at most α Δ²/2hσ² + τ, and so within thrice τ."""
    chance = summed(shares, sigma)
    one, other = chance[moved:], chance[:-moved]
    kept = (one > 1e-250) & (other > 1e-250)
    powers = order * np.log(one[kept]) + (1 - order) * np.log(other[kept])
    found = float(np.logaddexp.reduce(powers)) / (order - 1)
    assert found <= order * moved**2 / (2 * shares * sigma**2) + tau(shares, sigma) + 1e-9


def test_rounds_cost_what_the_closed_form_says() -> None:
    """With ρ(α) = T(α/2z² + 3·2⁻⁴⁰): the least of ρ + log(1 − 1/α) − log(αδ)/(α − 1) over whole orders."""
    pytest.importorskip("dp_accounting", reason="differential privacy is accounted for by dp-accounting")
    for noise, rounds, delta in ((1.0, 1, 1e-5), (4.0, 20, 1e-6), (20.0, 500, 1e-3)):
        found = Accounted(mechanism="distributed", delta=delta).epsilon(noise, [rounds])
        spent = [
            rounds * (a / (2 * noise**2) + 3 * EXCESS) + math.log1p(-1 / a) - math.log(a * delta) / (a - 1)
            for a in range(2, 400)
        ]
        assert found == pytest.approx(min(spent), rel=2e-3)
        assert found >= min(spent) - 1e-12
        discrete = Accounted(mechanism="discrete", delta=delta).epsilon(noise, [rounds])
        assert discrete < found < discrete + rounds * 4 * EXCESS
    assert Accounted(mechanism="distributed", delta=1e-5).epsilon(1.0, []) == 0


@pytest.mark.parametrize(
    ("noise", "clients", "honest", "length"), [(1.0, 4, 3, 100), (0.3, 100, 60, 10**6), (8.0, 1000, 500, 10**7)]
)
def test_grids_are_as_fine_as_they_can_be(noise: float, clients: int, honest: int, length: int) -> None:
    """The honest have enough noise, to the last digit; nothing wraps; with steps half as large something might."""
    lattice = lattice_for(noise, clients, honest, length)
    assert math.log2(lattice.radius).is_integer()
    assert lattice.sigma * math.sqrt(honest) >= noise * lattice.radius
    assert (lattice.sigma - 1) * math.sqrt(honest) < noise * lattice.radius
    assert wrapping(lattice, clients, length) <= WRAPPED
    assert wrapping(Lattice(2 * lattice.radius, 2 * lattice.sigma), clients, length) > WRAPPED
    assert tau(honest, lattice.sigma) * length <= EXCESS


def test_what_would_wrap_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"^privacy\.noise: a sum of 100 clients with noise 1e\+06 would wrap"):
        lattice_for(1e6, 100, 60, 1000)
    with pytest.raises(BadInput, match=r"^privacy\.noise: a sum of 4194304 clients"):
        lattice_for(1.0, MOST // LEAST_RADIUS * 2 + 2, 60, 1000)
    with pytest.raises(BadInput, match=r"^secure\.dropouts: of 3 clients nobody"):
        lattice_for(1.0, 3, 0, 10)
    with pytest.raises(BadInput, match=r"^privacy\.noise: the shares of 1024 clients .* raise it"):
        lattice_for(0.001, 2**20, 2**10, 1000)


def test_the_bound_on_wrapping_holds() -> None:
    """Sums of whole shares with so little room that some are beyond it, counted."""
    lattice, clients, size = Lattice(LEAST_RADIUS, 2**29), 4, 5000
    noise = sum(sent(upload(size), 1.0, lattice, client_key(KEY, n), 0) for n in range(clients))
    share = float((torch.as_tensor(noise).abs() > MOST).double().mean())
    assert 0 < share <= wrapping(lattice, clients, 1)


def test_the_noise_of_a_sum_has_the_variance_that_was_asked_for() -> None:
    """Five clients, three of them for sure honest: these have z² R² = 4 R², all together 5/3 of it."""
    size, noise, clients = 20_000, 2.0, 5
    lattice = lattice_for(noise, clients, 3, size)
    none = Upload({"a": torch.zeros(2), "b": torch.zeros(2, (size - 2) // 2)}, torch.tensor(0.0))
    drawn = torch.stack([sent(none, 1.0, lattice, client_key(KEY, n), 0) for n in range(clients)]).double()
    three = (drawn[:3].sum(0) / lattice.radius).square().mean()
    everyone = (drawn.sum(0) / lattice.radius).square().mean()
    assert float(three) == pytest.approx(noise**2, rel=0.04)
    assert float(everyone) == pytest.approx(noise**2 * 5 / 3, rel=0.04)
    assert np.abs(np.corrcoef(drawn.numpy()) - np.eye(clients)).max() < 0.03


def test_what_is_sent_is_the_same_for_the_same_and_for_nothing_else() -> None:
    lattice = lattice_for(1.0, 4, 3, 6)
    first = sent(upload(), 0.5, lattice, KEY, 3)
    assert torch.equal(first, sent(upload()._replace(loss=torch.tensor(9.0)), 0.5, lattice, KEY, 3))
    others = [
        sent(upload(), 0.5, lattice, KEY, 4),
        sent(upload(), 0.5, lattice, client_key(KEY, 0), 3),
        sent(upload(), 0.5, Lattice(lattice.radius, lattice.sigma + 1), KEY, 3),
        sent(upload(seed=1), 0.5, lattice, KEY, 3),
    ]
    assert len({first.numpy().tobytes(), *(other.numpy().tobytes() for other in others)}) == 5


def test_an_upload_is_clipped_and_comes_back_in_clips() -> None:
    """With next to no noise: far within the clip it is itself, far beyond it has norm 1."""
    lattice, half = Lattice(2**20, 1), 2.0**-18
    for scale in (1e-3, 1e3):
        given = upload(scale=scale)
        found = in_clips(sent(given, 0.5, lattice, KEY, 0), given, torch.tensor(2.0), lattice)
        whole = torch.cat([leaf.flatten() for leaf in given.change.values()]).double()
        wanted = whole / max(0.5, float(whole.norm()))
        got = torch.cat([leaf.flatten() for leaf in found.change.values()])
        torch.testing.assert_close(got, wanted, rtol=0, atol=10 * half)
        assert found.change["b"].shape == (2, 2)
        assert found.loss == 2
    assert length_of(given) == 6
