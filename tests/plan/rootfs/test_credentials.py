"""Which host paths are refused as mounts because of what they hold, and which are not."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from ringfence.plan.rootfs.credentials import Holding, contains_home, holdings, holds_credentials


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    for name in (".ssh", ".aws", ".config/gcloud", "work/project"):
        (home / name).mkdir(parents=True)
    (home / ".netrc").write_text("machine example.com password x\n")
    return home


@pytest.mark.parametrize("name", [".ssh", ".ssh/deep/er", ".aws", ".config/gcloud", ".netrc", ".kube"])
def test_a_credential_folder_and_what_lies_in_it_is_known_even_before_it_exists(home: Path, name: str) -> None:
    assert holds_credentials(str(home / name), str(home)) is not None


def test_a_home_is_known_by_what_it_contains_and_each_is_named(home: Path) -> None:
    found = {Path(one.path).relative_to(home).as_posix() for one in holdings(str(home), str(home))}
    assert found == {".ssh", ".aws", ".config/gcloud", ".netrc"}
    assert contains_home(str(home.parent), str(home)) == str(home)


def test_a_folder_around_some_credentials_is_known_by_them(home: Path) -> None:
    assert holdings(str(home / ".config"), str(home)) == (
        Holding(str(home / ".config" / "gcloud"), "Google Cloud credentials"),
    )


def test_a_project_in_a_home_is_fine(home: Path) -> None:
    assert holds_credentials(str(home / "work" / "project"), str(home)) is None
    assert contains_home(str(home / "work"), str(home)) is None


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "/etc/ssh", "/run/secrets", "/run/user/1000", "/run/docker.sock", "/run", "/tmp", "/root/.ssh"],
)
def test_the_hosts_own_secrets_and_sockets_are_known(path: str, home: Path) -> None:
    assert holds_credentials(path, str(home)) is not None


@pytest.mark.parametrize("path", ["/usr/share", "/opt/data", "/etc/fonts", "/srv", "/run/media/someone/disk"])
def test_ordinary_places_are_fine(path: str, home: Path) -> None:
    assert holds_credentials(path, str(home)) is None


def test_a_key_is_known_by_its_text_and_a_certificate_is_not_taken_for_one(tmp_path: Path) -> None:
    key, certificate, named = tmp_path / "server.pem", tmp_path / "ca.pem", tmp_path / "id_ed25519"
    key.write_text("-----BEGIN RSA PRIVATE KEY-----\nxx\n")
    certificate.write_text("-----BEGIN CERTIFICATE-----\nxx\n")
    named.write_text("")
    assert holdings(str(key), "/nonexistent") == (Holding(str(key), "a private key"),)
    assert holdings(str(named), "/nonexistent") == (Holding(str(named), "a private key"),)
    assert holdings(str(certificate), "/nonexistent") == ()


def test_a_socket_in_a_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("agent.sock")
        assert holdings(str(tmp_path), "/nonexistent") == (Holding(str(tmp_path / "agent.sock"), "a socket"),)


def test_a_socket_is_found_at_any_depth_while_somebody_has_it_bound() -> None:
    with tempfile.TemporaryDirectory(prefix="rf-", dir="/var/tmp") as short:  # a socket's name has 107 bytes
        deep = Path(short, "app", "tmp", "with spaces in it")
        deep.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{short}/app/tmp/with spaces in it/puma.sock")
            assert holdings(short, "/nonexistent") == (Holding(f"{deep}/puma.sock", "a socket"),)
            assert holdings(f"{short}/app/tmp", "/nonexistent") == (Holding(f"{deep}/puma.sock", "a socket"),)
        assert holdings(short, "/nonexistent") == ()  # no process listens: it is only a name


def test_a_socket_bound_by_way_of_a_link_is_found_where_it_lies() -> None:
    with tempfile.TemporaryDirectory(prefix="rf-", dir="/var/tmp") as short:
        deep = Path(short, "real", "deep")
        deep.mkdir(parents=True)
        Path(short, "link").symlink_to(deep)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{short}/link/s")
            assert holdings(f"{short}/real", "/nonexistent") == (Holding(f"{deep}/s", "a socket"),)


def test_a_named_pipe_in_a_folder_is_found(tmp_path: Path) -> None:
    """A read-only mount does not keep a guest from writing to a named pipe, which a program of the host reads."""
    os.mkfifo(tmp_path / "control")
    assert holdings(str(tmp_path), "/nonexistent") == (Holding(str(tmp_path / "control"), "a named pipe"),)
