"""Updates are checked before they touch the model: every class of malformed ones is refused by its own name."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deploy_harness import identity_of
from hypothesis import assume, given
from hypothesis import strategies as st
from processes import SMALL, recipe_of
from torch import Tensor
from updates import CLASSES, generated

from personafl.algorithms.fedavg import FedAvgClient
from personafl.core import wire
from personafl.core.algorithm import Problem
from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.deploy import pki
from personafl.deploy.device.datafile import load_own
from personafl.deploy.device.state import DeviceState
from personafl.deploy.device.training import LocalClient
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Code, Hello, Refused, Update, digest_of
from personafl.deploy.net.payload import check_declared, opened_update
from personafl.deploy.server.rounds import Rounds
from personafl.errors import BadInput
from personafl.recipe.recipe import Recipe

BOUND = 100.0
FOREVER = datetime.max.replace(tzinfo=UTC)


class Open(NamedTuple):
    """A server whose second round is open, and two devices: one has a good update that was not sent."""

    rounds: Rounds
    one: Identity
    other: Identity
    update: Update
    payload: bytes


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return second_round(tmp_path_factory.mktemp("open"), recipe_of("fedalt", 2, {"norm_bound": BOUND}))


def second_round(folder: Path, recipe: Recipe) -> Open:
    from personafl.deploy.device.dealing import deal

    pki.init(folder / "pki")
    recipe, files = deal(recipe, folder / "dealt")
    rounds = Rounds(recipe, folder / "run")
    who = [identity_of(folder / "pki", f"device-{number}") for number in (0, 1)]
    clients = []
    for number, file in enumerate(files):
        own = load_own(str(file), number, recipe)
        client = LocalClient(recipe, own, number, None, DeviceState(folder / f"{number}", rounds.run, number))
        rounds.enrol(who[number], Hello(samples=client.samples, input_shape=[1, 8, 8], classes=10))
        clients.append(client)
    rounds.begin()
    for round_ in range(2):
        rounds.open_next()
        for identity, client in zip(who, clients, strict=True):
            task = rounds.task(client.number, client.state.known)
            assert task is not None
            client.train(*task)
            pending = client.state.pending
            assert pending is not None
            update = Update(round=pending.round, model=pending.model, samples=client.samples)
            if round_ == 0:
                rounds.accept(identity, update, pending.update)
                client.state.accepted()
        if round_ == 0:
            rounds.close()
    pending = clients[0].state.pending
    assert pending is not None
    update = Update(round=1, model=pending.model, samples=clients[0].samples)
    return Open(rounds, who[0], who[1], update, pending.update)


def model_of(rounds: Rounds) -> str:
    return digest_of(wire.encode(rounds._server.state))


def refusal(opened: Open, update: Update, payload: bytes, who: Identity | None = None) -> Code | None:
    """Offer an update; return the code that refused it, and check that nothing changed."""
    rounds = opened.rounds
    before, files = model_of(rounds), sorted((rounds.directory.path / "updates").iterdir())
    try:
        rounds.accept(who or opened.one, update, payload)
    except Refused as refused:
        assert model_of(rounds) == before
        assert sorted((rounds.directory.path / "updates").iterdir()) == files
        assert rounds.open is not None
        assert rounds.open.taken == {}
        return refused.code
    return None


def test_a_server_has_one_number_for_each_device_however_many_samples_these_claim(tmp_path: Path) -> None:
    """Twenty devices claim 10⁶ samples each: 160 MB at every enrolment, if a server had an entry for each of them."""
    hello = Hello(samples=10**6, input_shape=[1, 8, 8], classes=10)
    with Rounds(recipe_of("fedavg", data=SMALL["data"] | {"normalize": "none"}), tmp_path / "run") as rounds:
        rounds.enrol(Identity("device-0", "device", 0, 0, FOREVER), hello)
        rounds.begin()
        tracemalloc.start()
        for number in range(1, 20):
            rounds.enrol(Identity(f"device-{number}", "device", number, 0, FOREVER), hello)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert rounds._roster().population == 20 * 10**6
        assert peak < 2**20


def test_there_are_at_least_twenty_classes() -> None:
    assert len(CLASSES) >= 20


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_refused_by_its_own_code(opened: Open, name: str) -> None:
    code, make = CLASSES[name]
    assert refusal(opened, *make(opened.update, opened.payload)) is code


def test_two_hundred_thousand_empty_tensors_are_refused_before_any_is_read(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading these 13 MB took a server's only worker 11 seconds and more."""

    def read(data: bytes) -> Any:
        raise AssertionError("was read")

    monkeypatch.setattr(wire, "decode_named", read)
    entries = (b'"change/%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(203_163))
    header = b"{" + b",".join(entries) + b"}"
    payload = len(header).to_bytes(8, "little") + header
    assert len(payload) > 13e6
    assert refusal(opened, opened.update, payload) is Code.BAD_PAYLOAD


@given(st.integers(0, 2**32))
def test_generated_ones_are_refused(opened: Open, seed: int) -> None:
    update, payload = generated(seed, opened.update, opened.payload)
    assume((update, payload) != (opened.update, opened.payload))
    assert refusal(opened, update, payload) is not None


@given(st.dictionaries(st.text(max_size=20), st.binary(max_size=20), max_size=4), st.binary(max_size=200))
def test_so_is_anything_else(opened: Open, entries: dict[str, bytes], tail: bytes) -> None:
    import safetensors.torch

    named = {name: torch.frombuffer(bytearray(data or b"0"), dtype=torch.uint8) for name, data in entries.items()}
    assert refusal(opened, opened.update, safetensors.torch.save(named) + tail) is not None


def test_who_is_not_enrolled_or_not_selected_is_refused(tmp_path: Path, opened: Open) -> None:
    pki.init(tmp_path / "pki")
    assert (
        refusal(opened, opened.update, opened.payload, identity_of(tmp_path / "pki", "device-5")) is Code.NOT_ENROLLED
    )
    going = opened.rounds.open
    assert going is not None
    cohort, going.cohort = going.cohort, (1,)
    assert refusal(opened, opened.update, opened.payload) is Code.NOT_SELECTED
    going.cohort = cohort


def test_an_update_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of the same bytes changes nothing; other bytes in its place are refused; so is a closed round's."""
    opened = second_round(tmp_path, recipe_of("fedavg", 2, robust={"rule": "mean"}))
    parsed, real = list[int](), wire.decode_named
    monkeypatch.setattr(wire, "decode_named", lambda data: parsed.append(len(data)) or real(data))  # type: ignore[func-returns-value]
    assert opened.rounds.accept(opened.one, opened.update, opened.payload) is False
    opened.rounds._joined()
    assert parsed == [len(opened.payload)]  # when it is used: as it came, its header was known from the round before
    assert opened.rounds.accept(opened.one, opened.update, opened.payload) is True
    with pytest.raises(Refused) as caught:
        opened.rounds.accept(opened.one, opened.update, opened.payload + b" ")
    assert caught.value.code is Code.DUPLICATE
    with pytest.raises(Refused) as caught:  # another device sends what it overheard
        opened.rounds.accept(opened.other, opened.update.model_copy(update={"samples": 10**5}), opened.payload)
    assert caught.value.code is Code.BAD_SAMPLES
    opened.rounds.close()
    assert opened.rounds.accept(opened.one, opened.update, opened.payload) is True  # it was: the device may go on
    with pytest.raises(Refused) as caught:
        opened.rounds.accept(opened.other, opened.update, opened.payload)
    assert caught.value.code is Code.ROUND_CLOSED


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"samples": 0}, Code.BAD_SAMPLES),
        ({"samples": 10**7}, Code.BAD_SAMPLES),
        ({"input_shape": [3, 8, 8]}, Code.OTHER_DATA),
        ({"classes": 11}, Code.OTHER_DATA),
        ({"samples": 17}, Code.OTHER_DATA),  # it enrolled with others
    ],
)
def test_an_enrolment_that_does_not_fit_is_refused(opened: Open, change: dict[str, Any], code: Code) -> None:
    hello = Hello(samples=opened.update.samples, input_shape=[1, 8, 8], classes=10)
    with pytest.raises(Refused) as caught:
        opened.rounds.enrol(opened.one, hello.model_copy(update=change))
    assert caught.value.code is code


