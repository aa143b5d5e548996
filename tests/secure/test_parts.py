"""Shares, graphs, masks and fixed point, each against brute force or another way to compute it."""

import contextlib
import itertools
import math
import random

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from personafl.secure import masks, shamir
from personafl.secure.faults import Breach, Fault
from personafl.secure.fixed import Grid, unwrapped, wrapped
from personafl.secure.graph import Degree, degree, neighbours


def test_the_field_is_a_prime() -> None:
    """Miller and Rabin, with forty bases."""
    odd, twos = shamir.PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in random.Random(0).sample(range(2, 10**9), 40):
        powers = [pow(base, odd * 2**power, shamir.PRIME) for power in range(twos)]
        assert powers[0] == 1 or shamir.PRIME - 1 in powers


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, bytes(range(32))])
@pytest.mark.parametrize("threshold", [1, 2, 3, 5])
def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not(secret: bytes, threshold: int) -> None:
    shares = shamir.split(secret, [1, 2, 7, 100, 2**40], threshold)
    for size in range(1, 6):
        for chosen in itertools.combinations(shares, size):
            some = {holder: shares[holder] for holder in chosen}
            if size >= threshold:
                assert shamir.join(some, threshold) == secret
            else:
                with pytest.raises(ValueError, match="are needed"):
                    shamir.join(some, threshold)
                if size > 1 or threshold > 1:  # with too low a threshold comes another secret, or none
                    with contextlib.suppress(ValueError):
                        assert shamir.join(some, size) != secret


def test_too_few_shares_fit_every_secret() -> None:
    """Over a polynomial of degree 1, one share and any secret have exactly one line through them: it says nothing."""
    share = int.from_bytes(shamir.split(b"s" * 32, [1, 2], 2)[1])
    for other in (0, 1, 2**256 - 1):
        slope = (share - other) % shamir.PRIME
        assert (other + slope) % shamir.PRIME == share


def test_shares_that_do_not_belong_together_are_found() -> None:
    shares = shamir.split(b"s" * 32, [1, 2, 3], 2)
    shares[3] = shamir.split(b"t" * 32, [3], 1)[3]
    with pytest.raises(ValueError, match="not of one secret"):
        shamir.join(shares, 2)


def hypergeometric(others: int, marked: int, drawn: int, least: int) -> float:
    """P[X ≥ least], by counting."""
    found = range(max(0, least), min(marked, drawn) + 1)
    ways = sum(math.comb(marked, x) * math.comb(others - marked, drawn - x) for x in found if drawn - x >= 0)
    return ways / math.comb(others, drawn)


