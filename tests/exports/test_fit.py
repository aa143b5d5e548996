"""What fits on a device: exact sizes, the choice, what the user writes, and the command."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from personafl import BadInput, Recipe, api, cli
from personafl.algorithms import quantize
from personafl.core import wire
from personafl.data.build import load
from personafl.exports.export import export
from personafl.exports.fit import BITS, Candidate, Limits, choose, fit, parse_bits, parse_models, parse_size
from personafl.exports.memory import round_memory
from personafl.models import make_net
from personafl.models.modelfile import card_of, compacted
from personafl.models.network import Network
from personafl.recipe.devices import DeviceSection
from personafl.runs.build import prepare
from tiers import tiered

PLENTY = Limits(bytes=10**9)
FEW = {"partition": {"kind": "iid", "clients": 3}}


def recipe(**sections: Any) -> Recipe:
    return Recipe.parse({"data": FEW, "rounds": 1, **sections})


@pytest.mark.parametrize(
    "network",
    [
        {"name": "cnn"},
        {"name": "cnn", "channels": [3, 5], "hidden": 7},  # odd sizes, and weights smaller than 256 centers
        {"name": "mlp", "hidden": [16, 16]},
        {"name": "resnet20", "width": 4},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_are_those_of_packed_weights(network: dict[str, Any], dtype: str) -> None:
    found = fit(recipe(engine={"dtype": dtype}), PLENTY, [Network(**network)])
    net = make_net(Network(**network), load(recipe().data, 0))
    model = {name: torch.randn(shape, dtype=getattr(torch, dtype)) for name, shape in net.shapes.items()}
    assert [candidate.bits for candidate in found.candidates] == list(BITS)
    for candidate in found.candidates:
        names = quantize.quantizable(net.shapes) if candidate.bits else ()
        codes = {
            n: quantize.pack(model[n], quantize.initial_centers(model[n], 2 ** (candidate.bits or 0))) for n in names
        }
        assert candidate.bytes == len(wire.encode(compacted((model | codes,))))
        assert candidate.parameters == net.parameters


@pytest.mark.parametrize("bits", tiered([None, 8, 2, 1], [2]))
def test_a_run_stores_and_exports_as_many_bytes(bits: int | None, tmp_path: Path) -> None:
    chosen = fit(recipe(), PLENTY, parse_models("cnn:channels=[4,8],hidden=16"), [bits]).chosen
    entry = tomllib.loads(chosen.to_toml())
    result = api.run({"data": FEW, "rounds": 1, "method": {"name": "quped"}, **entry}, out=tmp_path / "run")
    stored = {row["bytes_stored"] for row in result.rows if row["model"] == "personal"}
    assert stored == {chosen.bytes}
    export(tmp_path / "run", clients="all")
    cards = [card_of(path) for path in (tmp_path / "run" / "export").glob("client-*.safetensors")]
    assert {card.bytes_packed for card in cards} == {chosen.bytes}
    assert {card.parameters for card in cards} == {chosen.parameters}


def test_the_method_says_what_is_quantized(tmp_path: Path) -> None:
    """With no layer in full precision the model is smaller, and one with two layers can be quantized."""
    mlp = parse_models("mlp")
    usual = fit(recipe(), PLENTY, mlp)
    method = {"name": "quped", "full_precision": "none", "bits": 4}
    whole = fit(recipe(method=method), PLENTY, mlp, [None, 2])
    assert [candidate.bits for candidate in usual.candidates] == [None]
    assert [candidate.bits for candidate in whole.candidates] == [None, 2]
    assert whole.candidates[0].bytes == usual.candidates[0].bytes  # the method's own bits have no say
    compared = {"options": {"quped": {"full_precision": "none"}}}
    assert fit(recipe(compare=compared), PLENTY, mlp, [None, 2]) == whole
    entry = tomllib.loads(whole.candidates[1].to_toml())
    result = api.run({"data": FEW, "rounds": 1, "method": method, **entry}, out=tmp_path / "run")
    assert {row["bytes_stored"] for row in result.rows if row["model"] == "personal"} == {whole.candidates[1].bytes}


@pytest.mark.system
def test_memory_is_the_measured_one_and_the_most_of_all_clients() -> None:
    """Clients with fewer samples than a batch need less, so the one with most is taken."""
    sections = {"data": {"partition": {"kind": "quantity", "clients": 20, "alpha": 0.5}, "min_samples": 5}}
    limits = Limits(bytes=10**9, memory=10**9)
    for candidate in fit(recipe(**sections), limits, parse_models("cnn:channels=[4,8]"), [None, 2]).candidates:
        job = prepare(recipe(**sections, method={"name": "quped"}, devices=[candidate.device]))
        fed = job.federation
        needs = {client: round_memory(fed, fed.problems[0], client) for client in map(int, fed.data.seen)}
        assert candidate.memory == max(needs.values()) > min(needs.values())


def test_memory_is_measured_only_where_there_is_a_limit_and_room() -> None:
    networks = parse_models("cnn,mlp")
    assert all(candidate.memory is None for candidate in fit(recipe(), PLENTY, networks).candidates)
    for candidate in fit(recipe(), Limits(bytes=20_000, memory=10**9), networks).candidates:
        assert (candidate.memory is None) == (candidate.bytes > 20_000)


def test_without_names_all_models_that_suit_the_data_and_the_recipes_own() -> None:
    found = fit(recipe(model={"name": "mlp", "hidden": [9]}), PLENTY)
    assert {candidate.label for candidate in found.candidates} == {
        *(
            "linear",
            "mlp",
            "mlp:hidden=[9]",
            "cnn",
            "resnet18",
            "resnet20",
            "resnet32",
        ),  # digits are too small for the others
    }
    assert list(found.candidates) == sorted(
        found.candidates, key=lambda c: (c.parameters, c.bits or math.inf), reverse=True
    )
    assert found.chosen is found.candidates[0]


networks = st.builds(
    lambda number, bits, size: Candidate(
        network=Network(name=f"net{number}"),
        bits=bits,
        parameters=100 * number,
        bytes=size,
        memory=size * 3 % 1000,
    ),
    st.integers(1, 5),
    st.sampled_from(BITS),
    st.integers(1, 1000),
)


@given(st.lists(networks, min_size=1), st.integers(1, 1000), st.none() | st.integers(0, 1000), st.sampled_from([1, 2]))
def test_the_choice_is_the_largest_that_fits(
    candidates: list[Candidate], most: int, memory: int | None, least: int
) -> None:
    limits = Limits(bytes=most, memory=memory)
    good = [
        one
        for one in candidates
        if one.bytes <= most and (memory is None or (one.memory or 0) <= memory) and (one.bits or 32) >= least
    ]
    if not good:
        with pytest.raises(BadInput, match=r"--max-(bytes|memory)"):
            choose(candidates, limits, least)
        return
    chosen = choose(candidates, limits, least)
    assert chosen in good
    assert chosen.parameters == max(one.parameters for one in good)
    assert (chosen.bits or 32) == max(one.bits or 32 for one in good if one.parameters == chosen.parameters)


def test_one_bit_only_if_asked_for() -> None:
    cnn = parse_models("cnn:hidden=256")
    all_bits = {candidate.bits: candidate.bytes for candidate in fit(recipe(), PLENTY, cnn).candidates}
    tight = Limits(bytes=all_bits[1])
    with pytest.raises(BadInput, match=rf"only with 1 bit .* cnn:hidden=256 in 1 bit with {all_bits[1]:,} .*--bits 1"):
        fit(recipe(), tight, cnn)
    assert fit(recipe(), tight, cnn, [2, 1]).chosen.bits == 1
    assert fit(recipe(), Limits(bytes=all_bits[2]), cnn).chosen.bits == 2


def test_nothing_fits() -> None:
    cnn = parse_models("cnn,linear")
    least = min(candidate.bytes for candidate in fit(recipe(), PLENTY, cnn).candidates)
    assert fit(recipe(), Limits(bytes=least), cnn).chosen.bytes == least
    with pytest.raises(BadInput, match=f"--max-bytes {least - 1}: .*smallest is linear in full .* {least:,} bytes"):
        fit(recipe(), Limits(bytes=least - 1), cnn)
    with pytest.raises(BadInput, match=r"--max-memory 10: .*linear in full precision needs least.*training.batch"):
        fit(recipe(), Limits(bytes=10**9, memory=10), cnn)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("100", 100), ("100k", 100_000), ("1.5M", 1_500_000), ("2G", 2 * 10**9), ("1.001k", 1001)),
        *(("64Ki", 65_536), ("1.5 MiB", 1_572_864), ("1gi", 2**30), ("8kB", 8000), (" 7 ", 7)),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--max-bytes") == size


@pytest.mark.parametrize("text", ["", "k", "-5", "1,000", "1k x", "10 0", "1e3", "nan", "0", "0.1", "3T", "1.k"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match=r"--max-bytes: .* is no size; write it as 100k"):
        parse_size(text, "--max-bytes")


def test_models_with_options() -> None:
    found = parse_models("cnn1, mlp:hidden=[16, 8],dropout=0.1,own.nets:Small:width=3,own.nets:Plain,additive:form=sum")
    assert found == [
        Network(name="cnn1"),
        Network(name="mlp", hidden=[16, 8], dropout=0.1),  # type: ignore[call-arg]
        Network(name="own.nets:Small", width=3),  # type: ignore[call-arg]
        Network(name="own.nets:Plain"),
        Network(name="additive", form="sum"),  # type: ignore[call-arg]
    ]


@given(st.sampled_from(["mlp", "own.nets:Small"]), st.lists(st.integers(1, 9)), st.sampled_from(BITS))
def test_what_is_printed_is_read_back(name: str, hidden: list[int], bits: int | None) -> None:
    network = Network(name=name, hidden=hidden, form="sum", buffers="dropped")  # type: ignore[call-arg]
    one = Candidate(network=network, bits=bits, parameters=1, bytes=1)
    assert parse_models(f"cnn,{one.label}") == [Network(name="cnn"), network]
    [entry] = tomllib.loads(one.to_toml())["devices"]
    section = DeviceSection.model_validate(entry)
    assert (section.model, section.bits, section.share) == (network, bits, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write NAME"),
        ("cnn,,mlp", "write NAME"),
        ("hidden=[3]", "write NAME"),
        ("cnn,mlp,cnn", "'cnn' is there twice"),
        ("mlp:personal=output", "--models mlp: a client's own network is personal as a whole"),
        ("mlp:buffers=odd", "--models mlp.buffers: "),
    ],
)
def test_models_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_models(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cn", "--models cn: .*no model 'cn'; did you mean 'cnn'"),
        ("lenet", "--models lenet: .*at least 12×12"),
        ("bag", "--models bag: .*is for text"),
        ("cnn:width=3", "--models cnn: .*width: unknown key"),
        ("mlp:hidden=[0]", "--models mlp: .*hidden"),
    ],
)
def test_models_that_cannot_be_built(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fit(recipe(), PLENTY, parse_models(text))


def test_models_that_cannot_be_quantized() -> None:
    with pytest.raises(BadInput, match=r"--models mlp: .*no layer to quantize"):
        fit(recipe(), PLENTY, parse_models("cnn,mlp"), [4])
    names = {candidate.network.name for candidate in fit(recipe(), PLENTY, None, [4]).candidates}
    assert names == {"cnn", "resnet18", "resnet20", "resnet32"}


def test_bits() -> None:
    assert parse_bits("full, 8,1") == [None, 8, 1]
    for text in ("", "0", "9", "2,2", "two", "1-4"):
        with pytest.raises(BadInput, match=r"--bits .*1 to 8 or full"):
            parse_bits(text)


def test_text(tmp_path: Path) -> None:
    """Networks for tokens are tried where the data are tokens; the vocabulary is the data's."""
    rng = np.random.default_rng(0)
    path = tmp_path / "text.npz"
    np.savez(path, x=rng.integers(1, 30, (40, 6)), y=rng.integers(0, 2, 40))
    data = {"source": str(path), "partition": {"kind": "iid", "clients": 2}}
    found = fit(Recipe.parse({"data": data}), Limits(bytes=10**9, memory=10**9))
    assert "bag" in {candidate.network.name for candidate in found.candidates}
    assert all(candidate.memory for candidate in found.candidates)


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Call the command in an empty folder; return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["personafl", "fit", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        printed = capsys.readouterr()
        return exit_.value.code or 0, printed.out, printed.err

    return call


FAST = ["--partition", "iid:clients=3", "--models", "cnn,mlp:hidden=[16, 16],linear"]


def test_the_command(main: Callable[..., Any]) -> None:
    code, printed, _ = main("--max-bytes", "10k", *FAST)
    assert code == 0
    table, _, entry = printed.partition("[[devices]]")
    line = next(line for line in table.splitlines() if "chosen" in line)
    assert line.split()[:3] == ["cnn", "13,706", "3"]
    assert "mlp:hidden=[16, 16]" in table
    assert max(map(len, table.splitlines())) <= 80
    assert tomllib.loads("[[devices]]" + entry)["devices"] == [{"share": 1.0, "model": {"name": "cnn"}, "bits": 3}]


def test_an_entry_wider_than_the_terminal_can_be_pasted(main: Callable[..., Any]) -> None:
    _, printed, _ = main("--max-bytes", "1M", "--partition", "iid:clients=3", "--models", f"mlp:hidden={[2] * 30}")
    [entry] = tomllib.loads(printed[printed.index("[[devices]]") :])["devices"]
    assert entry["model"] == {"name": "mlp", "hidden": [2] * 30}


def test_the_command_in_json(main: Callable[..., Any]) -> None:
    _, printed, _ = main("--max-bytes", "10k", "--max-memory", "500k", *FAST, "--json", "training.batch=4")
    found = json.loads(printed)
    assert (found["max_bytes"], found["max_memory"], found["method"]) == (10_000, 500_000, "quped")
    [chosen] = [one for one in found["candidates"] if one["chosen"]]
    assert found["device"] == {"share": 1.0, "model": {"name": "mlp", "hidden": [16, 16]}}
    assert chosen["model"] == found["device"]["model"]
    assert chosen["fits"]
    assert chosen["bytes"] <= 10_000
    assert chosen["memory"] <= 500_000
    larger = [one for one in found["candidates"] if one["model"]["name"] == "cnn" and one["memory"] is not None]
    assert larger  # they would fit but for the memory
    assert not any(one["fits"] for one in larger)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--max-bytes"),
        (["--max-bytes", "lots"], "--max-bytes: 'lots' is no size"),
        (["--max-bytes", "1k", "--max-memory", "-1"], "--max-memory: '-1' is no size"),
        (["--max-bytes", "1k", "--bits", "16"], "--bits '16'"),
        (["--max-bytes", "1k", "--models", "lenet"], "--models lenet: "),
        (["--max-bytes", "1k", "--models", "cnn"], "the smallest is cnn in 1 bit with 6,192 bytes"),
        (["--max-bytes", "1k", "method.name=no"], "no method 'no'"),
    ],
)
def test_commands_that_cannot_be(main: Callable[..., Any], words: list[str], message: str) -> None:
    code, printed, error = main(*words, "--partition", "iid:clients=3")
    assert (code, printed) == (2, "")
    assert message in error
