"""Compare containers with LLM Sandbox: same engine, same image, a fresh sandbox for each run. Needs DOCKER_HOST."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measuring import Row, alternate, milliseconds
from ringfence import Sandbox, images
from ringfence.backends.container import api as engines
from ringfence.images.builder import Recipe

_NAME = "beside LLM Sandbox (theirs / ours), fresh"
_BAR = 1.5
_ARCHIVE = Path(__file__).resolve().parents[1] / ".cache" / "images" / "debian-python3.tar"  # made by the tests
_IMAGE = "ringfence-bench"
_CLIENT = Path(__file__).parent / "peers" / "llm_sandbox_client.py"


def fresh(count: int) -> list[Row]:
    python = Path(sys.prefix, "peers", "llm-sandbox", "bin", "python")
    if not os.environ.get("DOCKER_HOST"):
        return []
    if not python.exists():
        return [Row(_NAME, _BAR, at_least=True, notes=("scripts/setup llm-sandbox installs it",))]
    with _image(), _peer(python) as theirs:
        ours, peer = alternate(count, _ours, theirs, warm_up=1)
    against = f"LLM Sandbox, without its set-up of an environment: {milliseconds(peer)}"
    ratio, worst = peer.p50 / ours.p50, peer.p99 / ours.p99
    return [Row(_NAME, _BAR, ratio, worst, at_least=True, ours=milliseconds(ours), against=against)]


def _ours() -> float:
    """Measure our run as LLM Sandbox's is measured: until the answer is there, without the end of the sandbox."""
    begun = time.perf_counter()
    with Sandbox(backend="container", image=_IMAGE) as box:
        said = box.run("print(6 * 7)").stdout
        took = time.perf_counter() - begun
    assert said == "42\n"
    return took


@contextlib.contextmanager
def _image() -> Iterator[None]:
    """Put the same image into the engine and into an image store. LLM Sandbox needs the name `python`."""
    api = engines.find().api
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        before = os.environ.get("XDG_DATA_HOME")
        os.environ["XDG_DATA_HOME"] = folder
        try:
            _load()
            images.import_image(_IMAGE, f"docker:{_IMAGE}")
            yield
            images.remove(_IMAGE)
        finally:
            api.remove_image(_IMAGE, force=True)
            os.environ.pop("XDG_DATA_HOME")
            if before is not None:
                os.environ["XDG_DATA_HOME"] = before


def _load() -> None:
    import docker

    client = docker.DockerClient(base_url=os.environ["DOCKER_HOST"])
    if not _ARCHIVE.exists():
        _ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
        images.build("debian", Recipe(apt=["python3"]))
        images.export("debian", _ARCHIVE)
    with open(_ARCHIVE, "rb") as file:
        (loaded,) = client.images.load(file)
    made = client.containers.run(
        loaded.id, ["ln", "-s", "python3", "/usr/bin/python"], user="0", network_mode="none", detach=True
    )
    made.wait()
    made.commit(_IMAGE, conf={"Cmd": ["/bin/sh"], "User": "0"})  # LLM Sandbox runs the image's command
    made.remove()
    client.close()


@contextlib.contextmanager
def _peer(python: Path) -> Iterator[Callable[[], float]]:
    process = subprocess.Popen(
        [python, _CLIENT, _IMAGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def one() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    try:
        yield one
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
