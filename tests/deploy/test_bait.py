"""A server's recipe, whatever it says, makes a device import nothing that it names and open no file that it names."""

from __future__ import annotations

import copy
import importlib.abc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from processes import recipe_of

from personafl.deploy.device.dealing import deal
from personafl.deploy.device.training import LocalClient
from personafl.errors import PersonaError

MODULE = "bait_of_a_server"
# Every section, and of every union the form with most keys; what two sections exclude is in one recipe or the other.
EVERYTHING: dict[str, Any] = {
    "name": "x",
    "label": "x",
    "start": "x",
    "finetune": True,
    "data": {
        "source": "digits",
        "task": "classification",
        "label": "y",
        "user": "u",
        "split": "s",
        "features": ["a", "b"],
        "drop": ["c"],
        "categories": {"a": ["x", "y"]},
        "missing": {"a": 1.0},
        "classes": [str(number) for number in range(10)],
        "target": "label",
        "test": "auto",
        "unit": "character",
        "normalize": "none",
        "scale": "auto",
        "augment": {"flip": True, "crop": 1},
    },
    "model": {"name": "mlp", "hidden": [8], "personal": ["output"], "adapter": "lora", "buffers": "dropped"},
    "training": {"optimizer": "sgd", "batch": "all", "class_weights": [1.0] * 10, "schedule": {"kind": "step"}},
    "federation": {"sampling": "exact", "weights": "examples"},
    "method": {"name": "fedavg", "server": {"optimizer": "adam"}},
    "devices": [{"name": "a", "share": 1.0, "model": {"name": "mlp", "buffers": "refused"}}],
    "uplink": {"form": "sparse"},
    "evaluation": {"every": "auto", "split": "test"},
    "engine": {"strategy": "auto", "device": "cpu", "dtype": "float32", "workers": "auto"},
    "tracking": ["tensorboard"],
    "deploy": {"task": "classification"},
    "compare": {
        "methods": ["fedavg", "v"],
        "options": {"ditto": {"pull": 1.0}},
        "variants": {"v": {"method": {"name": "fedavg"}, "model": {"name": "mlp"}}},
    },
    "pretrain": {"rounds": 1, "method": {"name": "fedavg"}, "training": {"optimizer": "sgd"}},
    "sweep": {"keys": {"training": {"lr": [0.1, 1.0]}, "method": {"name": ["fedavg"]}}},
    "cloud": {
        "servers": 1,
        "protocol": "gossip",
        "mixing": "full",
        "members": [["0"]],
        "arrival": {"kind": "trace", "file": "x"},
        "step": {"kind": "trace", "file": "x"},
    },
    "buffer": {"size": 1, "discount": "none", "arrival": {"kind": "trace", "file": "x"}},
}


class Watch(importlib.abc.MetaPathFinder):
    """Notes imports of the bait, and files with its name that are opened; there is one for the process."""

    found: list[str]

    def __init__(self) -> None:
        self.found, self.on = [], False
        sys.addaudithook(self.heard)

    def find_spec(self, name: str, *_: Any) -> None:
        if self.on and name.partition(".")[0] == MODULE:
            self.found.append(f"import {name}")

    def heard(self, event: str, given: tuple[Any, ...]) -> None:
        kinds = ("open", "os.listdir", "os.scandir", "subprocess.Popen", "socket.connect")
        if self.on and event in kinds and MODULE in str(given[0]):
            self.found.append(f"{event} {given[0]}")


WATCH = Watch()


@pytest.fixture
def watched() -> Iterator[list[str]]:
    sys.meta_path.insert(0, WATCH)
    WATCH.found, WATCH.on = [], True
    yield WATCH.found
    WATCH.on = False
    sys.meta_path.remove(WATCH)


def places(values: Any, every: bool, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every text in nested values, or of every value of whatever kind."""
    if path and (every or isinstance(values, str)):
        yield path
    parts = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, part in parts:
        yield from places(part, every, (*path, key))


def baited(values: dict[str, Any], path: tuple[Any, ...], bait: Any) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = bait
    return changed


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.system)])
def test_no_value_of_a_recipe_is_imported_or_opened_by_a_device(
    every: bool, tmp_path: Path, watched: list[str]
) -> None:
    """Each value of a recipe that has every section, in turn, names a module, or a file that is there.

    The quick test does so for texts alone, and names the module.
    """
    module = tmp_path / f"{MODULE}.py"
    module.write_text("raise SystemExit('imported')\n")
    served, files = deal(recipe_of("fedavg", 2), tmp_path / "dealt")
    dice = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=dice.random((60, 1, 8, 8), dtype=np.float32), y=np.arange(60) % 10)
    plain = served.model_dump(mode="json", exclude_none=True)
    watched.clear()
    tried, wrong = 0, []
    for path in places(EVERYTHING, every):
        # The section alone, in a recipe that works: else what is wrong elsewhere in it is what is found.
        whole = {**plain, path[0]: EVERYTHING[path[0]]}
        whole |= {"deploy": plain["deploy"] | EVERYTHING["deploy"]} if path[0] == "deploy" else {}
        whole |= {"method": {"name": "local"}} if path[0] == "devices" else {}  # it has networks of their own
        for bait in (f"{MODULE}:x", str(module), {"name": f"{MODULE}:x"}, [f"{MODULE}:x"])[: 4 if every else 1]:
            text = tomli_w.dumps(baited(whole, path, bait)).encode()
            for own in (str(files[0]), str(tmp_path / "own.npz"))[: 2 if every and path[0] == "data" else 1]:
                wrong += [f"{path} = {bait!r}: {what}" for what in (_ended(text, own, tmp_path), *watched) if what]
                watched.clear()
                tried += 1
    assert wrong == []
    assert tried > (400 if every else 50)
    assert MODULE not in sys.modules


def _ended(text: bytes, own: str, folder: Path) -> str:
    """Return how a device that is sent a recipe ends, if not with a line or ready."""
    try:
        LocalClient.opened(text, "the recipe", own, 0, "a", folder / "state", "0" * 32)
    except PersonaError as error:
        return str(error) if "\n" in str(error) else ""
    except BaseException as error:
        return repr(error)
    return ""
