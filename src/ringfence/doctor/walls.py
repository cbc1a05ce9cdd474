"""Tries the backends whose wall is an engine's: what they rest on, versions with known escapes, and a whole run."""

from __future__ import annotations

import time

from ringfence.doctor import escapes, fixes
from ringfence.doctor.report import BackendReport, Finding
from ringfence.errors import RingfenceError, SandboxError, UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.backends.container.engine import Engine
    from ringfence.values import BackendName

_MOST_SAID = 200


def examine_container() -> BackendReport:
    from ringfence.backends.container import engine as engines

    try:
        found = engines.find(start=False)
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
    """Of the engine and what it starts containers with, as it tells them."""
    told = {engine.name: engine.version}
    for part in engine.api.version().get("Components") or ():
        name = str(part.get("Name", "")).lower()
        program = next((each for each in ("runc", "crun", "containerd") if each in name), None)
        if program is not None:
            told[program] = _number(str(part.get("Version", "")))
    lines = []
    for program, version in told.items():
        found = escapes.known(program, version)
        for each in found:
            detail = f"{program} {version} has {each.cve} by its number ({each.how})"
            lines.append(Finding("known escapes", "weaker", detail, fixes.install(program, program)))
        if not found:
            lines.append(Finding("known escapes", "ok", f"{program} {version}: none"))
    return lines


def _number(text: str) -> str:
    """Podman tells "runc version 1.1.5 …" where Docker tells "1.1.5"."""
    return next((word for word in text.replace(",", " ").split() if escapes.numbers_of(word)), text)[:40]


def examine_gvisor() -> BackendReport:
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
            said = box.exec(["echo", "1"], timeout_s=20)
    except RingfenceError as error:
        return Finding("a whole sandbox", "missing", str(error)[:_MOST_SAID], error.fix)
    if said.stdout != "1\n":
        return Finding("a whole sandbox", "missing", f"echo 1 ended as {said.status} ({said.reason})")
    return Finding("a whole sandbox", "ok", f"echo 1 printed 1, {(time.monotonic() - begun) * 1000:.0f} ms")
