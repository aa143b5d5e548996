"""What a device agrees to: recipes outside its policy file are refused before anything is trained or sent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from deploy_harness import Loopback, answering, loopback
from processes import SMALL, recipe_of

from personafl.algorithms import METHODS
from personafl.algorithms.training import Training
from personafl.core import wire
from personafl.deploy.device.datafile import load_own
from personafl.deploy.device.dealing import deal
from personafl.deploy.device.limits import within_seconds
from personafl.deploy.device.policy import Policy
from personafl.deploy.device.state import DeviceState
from personafl.deploy.device.training import TRAINED, LocalClient
from personafl.deploy.net.identity import Identity
from personafl.deploy.net.messages import Enrolled, Hello, Said, Welcome
from personafl.deploy.server.opening import open_federation
from personafl.errors import BadInput, Failed
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import digests_of

RAW: dict[str, Any] = {"data": {**SMALL["data"], "normalize": "auto"}}  # a device sends sums of its inputs
ONE = {"training": {"steps": 1, "batch": 1}}


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(textwrap.dedent(text))
    return path


def journaled(folder: Path) -> Counter[str]:
    """Return how often each thing is in a server's journal."""
    return Counter(json.loads(line)["event"] for line in (folder / "run" / "journal.jsonl").read_text().splitlines())


# ---- the file


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("least_bach = 4", "least_bach: unknown key; did you mean 'least_batch'"),
        ('least_batch = "many"', "least_batch: input should be a valid integer"),
        ("least_batch = 0", "least_batch: input should be greater than or equal to 1"),
        ("least_steps = true", "least_steps: input should be a number, not true or false"),
        ("most_seconds = nan", "most_seconds: input should be"),
        ("most_seconds = -1", "most_seconds: input should be greater than 0"),
        ('methods = ["fedagv"]', "methods: no method 'fedagv'; did you mean 'fedavg'"),
        ("methods = 3", "methods: input should be a list"),
        ('recipe = "abc"', "recipe: string should match pattern"),
        ('sums = "perhaps"', "sums: input should be a valid boolean"),
        ("least_batch = ", "not valid TOML"),
    ],
)
def test_a_wrong_policy_is_one_line_with_its_file_and_key(text: str, line: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInput) as caught:
        Policy.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--policy .*none\.toml: no such file"):
        Policy.read(tmp_path / "none.toml")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_what_its_uploads_are_trained_in(method: str) -> None:
    assert TRAINED in METHODS[method].build(Training()).client.phases


# ---- a device and a server


def refusal(recipe: Recipe, folder: Path, policy: str | None, raw: bool = False) -> tuple[str, Loopback]:
    """Return the line that a device with a policy ends with, and what its server has seen."""

    async def refused() -> tuple[str, Loopback]:
        made = await asyncio.to_thread(Loopback, recipe, folder)
        if raw:
            made.recipe = recipe  # as a server has it whose devices have data of their own
        server = asyncio.create_task(made.serve())
        await made.until("listening")
        try:
            agreed = Policy() if policy is None else Policy.read(written(folder, policy))
            with pytest.raises(BadInput) as caught:
                await made.device(made.names[0], policy=agreed)
            return str(caught.value), made
        finally:
            server.cancel()
            await asyncio.wait([server])

    return asyncio.run(refused())


@pytest.mark.parametrize(
    ("policy", "changes", "key", "value"),
    [
        ('methods = ["ditto", "fedalt"]', {}, "methods = ['ditto', 'fedalt']", "method.name = 'fedavg'"),
        (f'recipe = "{"0" * 64}"', {}, "recipe = ", "has the digest "),
        ("least_batch = 8", {"training": {"steps": 9, "batch": 4}}, "least_batch = 8", "training.batch = 4"),
        ("least_steps = 4", {"training": {"steps": 3, "batch": 16}}, "least_steps = 4", "training.steps = 3"),
        ("least_steps = 4", {"training": {"steps": 9, "least_steps": 3}}, "least_steps = 4", "an update in 3"),
        ("least_samples = 5", {"training": {"steps": 2, "batch": 2}}, "least_samples = 5", "an update from 4"),
        ("least_samples = 999999", {}, "least_samples = 999999", "training samples)"),
        (None, ONE, "least_samples = 2", "an update from 1 (training.batch = 1, training.steps = 1;"),
        ("most_rounds = 2", {}, "most_rounds = 2", "rounds = 3"),
        ("most_up_mb = 0.001", {}, "most_up_mb = 0.001", "MB go up in a round"),
        ("most_down_mb = 0.001", {}, "most_down_mb = 0.001", "MB go down in a round"),
        ("most_up_total_mb = 0.001", {}, "most_up_total_mb = 0.001", "MB go up in a round"),
        ("most_down_total_mb = 0.001", {}, "most_down_total_mb = 0.001", "MB go down in a round"),
        ("sums = false", RAW, "sums = false", 'data.normalize = "auto"'),
        ("personal = false", {"method": "scaffold"}, "personal = false", "'scaffold', which sends its control"),
    ],
)
def test_a_recipe_outside_is_refused_before_more_than_a_knock(
    policy: str | None, changes: dict[str, Any], key: str, value: str, tmp_path: Path
) -> None:
    changes = dict(changes)
    recipe = recipe_of(changes.pop("method", "fedavg"), 2, **changes)
    line, made = refusal(recipe, tmp_path, policy, raw="data" in changes)
    where = "without --policy" if policy is None else str(tmp_path / "policy.toml")
    assert line.startswith(f"{where}: {key}")
    assert value in line
    assert "the recipe of localhost" in line
    assert "\n" not in line
    assert not [event for event in made.events if event.what == "enrolled"]
    assert set(journaled(tmp_path)) == {"created"}  # nothing came of the knock
    assert not list((tmp_path / "devices").rglob("*.safetensors"))


