"""Normalised and augmented data in whole runs: the same numbers however clients are run; models for plain images."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import personafl
from personafl import BadInput
from personafl.core import tree
from personafl.data.build import federate, load
from personafl.data.config import Augmentation, DataConfig, Iid, Moments
from personafl.data.federated import FederatedData
from personafl.data.inputs import as_seen
from personafl.data.moments import Sums, agreed, moments_of
from personafl.data.sources.dataset import checked
from personafl.deploy.device.dealing import deal
from personafl.deploy.server.opening import deployable
from personafl.recipe.recipe import Recipe
from personafl.runs.build import prepare
from personafl.runs.scoring import score, tune
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from tiers import tiered

AUGMENT = {"flip": True, "crop": 2}
DATA = {"partition": {"kind": "quantity", "clients": 6, "alpha": 1.0}, "unseen": 1, "normalize": "channel"}
SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": DATA | {"augment": AUGMENT},
    "model": {"name": "mlp", "hidden": [8], "personal": "output"},
    "training": {"epochs": 2, "batch": 16},
    "federation": {"cohort": 3},
    "engine": {"threads": 1, "dtype": "float64", "strategy": "stacked", "workers": 1},
}


def recipe(method: str, **engine: Any) -> Recipe:
    return Recipe.parse(SMALL | {"method": {"name": method}, "engine": SMALL["engine"] | engine})


def trained(given: Recipe) -> dict[str, Tensor]:
    """All numbers after two rounds and fine-tuning of those who have no state."""
    fed = prepare(given).federation
    with tempfile.TemporaryDirectory() as folder:
        run = Simulation(fed, Store(Path(folder) / "states", 2**30))
        for number in range(given.rounds):
            run.step(number)
        tuned = Store(Path(folder) / "tuned", 2**30)
        if fed.algorithm.client.tuning:
            tune(run, tuned, fed.data.unseen, given.rounds)
        run.workers.close()
        found = dict(tree.flatten(run.server))
        for store in (run.store, tuned):
            for client in (int(client) for client in range(fed.data.clients) if client in store):
                found |= {f"{client}/{path}": leaf for path, leaf in store.get(client).items()}
        return found


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[path].double() - other[path].double()).abs().max()) for path in one)


@pytest.mark.parametrize("method", tiered(["fedavg", "fedalt", "fedslr", "quped"], ["fedavg"]))
def test_stacked_or_one_by_one_clients_see_the_same_windows(method: str) -> None:
    """Clients of very unequal sizes, padded to each other; newcomers are fine-tuned on augmented data too."""
    stacked = trained(recipe(method))
    assert gap(stacked, trained(recipe(method, strategy="sequential"))) < 1e-10
    if method == "fedalt":
        assert gap(stacked, trained(recipe(method, workers=2, strategy="sequential"))) < 1e-10
        plain = Recipe.parse(recipe(method).model_dump(exclude_none=True) | {"data": DATA})
        assert gap(stacked, trained(plain)) > 1e-3


@pytest.mark.system
def test_a_resumed_run_goes_on_with_the_same_windows(tmp_path: Path) -> None:
    given = recipe("fedalt", checkpoint_seconds=0.0)
    whole = personafl.run(given, out=tmp_path / "whole")

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        personafl.run(given, out=tmp_path / "cut", listener=stop)
    again = personafl.run(given, out=tmp_path / "cut", resume=True)
    assert again.columns == whole.columns
    kept = json.loads((tmp_path / "cut" / "split.json").read_text())
    assert len(kept["normalize"]["mean"]) == 1
    other = Recipe.parse(given.model_dump(exclude_none=True) | {"data": DATA})
    with pytest.raises(BadInput, match=r"another recipe .see data"):
        personafl.run(other, out=tmp_path / "cut", resume=True)


def test_only_training_sees_augmented_images() -> None:
    """Before the first round test scores are what they are without augmentation, also on the training data."""
    outcomes = []
    for augment in (None, AUGMENT):
        data = DATA | ({} if augment is None else {"augment": augment})
        fed = prepare(Recipe.parse(recipe("fedavg").model_dump(exclude_none=True) | {"data": data})).federation
        with tempfile.TemporaryDirectory() as folder:
            run = Simulation(fed, Store(Path(folder) / "states", 2**30))
            splits = {"test": fed.data.test, "train": fed.data.train}
            scored = score(run, None, fed.data.seen, splits, blends=False).scores
            outcomes.append({place: (found.accuracy, found.loss) for place, found in scored.items()})
    assert outcomes[0].keys() == outcomes[1].keys()
    for place, (accuracy, loss) in outcomes[0].items():
        assert np.array_equal(accuracy, outcomes[1][place][0])
        assert np.array_equal(loss, outcomes[1][place][1])


def images(clients: int = 4) -> FederatedData:
    """Twenty images of two channels; the last client never trains."""
    x = np.random.default_rng(3).random((20, 2, 4, 5), dtype=np.float32)
    x[:, 1] = 0.5
    dataset = checked("here", name="blocks", x=x, y=np.arange(20) % 2)
    return federate(dataset, DataConfig(partition=Iid(clients=clients), unseen=1, test=0.4), 0)


def test_moments_are_those_of_what_seen_clients_train_on() -> None:
    data = images()
    rows = np.concatenate([data.train[int(client)] for client in data.seen])
    pixels = data.x.numpy()[rows].astype(np.float64)
    found = moments_of(data, "channel")
    assert np.allclose(found.mean, pixels.mean((0, 2, 3)), atol=1e-12)
    assert np.allclose(found.std, [pixels[:, 0].std(), 1.0], atol=1e-12)  # a channel without spread is only centred
    wanted = (data.x.double() - torch.tensor(found.mean).reshape(2, 1, 1)) / torch.tensor(found.std).reshape(2, 1, 1)
    seen = as_seen(data, DataConfig(normalize="channel"), torch.float32)
    assert torch.allclose(seen.x.double(), wanted, atol=1e-6)
    assert torch.equal(
        seen.x[data.test.flat], as_seen(data, DataConfig(normalize=found), torch.float32).x[data.test.flat]
    )
    assert seen.fingerprint == data.fingerprint  # it is the same split of the same data


def test_the_edge_is_what_a_black_pixel_becomes() -> None:
    data = images()
    data = dataclasses.replace(data, x=torch.cat([data.x, torch.zeros(1, 2, 4, 5)]))
    for dtype in (torch.float32, torch.float64):
        seen = as_seen(data, DataConfig(normalize="channel", augment=Augmentation(crop=1)), dtype)
        assert seen.augment.black == tuple(seen.x[-1, :, 0, 0].tolist())
    assert as_seen(data, DataConfig(normalize="none", augment=Augmentation(crop=1)), torch.float32).augment.black == ()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "run"
    personafl.run(recipe("ditto", dtype="float32"), out=path)
    return path


def test_exported_models_take_images_as_they_are(finished: Path) -> None:
    """Their accuracies on plain test images are those of the run."""
    exported = personafl.export(finished, clients="all")
    data = load(Recipe.parse(SMALL).data, 0)
    assert exported.models
    for model in exported.models:
        network = personafl.load_model(model.file)
        members = data.seen if model.client is None else [data.client_names.index(model.client)]
        shares = []
        for client in members:
            rows = torch.from_numpy(data.test[int(client)])
            shares.append(float((network(data.x[rows]).argmax(1) == data.y[rows]).float().mean()))
        assert np.mean(shares) == pytest.approx(model.test_accuracy, abs=1e-6)


@pytest.mark.system
def test_so_do_onnx_files(finished: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    (model,) = personafl.export(finished, tmp_path, onnx=True).models
    x = load(Recipe.parse(SMALL).data, 0).x[:50]
    (scores,) = onnxruntime.InferenceSession(model.onnx).run(["scores"], {"x": x.numpy()})
    assert np.allclose(scores, personafl.load_model(model.file)(x).detach().numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": {"crop": 8}}, r"data.augment.crop: 8 is as much as the images of digits have .8×8., .* at most 7"),
        ({"augment": {"crop": -1}}, r"data.augment.crop: input should be greater than or equal to 0"),
        ({"augment": {"rotate": 1}}, r"data.augment.rotate: unknown key"),
        ({"normalize": "channels"}, r"data.normalize: input should be 'auto', 'none' or 'channel'"),
        (
            {"normalize": {"mean": [0.5] * 3, "std": [1.0] * 3}},
            r"data.normalize.mean: has 3 numbers, .* one for each of 1 channels",
        ),
        ({"normalize": {"mean": [0.5], "std": [0.0]}}, r"data.normalize.std: input should be greater than 0"),
        ({"normalize": {"mean": [0.5], "std": [1.0, 2.0]}}, r"data.normalize: .*mean has 1 numbers and std 2"),
    ],
)
def test_bad_input_names_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(Recipe.parse({"data": changes}))


@pytest.mark.parametrize("changes", [{"augment": {"flip": True}}, {"normalize": "channel"}])
def test_data_without_images_are_refused(changes: dict[str, Any]) -> None:
    key = next(iter(changes))
    rows = np.arange(20)
    dataset = checked("here", name="rows", x=np.ones((20, 5), dtype=np.float32), y=rows % 2, user=rows // 5)
    with pytest.raises(
        BadInput, match=rf"data.{key}: is for images .* rows has samples of shape \[5\]; remove data.{key}"
    ):
        prepare(Recipe.parse({"data": changes}), federate(dataset, DataConfig(), 0))


def test_a_server_is_told_the_moments(tmp_path: Path) -> None:
    given = Recipe.parse({"data": {"normalize": "channel"}, "deploy": {"input_shape": [1, 8, 8], "classes": 10}})
    with pytest.raises(BadInput, match=r"data.normalize: a server has no data .* personafl data deal"):
        deployable(given)
    dealt, _ = deal(given, tmp_path)
    assert isinstance(dealt.data.normalize, Moments)
    assert dealt.data.normalize == moments_of(load(given.data, 0), "channel")
    deployable(dealt)


@pytest.mark.parametrize("shape", [(5,), (2, 6), (2, 3, 4)])
def test_units_do_not_matter(shape: tuple[int, ...]) -> None:
    """What networks see of x, of 1,000 x + 500 and of x about 10⁶ is the same, and has mean 0 and deviation 1."""
    x = np.random.default_rng(0).normal(0.3, 2.0, (60, *shape))
    found = {}
    for units, (scale, shift) in {"plain": (1, 0), "raw": (1000, 500), "tiny": (1e-4, 0), "far": (1e3, 1e6)}.items():
        dataset = checked("here", name="rows", x=scale * x + shift, y=np.arange(60) % 2, user=np.arange(60) // 6)
        data = federate(dataset, DataConfig(unseen=2), 0)
        found[units] = as_seen(data, DataConfig(), torch.float32).x
    rows = torch.from_numpy(data.train.of(data.seen))
    axes = (0, *range(2, x.ndim))
    assert torch.allclose(found["plain"][rows].mean(axes), torch.zeros(()), atol=1e-5)
    assert torch.allclose(found["plain"][rows].std(axes, correction=0), torch.ones(()), atol=1e-5)
    for units, tolerance in {"raw": 1e-6, "tiny": 1e-6, "far": 1e-4}.items():
        assert float((found[units] - found["plain"]).abs().max()) < tolerance


def test_sums_keep_a_small_spread_and_join_in_any_order() -> None:
    """500 ± 0.01 and 10⁶ ± 0.01, of which Σx²/n − m² would lose the spread; brute force by numpy in float64."""
    x = torch.from_numpy(np.array([500.0, 1e6]) + 0.01 * np.random.default_rng(1).normal(size=(300, 2)))
    parts = [Sums.of(part) for part in torch.split(x, 7)]
    forward, back = (functools.reduce(Sums.joined, order) for order in (parts, parts[::-1]))
    assert np.allclose(forward.moments().std, x.numpy().std(0), rtol=1e-6)
    forward, back, whole = (agreed([Sums(s.size, s.mean[:1], s.spread[:1])]) for s in (forward, back, Sums.of(x)))
    assert forward == back == whole  # a server that adds up its devices' sums has the simulator's numbers


def test_rare_constant_and_token_features_do_no_harm() -> None:
    x = np.random.default_rng(2).normal(size=(20_000, 3)).astype(np.float32)
    x[:, 1], x[:, 2] = 0, 7.1
    dataset = checked("here", name="rows", x=x, y=np.arange(20_000) % 2)
    data = federate(dataset, DataConfig(partition=Iid(clients=2)), 0)
    row = int(data.train.flat[0])
    data.x[row, 1] = 1  # one in 16,000: 126 standard deviations away
    seen = as_seen(data, DataConfig(), torch.float32)
    assert seen.x[row, 1] == 10.0
    assert seen.x[:, 1].abs().median() < 0.01
    assert seen.x[:, 2].abs().max() < 1e-5
    tokens = checked("here", name="words", x=np.arange(40).reshape(10, 4), y=np.arange(10) % 2)
    seen = as_seen(federate(tokens, DataConfig(partition=Iid(clients=2)), 0), DataConfig(), torch.float32)
    assert seen.moments is None
    assert torch.equal(seen.x, tokens.x)


def test_what_is_not_finite_is_named() -> None:
    data = images()
    x = data.x.clone()
    x[int(data.train[int(data.seen[1])][0]), 1, 2, 2] = np.nan
    with pytest.raises(BadInput, match=rf"blocks: channel 1 of client '{data.seen[1]}' holds NaN or infinity; remove"):
        as_seen(dataclasses.replace(data, x=x), DataConfig(), torch.float32)
