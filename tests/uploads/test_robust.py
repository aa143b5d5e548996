"""A server with a robust rule: what the method is given, by hand, and which methods it cannot serve."""

from typing import Any

import pytest
import torch

from personafl.algorithms import METHODS, Training
from personafl.algorithms.averaging import Averaging, Change
from personafl.core.algorithm import ClientRule
from personafl.errors import BadInput, Diverged
from personafl.robust.clip import RunningMedian
from personafl.robust.mixing import Arc, Bucketing, NearestNeighbours
from personafl.robust.rule import CHUNK, Mix, Rule
from personafl.robust.table import RULES
from personafl.robust.weighing import CenteredClipping, Mean
from personafl.testing.case import make_case
from personafl.testing.laws import LAWS
from personafl.uploads.robust import Robust, RobustServer, made_robust

START = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.zeros(1, 2, dtype=torch.float64)}
PROBLEM: Any = None  # the rules under test do not look at it
CLIENT: ClientRule = METHODS["fedavg"].build(Training()).client


def server(rule: Rule, **how: Any) -> RobustServer:
    return RobustServer(rule=Averaging(), robust=rule, client=CLIENT, **how)


def rows(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sent(vectors: torch.Tensor) -> Change:
    change = {"a": vectors[:, :2], "b": vectors[:, 2:].reshape(-1, 1, 2)}
    return Change(change, torch.arange(1.0, len(vectors) + 1))


def stepped(rule: RobustServer, vectors: torch.Tensor, parts: int = 1, weights: Any = None) -> tuple[Robust, Any]:
    """Return the state after a round, whose uploads come in parts, and how the model moved."""
    state, joined = rule.init(PROBLEM, START, 10.0), None
    weights = torch.ones(len(vectors)) if weights is None else torch.tensor(weights)
    for some, counts in zip(vectors.chunk(parts), weights.chunk(parts), strict=True):
        joined = rule.join(state, joined, sent(some), counts)
    assert joined is not None
    after = rule.update(state, joined, 3)
    moved = torch.cat([(after.own.model[name] - START[name]).flatten() for name in ("a", "b")])
    return after, (moved, joined)


@pytest.mark.parametrize("name", [name for name in RULES if not RULES[name].from_centre])
@pytest.mark.parametrize("before", [(), (NearestNeighbours(f=1), Arc(f=1))])
def test_the_model_moves_by_what_the_rule_gives(name: str, before: tuple[Mix, ...]) -> None:
    """Uploads in one part or in three: the model moves by the rule of them as vectors, and the loss is their mean."""
    rule, vectors = RULES[name](f=1), rows(9)
    expected = vectors
    for step in before:
        expected = step(expected)
    for parts in (1, 3):
        moved, joined = stepped(server(rule, before=before), vectors, parts)[1]
        torch.testing.assert_close(moved, rule(expected), rtol=0, atol=1e-12)
        assert joined.clients == 9
        assert joined.loss() == pytest.approx(5.0 if parts == 1 else 2.0)


def test_leaves_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = rows(7)
    whole = stepped(server(RULES["multi-krum"](f=2)), vectors)[1][0]
    monkeypatch.setattr("personafl.robust.rule.CHUNK", 1)
    assert CHUNK > 1
    torch.testing.assert_close(stepped(server(RULES["multi-krum"](f=2)), vectors)[1][0], whole, rtol=0, atol=1e-12)


def test_the_mean_weighs_uploads_up_to_a_share() -> None:
    """Weights 1, 1, 8 are 1, 1, 2 where none may have more than half."""
    vectors = rows(3)
    moved = stepped(server(Mean()), vectors, 1, [1.0, 1.0, 8.0])[1][0]
    torch.testing.assert_close(moved, (vectors[0] + vectors[1] + 8 * vectors[2]) / 10)
    moved = stepped(server(Mean(), most=0.5), vectors, 1, [1.0, 1.0, 8.0])[1][0]
    torch.testing.assert_close(moved, (vectors[0] + vectors[1] + 2 * vectors[2]) / 4)


def test_uploads_are_clipped_at_a_norm_or_at_the_median_of_norms() -> None:
    vectors = rows(3) / rows(3).norm(dim=1, keepdim=True) * torch.tensor([[1.0], [2.0], [8.0]])
    after, (moved, _) = stepped(server(Mean(), clip=4.0), vectors)
    torch.testing.assert_close(moved, (vectors[0] + vectors[1] + vectors[2] / 2) / 3)
    rule = server(Mean(), clip=RunningMedian(times=1.0, rounds=2))
    after, (moved, _) = stepped(rule, vectors)
    torch.testing.assert_close(moved, (vectors[0] + vectors[1] + vectors[2] / 4) / 3)
    assert after.medians.tolist() == [-1.0, pytest.approx(2.0)]
    assert rule.told(after) == {"clip": pytest.approx(2.0), "clipped": pytest.approx(1 / 3), "left_out": 0.0}


def test_where_nobody_moves_there_is_nothing_to_clip_to() -> None:
    _, (moved, _) = stepped(server(Mean(), clip=RunningMedian()), torch.zeros(3, 4, dtype=torch.float64))
    assert (moved == 0).all()


@pytest.mark.parametrize("name", list(RULES))
def test_what_is_not_finite_is_left_out(name: str) -> None:
    """Two of nine are left out: what is left is held to f = 0."""
    if RULES[name].from_centre:
        return
    vectors = rows(9)
    wrong = vectors.clone()
    wrong[2, 3], wrong[7, 0] = torch.inf, torch.nan
    good = [row for row in range(9) if row not in (2, 7)]
    rule = server(RULES[name](f=2 if name != "bulyan" else 1))
    if name == "bulyan":
        with pytest.raises(Diverged, match="round 4: 2 of 9 uploads are not finite, more than"):
            stepped(rule, wrong)
        return
    after, (moved, _) = stepped(rule, wrong, 2)
    torch.testing.assert_close(moved, RULES[name](f=0)(vectors[good]), rtol=0, atol=1e-12)
    assert rule.told(after) == {"left_out": 2.0}


def test_buckets_are_drawn_anew_in_every_round() -> None:
    rule, vectors = server(RULES["median"](), before=(Bucketing(size=3),), seed=1), rows(9)
    state = rule.init(PROBLEM, START, 10.0)
    joined = rule.join(state, None, sent(vectors), torch.ones(9))
    models = [rule.update(state, joined, round_).own.model["a"] for round_ in (0, 0, 1)]
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedslr", "fedbcd"])
def test_methods_that_use_more_than_the_mean_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"robust: what {name}'s clients send is more than changes"):
        made_robust(METHODS[name].build(Training()), rule=RULES["median"]())


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedalt", "fedrep", "fedadam", "pfedme", "apfl"])
def test_methods_that_average_changes_are_served(name: str) -> None:
    made = made_robust(METHODS[name].build(Training()), rule=RULES["median"]())
    assert isinstance(made.server, RobustServer)


def test_who_sends_nothing_is_left_as_it_is() -> None:
    local = METHODS["local"].build(Training())
    assert made_robust(local, rule=RULES["median"]()) is local


@pytest.mark.parametrize(
    "law", ["stacked_equals_one_by_one", "state_survives_a_checkpoint", "only_declared_fields_leave"]
)
def test_laws_of_whole_rounds(law: str) -> None:
    """Those that go through a simulator, whose server joins uploads as the rule says."""
    fedalt = METHODS["fedalt"].build(Training())
    LAWS[law](make_case(made_robust(fedalt, rule=CenteredClipping(radius=0.1), clip=RunningMedian(), seed=1)))
