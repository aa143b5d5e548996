"""Certificates: what is issued says who may do what, keys are private, numbers are never given out twice."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from personafl.deploy import pki
from personafl.deploy.net.identity import Revocations, identify
from personafl.deploy.net.messages import Code, Refused
from personafl.errors import BadInput


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki")
    return tmp_path / "pki"


def loaded(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_device_may_be_a_client_and_never_a_server(authority: Path) -> None:
    for name, uses in (
        ("device-3", {"clientAuth"}),
        ("server", {"serverAuth"}),
        ("cloud-a", {"clientAuth", "serverAuth"}),
    ):
        usage = loaded(pki.issue(authority, name).certificate).extensions.get_extension_for_class(x509.ExtendedKeyUsage)
        assert {use._name for use in usage.value} == uses
    names = loaded(authority / "device-3.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["device-3"]
    assert names.get_values_for_type(x509.IPAddress) == []


def test_keys_are_readable_by_their_owner_alone(authority: Path) -> None:
    pki.issue(authority, "device-0")
    for name in ("ca.key", "device-0.key"):
        assert stat.S_IMODE((authority / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(authority.stat().st_mode) == 0o700


def test_a_number_is_that_of_the_name_or_the_lowest_that_is_free_and_stays_with_a_renewal(authority: Path) -> None:
    names = ["1", "a", "b", "a"]
    numbers = [identify(pki.issue(authority, f"device-{name}").certificate.read_bytes()).number for name in names]
    assert numbers == [1, 0, 2, 0]


def test_two_devices_never_have_one_number(authority: Path) -> None:
    pki.issue(authority, "device-anna")  # number 0
    with pytest.raises(BadInput, match="another device's"):
        pki.issue(authority, "device-0")


@pytest.mark.parametrize(
    "name", ["anna", "device-", "device-A", "ca", "../device-1", "device-1/x", "server-2", "device-" + "a" * 60]
)
def test_other_names_are_refused(authority: Path, name: str) -> None:
    with pytest.raises(BadInput, match="device-NAME"):
        pki.issue(authority, name)


def test_an_authority_is_made_once_and_needed(authority: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="already"):
        pki.init(authority)
    with pytest.raises(BadInput, match="pki init"):
        pki.issue(tmp_path / "elsewhere", "server")
    with pytest.raises(BadInput, match="never issued"):
        pki.revoke(authority, "device-9")


def test_a_revoked_name_is_refused_at_once_and_its_next_certificate_is_not(authority: Path) -> None:
    files = pki.issue(authority, "device-1")
    listed = Revocations(authority / "revoked.pem", files.authority)
    first = identify(files.certificate.read_bytes())
    listed.check(first)
    assert pki.revoke(authority, "device-1") == 1
    with pytest.raises(Refused) as caught:
        listed.check(first)
    assert caught.value.code is Code.REVOKED
    again = identify(pki.issue(authority, "device-1").certificate.read_bytes())
    listed.check(again)
    assert again.number == first.number
    assert pki.revoke(authority, "device-1") == 1  # the one that was valid


def test_a_certificate_that_has_ended_is_refused_also_in_the_middle_of_a_connection(authority: Path) -> None:
    files = pki.issue(authority, "device-1", lifetime=timedelta(days=-1))
    identity = identify(files.certificate.read_bytes())
    assert identity.ends < datetime.now(UTC)
    with pytest.raises(Refused) as caught:
        Revocations(authority / "revoked.pem", files.authority).check(identity)
    assert caught.value.code is Code.EXPIRED


def test_without_a_list_signed_by_the_authority_everyone_is_refused(authority: Path, tmp_path: Path) -> None:
    files = pki.issue(authority, "device-1")
    listed = Revocations(authority / "revoked.pem", files.authority)
    identity = identify(files.certificate.read_bytes())
    pki.init(tmp_path / "other")
    for wrong in ((tmp_path / "other" / "revoked.pem").read_bytes(), b"nothing", b""):
        (authority / "revoked.pem").write_bytes(wrong)
        with pytest.raises(Refused) as caught:
            listed.check(identity)
        assert caught.value.code is Code.REVOCATIONS_UNREADABLE
    (authority / "revoked.pem").unlink()
    with pytest.raises(Refused):
        listed.check(identity)


def test_many_are_issued_with_one_list(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read and written anew for each: an hour for 10,000 devices."""
    written: list[int] = []
    write_json = pki.write_json
    monkeypatch.setattr(pki, "write_json", lambda path, value: (written.append(1), write_json(path, value))[1])
    pki.issue(authority, "device-2")
    written.clear()
    names = ["server", "device-a", "device-b", "device-5", "device-2", "device-c"]
    found = pki.issue_all(authority, names)
    assert len(written) == 1
    assert list(found) == names
    numbers = [identify(found[name].certificate.read_bytes()).number for name in names]
    assert numbers == [None, 0, 1, 5, 2, 3]
    with pytest.raises(BadInput, match="another device's"):
        pki.issue_all(authority, ["device-d", "device-3"])
    assert not (authority / "device-d.pem").exists()
