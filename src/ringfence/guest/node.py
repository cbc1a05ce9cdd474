"""Starts JavaScript: an exec of the image's node, with our text for it and the job as a file in memory."""

from __future__ import annotations

import os

from . import lean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .shapes import Work

PROGRAM = "node"
_FD = 4
_START = (
    f"{{const p=JSON.parse(require('fs').readFileSync({_FD},'utf8'));require('fs').closeSync({_FD});"
    "require('vm').runInThisContext(p.text,{filename:'<kernel>'})(require,(name)=>import(name),p.job)}"
)
_text: list[str] = []


def prepare() -> None:
    """Read our own text, before there is a root without it."""
    with open(f"{os.path.dirname(__file__)}/session.js", encoding="utf-8") as file:
        _text.append(file.read())


def argv(job: Work, line_fd: int) -> list[str]:
    """The command; descriptor 4 holds text and job, and the line stays open across the exec."""
    memory = os.memfd_create("run", 0)
    handed = {name: job[name] for name in ("kind", "code", "args", "tools") if name in job}
    with open(memory, "wb", closefd=False) as file:
        file.write(lean.dumps({"text": _text[0], "job": handed}))
    os.lseek(memory, 0, os.SEEK_SET)
    if memory != _FD:
        os.dup2(memory, _FD, inheritable=True)
        os.close(memory)
    if job["kind"] == "session":
        _input_as_file()
    os.set_inheritable(line_fd, True)
    return [PROGRAM, "-e", _START]


def _input_as_file() -> None:
    """Standard input of a session is a file that its kernel fills for each cell: node cannot put another in place."""
    memory = os.memfd_create("input", os.MFD_CLOEXEC)
    os.dup2(memory, 0)
    os.close(memory)
