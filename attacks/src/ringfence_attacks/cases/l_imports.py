"""L: persistence in modules that a guest leaves where Ringfence's own processes could import them."""

from __future__ import annotations

import os
import subprocess
import sys

from ringfence_attacks.case import ESCAPE, HOST_CODE, Seen, attack, cases
from ringfence_attacks.host_programs import SOURCE, host_process
from ringfence_attacks.witnesses import text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm

# A planted module: leaves a mark, then loads the real module of its name in its place.
_PLANTED = """
import os, sys
with open({mark!r}, "a") as file:
    file.write(f"{{__name__}} in {{os.getpid()}}\\n")
whole = sys.path[:]
sys.path[:] = [each for each in whole if os.path.abspath(each) != os.path.dirname(__file__)]
del sys.modules[__name__]
try:
    import importlib
    sys.modules[__name__] = importlib.import_module(__name__)
finally:
    sys.path[:] = whole
"""
_PLANT = """
import sys
folder, text, *names = sys.argv[1:]
for name in names:
    with open(f"{folder}/{name}.py", "w") as file:
        file.write(text)
"""
# A program of the caller. `off`: without the guard that keeps Ringfence's imports out of the folder.
_CALLER = """
import sys, warnings
warnings.simplefilter("ignore")
from ringfence import Mount, Network, Policy, Sandbox; from ringfence.host import import_path
backend, project, off, first, names = {values}
if off:
    import_path.guard = lambda: None
if first:
    sys.path.insert(0, project)
network = Network() if first else Network(allow=["example.com"])
with Sandbox(policy=Policy(mounts=[Mount(project, mode="rw")], network=network), backend=backend) as box:
    if not first:
        sys.path[:] = [*(each for each in sys.path if "-packages" not in each), project]
    box.exec(["python3", "-c", {plant!r}, project, {planted!r}, *names]).check()
    {then}
"""
_OWN_VERBS = """box.files.write("x", "1")
    box.files.download("x", project + "/out")
    box.expose(9).close()
    box.snapshot()"""
_REQUEST = "import urllib.request; urllib.request.urlopen('http://example.com/', timeout=5)"
_GUESTS_REQUEST = f"""box.exec(["python3", "-c", {_REQUEST!r}])"""
_OPTIONAL = ("h11", "h2", "hpack", "cryptography", "org", "msvcrt", "nt", "_winapi")


def _modules() -> tuple[str, ...]:
    """Return the names of Python's own modules that a planted file can have."""
    return tuple(sorted(set(sys.stdlib_module_names) - set(sys.builtin_module_names) - {"site", "os", "io", "codecs"}))


def _project(arm: Arm) -> str:
    """Make a folder that the guest may write to, and return its path. The mark is outside this folder."""
    path = f"{arm.directory}/project"
    os.mkdir(path)
    os.chmod(path, 0o777)
    return path


def _played(arm: Arm, names: tuple[str, ...], then: str, *, first: bool) -> Seen:
    mark = f"{arm.directory}/mark"
    values = (arm.backend, _project(arm), arm.off, first, names)
    planted = _PLANTED.format(mark=mark)
    done = host_process(_CALLER.format(values=values, plant=_PLANT, planted=planted, then=then), timeout_s=60)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-300:])
    return _judged(mark)


def _judged(mark: str) -> Seen:
    ran = text_of(mark).splitlines()
    return Seen(bool(ran), f"run on the host: {', '.join(ran[:3])}" if ran else "nothing ran on the host")


@attack(
    "L12",
    "Ringfence imports no module that a guest left in a folder of sys.path",
    ESCAPE,
    off=HOST_CODE,
    label="imports",
)
def left_for_the_library(arm: Arm) -> Seen:
    """The folder is the first entry of sys.path, as a script's own folder is, and has a file for each of Python's own
    modules. Off: Ringfence imports from everywhere that Python does."""
    return _played(arm, _modules(), _OWN_VERBS, first=True)


@attack(
    "L12-optional",
    "Ringfence imports no module that a guest left under the name of a package that is not installed",
    ESCAPE,
    off=HOST_CODE,
    label="imports",
)
def left_for_a_missing_package(arm: Arm) -> Seen:
    """The folder is the last entry of sys.path, and shadows nothing. The gateway imports h11 when the guest sends a
    plain request."""
    return _played(arm, _OPTIONAL, _GUESTS_REQUEST, first=False)


@attack(
    "L12-command",
    "the command, started where a guest worked, imports no module that the guest left",
    ESCAPE,
    off=HOST_CODE,
    label="command's path",
)
def left_for_the_command(arm: Arm) -> Seen:
    """Start the command twice: once in the folder, from which `python -m` takes modules, and once with the folder in
    PYTHONPATH.

    Modules that Python itself imports before the command's first line are not planted: no program can keep these out.
    Off: the command without the guard that it sets first.
    """
    project, mark = _project(arm), f"{arm.directory}/mark"
    taken = ("runpy", "importlib", "contextlib", "functools", "collections", "reprlib", "keyword", "operator", "types")
    names = [name for name in _modules() if name not in (*taken, "warnings", "encodings", "typing", "abc", "stat")]
    arm.sandbox(arm.shared()).exec(["python3", "-c", _PLANT, project, _PLANTED.format(mark=mark), *names]).check()
    start = ["-m", "ringfence"]
    if arm.off:
        start = ["-c", "import sys; from ringfence.cli import main; sys.exit(main(sys.argv[1:]))"]
    for flags, folder, path in (([], project, SOURCE), (["-P"], "/", f"{project}:{SOURCE}")):
        done = subprocess.run(
            [sys.executable, "-s", "-S", *flags, *start, "exec", "--", "/bin/true"],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "HOME": os.path.expanduser("~")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(done.stderr[-300:])
    return _judged(mark)


CASES = cases(globals())
