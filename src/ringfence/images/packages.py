"""Adds pip and npm packages to a tree. Downloads are data, made by the host's own pip and npm as the host has them
configured; what is installed is written inside a sandbox of the image, without a network, and comes out as a layer.

Only wheels are taken, npm's scripts are not run, and neither may start a program: nothing of a package runs here.
"""

from __future__ import annotations

import os
import subprocess
import sys

from ringfence.errors import ImageError, Missing, UnsupportedError
from ringfence.host import programs
from ringfence.images.importer import apply_directory, apply_stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ringfence._sync.sandbox import Sandbox
    from ringfence.images.tree import Tree

    Progress = Callable[[str], None]

_DOWNLOAD_S = 1800.0
# By which the caller says which index or registry, and how it is reached.
_SETTINGS = (
    "PIP_*",
    "npm_config_*",
    "NPM_CONFIG_*",
    "XDG_*",
    "SSL_CERT_*",
    "REQUESTS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
)
_GLIBC = (17, 24, 27, 28, 31, 34, 35, 36)  # that wheels are made for; an image's own is asked for
_TELL = "import os, platform, sys; print(*sys.version_info[:2], platform.libc_ver()[1] or '2.17', os.uname().machine)"
# pip builds what is named by a path or an address, --only-binary or not, and a wheel may name such a thing as its need:
# its setup.py would run here. pip starts a program for every build, and none for a wheel.
_PIP_ALONE = """
import sys
import runpy
def refuse(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"):
        if not args or str(args[0]) not in ("rustc", "lsb_release"):  # asked to tell an index who asks; it does without
            sys.stderr.write(f"ringfence: pip may not start {args[:1]}\\n")
        raise PermissionError("pip may not start a program")
sys.addaudithook(refuse)
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
# npm fetches what is named by a repository's address with git, which copies any repository of this host that a package
# names (git+file://), and runs itself there again. It starts no program for what comes from a registry.
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
_NPM_OWN = ("file", "directory")  # of this host: a recipe may name one, a package not; newer versions know it
_PACK = """
import sys, tarfile
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
    tar.add("/workspace/out", arcname=".")
"""


def add_pip(
    tree: Tree, packages: tuple[str, ...], python: str, open_box: Callable[[str], Sandbox], scratch: str, say: Progress
) -> None:
    """Install `packages` with the image's own Python. `open_box(wheels)` makes a sandbox that shows that folder."""
    wheels = f"{scratch}/wheels"
    os.mkdir(wheels, 0o755)
    with open_box(wheels) as box:
        told = box.exec([python, "-I", "-c", _TELL])
        words = told.stdout.split()
        if not told.ok or len(words) != 4:
            raise ImageError(f"the image's Python does not run: {told.stderr[-200:]!r}", code="image-python")
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
    """The standard output of a process as a stream. Its pieces are small: an argument says how much, they are less."""
    from ringfence.events import Gap, Stdout

    def pieces() -> Iterator[bytes]:
        for event in events:  # type: ignore[attr-defined]  # a Process
            if isinstance(event, Gap):
                raise ImageError("the sandbox's output came faster than it was read", code="build", fix="try again")
            if isinstance(event, Stdout):
                yield event.data

    source = pieces()
    return lambda _: next(source, b"")


def _download(packages: tuple[str, ...], wheels: str, told: list[str]) -> None:
    major, minor, glibc, machine = told
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
        # Imported, and not run: a pip that runs does first what its settings say, "python = …" among it (L18).
        if python and _run([python, "-I", "-c", "import pip"], "/").returncode == 0:
            return python
    raise UnsupportedError(
        "adding pip packages needs pip on this host",
        code="pip",
        missing=[Missing("image build", "pip", "sudo apt-get install python3-pip")],
    )


def add_npm(tree: Tree, packages: tuple[str, ...], scratch: str, say: Progress) -> None:
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
    """Variables with which every Node runs that script first. The caller's own options would come before it."""
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
