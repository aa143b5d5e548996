"""Distributions of times: quantiles, means, traces, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from scipy import stats

from personafl.core.rng import uniforms
from personafl.errors import BadInput
from personafl.latency.laws import (
    Constant,
    Exponential,
    Latency,
    Law,
    Lognormal,
    Pareto,
    Trace,
    Weibull,
    parse_latency,
)
from personafl.latency.samples import Sample, read_trace

SHARES = np.linspace(0.001, 0.999, 41)
LAWS: list[tuple[Law, Any]] = [
    (Exponential(mean=2.0), stats.expon(scale=2.0)),
    (Weibull(shape=1.7, scale=3.0), stats.weibull_min(1.7, scale=3.0)),
    (Pareto(shape=2.5, minimum=0.5), stats.pareto(2.5, scale=0.5)),
    (Lognormal(median=1.5, sigma=0.8), stats.lognorm(0.8, scale=1.5)),
]


@pytest.mark.parametrize(("law", "reference"), LAWS, ids=lambda value: getattr(value, "kind", ""))
def test_quantiles_and_means_are_those_of_the_law(law: Law, reference: Any) -> None:
    np.testing.assert_allclose(law.quantile(SHARES), reference.ppf(SHARES), rtol=1e-12)
    assert law.mean == pytest.approx(reference.mean(), rel=1e-12)
    draws = law.quantile(uniforms(3, "test", np.arange(4000)))
    assert stats.kstest(draws, reference.cdf).pvalue > 1e-3


@pytest.mark.parametrize("law", [Constant(seconds=3.0), *(law for law, _ in LAWS)], ids=lambda law: law.kind)
def test_the_tail_is_exact_where_shares_round_to_one(
    law: Constant | Exponential | Weibull | Pareto | Lognormal,
) -> None:
    hazard = np.array([0.0, 1e-12, 1.0, 30.0])
    np.testing.assert_allclose(law.at(hazard), law.quantile(-np.expm1(-hazard)), rtol=1e-2)
    assert np.isfinite(law.at(np.array(200.0)))  # a share of 1 − 1e-87


def test_constant_is_the_number_itself() -> None:
    assert Constant(seconds=0.1).quantile([0.0, 0.3, 0.999]).tolist() == [0.1] * 3
    assert Constant(seconds=0.0).mean == 0.0
    assert Pareto(shape=1.0).mean == np.inf


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_quantiles_of_a_sample_are_its_values(times: list[float]) -> None:
    sample = Sample.of(times)
    n = len(times)
    np.testing.assert_array_equal(sample.quantile(np.arange(1, n + 1) / n), np.sort(times))
    np.testing.assert_array_equal(sample.quantile((np.arange(n) + 0.5) / n), np.sort(times))
    assert sample.quantile(0.0) == min(times)
    assert sample.mean == pytest.approx(np.mean(times))


def test_uniforms_are_in_the_open_interval_and_repeat() -> None:
    share = uniforms(0, "x", np.arange(1000)[:, None], np.arange(20))
    assert share.shape == (1000, 20)
    assert 0 < share.min() < share.max() < 1
    assert stats.kstest(share.ravel(), "uniform").pvalue > 1e-3
    assert share[3, 4] == uniforms(0, "x", 3, 4) != uniforms(1, "x", 3, 4)
    most = (float(2**52 - 1) + 0.5) * 2.0**-52  # all bits set
    assert most < 1


def test_a_trace_is_read_from_text_and_from_an_array(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("3\n1.5\n\n 2e0 \n")
    np.save(tmp_path / "t.npy", np.array([[3.0, 1.5], [2.0, 2.0]], dtype=np.float32))
    assert read_trace(str(tmp_path / "t.txt")).values.tolist() == [1.5, 2.0, 3.0]
    law = Trace(file=str(tmp_path / "t.npy"))
    assert law.sample.values.tolist() == [1.5, 2.0, 2.0, 3.0]
    assert law.quantile([0.1, 0.9]).tolist() == [1.5, 3.0]
    assert law.mean == 2.125
    assert law.model_dump() == {"kind": "trace", "file": str(tmp_path / "t.npy")}
    assert law == Trace(file=law.file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"1\n-2\n", "a.txt, line 2: '-2' is no time"),
        ("a.txt", b"1\n\nnan\n", "a.txt, line 3: 'nan' is no time"),
        ("a.txt", b"inf", "line 1: 'inf'"),
        ("a.txt", b"1\n2 3\n", "line 2: '2 3'"),
        ("a.txt", b"\n \n", "a.txt: the trace is empty"),
        ("a.txt", b"\xff\xfe\x00", "a.txt: is no text"),
        ("a.npy", b"1\n2\n", r"a.npy: is no .npy file"),
        ("a.npy", b"", r"a.npy: is no .npy file"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        _ = Trace(file=str(tmp_path / name)).mean


@pytest.mark.parametrize(("values", "message"), [([1.0, np.nan], "value 2: 'nan'"), ([], "empty"), (["a"], "value 1")])
def test_a_bad_array_names_the_value(tmp_path: Path, values: list[Any], message: str) -> None:
    np.save(tmp_path / "a.npy", np.array(values))
    with pytest.raises(BadInput, match=message):
        read_trace(str(tmp_path / "a.npy"))


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none.txt: cannot read the trace \(No such file"):
        read_trace(str(tmp_path / "none.txt"))
    with pytest.raises(BadInput, match="cannot read the trace"):
        read_trace(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant:seconds=2", Constant(seconds=2.0)),
        ("exponential:mean=2", Exponential(mean=2.0)),
        ("weibull: shape = 2", Weibull(shape=2.0, scale=1.0)),
        ("pareto:shape=3,minimum=0.5", Pareto(shape=3.0, minimum=0.5)),
        ("lognormal:median=1,sigma=0.5", Lognormal(median=1.0, sigma=0.5)),
        ("trace:file=a b.txt", Trace(file="a b.txt")),
    ],
)
def test_short_form(text: str, expected: Law) -> None:
    assert parse_latency(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exponental:mean=2", "latency 'exponental' is unknown: did you mean 'exponential'"),
        ("exponential", "latency 'exponential': mean: Field required"),
        ("exponential:rate=2", "latency 'exponential' has no key 'rate'"),
        ("exponential:mean=0", "mean: Input should be greater than 0"),
        ("exponential:mean=inf", "mean: Input should be a finite number"),
        ("constant:seconds=-1", "seconds: Input should be greater than or equal to 0"),
        ("weibull:shape=-2", "shape: Input should be greater than 0"),
        ("pareto:shape=2,minimum=0", "minimum: Input should be greater than 0"),
        ("lognormal:median=nan,sigma=1", "median: Input should be"),
        ("weibull:shape=", "'shape' needs a value"),
    ],
)
def test_bad_short_form(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        parse_latency(text)
    assert "\n" not in str(caught.value)


def test_in_a_recipe_the_kind_decides() -> None:
    class Section(BaseModel):
        arrival: Latency

    assert Section.model_validate({"arrival": {"kind": "weibull", "shape": 2}}).arrival == Weibull(shape=2.0)
    for wrong in ({"kind": "uniform"}, {"kind": "weibull", "mean": 1, "shape": 1}, {"shape": 2}):
        with pytest.raises(ValidationError):
            Section.model_validate({"arrival": wrong})
