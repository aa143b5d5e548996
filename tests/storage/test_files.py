"""Writes that fail: old bytes or new, one line for the user, and a run that can be continued to the same result."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crash_driver import FAILPOINTS, differences, outcome
from personafl import api
from personafl.errors import BadInput, StorageFailed
from personafl.recipe.values import apply_overrides
from personafl.storage.files import append, atomic_write, cut, read_json, storage, write_json
from personafl.storage.rundir import RunDirectory
from tiers import tiered

RECIPE = apply_overrides({}, FAILPOINTS)
MAIN = "from personafl.cli import main; main()"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("straight") / "run"
    api.run(RECIPE, out=path)
    return outcome(path)


def test_atomic_write_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"old", b"", b"x" * 10**6):
        atomic_write(path, data)
        assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    for mode, of_files in ((0o755, 0o644), (0o700, 0o600), (0o750, 0o640)):  # as open as the directory
        tmp_path.chmod(mode)
        atomic_write(path, b"new")
        assert path.stat().st_mode & 0o777 == of_files


def test_two_who_write_one_file_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes the file while this one is about to put its own in place: both succeed, the last holds."""
    path, replace, pid = tmp_path / "file", os.replace, os.getpid()

    def late(old: Path, new: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        atomic_write(path, b"theirs", alone=False)
        replace(old, new)

    monkeypatch.setattr(os, "replace", late)
    atomic_write(path, b"mine", alone=False)
    assert path.read_bytes() == b"mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    atomic_write(tmp_path / "file", b"0123456789")
    assert append(tmp_path / "file", b"abcdefg", durable=True) == 17
    assert (tmp_path / "file").read_bytes() == b"0123456789abcdefg"


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "larger than this system allows"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_failed_write_keeps_the_old_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, remedy: str
) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def fail(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StorageFailed, match=remedy) as caught:
            atomic_write(path, b"new and longer")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]  # no half file takes the space that is missing


def test_a_failed_append_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="Is a directory"):
        append(tmp_path, b"x", durable=False)


def test_errors_without_a_number_are_told_too(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="odd"), storage(tmp_path):
        raise OSError("odd")


def test_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    cut(path, 0)
    assert path.read_bytes() == b""
    append(path, b"one\ntwo\nthr", durable=False)
    cut(path, 8)
    assert path.read_bytes() == b"one\ntwo\n"
    with pytest.raises(BadInput, match="log: shorter than the checkpoint says"):
        cut(path, 9)
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize(("text", "message"), [(None, "is .* a run directory"), ("{", "cannot be read")])
def test_read_json_names_the_file(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(BadInput, match=rf"a\.json: .*{message}"):
        read_json(tmp_path / "a.json")


def test_json_round_trip(tmp_path: Path) -> None:
    value = {"a": [1, 0.1, None], "b": {"c": "ä"}}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value


# --- whole runs ---


@pytest.mark.parametrize("code", tiered([errno.ENOSPC, errno.EIO], []))
def test_every_write_of_a_run_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[str, Any], code: int
) -> None:
    """The n-th os.write writes half of its bytes and fails, for every fifth n, until a run has fewer writes."""
    write, failed = os.write, 0
    for at in range(code % 5, 1000, 5):
        path = tmp_path / f"at-{at}" / "run"
        calls = iter(range(10**9))

        def half(descriptor: int, data: Any, calls: Iterator[int] = calls, at: int = at) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)) and next(calls) >= at:
                write(descriptor, data[: len(data) // 2])
                raise OSError(code, os.strerror(code))
            return write(descriptor, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            try:
                api.run(RECIPE, out=path)
                break
            except (StorageFailed, UserWarning) as error:  # a warning if only the report is missing
                message = str(error)
        failed += 1
        assert str(path.parent) in message
        beside = [entry.name for entry in path.parent.iterdir()]
        assert beside in ([], ["run"])  # nothing half-made remains, not even under another name
        api.resume(path) if beside else api.run(RECIPE, out=path)
        assert differences(outcome(path), straight) == []
    assert failed >= 4


def limited(path: Path, size: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, "run", *FAILPOINTS, "--out", str(path), "--quiet"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.mark.system
def test_a_real_limit_on_file_size(tmp_path: Path, straight: dict[str, Any]) -> None:
    """RLIMIT_FSIZE: the first states do not fit, the files before them do."""
    path = tmp_path / "run"
    done = limited(path, 4000)
    assert done.returncode == StorageFailed.exit_code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "larger than this system allows" in done.stderr
    assert RunDirectory(path).checkpoint().rounds == 0
    api.resume(path)
    assert differences(outcome(path), straight) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "personafl-test", str(folder)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("free", [0, 4, 8, 14])
def test_a_really_full_disk(tiny_disk: Path, straight: dict[str, Any], free: int) -> None:
    """Filled up to so many pages of 4 KiB; the run fails somewhere, and goes on once there is space."""
    path, filler = tiny_disk / "run", tiny_disk / "filler"
    filler.write_bytes(bytes((32 - 2 - free) * 4096))
    with pytest.raises(StorageFailed, match="the disk is full"):
        api.run(RECIPE, out=path)
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True)
    api.resume(path) if path.exists() else api.run(RECIPE, out=path)
    assert differences(outcome(path), straight) == []


def test_a_really_read_only_disk(tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(StorageFailed, match="read-only: choose another --out"):
        api.run(RECIPE, out=tiny_disk / "run")
    assert list(tiny_disk.iterdir()) == []


def test_resume_on_a_read_only_disk(tiny_disk: Path, straight: dict[str, Any]) -> None:
    path = tiny_disk / "run"
    subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True)

    def listener(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.run(RECIPE, out=path, listener=listener)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(StorageFailed, match="read-only"):
        api.resume(path)
    subprocess.run(["mount", "-o", "remount,rw", str(tiny_disk)], check=True)
    assert RunDirectory(path).checkpoint().rounds == 1
    api.resume(path)
    assert differences(outcome(path), straight) == []


def test_out_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageFailed, match="file"):
        api.run(RECIPE, out=tmp_path / "file" / "run")
    with pytest.raises(BadInput, match="exists already"):
        api.run(RECIPE, out=tmp_path / "empty")
    with pytest.raises(StorageFailed, match="too long"):
        api.run(RECIPE, out=tmp_path / ("x" * 300))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "file"]