def test_a_recipe_inside_is_trained_with_its_digest_pinned_also_after_sums(tmp_path: Path) -> None:
    """The server puts in the moments of all devices' sums; the digest is that of the recipe as it was written."""
    recipe = recipe_of("scaffold", 2, rounds=2, **RAW)
    policy = f"""
        recipe = "{recipe.digest()}"
        methods = ["scaffold"]
        least_batch = 2
        least_samples = 8
        most_rounds = 2
        most_seconds = 3000
        most_memory_mb = 4000
        most_up_mb = 1
        most_down_mb = 1
        most_up_total_mb = 10
        most_down_total_mb = 10
    """

    async def whole() -> Loopback:
        made = await asyncio.to_thread(Loopback, recipe, tmp_path)
        made.recipe = recipe
        agreed = Policy.read(written(tmp_path, policy))
        server = asyncio.create_task(made.serve())
        await made.until("listening")
        await asyncio.gather(*(made.device(name, policy=agreed) for name in made.names))
        await server
        return made

    made = asyncio.run(whole())
    assert any(event.what == "recipe" and recipe.digest() in event.text for event in made.events)  # where it is from
    assert any(recipe.digest() in text for text in made.said)
    gone = json.loads((tmp_path / "devices" / made.names[0] / "traffic.json").read_text())
    sent = [int(text.split()[-2]) for text in made.said if text.startswith(made.names[0]) and "accepted" in text]
    assert gone["up"] == sum(sent) > 0
    assert gone["down"] > 0


def test_a_recipe_that_changes_after_sums_were_sent_is_not_trained(tmp_path: Path) -> None:
    """Each time it is read it is compared with the policy; and but for the moments it must be the same."""
    recipe = recipe_of("fedavg", 2, rounds=2, **RAW)
    told = {"data": {**RAW["data"], "normalize": {"mean": [0.0], "std": [1.0]}}}
    changes = (("least_batch = 8", {"training": {"batch": 4}}), ("least_batch = 2", {"training": {"batch": 4}}))
    lines = []
    for number, (policy, change) in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = Loopback(recipe, folder)
        texts = [recipe.to_toml(), recipe_of("fedavg", 2, rounds=2, **told, **change).to_toml()]
        agreed = Policy.read(written(folder, policy))
        lines.append(asyncio.run(_served_by(made, texts, agreed)))
    assert "least_batch = 8: the recipe of" in lines[0]
    assert "has another recipe since this device has sent its sums" in lines[1]


async def _served_by(made: Loopback, texts: list[str], policy: Policy) -> str:
    """Return the line that a device ends with whose server sends one recipe after another."""

    async def answer(identity: Identity, said: Said) -> Said:
        if isinstance(said.message, Hello):
            return Said(Enrolled())
        return Said(Welcome(run="0" * 32), texts.pop(0).encode())

    async with answering(made.folder / "pki", answer) as made.port:
        with pytest.raises(BadInput) as caught:
            await made.device(made.names[0], policy=policy)
    return str(caught.value)


def test_digests_are_those_of_what_a_recipe_says() -> None:
    recipe = recipe_of("fedavg")
    values = recipe.model_dump(mode="json", exclude_none=True)
    told = {**values, "data": {**values["data"], "normalize": {"mean": [0.0], "std": [1.0]}}}
    assert digests_of(told)[1] == digests_of(values)[0]
    assert digests_of(told)[0] != digests_of(values)[0]
    assert recipe.digest() == Recipe.parse(values).digest()
    assert recipe.digest() != recipe_of("fedavg", rounds=9).digest()


