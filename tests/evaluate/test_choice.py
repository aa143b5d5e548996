"""The guarded choice between the global model, the personal one and those in between."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from personafl.errors import BadInput
from personafl.evaluate.choice import Evidence, Gains, choose, evidence_of, learn_prior, posterior

Values = NDArray[np.float64]
Choice = NDArray[np.int64]

PATH = np.array([0.0, 0.25, 0.5, 0.75, 1.0])  # w + a(v - w)
# Of a device's margin b·a - k·a² over the global model at a: mean and spread of b, and k.
REGIMES = {"helps": (1.1, 0.5, 0.4), "mixed": (0.5, 0.7, 0.5), "hurts": (0.1, 0.5, 0.8)}


def simple(gain: list[list[float]], variance: list[list[float]], samples: list[int]) -> Evidence:
    """Evidence in accuracy alone, for candidates beside the global model."""
    full = np.pad(np.array(gain), ((0, 0), (1, 0)))
    spread = np.pad(np.array(variance), ((0, 0), (1, 0)))
    return Evidence(full[..., None], spread[..., None, None], np.array(samples))


def random_evidence(devices: int, seed: int, most: int = 12) -> Evidence:
    _, correct, loss, samples = simulate("mixed", devices, seed, most)
    return evidence_in(correct, loss, samples)


def simulate(
    regime: str, devices: int, seed: int, most: int = 30, sharp: float = 0.0
) -> tuple[Values, Values, Values, Choice]:
    """Return true accuracies [devices, candidates], then per sample hits and losses [devices, most, candidates], and n.

    A sample is right if its margin, device's mean + N(0, 1), is positive; noises of candidates correlate, 0.8 between
    global and personal. `sharp` > 0 makes personal models surer than they should be: loss then misleads.
    """
    rng = np.random.default_rng(seed)
    slope, spread, curve = REGIMES[regime]
    mean = rng.normal(1, 0.5, (devices, 1)) + rng.normal(slope, spread, (devices, 1)) * PATH - curve * PATH**2
    samples = rng.integers(2, most + 1, devices)
    shared, own = rng.normal(size=(2, devices, most, 1))
    margin = mean[:, None] + np.sqrt(1 - (0.6 * PATH) ** 2) * shared + 0.6 * PATH * own
    accuracy = 0.5 * (1 + np.vectorize(math.erf)(mean / math.sqrt(2)))
    return accuracy, (margin > 0).astype(float), np.log1p(np.exp(-2 * (1 + sharp * PATH) * margin)), samples


def evidence_in(correct: Values, loss: Values, samples: Choice) -> Evidence:
    real = (np.arange(correct.shape[1]) < samples[:, None])[..., None, None]
    both = np.stack([correct, np.exp(-loss)], -1)
    gains = (both - both[:, :, :1]) * real
    return Evidence.from_sums(gains.sum(1), np.einsum("dnca,dncb->dcab", gains, gains), samples)


def means(values: Values, samples: Choice) -> Values:
    real = (np.arange(values.shape[1]) < samples[:, None])[..., None]
    result: Values = (values * real).sum(1) / samples[:, None]
    return result


def outcome(accuracy: Values, pick: Choice) -> tuple[float, float, float]:
    """Mean, worst decile, share hurt, by true accuracy."""
    got = np.take_along_axis(accuracy, pick[:, None], 1)[:, 0]
    return float(got.mean()), float(np.sort(got)[: len(got) // 10].mean()), float((got < accuracy[:, 0]).mean())


def test_two_devices_by_hand() -> None:
    """Accuracy alone, n = 2 and 2, d = 0.5 and 0, s² = 0.5 and 0.

    Σ(n-1)s² = 0.5; M = (0.5 + 2·0.25 + 0)/4 = 0.25; s₀² = (0.25 + 0.5)/(1 + 2) = 0.25.
    c = 4 - 8/4 = 2; d̄ = 0.25; Σn(d-d̄)² = 4/16 = 0.25, less (K-1)s₀² = 0.25 is 0, so the floor holds:
    τ² = s₀²·√2/c = √2/8. μ = 0.25 as the weights are equal, Var μ = (τ² + 1/8)/2.
    s̃² = (4·0.25 + 0.5)/5 = 0.3 and (4·0.25 + 0)/5 = 0.2; σ² = 0.15 and 0.1; m = μ + τ²/(τ² + σ²)·(d - μ).
    """
    evidence = simple([[0.5], [0.0]], [[0.5], [0.0]], [2, 2])
    prior = learn_prior(evidence)
    spread = math.sqrt(2) / 8
    assert prior.noise[1, 0, 0] == pytest.approx(0.25, rel=1e-5)
    assert prior.spread[1, 0, 0] == pytest.approx(spread, rel=1e-5)
    assert prior.mean[1, 0] == pytest.approx(0.25, rel=1e-5)
    assert prior.mean_covariance[1, 0, 0] == pytest.approx((spread + 0.125) / 2, rel=1e-5)
    belief = posterior(evidence, prior)
    for device, (own, gain) in enumerate([(0.15, 0.5), (0.1, 0.0)]):
        rest = own / (spread + own)
        assert belief.mean[device, 1] == pytest.approx(rest * 0.25 + (1 - rest) * gain, rel=1e-5)
        assert belief.variance[device, 1] == pytest.approx(rest * spread + rest**2 * (spread + 0.125) / 2, rel=1e-5)
    assert (belief.mean[:, 0] == 0).all()


def test_spread_beyond_noise_is_found() -> None:
    """n = 100 each, d = ±0.3, s² = 0.1: the moments give τ² = (200·0.09 - s₀²)/100 ≈ 0.18, so data outweigh μ."""
    evidence = simple([[0.3], [-0.3]], [[0.1], [0.1]], [100, 100])
    prior = learn_prior(evidence)
    assert prior.spread[1, 0, 0] == pytest.approx((200 * 0.09 - prior.noise[1, 0, 0]) / 100)
    assert posterior(evidence, prior).mean[:, 1] == pytest.approx([0.3, -0.3], abs=0.005)
    assert choose(evidence).tolist() == [1, 0]


def test_a_second_statistic_is_worth_what_it_predicts() -> None:
    """Devices 0 and 1 both gain 0 in accuracy, but ±0.3 in probability, which elsewhere goes with accuracy."""
    rng = np.random.default_rng(0)
    true = rng.normal(0, 0.2, 500)
    samples = np.full(500, 5)
    noise = np.array([[0.5, 0.05], [0.05, 0.02]])  # of one sample
    gain = true[:, None] + rng.multivariate_normal([0, 0], noise / 5, 500)
    gain[0], gain[1] = (0, 0.3), (0, -0.3)
    full = np.stack([np.zeros_like(gain), gain], 1)
    covariance = np.stack([np.zeros((2, 2)), noise])[None].repeat(500, 0)
    both = Evidence(full, covariance, samples)
    alone = Evidence(full[..., :1], covariance[..., :1, :1], samples)
    better, worse = posterior(both, learn_prior(both)).mean[:2, 1]
    assert better > 0.15
    assert worse < -0.15
    assert choose(both)[:2].tolist() == [1, 0]
    assert choose(alone)[0] == choose(alone)[1] == 0
    errors = [np.abs(posterior(e, learn_prior(e)).mean[2:, 1] - true[2:]).mean() for e in (both, alone)]
    assert errors[0] < 0.6 * errors[1]


def test_a_surer_model_is_not_a_better_one() -> None:
    """All personal models have much less loss and are less accurate: nobody takes one."""
    rng = np.random.default_rng(1)
    correct = np.stack([rng.random((80, 10)) < 0.8, rng.random((80, 10)) < 0.6], -1).astype(float)
    loss = np.where(correct > 0, [0.7, 0.01], [1.0, 0.9])
    evidence = evidence_in(correct, loss, np.full(80, 10))
    assert (evidence.gain[:, 1, 1] > 0).mean() > 0.5
    assert (choose(evidence) == 0).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_few_samples_do_not_flip_a_strong_prior(sign: int) -> None:
    """A hundred devices agree; one has two samples that both say the opposite, the most two samples can say."""
    rng = np.random.default_rng(2)
    gain = sign * 0.2 + rng.normal(0, math.sqrt(0.2 / 50), (101, 1))
    gain[-1] = -sign
    variance = np.full((101, 1), 0.2)
    variance[-1] = 0.0
    evidence = simple(gain.tolist(), variance.tolist(), [50] * 100 + [2])
    assert choose(evidence)[-1] == (sign > 0)


def test_many_samples_follow_the_data() -> None:
    """The population loses 0.1 ± 0.1, one device gains 0.2 on a thousand samples; two samples alike say nothing."""
    rng = np.random.default_rng(3)
    gain = rng.normal(-0.1, 0.1, (60, 1))
    gain[-2:] = 0.2
    samples = [1000] * 58 + [1000, 2]
    assert choose(simple(gain.tolist(), [[0.2]] * 60, samples))[-2:].tolist() == [1, 0]


def test_nothing_better_leaves_all_global() -> None:
    rng = np.random.default_rng(4)
    gain = -np.abs(rng.normal(0.1, 0.05, (50, 3)))
    assert (choose(simple(gain.tolist(), [[0.1] * 3] * 50, [10] * 50), caution=0.5) == 0).all()


def test_ties_go_to_global_then_to_the_nearest() -> None:
    same = simple([[0.0, 0.0]] * 5, [[0.0, 0.0]] * 5, [10] * 5)
    assert (choose(same, caution=0.5) == 0).all()
    balanced = simple([[0.1], [-0.1]], [[0.1], [0.1]], [1, 1])
    assert learn_prior(balanced).mean[1, 0] == 0
    equal = simple([[0.3, 0.3]] * 5, [[0.1, 0.1]] * 5, [40] * 5)
    assert (choose(equal) == 1).all()


def test_without_samples_a_device_follows_a_clear_prior_only() -> None:
    rng = np.random.default_rng(5)
    for mean, kept in ((0.3, 1), (0.02, 0), (-0.3, 0)):
        gain = rng.normal(mean, 0.1, (41, 1))
        gain[-1] = math.nan
        evidence = simple(gain.tolist(), [[0.05]] * 40 + [[math.nan]], [30] * 40 + [0])
        prior = learn_prior(evidence)
        belief = posterior(evidence, prior)
        assert belief.mean[-1, 1] == prior.mean[1, 0]
        assert belief.variance[-1, 1] == pytest.approx((prior.spread + prior.mean_covariance)[1, 0, 0])
        assert choose(evidence)[-1] == kept


def test_nobody_has_samples() -> None:
    evidence = simple([[math.nan]] * 3, [[math.nan]] * 3, [0] * 3)
    assert choose(evidence).tolist() == [0, 0, 0]
    with pytest.raises(BadInput, match=r"data\.validation"):
        learn_prior(evidence)
    assert choose(simple([[0.1]], [[0.1]], [5])[:0]).tolist() == []


def test_a_device_alone_has_only_its_own_data() -> None:
    """One device: the posterior mean is what it measured, and only much evidence makes it move."""
    for gain, samples, kept in ((0.1, 10, 0), (0.3, 40, 1), (-0.3, 40, 0)):
        evidence = simple([[gain]], [[0.4]], [samples])
        assert posterior(evidence, learn_prior(evidence)).mean[0, 1] == pytest.approx(gain)
        assert choose(evidence).tolist() == [kept]


def test_single_samples_have_no_variance_and_need_none() -> None:
    evidence = simple([[1.0], [0.0], [0.0], [-1.0]] * 5, [[math.nan]] * 20, [1] * 20)
    assert (choose(evidence, 0.2) == 0).all()
    evidence = simple([[1.0], [1.0], [1.0], [0.0]] * 10, [[math.nan]] * 40, [1] * 40)
    assert (choose(evidence, 0.2)[:3] == 1).all()


def test_with_a_prior_a_device_decides_alone() -> None:
    evidence = random_evidence(100, seed=6)
    prior = learn_prior(evidence)
    together = choose(evidence)
    assert 0 < (together > 0).mean() < 1
    assert [int(choose(evidence[i : i + 1], prior=prior)[0]) for i in range(100)] == together.tolist()


def test_the_order_of_devices_does_not_matter() -> None:
    evidence = random_evidence(200, seed=7)
    order = np.random.default_rng(0).permutation(200)
    assert (choose(evidence[order]) == choose(evidence)[order]).all()


@pytest.mark.parametrize("regime", sorted(REGIMES))
def test_probabilities_of_being_worse_keep_their_word(regime: str) -> None:
    """Of the candidates whose probability of being worse is about 0.05, 0.15 or 0.3, no more are worse than that."""
    accuracy, correct, loss, samples = simulate(regime, 4000, 12, 20, sharp=1.0)
    evidence = evidence_in(correct, loss, samples)
    belief = posterior(evidence, learn_prior(evidence))
    score = (belief.mean[:, 1:] / np.sqrt(belief.variance[:, 1:])).ravel()
    worse = (accuracy[:, 1:] < accuracy[:, :1]).ravel()
    for low, high in ((0.0, 0.1), (0.1, 0.2), (0.2, 0.4)):
        least = NormalDist().inv_cdf(1 - high)
        most = NormalDist().inv_cdf(1 - low) if low else math.inf
        assert worse[(score > least) & (score <= most)].mean() < (low + high) / 2


def test_caution_only_takes_away() -> None:
    evidence = random_evidence(300, seed=8)
    bold, wary = choose(evidence, 0.4), choose(evidence, 0.05)
    assert ((wary == 0) | (bold > 0)).all()
    assert (wary > 0).sum() < (bold > 0).sum()


def test_sums_give_means_and_covariances() -> None:
    rng = np.random.default_rng(9)
    gains = rng.normal(size=(7, 3, 2))
    gains[:, 0] = 0
    products = np.einsum("nca,ncb->cab", gains, gains)
    first = gains[:1]
    evidence = Evidence.from_sums(
        [gains.sum(0), first[0], np.zeros((3, 2))],
        [products, np.einsum("nca,ncb->cab", first, first), np.zeros((3, 2, 2))],
        [7, 1, 0],
    )
    assert evidence.gain[0] == pytest.approx(gains.mean(0))
    assert evidence.covariance[0, 2] == pytest.approx(np.cov(gains[:, 2].T))
    assert evidence.gain[1] == pytest.approx(first[0])
    assert (evidence.covariance[1:] == 0).all()


def test_candidates_join_behind_the_global_model() -> None:
    _, correct, loss, samples = simulate("mixed", 30, 13)
    samples[3] = 0
    real = np.arange(30) < samples[:, None]
    candidates = []
    for index in range(1, 5):
        right = (correct[..., index] - correct[..., 0]) * real
        sure = (np.exp(-loss[..., index]) - np.exp(-loss[..., 0])) * real
        sums = [value.sum(1) for value in (right, right**2, sure, sure**2, right * sure)]
        for value in sums:
            value[3] = math.nan  # nothing was measured
        candidates.append(Gains(sums[0], sums[1], sums[2], sums[3], sums[4], samples))
    joined, expected = evidence_of(candidates), evidence_in(correct, loss, samples)
    assert np.delete(joined.gain, 3, 0) == pytest.approx(np.delete(expected.gain, 3, 0))
    assert joined.covariance == pytest.approx(expected.covariance)
    assert (choose(joined) == choose(expected)).all()
    with pytest.raises(BadInput, match="no candidate"):
        evidence_of([])


def test_bad_input_is_named() -> None:
    good = simple([[0.1], [0.2]], [[0.1], [0.1]], [5, 5])
    for caution in (0.0, 0.6, math.nan):
        with pytest.raises(BadInput, match="caution"):
            choose(good, caution)
    with pytest.raises(BadInput, match="candidates, statistics"):
        choose(good, prior=learn_prior(random_evidence(5, 0)))
    with pytest.raises(BadInput, match="got"):
        Evidence(good.gain, good.covariance, np.array([5]))
    with pytest.raises(BadInput, match="finite"):
        simple([[math.nan]], [[0.1]], [5])
    with pytest.raises(BadInput, match="negative"):
        simple([[0.1]], [[0.1]], [-1])
    with pytest.raises(BadInput, match="candidate 0"):
        Evidence(good.gain[:, ::-1], good.covariance[:, ::-1], good.samples)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1), st.floats(0.01, 0.5))
def test_always_finite(devices: int, candidates: int, statistics: int, seed: int, caution: float) -> None:
    """Right-or-wrong gains with collinear or constant statistics and down to no samples never give NaN or a warning."""
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, 4, devices)
    gains = rng.integers(-1, 2, (devices, 3, candidates, 1)) * rng.choice([0.0, 1.0, 0.3, 1e-8, 1e4], statistics)
    gains *= (np.arange(3) < samples[:, None])[..., None, None]
    gains[:, :, 0] = 0
    single = gains.astype(np.float32)
    evidence = Evidence.from_sums(single.sum(1), np.einsum("dnca,dncb->dcab", single, single), samples)
    chosen = choose(evidence, caution)
    assert chosen.dtype == np.int64
    assert ((chosen >= 0) & (chosen < candidates)).all()
    if samples.any():
        belief = posterior(evidence, learn_prior(evidence))
        assert np.isfinite(belief.mean).all()
        assert np.isfinite(belief.variance).all()


@pytest.mark.parametrize("sharp", [0.0, 2.0])
@pytest.mark.parametrize("most", [8, 30])
@pytest.mark.parametrize("regime", sorted(REGIMES))
def test_fewer_are_hurt_than_by_simpler_rules(regime: str, most: int, sharp: float) -> None:
    """Devices with 2 to `most` samples: fewer are hurt, and neither the mean nor the worst decile pays for it.

    Naive is the best validation accuracy, ties to the least loss. Where nearly all devices gain and eight samples at
    most tell them apart, as few are hurt by either. Many devices, so that chance does not decide.
    """
    accuracy, correct, loss, samples = simulate(regime, 4000, 11, most, sharp)
    naive = np.argmax(means(correct, samples) - 1e-9 * means(loss, samples), 1)
    mean, worst, hurt = outcome(accuracy, choose(evidence_in(correct, loss, samples), 0.2))
    shared, personal = (outcome(accuracy, np.full(4000, index)) for index in (0, 4))
    limit = outcome(accuracy, naive)[2]
    assert hurt < {("helps", 8): limit + 0.005, ("helps", 30): limit}.get((regime, most), limit / 2)
    assert hurt < personal[2] / 2
    assert hurt < 0.2 / 4
    assert mean >= max(shared[0], personal[0] - 0.005)
    assert worst >= max(shared[1], personal[1])
