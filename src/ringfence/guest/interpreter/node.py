"""Starts JavaScript: an exec of the image's node, with our text for it and the job as a file in memory."""

from __future__ import annotations

import os

from ringfence.guest import job_modules
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.guest.guestd.protocols import Work

PROGRAM = "node"
_FOLDER = "ringfence/guest/interpreter"
_FILES = {"text": f"{_FOLDER}/session.js", "watcher": f"{_FOLDER}/watcher.js"}
_FD = 5
_START = (
    f"{{const p=JSON.parse(require('fs').readFileSync({_FD},'utf8'));require('fs').closeSync({_FD});"
    "require('vm').runInThisContext(p.text,{filename:'<kernel>'})(require,(name)=>import(name),p.job,p.watcher)}"
)
# An interrupt may end a callback in its middle; node takes that for a broken program, and aborts, unless told not to.
_OPTIONS = ("--no-force-async-hooks-checks",)
_texts: dict[str, str] = {}


def prepare() -> None:
    """Read our own text, before there is a root without it."""
    _texts.update({name: job_modules.text_of(path) for name, path in _FILES.items()})


def argv(job: Work, line_fd: int) -> list[str]:
    """The command; descriptor 5 holds text and job, and the line stays open across the exec."""
    memory = os.memfd_create("run", 0)
    handed = {name: job[name] for name in ("kind", "code", "args", "tools") if name in job}
    with open(memory, "wb", closefd=False) as file:
        file.write(fast_stdlib.dumps({**_texts, "job": handed}))
    os.lseek(memory, 0, os.SEEK_SET)
    if memory != _FD:
        os.dup2(memory, _FD, inheritable=True)
        os.close(memory)
    if job["kind"] == "session":
        _input_as_file()
        os.set_inheritable(line_fd + 1, True)
    os.set_inheritable(line_fd, True)
    return [PROGRAM, *_OPTIONS, "-e", _START]


def _input_as_file() -> None:
    """Standard input of a session is a file that its kernel fills for each cell: node cannot put another in place."""
    memory = os.memfd_create("input", os.MFD_CLOEXEC)
    os.dup2(memory, 0)
    os.close(memory)
