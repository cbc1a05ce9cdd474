"""Adds packages to an image's tree: a Debian root with mmdebstrap, then pip's and npm's.

Packages come from where this host's own apt, pip and npm are configured to get them; no address is written here, and
none stays in the image. What pip and npm download is data: pip takes only wheels, npm runs no scripts of packages, and
neither may start a program. pip's wheels are installed inside a sandbox of the image without a network, and come out as
a layer. mmdebstrap runs without a daemon, as root or as a user where the host gives the user uids to map.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from ringfence.errors import ImageError, Missing, UnsupportedError
from ringfence.host import programs
from ringfence.images.importer import apply_directory, apply_stream
from ringfence.images.store import AS_ROOT, run_as_root
from ringfence.images.tar_reader import CutShortError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ringfence._sync.sandbox import Sandbox
    from ringfence.images.tree import ImageTree

    Progress = Callable[[str], None]


# ── Debian ────────────────────────────────────────────────────────────────────────────────────────

_LAST_LINES = 200
# mmdebstrap runs in a pid namespace of its own: one SIGKILL ends it and all that it started, maintainers' scripts too.
# For an ordinary user it runs in our user namespace besides, not in mmdebstrap's own: the root of that namespace is
# another uid, which may not enter our folder.
_ALONE = ("--pid", "--fork", "--kill-child=KILL", "--mount-proc")
# Further variables that apt uses. Maintainers' scripts see every variable, and must not see the caller's tokens.
_PASSED = ("APT_CONFIG", "SOURCE_DATE_EPOCH")
_PROBE_S = 20.0
_LEAN = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
_KEPT = ("/usr/share/doc/*/copyright",)
_NOT_IN_IMAGES = (("etc", "apt", "sources.list"), ("etc", "apt", "sources.list.d"), ("etc", "apt", "auth.conf.d"))


def suite_of(base: str) -> str:
    """Return the release that a recipe's base means: "debian" is this host's own on Debian, else "stable"."""
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
    tree: ImageTree, *, suite: str, packages: tuple[str, ...], scratch: str, progress: Callable[[str], None]
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
        ended = error  # the stream of a program that failed ends so too, and its message matters more
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
    """Raise ImageError for an unknown package, in seconds, before most of the work is done."""
    simulation = _start([command[0], "--simulate", *command[1:]], scratch)
    try:
        _, errors = simulation.communicate()
    except BaseException:
        simulation.kill()
        simulation.communicate()
        raise
    if simulation.returncode != 0:
        raise _failed(errors.decode("utf-8", "replace").splitlines(), suite)


def check_host() -> None:
    """Raise UnsupportedError when this host cannot build images."""
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
    """Return why this user cannot be root over a range of uids; None when it can."""
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
    """Return the "deb …" lines of this host's apt for a release; [] leaves the choice to mmdebstrap."""
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


# ── pip and npm ───────────────────────────────────────────────────────────────────────────────────

_DOWNLOAD_S = 1800.0
# Variables by which the caller chooses an index or registry and how to reach it.
_SETTINGS = (
    "PIP_*",
    "npm_config_*",
    "NPM_CONFIG_*",
    "XDG_*",
    "SSL_CERT_*",
    "REQUESTS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
)
_GLIBC = (17, 24, 27, 28, 31, 34, 35, 36)  # versions 2.x that wheels are made for
_PLATFORM = (
    "import os, platform, sys; print(*sys.version_info[:2], platform.libc_ver()[1] or '2.17', os.uname().machine)"
)
# pip builds a package named by a path or an address, --only-binary or not, and a wheel may depend on such a package:
# its setup.py would run here. pip starts a program for every build, and none for a wheel.
_PIP_ALONE = """
import sys
import runpy
def refuse(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"):
        if not args or str(args[0]) not in ("rustc", "lsb_release"):  # only for the user agent; pip does without
            sys.stderr.write(f"ringfence: pip may not start {args[:1]}\\n")
        raise PermissionError("pip may not start a program")
sys.addaudithook(refuse)
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
# For a package named by a repository's address npm runs git, which copies any repository of this host that a package
# names (git+file://), and runs itself again in the copy. npm starts no program for a package from a registry.
_NPM_ALONE = """
const programs = require("child_process");
function refuse(file) {
  process.stderr.write(`ringfence: npm may not start ${JSON.stringify(file)}\\n`);
  throw new Error("npm may not start a program");
}
programs.ChildProcess.prototype.spawn = (options) => refuse(options.file);
for (const name of Object.keys(programs)) {
  if (typeof programs[name] === "function" && name !== "ChildProcess") programs[name] = refuse;
}
require("module").syncBuiltinESMExports();
"""
_NPM_OWN = ("file", "directory")  # files of this host: a recipe may name one, a package not; newer npm has the option
_PACK = """
import sys, tarfile
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
    tar.add("/workspace/out", arcname=".")
