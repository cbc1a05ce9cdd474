"""The library or the engine dies while a container runs: nothing stays, and the survivor reports the loss."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPResponse

import pytest

import engines
from ringfence import Sandbox, SandboxLostError
from ringfence.backends import Container
from ringfence.backends.container import api as clients

LIBRARY = """
import sys, ringfence
from ringfence.backends import Container
box = ringfence.Sandbox(backend=Container(engine=sys.argv[1], socket=sys.argv[2])).start()
p = box.spawn(["sh", "-c", "setsid sleep 600 & echo up; sleep 600"])
next(iter(p))
{then}
print("go", flush=True)
p.wait()
"""


def ours(backend: Container) -> list[str]:
    api = clients.find(backend.engine, backend.socket).api
    rows = api.containers(all=True)
    return [row["Id"] for row in rows if row["State"] != "exited" and row["State"] != "dead"]


def killed_library(backend: Container, then: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LIBRARY.format(then=then), str(backend.engine), str(backend.socket)],
        stdout=subprocess.PIPE,
        text=True,
    ) as library:
        assert library.stdout is not None
        assert library.stdout.readline() == "go\n"
        assert len(ours(backend)) == 1
        library.kill()


def swept(backend: Container) -> list[object]:
    """Return the containers and volumes that are left after the next start by another process."""
    code = LIBRARY.partition("p = ")[0] + "box.close()"
    subprocess.run([sys.executable, "-c", code, str(backend.engine), str(backend.socket)], check=True, timeout=60)
    api = clients.find(backend.engine, backend.socket).api
    volumes = api.volumes().get("Volumes") or []
    return [*api.containers(all=True), *volumes]


def test_a_killed_library_takes_its_container_along_and_the_next_start_sweeps(contained: Container) -> None:
    killed_library(contained, "")
    deadline = time.monotonic() + 10
    while ours(contained) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ours(contained) == []
    assert swept(contained) == []


def test_a_paused_container_of_a_killed_library_is_swept(contained: Container) -> None:
    killed_library(contained, "box.pause()")
    assert swept(contained) == []


@pytest.fixture
def docker() -> Iterator[engines.Started]:
    """Start an engine for this test, which may be killed."""
    reason = engines.missing("docker")
    if reason is not None:
        pytest.skip(reason)
    engine = engines.make("docker")
    assert engine.start() is None
    yield engine
    engine.end()


# The SDK leaves connections to an engine that died to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_an_engine_that_dies_in_mid_run_is_said_and_leaves_nothing_after_its_return(docker: engines.Started) -> None:
    backend = Container(engine="docker", socket=docker.socket)
    with Sandbox(backend=backend) as box:
        process = box.spawn(["sleep", "60"])
        docker.kill(hard=True)
        result = process.wait()
        assert (result.status, result.reason) == ("lost", "guest-lost")
        with pytest.raises(SandboxLostError, match="docker does not answer any more"):
            box.exec(["true"])
    with pytest.raises(SandboxLostError, match="does not answer any more"), Sandbox(backend=backend):
        pass
    assert docker.start() is None
    with Sandbox(backend=backend) as box:
        assert box.exec(["echo", "back"]).stdout == "back\n"
    api = clients.find("docker", docker.socket).api
    left = [row for row in api.containers(all=True) if row["State"] == "running"]
    assert left == []
    clients.forget(clients.find("docker", docker.socket))
    gc.collect()


def test_of_its_connection_nothing_is_left_half_closed(contained: Container) -> None:
    """A response with a file that was closed early complains when collected; from Python 3.13 on that is printed."""
    with Sandbox(backend=contained) as box:
        assert box.run("1 + 1").value == "2"
        assert box._box is not None
        stream = box._box._wall._stream  # type: ignore[attr-defined]  # of a container
    deadline = time.monotonic() + 10
    while stream.lasts and time.monotonic() < deadline:
        time.sleep(0.01)
    responses = [one for one in gc.get_objects() if isinstance(one, HTTPResponse) and one.fp is not None]
    assert [one for one in responses if getattr(one.fp, "raw", one.fp).closed] == []


def test_an_image_of_ours_that_somebody_removed_from_the_engine_is_made_again(contained: Container) -> None:
    with Sandbox(backend=contained) as box:
        assert box.exec(["true"]).ok
    api = clients.find(contained.engine, contained.socket).api
    for image in api.images():
        if any("ringfence-skeleton" in tag for tag in image["RepoTags"] or ()):
            api.remove_image(image["Id"], force=True)
    with Sandbox(backend=contained) as box:
        assert box.exec(["true"]).ok
