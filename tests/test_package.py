"""What is published: sdist and wheel are valid and complete, the wheel runs by itself, every extra can be installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def ran(*command: str | Path, **options: Any) -> str:
    """Run a command and return what it printed; it must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both: the wheel from the sdist, so that the sdist has all that a wheel needs."""
    for tool in ("build", "hatchling", "twine"):
        pytest.importorskip(tool, reason="not installed (pip install -e '.[dev]')")
    folder = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, which borrows all other packages from the one of the tests."""
    fresh = tmp_path_factory.mktemp("installed")
    ran(sys.executable, "-m", "venv", "--without-pip", fresh)
    python = fresh / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    packages = Path(ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(others))  # which does not lead to an editable install in there
    return fresh


def test_registries_accept_both(dist: Path) -> None:
    assert ran(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()).count("PASSED") == 2


def test_the_wheel_has_every_file_of_the_package(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    package = ROOT / "src" / "personafl"
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.suffix for path in files} >= {".py", ".toml", ".html", ".css", ".js", ".typed"}
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == {str(path.relative_to(package.parent)) for path in files}


def test_the_sdist_has_what_developers_need(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {path.name for path in ROOT.glob("*.md")} <= inside
    assert {"LICENSE", "CITATION.cff", "Makefile", "constraints.txt", "mkdocs.yml", "recipes/demo.toml"} <= inside
    assert {"docs/choose.md", "tests/test_package.py", "benchmarks/README.md"} <= inside


def test_the_wheel_runs_by_itself(installed: Path, tmp_path: Path) -> None:
    """Nothing comes from the checkout: presets and the report's page are read from the wheel's own files."""
    command, here = installed / "bin" / "personafl", {"cwd": tmp_path, "env": {"HOME": str(tmp_path)}}
    home = ran(installed / "bin" / "python", "-c", "import personafl; print(personafl.__file__)", **here)
    assert Path(home.strip()).is_relative_to(installed)
    assert "compare" in ran(command, "--help", **here)
    assert "fedslr/table1" in ran(command, "reproduce", **here)
    ran(command, "run", "--method", "ditto", "--rounds", "1", "--out", "run", "--quiet", **here)
    assert "<style>" in (tmp_path / "run" / "report.html").read_text()


@pytest.fixture(scope="module")
def registry() -> None:
    """Skip where no package registry can be reached, or its packages cannot be read."""
    asked = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "hatchling"]
    if (done := subprocess.run(asked, capture_output=True, text=True)).returncode:
        pytest.skip(f"no package registry can be reached: {done.stderr.strip().splitlines()[-1]}")


def plain(name: str) -> str:
    """Return a package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_an_extra_can_be_installed_with_the_constraints(extra: str, tmp_path: Path) -> None:
    """And the constraints name every package that it would bring, so that an install can be repeated."""
    report, wanted = tmp_path / "report.json", f"{ROOT}[{extra}]"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "-c", ROOT / "constraints.txt"]
    ran(*pip, "--report", report, wanted)
    brings = {plain(entry["metadata"]["name"]) for entry in json.loads(report.read_text())["install"]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {plain(line.partition("==")[0]) for line in lines if "==" in line and not line.startswith("#")}
    assert brings - pinned <= {"personafl"}
