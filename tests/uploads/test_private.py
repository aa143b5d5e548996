"""Privacy of clients: what is summed is clipped, what is released is noisy, what is kept is untouched."""

from typing import Any

import numpy as np
import pytest
import torch

from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Averaging, Change
from personafl.core.algorithm import Reduced
from personafl.core.optim import Sgd
from personafl.errors import BadInput
from personafl.privacy.clip import AdaptiveClip
from personafl.privacy.noise import gaussians_on, make_key
from personafl.testing.case import make_case
from personafl.testing.laws import LAWS
from personafl.uploads.private import Private, PrivateServer, private

KEY = make_key(0)
START = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.zeros(1, 2, dtype=torch.float64)}
PROBLEM: Any = None  # the rules under test do not look at it


def server(clip: float | AdaptiveClip = 1.0, noise: float = 0.5, cohort: float = 4.0) -> PrivateServer:
    return PrivateServer(rule=Averaging(), clip=clip, noise=noise, cohort=cohort, key=KEY)


def uploads(norms: Any, seed: int = 0) -> Change:
    """Return stacked changes with these norms over both leaves."""
    generator = torch.Generator().manual_seed(seed)
    norms = torch.as_tensor(norms, dtype=torch.float64)
    rows = torch.randn(len(norms), 4, dtype=torch.float64, generator=generator)
    rows = norms[:, None] * rows / rows.norm(dim=1, keepdim=True)
    return Change({"a": rows[:, :2], "b": rows[:, 2:].reshape(-1, 1, 2)}, torch.arange(1.0, len(norms) + 1))


def flat(sums: Any) -> torch.Tensor:
    return torch.cat([sums.change["a"].flatten(), sums.change["b"].flatten()])


def joined(rule: PrivateServer, state: Private, stacked: Change, weights: Any = None) -> Reduced:
    return rule.join(state, None, stacked, torch.ones(len(stacked.loss)) if weights is None else weights)


def test_a_round_by_hand() -> None:
    """Norms 0.5, 1 and 4 at a clip of 1; the sum is divided by the expected cohort of 4, though 3 came."""
    rule, sent = server(), uploads([0.5, 1.0, 4.0])
    state = rule.init(PROBLEM, START, 10.0)
    after = rule.update(state, joined(rule, state, sent, torch.tensor([5.0, 1.0, 100.0])), round_=7)
    factors = torch.tensor([1.0, 1.0, 0.25], dtype=torch.float64)
    drawn = gaussians_on(torch.device("cpu"), KEY, "7", 5)  # the last one is the loss's, and not used
    for name, noise in (("a", 0.5 * drawn[:2]), ("b", 0.5 * drawn[2:4].reshape(1, 2))):
        sums = torch.einsum("i,i...->...", factors, sent.change[name])
        expected = START[name] + (sums + noise) / 4
        torch.testing.assert_close(after.own.model[name], expected, rtol=0, atol=1e-15)
    assert after.clip == state.clip


def test_one_client_more_moves_a_sum_by_the_clip_at_most() -> None:
    rule = server(clip=0.7)
    state = rule.init(PROBLEM, START, 10.0)
    norms = np.random.default_rng(0).lognormal(sigma=3, size=50)
    sent = uploads(norms)
    all_of_them = flat(joined(rule, state, sent).total.upload)
    for left_out in range(50):
        rest = [row for row in range(50) if row != left_out]
        fewer = Change({name: leaf[rest] for name, leaf in sent.change.items()}, sent.loss[rest])
        moved = (all_of_them - flat(joined(rule, state, fewer).total.upload)).norm()
        assert moved == pytest.approx(min(norms[left_out], 0.7), abs=1e-12)


def test_losses_are_a_mean_of_who_came_and_are_not_noisy() -> None:
    rule = server()
    found = joined(rule, rule.init(PROBLEM, START, 10.0), uploads([1.0, 9.0, 9.0]))
    assert found.loss() == 2.0
    assert found.clients == 3


def test_an_upload_of_nothing_stays_that() -> None:
    rule = server()
    found = joined(rule, rule.init(PROBLEM, START, 10.0), uploads([0.0]))
    assert flat(found.total.upload).tolist() == [0.0] * 4


