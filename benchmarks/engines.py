"""Compare containers and gVisor with the commands of their engines, equally hardened. Containers need DOCKER_HOST."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import Row, alternate, compared, output_of, seconds
from ringfence import Sandbox, SandboxManager
from ringfence.backends.container import api as engines
from ringfence.backends.gvisor import runsc

_FLAGS = (
    *("--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
    *("--user=1000:1000", "--memory=512m", "--memory-swap=512m", "--pids-limit=140", "--cpus=1", "--log-driver=none"),
    *("--tmpfs=/tmp:size=100m,nr_inodes=10001", "--tmpfs=/workspace:size=100m,nr_inodes=10001"),
)
_BINDS = ("usr", "bin", "lib", "lib64")


def _docker_run(image: str) -> float:
    binds = [f"--volume=/{name}:/{name}:ro" for name in _BINDS if os.path.exists(f"/{name}")]
    command = [shutil.which("docker") or "docker", "run", *_FLAGS, *binds, image, "/usr/bin/true"]
    return seconds(lambda: output_of(command, {**os.environ}))


def _image() -> str:
    """Return the id of the empty image of Ringfence's containers; it exists after the first container."""
    found = engines.find().api.images("ringfence-skeleton")
    return str(found[0]["Id"])


def _ours(backend: str) -> float:
    def work() -> None:
        with Sandbox(backend=backend) as box:  # type: ignore[arg-type]  # a name
            assert box.exec(["true"]).ok

    return seconds(work)


def containers(count: int) -> list[Row]:
    if not os.environ.get("DOCKER_HOST") or shutil.which("docker") is None:
        return []
    _ours("container")
    image = _image()
    cold, bare = alternate(count, lambda: _ours("container"), lambda: _docker_run(image))
    rows = [compared("container, cold", 1.3, cold, bare, "docker run, the same flags")]
    with SandboxManager(backend="container", warm=4) as manager:
        manager.environment("warm")

        def warm() -> float:
            box = manager.sandbox()

            def work() -> None:
                box.start()
                assert box.exec(["true"]).ok

            took = seconds(work)
            box.close()
            return took

        taken, again = alternate(count, warm, lambda: _docker_run(image))
    rows.append(compared("container, from the pool", 0.05, taken, again, "docker run, the same flags"))
    return rows


_HI = ("/usr/bin/python3", "-c", "print('hi')")  # what `run` is asked for, and plain runsc too


def under_gvisor(count: int) -> list[Row]:
    if shutil.which("runsc") is None:
        return []
    _hi_under_gvisor()
    against = "runsc run python3 -c \"print('hi')\""
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", dir="/var/tmp") as folder:
        bundle = Path(folder)
        _plain_bundle(bundle)
        numbers = iter(range(1_000_000))

        def plain() -> float:
            return _runsc_run(bundle, next(numbers))

        cold, bare = alternate(count, _hi_under_gvisor, plain)
        rows = [compared("gvisor, cold", 1.5, cold, bare, against)]
        with SandboxManager(backend="gvisor", warm=2) as manager:
            manager.environment("warm")
            taken, again = alternate(count, lambda: _hi_from_pool(manager), plain)
    rows.append(compared("gvisor, from the pool", 0.1, taken, again, against))
    return rows


def _hi_under_gvisor() -> float:
    """Measure until the output is here, without the end of the sandbox, as `ringfence.run` returns."""
    box = Sandbox(backend="gvisor")
    took = seconds(lambda: _hi(box))
    box.close()
    return took


def _hi_from_pool(manager: SandboxManager) -> float:
    """Measure a sandbox from a pool, which gets time to be filled again before each sample."""
    time.sleep(1.0)
    box = manager.sandbox()
    took = seconds(lambda: _hi(box))
    box.close()
    return took


def _hi(box: Sandbox) -> None:
    box.start()
    assert box.run(_HI[-1]).stdout == "hi\n"


def _plain_bundle(bundle: Path) -> None:
    (bundle / "root").mkdir()
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    for name in _BINDS:
        if os.path.exists(f"/{name}"):
            (bundle / "root" / name).mkdir()
            mounts.append(
                {"destination": f"/{name}", "type": "bind", "source": f"/{name}", "options": ["rbind", "ro"]}  # type: ignore[dict-item]  # as OCI has it
            )
    process = {"user": {"uid": 1000, "gid": 1000}, "args": list(_HI), "cwd": "/", "env": ["PATH=/usr/bin"]}
    config = {"ociVersion": "1.0.2", "process": process, "root": {"path": "root", "readonly": True}, "mounts": mounts}
    (bundle / "config.json").write_text(json.dumps(config))


def _runsc_run(bundle: Path, number: int) -> float:
    found = runsc.find()
    flags = [f"--root={bundle}/state", f"--platform={found.platform}", "--network=none", "--ignore-cgroups"]
    command = [found.path, *flags, *runsc.rootless(), "run", f"--bundle={bundle}", f"bench-{number}"]
    return seconds(lambda: output_of(command))
