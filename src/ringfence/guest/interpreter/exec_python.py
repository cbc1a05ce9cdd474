"""Starts guest code in an interpreter of its own: an address space that no zygote and no other sandbox shares.

The image need not hold our package, so the text of what runs the code goes along, with the job, as a file in memory.
"""

from __future__ import annotations

import os

from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.guest.guestd.protocols import Work

# each after those that it imports
MODULES = (
    "shared/fast_stdlib",
    *(f"guest/interpreter/{name}" for name in ("line", "display", "runner", "bash", "session")),
)
_FD = 5
_START = f"import os;_f=open({_FD},'rb');_f.seek(0);exec(compile(_f.read(),'<fresh>','exec'),{{'file':_f}})"
_PROGRAM = """
import sys, types
for name in ("ringfence", "ringfence.shared", "ringfence.guest", "ringfence.guest.interpreter"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, text in {sources!r}:
    package, _, last = ("ringfence/" + name).replace("/", ".").rpartition(".")
    module = types.ModuleType(package + "." + last)
    module.__package__, module.__file__ = package, "<" + last + ">"
    sys.modules[module.__name__] = module
    setattr(sys.modules[package], last, module)
    exec(compile(text, module.__file__, "exec"), module.__dict__)
os = module.os
file.close()
job = sys.modules["ringfence.shared.fast_stdlib"].loads({job!r})
for line in ({report}, {report} + 1) if job["kind"] == "session" else ({report},):
    os.set_inheritable(line, False)
begin = {{"python": module.serve, "bash": sys.modules["ringfence.guest.interpreter.bash"].serve}}
os._exit(begin[job["language"]](job, {report}) if job["kind"] == "session" else module.runner.run(job, {report}))
"""


def text_of(name: str) -> str:
    """A file of our package: by whatever loaded us, which may hold it in memory."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    data: bytes = __spec__.loader.get_data(f"{folder}/{name}")  # type: ignore[union-attr]  # loaders of files, and ours, have it
    return data.decode()


def prepare() -> None:
    """Read our own text, before there is a root without it."""
    _sources.extend((name, text_of(f"{name}.py")) for name in MODULES)


_sources: list[tuple[str, str]] = []


def argv(job: Work, report_fd: int) -> list[str]:
    """The command of the interpreter; descriptor 5 holds the program, and the line stays open across the exec."""
    memory = os.memfd_create("run", 0)
    text = _PROGRAM.format(sources=_sources, report=report_fd, job=fast_stdlib.dumps(job).decode())
    with open(memory, "wb", closefd=False) as file:
        file.write(text.encode())
    if memory != _FD:
        os.dup2(memory, _FD, inheritable=True)
        os.close(memory)
    for line in (report_fd, report_fd + 1) if job["kind"] == "session" else (report_fd,):
        os.set_inheritable(line, True)
    site = [] if job["sys_path"] is None else ["-S"]  # an image's own Python finds its packages itself
    return [str(job["executable"]), "-I", *site, "-c", _START]
