"""Makes a Debian root with mmdebstrap, without a daemon: as root, or as a user where the host gives it uids to map.

Packages come from where this host's own apt is configured to get them; no address is written here, and none stays in
the image.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from ringfence.errors import ImageError, Missing, UnsupportedError
from ringfence.host import programs
from ringfence.images.importer import apply_stream
from ringfence.images.store import AS_ROOT, run_as_root
from ringfence.images.tar_reader import CutShortError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.images.tree import Tree

_LAST_LINES = 200
# In a pid namespace of its own: one SIGKILL ends it and all that it started, maintainers' scripts too. An ordinary user
# is root in a user namespace besides; not in mmdebstrap's own, whose root is another uid that may not enter our folder.
_ALONE = ("--pid", "--fork", "--kill-child=KILL", "--mount-proc")
# What apt asks for besides. Maintainers' scripts see all that is passed, and the caller's tokens are none of theirs.
_PASSED = ("APT_CONFIG", "SOURCE_DATE_EPOCH")
_PROBE_S = 20.0
_LEAN = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
_KEPT = ("/usr/share/doc/*/copyright",)
_NOT_IN_IMAGES = (("etc", "apt", "sources.list"), ("etc", "apt", "sources.list.d"), ("etc", "apt", "auth.conf.d"))


def suite_of(base: str) -> str:
    """The release that a recipe's base means: "debian" is this host's own on Debian, else the stable one."""
    named = base.partition(":")[2]
    if named:
        return named
    found = _os_release()
    return found.get("VERSION_CODENAME", "stable") if found.get("ID") == "debian" else "stable"


def _os_release() -> dict[str, str]:
    try:
        with open("/etc/os-release", encoding="utf-8", errors="replace") as file:
            pairs = [line.strip().partition("=") for line in file]
    except OSError:
        return {}
    return {key: value.strip("\"'") for key, _, value in pairs}


def debootstrap(
    tree: Tree, *, suite: str, packages: tuple[str, ...], scratch: str, progress: Callable[[str], None]
) -> None:
    """Fill an empty tree with a Debian root and `packages`. Raises UnsupportedError, or ImageError with the reason."""
    check_host()
    command = _command(suite, packages)
    os.chmod(scratch, 0o755)  # apt's own user and, in a user namespace, root go through it
    count = f"{len(packages)} package{'s' * (len(packages) != 1)}"
    if packages:
        progress(f"looking for {count}")
        _look_for_packages(command, suite, scratch)
    progress(f"Debian {suite} with {count}")
    running = _start(command, scratch)
    said: list[str] = []
    listener = threading.Thread(target=_listen, args=(running, said, progress), daemon=True)
    listener.start()
    ended: CutShortError | None = None
    assert running.stdout is not None
    assert running.stderr is not None
    try:
        apply_stream(tree, running.stdout.read)
    except CutShortError as error:
        ended = error  # as the stream of a program that failed does: what it said matters more
    finally:
        running.stdout.close()
        if sys.exc_info()[0] is not None:
            running.kill()
        status = running.wait()
        listener.join(5)
        running.stderr.close()
    if status != 0:
        raise _failed(said, suite)
    if ended is not None:
        raise ended
    for path in _NOT_IN_IMAGES:
        tree.remove(path)


def _start(command: list[str], scratch: str) -> subprocess.Popen[bytes]:
    mapped = () if os.geteuid() == 0 else AS_ROOT
    unshare = _program("unshare", "util-linux")
    return subprocess.Popen(
        programs.dying_with_us([unshare, *_ALONE, *mapped, *command]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **programs.environment(command[0], *_PASSED),
            "TMPDIR": scratch,
            "LC_ALL": "C.UTF-8",
            "DEBIAN_FRONTEND": "noninteractive",
        },
        start_new_session=True,
    )


def _program(name: str, package: str) -> str:
    found = programs.look_up(name)
    if found.path is None:
        raise UnsupportedError(
            f"building an image needs {name}, and there is none that may be used{found.remark}",
            code=name,
            missing=[Missing("image build", name, f"sudo apt-get install {package}")],
        )
    return found.path


def _look_for_packages(command: list[str], suite: str, scratch: str) -> None:
    """A name that no package has would be found only when most of the work is done: ask first, in seconds."""
    asking = _start([command[0], "--simulate", *command[1:]], scratch)
    try:
        _, told = asking.communicate()
    except BaseException:
        asking.kill()
        asking.communicate()
        raise
    if asking.returncode != 0:
        raise _failed(told.decode("utf-8", "replace").splitlines(), suite)


def check_host() -> None:
    """Raises UnsupportedError when this host cannot build."""
    _program("mmdebstrap", "mmdebstrap")
    if os.geteuid() != 0 and (why := _not_mapped()):
        raise UnsupportedError(
            f"building an image as an ordinary user needs a range of uids to map, and newuidmap ({why})",
            code="subuid",
            missing=[
                Missing(
                    "image build",
                    "uids in /etc/subuid and /etc/subgid",
                    "sudo apt-get install uidmap && sudo usermod --add-subuids 100000-165535 "
                    "--add-subgids 100000-165535 $USER; or build as root, export, and import here",
                )
            ],
        )


def _not_mapped() -> str | None:
    """Why this user cannot be root over a range of uids; None: it can."""
    why = run_as_root(["true"], _PROBE_S)
    return None if why is None else why[:200]


def _command(suite: str, packages: tuple[str, ...]) -> list[str]:
    command = [_program("mmdebstrap", "mmdebstrap"), "--variant=essential", "--format=tar", "--mode=root"]
    command += ["--skip=output/dev,output/mknod"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEAN]
    command += [f"--dpkgopt=path-include={pattern}" for pattern in _KEPT]
    if packages:
        command.append(f"--include={','.join(packages)}")
    return [*command, suite, "-", *host_sources(suite)]


def _listen(running: subprocess.Popen[bytes], said: list[str], progress: Callable[[str], None]) -> None:
    assert running.stderr is not None
    for raw in running.stderr:
        line = raw.decode("utf-8", "replace").strip()[:500]
        if not line:
            continue
        said.append(line)
        del said[:-_LAST_LINES]
        if line.startswith("I: ") and "..." in line:
            progress(line[3:].rstrip("."))


def _failed(said: list[str], suite: str) -> ImageError:
    for line in said:
        if "Unable to locate package" in line or "has no installation candidate" in line:
            name = line.rpartition("package ")[2].strip("'\" ").split()[0] if "locate" in line else line
            return ImageError(
                f"Debian {suite} has no package {name!r:.80}; nothing was kept",
                code="package-unknown",
                fix=f"correct its name in the recipe; to search: apt-cache search {name[:40]}",
            )
    errors = [line for line in said if line.startswith("E: ")] or said[-3:]
    text = "; ".join(line.removeprefix("E: ") for line in errors[:3])[:400]
    if any("No space left" in line for line in said):
        fix = "free some (ringfence image gc), or set XDG_DATA_HOME to a larger disk"
        return ImageError("mmdebstrap: no space left on the disk; nothing was kept", code="disk-full", fix=fix)
    return ImageError(
        f"mmdebstrap failed: {text}; nothing was kept", code="build", fix="try again, or see ringfence doctor"
    )


def host_sources(suite: str) -> list[str]:
    """Lines "deb …" of this host's apt for a release; none: mmdebstrap's own choice."""
    wanted = {suite, f"{suite}-updates", f"{suite}-security"}
    found: list[str] = []
    folder = "/etc/apt/sources.list.d"
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for path in ("/etc/apt/sources.list", *(f"{folder}/{name}" for name in names)):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(1 << 20)
        except OSError:
            continue
        found += _stanzas(text, wanted) if path.endswith(".sources") else _one_lines(text, wanted)
    own = [line for line in found if f" {suite} " in line]
    return list(dict.fromkeys(found)) if own else []


def _one_lines(text: str, wanted: set[str]) -> list[str]:
    lines = []
    for line in text.splitlines():
        words = line.split("]", 1)[-1].split() if "[" in line else line.split()[1:]
        if line.startswith("deb ") and len(words) >= 2 and words[1].rstrip("/") in wanted:
            lines.append(" ".join(line.split()))
    return lines


def _stanzas(text: str, wanted: set[str]) -> list[str]:
    lines = []
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        for line in stanza.splitlines():
            key, colon, value = line.partition(":")
            if colon and not line.startswith(("#", " ", "\t")):
                fields[key.strip().lower()] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        key = fields.get("signed-by", "")
        signed = f"[signed-by={key}] " if key.startswith("/") and " " not in key else ""
        for suite in fields.get("suites", "").split():
            if suite in wanted:
                uris = fields.get("uris", "").split()
                lines += [f"deb {signed}{uri} {suite} {fields.get('components', 'main')}" for uri in uris]
    return lines