def test_what_goes_up_in_total_ends_a_device_also_after_it_was_started_again(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", 1, {"deadline": 3600.0}, rounds=500)
    client = _client(recipe, tmp_path)
    agreed = Policy.read(written(tmp_path, f"most_up_total_mb = {2.5 * _upload_size(client) / 2**20}"))

    async def twice() -> list[str]:
        lines = []
        async with loopback(recipe, tmp_path / "run") as (made, _):
            for _ in range(2):
                with pytest.raises(Failed) as caught:
                    await made.device(made.names[0], policy=agreed)
                lines.append(str(caught.value))
            assert sum("update accepted" in text for text in made.said) == 2
        return lines

    for line in asyncio.run(twice()):
        assert line.startswith(f"{tmp_path / 'policy.toml'}: most_up_total_mb = ")
        assert "went up" in line


def _upload_size(client: LocalClient) -> int:
    client.check("the recipe")
    return client._upload_bytes


def _client(recipe: Recipe, folder: Path) -> LocalClient:
    served, files = deal(recipe, folder / "dealt")
    own = load_own(str(files[0]), 0, served)
    return LocalClient(served, own, 0, None, DeviceState(folder / "state", "0" * 32, 0))


# ---- time and memory, as they are used


@pytest.mark.system
def test_training_that_takes_longer_is_ended_and_the_server_told(tmp_path: Path) -> None:
    """A method's own loop, of 10⁸ steps for each batch, is ended as well: nothing in it looks at a clock."""
    recipe = recipe_of("pfedme", 2, {"deadline": 3600.0}, rounds=2).model_dump(mode="json", exclude_none=True)
    slow = Recipe.parse({**recipe, "method": {"name": "pfedme", "inner_steps": 10**8}})

    async def ended() -> tuple[list[str], Loopback]:
        async with loopback(slow, tmp_path) as (made, _):
            agreed = Policy.read(written(tmp_path, "most_seconds = 2"))
            devices = [asyncio.create_task(made.device(name, policy=agreed)) for name in made.names]
            lines = [str(error) for error in await asyncio.gather(*devices, return_exceptions=True)]
            return lines, made

    lines, made = asyncio.run(ended())
    for line in lines:
        assert line.startswith(f"{tmp_path / 'policy.toml'}: most_seconds = 2.0: training in round 1 took longer")
    assert journaled(tmp_path)["left"] == 2
    assert not [text for text in made.said if "accepted" in text]


def test_what_ends_just_in_time_is_not_disturbed_later() -> None:
    """However near the end and the alarm are, the exception comes from there or not at all."""

    def work(seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return "done"

    found = []
    for attempt in range(60):
        try:
            found.append(within_seconds(0.0045, lambda: work(0.004 + attempt % 3 * 0.0005), "late"))  # noqa: B023
        except Failed as error:
            found.append(str(error))
        for _ in range(1000):
            pass
    assert set(found) <= {"done", "late"}
    assert within_seconds(None, lambda: work(0.0), "late") == "done"


MEMORY = """
import sys, tomllib
from pathlib import Path
from personafl.deploy.device.policy import Policy
from personafl.deploy.device.training import LocalClient
from personafl.errors import PersonaError
folder, policy = Path(sys.argv[1]), Path(sys.argv[2])
given = (folder / "recipe.toml").read_bytes(), "the recipe", str(folder / "device-0.safetensors"), 0, None
try:
    client = LocalClient.opened(*given, folder / "state", "0" * 32, Policy.read(policy))
    client.train(0, "0" * 64, (folder / "broadcast").read_bytes())
    print("trained")
except PersonaError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone keeps to it")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": {"name": "mlp", "hidden": [200, 400_000]}}, "getting ready for the recipe takes more"),
        pytest.param(
            {"training": {"steps": 10**7, "batch": 10}}, "training in round 1 takes more", marks=pytest.mark.system
        ),
        pytest.param({}, "trained", marks=pytest.mark.system),
    ],
)
def test_what_takes_more_memory_is_ended_with_a_line(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    """A network of 320 MB, and the places of 10⁸ samples in batches; the machine would have room for the former."""
    served, _ = deal(recipe_of("fedavg", 2, **changes), tmp_path)
    if "model" not in changes:
        (tmp_path / "broadcast").write_bytes(wire.encode(open_federation(served).serving().broadcast()))
    policy = written(tmp_path, "most_memory_mb = 250")
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(policy)]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("trained" if what == "trained" else f"{policy}: most_memory_mb = 250: {what}")


# ---- why there is a floor


@pytest.mark.parametrize("model", [{"name": "linear"}, {"name": "mlp", "hidden": [32]}])
def test_an_update_from_one_sample_gives_it_away(model: dict[str, Any], tmp_path: Path) -> None:
    """The change of the first layer's weights is −η (∂f/∂z) xᵀ, that of its biases −η ∂f/∂z: their ratio is the image.

    So the recipe is refused where no policy says otherwise.
    """
    plain = {**SMALL["data"], "normalize": "none"}
    recipe = recipe_of("fedavg", 2, model=model, data=plain, **ONE)
    client = _client(recipe, tmp_path)
    client.train(0, "0" * 64, wire.encode(open_federation(client.recipe).serving().broadcast()))
    assert client.state.pending is not None
    sent = wire.decode_named(client.state.pending.update)
    (weights,) = [leaf for path, leaf in sent.items() if leaf.ndim == 2 and leaf.shape[1] == 64]
    biases = next(leaf for leaf in sent.values() if leaf.shape == weights.shape[:1])
    row = int(biases.abs().argmax())
    found = weights[row] / biases[row]
    data = client.side.learners.data
    images = data.x[torch.from_numpy(data.train[0])].reshape(-1, 64)
    likeness = torch.nn.functional.cosine_similarity(images, found[None], dim=1)
    assert float(likeness.max()) > 0.9999
    with pytest.raises(BadInput, match=r"^without --policy: least_samples = 2: the recipe makes an update from 1 "):
        client.check("the recipe")
