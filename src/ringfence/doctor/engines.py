"""The examination of the backends with an engine: their programs, versions with known escapes, and a whole run."""

from __future__ import annotations

import time

from ringfence.backends.contract import BackendReport, Finding
from ringfence.doctor import fixes
from ringfence.doctor.examination import with_passed_over
from ringfence.errors import RingfenceError, SandboxError, UnsupportedError
from ringfence.values import Struct, final

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.container.api import Engine
    from ringfence.values import BackendName


@final
class Escape(Struct):
    """A known way out of a container: `program` is vulnerable before version `fixed`.

    A later line of versions with a fix of its own has an entry of its own, which begins at `since`.
    """

    program: str
    fixed: tuple[int, ...]
    cve: str
    how: str
    since: tuple[int, ...] = ()


_MASKED = "masked paths are swapped for links while a container starts"
_CONSOLE = "/dev/console is swapped for a link while a container starts"
_LABELS = "labels are written to a file of the guest's choice"

ESCAPES = (
    Escape("runc", (1, 0, 0), "CVE-2019-5736", "a guest overwrites runc itself through /proc/self/exe"),
    Escape("runc", (1, 1, 12), "CVE-2024-21626", "a working directory of /proc/self/fd/N is a folder of the host"),
    Escape("runc", (1, 2, 8), "CVE-2025-31133", _MASKED),
    Escape("runc", (1, 2, 8), "CVE-2025-52565", _CONSOLE),
    Escape("runc", (1, 2, 8), "CVE-2025-52881", _LABELS),
    Escape("runc", (1, 3, 3), "CVE-2025-31133", _MASKED, since=(1, 3)),
    Escape("runc", (1, 3, 3), "CVE-2025-52565", _CONSOLE, since=(1, 3)),
    Escape("runc", (1, 3, 3), "CVE-2025-52881", _LABELS, since=(1, 3)),
    Escape("docker", (18, 9, 2), "CVE-2019-5736", "the runc it comes with"),
    Escape("docker", (19, 3, 1), "CVE-2019-14271", "docker cp loads a library of the container's"),
    Escape("containerd", (1, 4, 3), "CVE-2020-15257", "the shim's socket is reached from the host's network"),
    Escape("containerd", (1, 6, 1), "CVE-2022-23648", "an image's volumes show files of the host"),
    Escape("podman", (4, 9, 4), "CVE-2024-1753", "a build mounts the host's root"),
    Escape("crun", (1, 4, 4), "CVE-2022-27650", "capabilities are inherited"),
)


def known(program: str, version: str) -> tuple[Escape, ...]:
    """Return the escapes that a version is vulnerable to, by its number alone.

    Distributions also fix older versions without a new number.
    """
    numbers = numbers_of(version)
    return tuple(each for each in ESCAPES if each.program == program and numbers and each.since <= numbers < each.fixed)


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers that a version starts with: (1, 1, 5) for 1.1.5+ds1, () for a version without any."""
    found: list[int] = []
    for part in version.lstrip("v").split("."):
        digits = ""
        for letter in part:
            if not letter.isdigit():
                break
            digits += letter
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


_LONGEST_ERROR = 200


def examine_container() -> BackendReport:
    """Report this host's container engine, the known escapes of its version, and a run of a whole sandbox."""
    return with_passed_over(_container(), "docker", "podman")


def _container() -> BackendReport:
    from ringfence.backends.container import api as engines

    try:
        found = engines.find()  # starts Podman's service where a launch would
    except SandboxError as error:
        return BackendReport("container", works=False, findings=(_missing(str(error), error.fix),))
    except UnsupportedError as error:
        lacking = [_missing(part.what, part.fix) for part in error.missing]
        return BackendReport("container", works=False, findings=tuple(lacking or [_missing(str(error), error.fix)]))
    lines = [Finding("engine", "ok", f"{found.name} {found.version} at {found.socket}"), *_versions(found)]
    if found.rootless:
        lines.append(Finding("rootless", "ok", "the engine runs without root"))
    ran = _run("container")
    return BackendReport("container", ran.state == "ok", (*lines, ran))


def _missing(what: str, fix: str | None) -> Finding:
    return Finding("engine", "missing", what, fix)


def _versions(engine: Engine) -> list[Finding]:
    """Return findings on the versions of the engine and of the programs it starts containers with."""
    versions = {engine.name: engine.version}
    for part in engine.api.version().get("Components") or ():
        name = str(part.get("Name", "")).lower()
        program = next((each for each in ("runc", "crun", "containerd") if each in name), None)
        if program is not None:
            versions[program] = _number(str(part.get("Version", "")))
    lines = []
    for program, version in versions.items():
        found = known(program, version)
        for each in found:
            detail = f"{program} {version} has {each.cve} by its number ({each.how})"
            lines.append(Finding("known escapes", "weaker", detail, fixes.install(program, program)))
        if not found:
            lines.append(Finding("known escapes", "ok", f"{program} {version}: none"))
    return lines


def _number(text: str) -> str:
    """Return the version in a text: Podman says "runc version 1.1.5 …" where Docker says "1.1.5"."""
    return next((word for word in text.replace(",", " ").split() if numbers_of(word)), text)[:40]


def examine_gvisor() -> BackendReport:
    """Report the runsc of this host: version, platform, and a run of a whole sandbox."""
    return with_passed_over(_gvisor(), "runsc")


def _gvisor() -> BackendReport:
    from ringfence.backends.gvisor import runsc

    try:
        found = runsc.find()
    except UnsupportedError as error:
        fix = fixes.install("runsc", "runsc (from gvisor.dev)") if error.code == "gvisor-missing" else error.fix
        return BackendReport("gvisor", works=False, findings=(Finding("runsc", "missing", str(error), fix),))
    ran = _run("gvisor")
    lines = (
        Finding("runsc", "ok", f"{found.version} at {found.path}"),
        Finding("platform", "ok" if found.platform != "ptrace" else "weaker", _platform(found.platform)),
        ran,
    )
    return BackendReport("gvisor", ran.state == "ok", lines)


def _platform(name: str) -> str:
    return name if name != "ptrace" else "ptrace: works everywhere, and each system call is slow"


def _run(backend: BackendName) -> Finding:
    from ringfence import Sandbox

    begun = time.monotonic()
    try:
        with Sandbox(backend=backend) as box:
            result = box.exec(["echo", "1"], timeout_s=20)
    except RingfenceError as error:
        return Finding("a whole sandbox", "missing", str(error)[:_LONGEST_ERROR], error.fix)
    if result.stdout != "1\n":
        return Finding("a whole sandbox", "missing", f"echo 1 ended as {result.status} ({result.reason})")
    return Finding("a whole sandbox", "ok", f"echo 1 printed 1, {(time.monotonic() - begun) * 1000:.0f} ms")
