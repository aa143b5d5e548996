"""Write requirements.lock: what a server or a device installs, with the hash of each file.

    python tests/lock.py > requirements.lock

The versions are those of constraints.txt, the files those that pip would take here: for this system and this Python.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
# What `personafl[deploy]` needs, with hashes, for {python} on {system}: the versions of constraints.txt.
# Made by python tests/lock.py; docs/install.md says how it is used.
"""


def brought() -> dict[str, tuple[str, str]]:
    """Return version and SHA-256 of all that pip would install, by name."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run(
        [*pip, "-c", ROOT / "constraints.txt", f"{ROOT}[deploy]"], capture_output=True, text=True, check=True
    )
    found = {}
    for entry in json.loads(done.stdout)["install"]:
        about, source = entry["metadata"], entry["download_info"]
        if "archive_info" in source:  # personafl itself is a folder
            found[plain(about["name"])] = about["version"], source["archive_info"]["hashes"]["sha256"]
    return found


def plain(name: str) -> str:
    """Return a package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def public(version: str) -> str:
    """Return a version without what says how it was built: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def locked(text: str) -> dict[str, tuple[str, str]]:
    """Return what a lock says, as `brought`."""
    lines = re.findall(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    return {name: (version, digest) for name, version, digest in lines}


if __name__ == "__main__":
    import platform

    system = f"{platform.system()} {platform.machine()}"
    print(HEAD.format(python=f"Python {sys.version_info[0]}.{sys.version_info[1]}", system=system))
    for name, (version, digest) in sorted(brought().items()):
        print(f"{name}=={public(version)} --hash=sha256:{digest}")