"""


def add_pip(
    tree: ImageTree,
    packages: tuple[str, ...],
    python: str,
    open_box: Callable[[str], Sandbox],
    scratch: str,
    say: Progress,
) -> None:
    """Install `packages` with the image's own Python. `open_box(wheels)` makes a sandbox that shows that folder."""
    wheels = f"{scratch}/wheels"
    os.mkdir(wheels, 0o755)
    with open_box(wheels) as box:
        result = box.exec([python, "-I", "-c", _PLATFORM])
        words = result.stdout.split()
        if not result.ok or len(words) != 4:
            raise ImageError(f"the image's Python does not run: {result.stderr[-200:]!r}", code="image-python")
    say(f"pip download {' '.join(packages)}")
    _download(packages, wheels, words)
    pip = next((name for name in sorted(os.listdir(wheels)) if name.startswith("pip-")), None)
    if pip is None:
        raise ImageError("the index has no wheel of pip itself", code="build", fix="check: pip download pip")
    say(f"pip install {' '.join(packages)}")
    with open_box(wheels) as box:
        command = [python, f"/wheels/{pip}/pip", "install", "--no-index", "--find-links", "/wheels", "--root"]
        command += ["/workspace/out", "--no-cache-dir", "--break-system-packages", "--no-warn-script-location"]
        done = box.exec([*command, "--quiet", "--", *packages])
        if not done.ok:
            raise ImageError(
                f"pip install failed ({done.status}): {_last(done.stderr)}; nothing was kept",
                code="build",
                fix="check the names and versions in the recipe",
            )
        with box.spawn([python, "-I", "-c", _PACK]) as packing:
            apply_stream(tree, _reader(packing))
            ended = packing.wait(timeout_s=60)
        if not ended.ok:
            raise ImageError(f"the packages could not be packed: {_last(ended.stderr)}", code="build")


def _reader(events: object) -> Callable[[int], bytes]:
    """Return a function that reads a process's standard output. Each call returns a piece, whatever the argument."""
    from ringfence.events import Gap, Stdout

    def pieces() -> Iterator[bytes]:
        for event in events:  # type: ignore[attr-defined]  # a Process
            if isinstance(event, Gap):
                raise ImageError("the sandbox's output came faster than it was read", code="build", fix="try again")
            if isinstance(event, Stdout):
                yield event.data

    source = pieces()
    return lambda _: next(source, b"")


