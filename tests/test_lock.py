"""requirements.lock has all that a server or a device needs, in the versions that the tests run with."""

import importlib.metadata

from packaging.requirements import Requirement

from lock import ROOT, locked, plain, public

LOCK = (ROOT / "requirements.lock").read_text()


def needed(name: str, extra: str = "") -> set[str]:
    """Return the names of all that an installed package needs, and what these need."""
    found: set[str] = set()
    waiting = [(name, extra)]
    while waiting:
        package, chosen = waiting.pop()
        for text in importlib.metadata.requires(package) or ():
            wanted = Requirement(text)
            if (wanted.marker is None or wanted.marker.evaluate({"extra": chosen})) and plain(wanted.name) not in found:
                found.add(plain(wanted.name))
                waiting += [(wanted.name, each) for each in ("", *wanted.extras)]
    return found


def test_each_line_has_a_hash_and_the_version_of_the_constraints() -> None:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    found = locked(LOCK)
    assert len(found) == len(lines)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in constraints if "==" in line and not line.startswith("#"))
    versions = {plain(name): public(version.strip()) for name, version in pinned.items()}
    assert {name: version for name, (version, _) in found.items()} == {name: versions[name] for name in found}


def test_it_has_what_a_device_needs() -> None:
    assert needed("personafl", "deploy") - locked(LOCK).keys() == set()
