"""Engines that are not there, not allowed or not what was named, and requests that no container gets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from accounts import OrdinaryUser
from backends.container import equipped
from ringfence import Mount, Policy, PolicyError, RingfenceError, Sandbox, UnsupportedError, images
from ringfence.backends import Container
from ringfence.backends.container import api as clients
from ringfence.plan.controls import Controls


def refused(backend: object, **kwargs: object) -> tuple[str, str, str, str | None]:
    with pytest.raises((RingfenceError, TypeError)) as caught:
        Sandbox(backend=backend, **kwargs).plan()  # type: ignore[arg-type]  # wrong on purpose
    error = caught.value
    return type(error).__name__, getattr(error, "code", ""), str(error), getattr(error, "fix", None)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (
            Container(engine="lxc"),  # type: ignore[arg-type]  # wrong on purpose
            ("PolicyError", "policy", "unknown container engine 'lxc'", "docker or podman"),
        ),
        (
            Container(socket="/nowhere/engine.sock"),
            (
                "UnsupportedError",
                "engine-missing",
                "no container engine: an engine at /nowhere/engine.sock: nothing is there",
                "start docker",
            ),
        ),
        (
            Container(socket="tcp://192.0.2.1:2375"),
            (
                "UnsupportedError",
                "engine-remote",
                "the engine at tcp://192.0.2.1:2375 is not on this host: files are shown inside by their paths here",
                "name a unix socket, or run ringfence where the engine is",
            ),
        ),
        (
            Container(socket=5),  # type: ignore[arg-type]  # wrong on purpose
            ("TypeError", "", "socket is a str, the path of an engine's, not int", None),
        ),
    ],
    ids=["an engine that does not exist", "no engine", "an engine elsewhere", "no path"],
)
def test_what_names_no_engine_is_refused(backend: Container, expected: tuple[str, str, str, str | None]) -> None:
    assert refused(backend) == expected


def test_docker_host_names_the_only_engine_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/engine.sock")
    assert refused("container")[2] == "no container engine: an engine at /nowhere/engine.sock: nothing is there"


def test_another_engine_than_the_one_named_is_refused(contained: Container) -> None:
    other = "podman" if contained.engine == "docker" else "docker"
    said = refused(Container(engine=other, socket=contained.socket))  # type: ignore[arg-type]  # one of the two
    assert (said[1], said[3]) == ("engine-missing", f'engine="{contained.engine}"')
    assert said[2].endswith(f": {contained.engine} answers there")


NO_RIGHT = """
import sys
sys.path.append({sdk!r})
import ringfence
from ringfence.backends import Container
try:
    ringfence.Sandbox(backend=Container(socket={socket!r})).plan()
except ringfence.UnsupportedError as error:
    print(error.code, str(error), error.fix, sep="\\n")
"""


def test_an_engine_without_permission_says_the_group_and_its_risk(
    contained: Container, ordinary_user: OrdinaryUser
) -> None:
    equipped.skip_unless_root()
    code = NO_RIGHT.format(sdk=str(equipped.sdk(ordinary_user)), socket=contained.socket)
    done = ordinary_user.run(code)
    assert done.stdout.splitlines() == [
        "engine-missing",
        f"no container engine: the right to use {contained.engine} at {contained.socket}",
        "use rootless Podman, or join the group docker, whose members are root in all but name",
    ], done.stderr


def test_the_engines_socket_is_refused_even_as_credentials_that_are_accepted(contained: Container) -> None:
    assert contained.socket is not None
    for source in (contained.socket, os.path.dirname(contained.socket)):
        mount = Mount(source, target="/engine", credentials=True)
        with pytest.raises(PolicyError, match=re.escape(f"the container engine's socket {contained.socket}")):
            Sandbox(backend=contained, policy=Policy(mounts=[mount])).plan()


@pytest.mark.parametrize("words", [("--privileged",), ("--network", "host"), ("--limit", "privileged=1")])
def test_the_command_has_no_option_that_opens_a_container(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ringfence", "exec", "--backend", "container", *words, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (125, "")
    assert re.match(r"ringfence: (exec has no option --|--limit 'privileged=1': there is no limit)", done.stderr)


def test_nothing_that_opens_a_container_can_be_asked_for() -> None:
    for word in ("privileged", "network", "network_mode", "cap_add", "devices", "pid_mode", "volumes"):
        with pytest.raises(TypeError, match=word):
            Container(**{word: True})  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(PolicyError, match="privileged is not a key of a policy"):
        Policy.loads("version = 1\nprivileged = true\n")


def test_a_container_whose_time_is_up_is_gone_from_the_engine(contained: Container) -> None:
    """The container is killed from outside: guestd inside is stopped and answers no request."""
    api = clients.find(contained.engine, contained.socket).api
    with Sandbox(backend=contained) as box:
        process = box.spawn(["sleep", "600"])
        (mine,) = [row["Id"] for row in api.containers() if "ringfence.owner" in (row.get("Labels") or {})]
        guestd = int(api.inspect_container(mine)["State"]["Pid"])
        os.kill(guestd, 19)
        threading.Timer(0.2, box.close).start()
        assert process.wait().status in ("killed", "lost")
    deadline = time.monotonic() + 30
    while Path(f"/proc/{guestd}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{guestd}").exists()
    while mine in [row["Id"] for row in api.containers(all=True)] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mine not in [row["Id"] for row in api.containers(all=True)]


class _LongName(Controls):
    """A host name that no engine takes."""

    def container(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "hostname": "x" * 300}


def test_an_engine_that_makes_no_container_is_quoted_and_doctor_is_named(contained: Container) -> None:
    box = Sandbox(backend=contained)
    launcher = box._launcher
    launcher.controls = _LongName()
    with pytest.raises(RingfenceError, match=f"{contained.engine} made no container: ") as caught:
        box.start()
    assert caught.value.fix == "ringfence doctor container"


def test_a_backend_without_an_engine_is_unsupported_not_lost() -> None:
    with pytest.raises(UnsupportedError):
        Sandbox(backend=Container(socket="/nowhere/engine.sock")).start()


@pytest.mark.parametrize("name", ["x,source=data", 'say "hi"', "two\nlines"])
def test_a_name_in_an_image_that_podman_would_read_as_options_is_refused_there(
    contained: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The engine's working directory has a folder `data`: this folder of the host was shown at /x."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "store"))
    root = tmp_path / "root"
    for folder in ("bin", "other", name):
        (root / folder).mkdir(parents=True)
    (root / "x").symlink_to("other")
    (root / name / "of the image").write_text("")
    images.import_image("odd", root)
    box = Sandbox(backend=contained, image="odd")
    if contained.engine == "podman":
        with pytest.raises(UnsupportedError, match="Podman cannot show") as caught:
            box.start()
        assert caught.value.code == "mounts"
    else:
        with box:
            assert [info.path for info in box.files.list(f"/{name}")] == ["of the image"]
    images.remove("odd")