@pytest.mark.parametrize(("clients", "lost", "corrupt"), [(100, 30, 10), (100, 30, 0), (200, 20, 20), (60, 3, 0)])
def test_degrees_are_the_smallest_that_do(clients: int, lost: int, corrupt: int) -> None:
    found = degree(clients, lost, corrupt)

    def does(k: int, t: int) -> bool:
        told = clients * hypergeometric(clients - 1, corrupt, k, 2 * t - k)
        stuck = clients * hypergeometric(clients - 1, lost, k, k - t + 1)
        gone = lost + corrupt
        cut = 0.0 if k > gone else clients**2 * math.comb(clients - 1 - k, gone - k) / math.comb(clients - 1, gone)
        return told <= 2**-40 and stuck <= 2**-20 and cut <= 2**-40

    assert does(found.neighbours, found.threshold)
    assert not any(does(k, t) for k in range(2, found.neighbours, 2) for t in range(k // 2 + 1, k + 1))
    assert not any(does(found.neighbours, t) for t in range(found.neighbours // 2 + 1, found.threshold))


@pytest.mark.parametrize(
    ("clients", "lost", "corrupt", "threshold"), [(2, 0, 0, 1), (3, 1, 0, None), (5, 1, 0, 3), (4, 1, 0, 2)]
)
def test_few_clients_are_all_neighbours(clients: int, lost: int, corrupt: int, threshold: int | None) -> None:
    """2t > n − 1 + corrupt, and t ≤ n − 1 − lost: for three of whom one may go there is none."""
    if threshold is None:
        with pytest.raises(Breach) as raised:
            degree(clients, lost, corrupt)
        assert raised.value.fault is Fault.TOO_FEW
    else:
        assert degree(clients, lost, corrupt) == Degree(clients - 1, threshold)


def test_a_graph_is_regular_symmetric_and_without_loops() -> None:
    clients = [number * 3 + 1 for number in range(31)]
    near = neighbours(b"seed", clients, 6)
    assert near != neighbours(b"other", clients, 6)
    assert {len(found) for found in near.values()} == {6}
    assert all(one in near[other] and other != one for one, found in near.items() for other in found)
    reached, new = {1}, {1}
    while new:
        new = {other for one in new for other in near[one]} - reached
        reached |= new
    assert reached == set(clients)


def test_neighbours_are_drawn_evenly() -> None:
    counts = np.zeros((9, 9))
    for seed in range(400):
        for one, found in neighbours(seed.to_bytes(4), range(9), 4).items():
            counts[one, list(found)] += 1
    expected = 400 * 4 / 8
    assert abs(counts[~np.eye(9, dtype=bool)] - expected).max() < 6 * math.sqrt(400 * 0.25)


def test_streams_are_those_of_aes_in_counter_mode() -> None:
    """Over a whole block and a part of one, each as the cipher gives it in a piece."""
    length = 2**14 + 5
    seeds = [bytes([value]) * 32 for value in range(3)]
    whole = [Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(4 * length)) for seed in seeds]
    one, two, three = (np.frombuffer(stream, "<u4").astype(np.int64) for stream in whole)
    vector = np.arange(length, dtype="<u4")
    masks.add_streams(vector, seeds[:2], seeds[2:])
    np.testing.assert_array_equal(vector, (np.arange(length) + one + two - three) % 2**32)


def test_two_clients_agree_and_sessions_and_purposes_differ() -> None:
    private = [bytes([value]) * 32 for value in (1, 2)]
    public = [masks.public_of(key) for key in private]
    assert masks.agreed(private[0], public[1], b"s", b"p") == masks.agreed(private[1], public[0], b"s", b"p")
    different = {
        masks.agreed(private[0], public[1], session, purpose) for session in (b"s", b"r") for purpose in (b"p", b"q")
    }
    assert len(different) == 4


@pytest.mark.parametrize(
    ("clients", "weight", "largest"), [(1, 1.0, 1.0), (100, 1.0, 0.3), (7, 1e6, 0.1), (10**4, 64.0, 8.0)]
)
def test_no_sum_wraps_and_the_step_is_the_finest(clients: int, weight: float, largest: float) -> None:
    grid = Grid(clients, weight, largest)
    beyond = torch.tensor([[-1e9], [1e9]], dtype=torch.float64)
    low, high = grid.integers(beyond, torch.full((2,), weight)).flatten().tolist()
    assert -(2**31) < clients * low < 0 < clients * high < 2**31
    assert clients * math.floor(weight * largest * 2.0 ** (grid.exponent + 1)) > 2**31 - 1


def test_a_mean_is_as_near_as_the_grid_says() -> None:
    """100 clients with entries up to 0.3: within 2⁻²⁷ < 10⁻⁸, whatever is sent; the worst case is half a step each."""
    grid, generator = Grid(100, 1.0, 0.3), torch.Generator().manual_seed(0)
    values = (torch.rand(100, 500, generator=generator, dtype=torch.float64) - 0.5) * 0.6
    values[:, 0] = (round(0.1 * 2**grid.exponent) + 0.5) * 2.0**-grid.exponent  # in the middle of a step
    sums = wrapped(grid.integers(values, torch.ones(100)).sum(0) + 0.0)
    mean = grid.real(torch.from_numpy(unwrapped(sums))) / 100
    errors = (mean - values.mean(0)).abs()
    assert errors.max() <= 2.0**-27 < 1e-8
    assert errors[0] == pytest.approx(2.0**-27)


def test_integers_by_hand() -> None:
    """Two clients with at most 3 and entries up to 2: 2^s · 2 · 3 · 2 ≤ 2³¹ − 1, so s = 27. An entry of ¼ that counts
    three times is ¾ · 2²⁷; one of 5 that counts twice is cut to 2 · 2 · 2²⁷; of nothing known, nothing is known.
    """
    grid = Grid(2, 3.0, 2.0)
    assert grid.exponent == 27
    found = grid.integers(torch.tensor([[0.25, float("nan")], [5.0, -0.125]]), torch.tensor([3.0, 2.0]))
    assert found[:, 0].tolist() == [0.75 * 2**27, 4 * 2**27]
    assert found[0, 1].isnan()
    assert found[1, 1] == -0.25 * 2**27
    assert unwrapped(wrapped(torch.tensor([-1.0, 2.0**31 - 1], dtype=torch.float64))).tolist() == [-1, 2**31 - 1]
    with pytest.raises(ValueError, match="not finite"):
        wrapped(found)