class Change(NamedTuple):
    change: Params
    loss: Tensor


class Leaky(NamedTuple):
    change: Params
    loss: Tensor
    personal: Params


def test_a_device_sends_the_declared_type_and_nothing_else() -> None:
    good = Change({"w": torch.ones(2)}, torch.tensor(0.0))
    check_declared(good, Change)
    for wrong in (Leaky(*good, {"v": torch.ones(2)}), tuple(good), {"change": good.change}):
        with pytest.raises(BadInput, match="not sent"):
            check_declared(wrong, Change)


def test_a_rule_that_declares_nothing_is_refused() -> None:
    class Silent(FedAvgClient):
        def update(self, problem: Any, down: Any, state: Any, data: Any) -> Any: ...

    class Loose(FedAvgClient):
        def update(self, problem: Any, down: Any, state: Any, data: Any) -> tuple[Any, dict[str, Tensor]]: ...  # type: ignore[override]

    for rule in (Silent(), Loose()):
        with pytest.raises(BadInput, match="does not declare"):
            _ = rule.uploads
        with pytest.raises(BadInput, match="does not declare"):
            rule.expects(Problem(Net(torch.nn.Linear(1, 1)), torch.mul), {})


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"places": torch.tensor([99], dtype=torch.int32)}, Code.BAD_FORM),
        ({"places": torch.tensor([0, 1], dtype=torch.int32)}, Code.BAD_FORM),
        ({"places": torch.tensor([0.0])}, Code.BAD_FORM),
        ({"shape": torch.tensor([2.0, 3.0])}, Code.BAD_FORM),
        ({"shape": torch.tensor([10**6, 10**6], dtype=torch.int32)}, Code.BAD_SHAPE),
        ({"values": torch.tensor([1.0], dtype=torch.float64)}, Code.BAD_DTYPE),
        ({"values": torch.tensor([float("nan")])}, Code.NOT_FINITE),
        ({"values": torch.tensor([1e9])}, Code.NORM_TOO_LARGE),
        ({}, None),
    ],
)
def test_compact_forms_are_checked_before_they_are_restored(parts: dict[str, Tensor], code: Code | None) -> None:
    import safetensors.torch

    like = Change({"w": wire.Sparse.of(torch.eye(2, 3))}, torch.tensor(0.0))  # type: ignore[dict-item]
    good = {"places": torch.tensor([5], dtype=torch.int32), "values": torch.tensor([2.0])}
    good["shape"] = torch.tensor([2, 3], dtype=torch.int32)
    named = {f"change/w#sparse.{part}": value for part, value in (good | parts).items()} | {"loss": torch.tensor(0.0)}
    data = safetensors.torch.save(named)
    if code is None:
        assert opened_update(data, like, Change, BOUND).change["w"].tolist() == [[0, 0, 0], [0, 0, 2]]
        return
    with pytest.raises(Refused) as caught:
        opened_update(data, like, Change, BOUND)
    assert caught.value.code is code