def test_a_round_of_nobody_is_noise() -> None:
    rule = server()
    state = rule.init(PROBLEM, START, 10.0)
    after = rule.update(state, joined(rule, state, uploads([])), round_=0)
    torch.testing.assert_close(
        after.own.model["a"], START["a"] + gaussians_on(torch.device("cpu"), KEY, "0", 5)[:2] * 0.5 / 4
    )


def test_chunks_join_to_the_same() -> None:
    rule, sent = server(), uploads([0.1, 2.0, 3.0, 0.4])
    state = rule.init(PROBLEM, START, 10.0)
    whole, parts = joined(rule, state, sent), None
    for rows in ([0, 1, 2], [3]):
        part = Change({name: leaf[rows] for name, leaf in sent.change.items()}, sent.loss[rows])
        parts = rule.join(state, parts, part, torch.ones(len(rows)))
    assert parts is not None
    torch.testing.assert_close(flat(parts.total.upload), flat(whole.total.upload), rtol=0, atol=1e-15)
    assert parts.total.within == whole.total.within == 0  # two of four are within: ½ + ½ − ½ − ½


@pytest.mark.parametrize("start", [0.1, 1.1, 10.0])
def test_an_adaptive_clip_finds_the_median_of_norms(start: float) -> None:
    """Norms with median 1, from below and above, within 5 % in 100 rounds of 100 clients."""
    rule = server(AdaptiveClip(start=start), noise=1.0, cohort=100.0)
    state, random = rule.init(PROBLEM, START, 1000.0), np.random.default_rng(1)
    seen = []
    for number in range(100):
        state = rule.update(state, joined(rule, state, uploads(random.lognormal(sigma=0.3, size=100))), number)
        seen.append(float(state.clip))
    assert np.exp(np.log(seen[-20:]).mean()) == pytest.approx(1.0, rel=0.05)
    assert seen[-1] == pytest.approx(1.0, rel=0.05)


def test_count_and_sum_together_are_as_private_as_one_mechanism() -> None:
    """1/z² = 1/z_Δ² + 1/(2σ_b)²: the sum by the clip, and the count by ½, are one vector in units of their noise."""
    rule = server(AdaptiveClip(noise=0.05), noise=1.3, cohort=40.0)
    count = 0.5 / (0.05 * 40)  # how far a client moves it, in standard deviations
    assert (1 / rule._of_sums()) ** 2 + count**2 == pytest.approx(1.3**-2)


def test_a_count_without_enough_noise_is_refused() -> None:
    with pytest.raises(BadInput, match=r"privacy\.clip\.noise: .* lower privacy\.noise below 1"):
        private(METHODS["fedavg"].build(Training()), clip=AdaptiveClip(), noise=1.0, cohort=10, key=KEY)


REFUSED = {
    *("feddyn", "scaffold", "fedslr", "fedbcd", "fedbcdi", "feddbe", "fedproto", "fedpac", "ifca"),
    *("pfedhn", "fedfomo"),
}


@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFUSED])
def test_who_uses_the_mean_of_changes_alone_can(name: str) -> None:
    """And so can who sends nothing, whose server stays as it is."""
    algorithm = METHODS[name].build(Training(optimizer=Sgd(lr=0.1)))
    found = private(algorithm, clip=1.0, noise=1.0, cohort=10, key=KEY)
    assert isinstance(found.server, PrivateServer) == (algorithm.client.uploads._fields != ("loss",))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_others_are_refused_by_name(name: str) -> None:
    algorithm = METHODS[name].build(Training(optimizer=Sgd(lr=0.1)))
    with pytest.raises(BadInput, match=f"what {name}'s clients send"):
        private(algorithm, clip=1.0, noise=1.0, cohort=10, key=KEY)


@pytest.mark.parametrize(
    "law", ["stacked_equals_one_by_one", "state_survives_a_checkpoint", "only_declared_fields_leave"]
)
def test_laws_of_whole_rounds(law: str) -> None:
    """Those that go through a simulator, whose server joins uploads as the rule says."""
    fedalt = METHODS["fedalt"].build(Training(optimizer=Sgd(lr=0.1)))
    LAWS[law](make_case(private(fedalt, clip=AdaptiveClip(noise=0.5), noise=0.7, cohort=5.0, key=KEY)))
