"""Sockets of engines: sockets at which something else answers, and sockets in another user's folder."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Mount, Policy, Sandbox, SandboxLostError, UnsupportedError
from ringfence.backends import Container
from ringfence.backends.container import api as clients
from ringfence.doctor import examine
from ringfence.values import replace

VERSION = {"Version": "20.10", "ApiVersion": "1.41", "MinAPIVersion": "1.12", "Components": [{"Name": "Engine"}]}
INFO = {"NCPU": 2, "DefaultRuntime": "runc", "Runtimes": {"runc": {}}, "MemoryLimit": True}

Serve = Callable[[tuple[int, Any], tuple[int, Any]], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Answers questions for the version, and for all else, with a status and a text each. Gives its path."""
    listener = socket.socket(socket.AF_UNIX)
    path = str(tmp_path / "engine.sock")
    listener.bind(path)
    listener.listen()

    def answer_all(version: tuple[int, Any], info: tuple[int, Any]) -> None:
        while True:
            try:
                peer = listener.accept()[0]
            except OSError:
                return
            with peer:
                asked = peer.recv(1 << 16)
                status, value = version if b"/version" in asked else info
                body = json.dumps(value).encode()
                head = f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                peer.sendall(head.encode() + body)

    def start(version: tuple[int, Any], info: tuple[int, Any]) -> str:
        threading.Thread(target=answer_all, args=(version, info), daemon=True).start()
        return path

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize(
    ("version", "info", "why"),
    [
        ((200, VERSION), (403, {"message": "not for you"}), "not for you"),  # as proxies before a socket answer
        ((200, VERSION), (200, {}), "its answers are not an engine's"),
        ((200, VERSION), (200, []), "its answers are not an engine's"),
        ((200, VERSION), (200, {**INFO, "NCPU": "many"}), "its answers are not an engine's"),
        ((200, {**VERSION, "Components": [1]}), (200, INFO), "its answers are not an engine's"),
    ],
)
def test_what_does_not_answer_as_an_engine_is_none(
    serve: Serve, version: tuple[int, Any], info: tuple[int, Any], why: str
) -> None:
    path = serve(version, info)
    with pytest.raises(UnsupportedError, match=why) as caught:
        Sandbox(backend=Container(engine="docker", socket=path)).plan()
    assert caught.value.code == "engine-missing"


def test_one_that_is_late_is_no_engine_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else "auto" would take another backend because this engine is busy (O27)."""
    monkeypatch.setattr(clients, "_TIMEOUT_S", 0.5)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen(8)
        with pytest.raises(SandboxLostError, match="listens, and did not answer within") as caught:
            Sandbox(backend=Container(engine="docker", socket=str(tmp_path / "s"))).plan()
        assert (caught.value.code, caught.value.retryable) == ("engine", True)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 's'}")
        (report,) = examine(backends=["container"]).backends
        assert (report.works, "did not answer" in report.lines[0][2]) == (False, True)


def test_what_answers_as_an_engine_is_one(serve: Serve) -> None:
    found = clients.find("docker", serve((200, VERSION), (200, INFO)))
    assert (found.name, found.version, found.cpus, found.limits) == ("docker", "20.10", 2, ("memory",))
    clients.forget(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_an_engine_in_another_users_runtime_directory_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root has that directory after `su`: its user would see and answer everything that root runs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = [("docker", f"{tmp_path}/docker.sock"), ("podman", f"{tmp_path}/podman/podman.sock")]
    system = clients._candidates(None, None)[2:]
    assert clients._candidates(None, None) == [*own, *system]
    os.chown(tmp_path, 65534, -1)
    assert clients._candidates(None, None) == system
    os.chown(tmp_path, 0, -1)


def test_a_writable_mount_that_mapped_users_could_not_write_to_is_refused(
    contained: Container, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rootless engine maps all users: the sandbox would start, and every write to the mount would fail."""
    found = clients.find(contained.engine, contained.socket)
    policy = Policy(mounts=[Mount(str(tmp_path), target="/shared", mode="rw")])
    tmp_path.chmod(0o755)
    assert Sandbox(backend=contained, policy=policy).plan().backend == "container"
    monkeypatch.setattr(clients, "look", lambda *_: replace(found, mapped=True))
    with pytest.raises(UnsupportedError, match="have no rights on the host, and cannot write to") as caught:
        Sandbox(backend=contained, policy=policy).plan()
    assert caught.value.code == "mounts"
    tmp_path.chmod(0o777)
    assert Sandbox(backend=contained, policy=policy).plan().backend == "container"