def _download(packages: tuple[str, ...], wheels: str, platform: list[str]) -> None:
    major, minor, glibc, machine = platform
    newest = int(glibc.partition(".")[2].partition(".")[0] or 17)
    # -I: nothing from the folder of wheels, whose names an index chose, nor from one that a guest can write (L12).
    command = [_python_with_pip(), "-I", "-c", _PIP_ALONE, "download", "--dest", wheels]
    command += ["--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--python-version", f"{major}.{minor}"]
    command += ["--implementation", "cp", "--abi", f"cp{major}{minor}", "--abi", "abi3", "--abi", "none"]
    for level in sorted((one for one in _GLIBC if one <= newest), reverse=True):
        command += ["--platform", f"manylinux_2_{level}_{machine}"]
    command += ["--platform", f"manylinux2014_{machine}", "--platform", f"linux_{machine}"]
    done = _run([*command, "--", "pip", *packages], wheels)
    if done.returncode == 0:
        return
    said = done.stderr.decode("utf-8", "replace")
    for line in said.splitlines():
        if "No matching distribution found for" in line:
            name = line.rpartition("for ")[2].strip()
            raise ImageError(
                f"no package {name!r:.80} with a wheel for Python {major}.{minor}; nothing was kept",
                code="package-unknown",
                fix="correct its name or version in the recipe; packages without wheels are not built",
            )
    if "ringfence: pip may not start" in said:
        raise ImageError(
            f"among {', '.join(packages)!r:.200} and what they need, pip found what is no wheel; nothing was kept",
            code="package-source",
            fix="name packages of an index, with wheels: nothing is built on this host",
        )
    raise ImageError(f"pip download failed: {_last(said)}; nothing was kept", code="build", fix="try again")


def _python_with_pip() -> str:
    for python in (sys.executable, programs.find("python3")):
        # pip is imported and not run: a pip that runs first obeys its settings, such as "python = …" (L18).
        if python and _run([python, "-I", "-c", "import pip"], "/").returncode == 0:
            return python
    raise UnsupportedError(
        "adding pip packages needs pip on this host",
        code="pip",
        missing=[Missing("image build", "pip", "sudo apt-get install python3-pip")],
    )


def add_npm(tree: ImageTree, packages: tuple[str, ...], scratch: str, say: Progress) -> None:
    """Put npm packages below /usr/local, as `npm install --global` does, without running their scripts."""
    npm = programs.look_up("npm")
    if npm.path is None:
        raise UnsupportedError(
            f"adding npm packages needs npm on this host{npm.remark}",
            code="npm",
            missing=[Missing("image build", "npm", "sudo apt-get install npm")],
        )
    say(f"npm install {' '.join(packages)}")
    prefix = f"{scratch}/npm"
    os.mkdir(prefix, 0o755)
    with open(f"{scratch}/alone.js", "w", encoding="utf-8") as file:
        file.write(_NPM_ALONE)
    command = [npm.path, "install", "--global", "--prefix", prefix, "--ignore-scripts", "--no-audit", "--no-fund"]
    command += [f"--allow-{kind}=root" for kind in _NPM_OWN]
    done = _run([*command, "--no-update-notifier", "--loglevel=error", "--", *packages], scratch, _node(file.name))
    said = done.stderr.decode("utf-8", "replace")
    if "ringfence: npm may not start" in said:
        raise ImageError(
            f"among {', '.join(packages)!r:.200} and what they need, npm found what no registry has; nothing was kept",
            code="package-source",
            fix="name packages of a registry: nothing is cloned or built on this host",
        )
    if done.returncode != 0:
        signs = ("not in this registry", "No matching version")
        unknown = [line for line in said.splitlines() if any(sign in line for sign in signs)]
        raise ImageError(
            f"npm install failed: {_last(unknown[0] if unknown else said)}; nothing was kept",
            code="package-unknown" if unknown else "build",
            fix="correct the names and versions in the recipe" if unknown else "try again",
        )
    apply_directory(tree, prefix, below="usr/local", whole=False)


def _node(script: str) -> dict[str, str]:
    """Return the variables with which every Node runs `script` first.

    The caller's own options are left out, because they would run before.
    """
    quoted = script.replace("\\", "\\\\").replace('"', '\\"')
    return {"NODE_OPTIONS": f'--require "{quoted}"'}


def _run(command: list[str], folder: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            programs.dying_with_us(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DOWNLOAD_S,
            check=False,
            cwd=folder,
            env={**programs.environment(command[0], *_SETTINGS), **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise ImageError(f"{command[0]} took longer than {_DOWNLOAD_S:g} s", code="build", fix="try again") from None


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-3:])[-300:] or "it said nothing"
