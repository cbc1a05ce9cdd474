"""Commands that start guest code by an exec: of Python, for Python and bash code of its own, or of the image's node.

Such an interpreter has an address space that no zygote and no other sandbox shares. The image need not hold our
package. Therefore our text that runs the code goes along with the job, as a file in memory.
"""

from __future__ import annotations

import os

from ringfence.guest import job_modules
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.guest.guestd.protocols import ProcessWork

_FD = 5  # the file in memory
_START_PYTHON = f"import os;_f=open({_FD},'rb');_f.seek(0);exec(compile(_f.read(),'<fresh>','exec'),{{'file':_f}})"
# The finder is taken away again before there is guest code, and `runner.prepare` forgets the modules.
_PROGRAM = """
import os, sys
from _frozen_importlib import ModuleSpec
file.close()
class Sent:
    texts = {texts!r}
    def find_spec(self, name, path=None, target=None):
        if name in self.texts:
            spec = ModuleSpec(name, self, origin="<" + name.rpartition(".")[2] + ">")
            spec.has_location = True
            return spec
        if any(text.startswith(name + ".") for text in self.texts):
            return ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        if module.__name__ in self.texts:
            exec(compile(self.texts[module.__name__], module.__file__, "exec"), module.__dict__)
sent = Sent()
sys.meta_path.insert(0, sent)
from ringfence.guest.interpreter import {begin}
from ringfence.shared.fast_stdlib import loads
sys.meta_path.remove(sent)
job = loads({job!r})
for line in ({report}, {report} + 1) if job["kind"] == "session" else ({report},):
    os.set_inheritable(line, False)
os._exit({begin}.{function}(job, {report}))
"""
_NODE = "node"
_FOLDER = "ringfence/guest/interpreter"
_NODE_FILES = {"text": f"{_FOLDER}/session.js", "watcher": f"{_FOLDER}/watcher.js"}
_START_NODE = (
    f"{{const p=JSON.parse(require('fs').readFileSync({_FD},'utf8'));require('fs').closeSync({_FD});"
    "require('vm').runInThisContext(p.text,{filename:'<kernel>'})(require,(name)=>import(name),p.job,p.watcher)}"
)
# An interrupt may end a callback in its middle. Node takes that for a broken program and aborts, unless this is set.
_NODE_OPTIONS = ("--no-force-async-hooks-checks",)
_python_texts: dict[str, str] = {}  # both are read by `prepare`
_node_texts: dict[str, str] = {}


def prepare() -> None:
    """Read our own text while the files that hold it can be seen."""
    _python_texts.update(job_modules.texts("bash", "runner", "session"))
    _node_texts.update({name: job_modules.text_of(path) for name, path in _NODE_FILES.items()})


def python_argv(job: ProcessWork, report_fd: int) -> list[str]:
    """Return Python's command. Descriptor 5 holds the program; the job's line stays open across the exec."""
    is_session = job["kind"] == "session"
    begin = ("bash" if job["language"] == "bash" else "session") if is_session else "runner"
    text = _PROGRAM.format(
        texts=_python_texts,
        begin=begin,
        function="serve" if is_session else "run",
        report=report_fd,
        job=fast_stdlib.dumps(job).decode(),
    )
    _put_in_memory(text.encode())
    for line in (report_fd, report_fd + 1) if is_session else (report_fd,):
        os.set_inheritable(line, True)
    site = [] if job["sys_path"] is None else ["-S"]  # an image's own Python finds its packages itself
    return [str(job["executable"]), "-I", *site, "-c", _START_PYTHON]


def node_argv(job: ProcessWork, line_fd: int) -> list[str]:
    """Return node's command. Descriptor 5 holds our text and the job; the job's line stays open across the exec."""
    handed = {name: job[name] for name in ("kind", "code", "args", "tools") if name in job}
    _put_in_memory(fast_stdlib.dumps({**_node_texts, "job": handed}))
    if job["kind"] == "session":
        _input_as_file()
        os.set_inheritable(line_fd + 1, True)
    os.set_inheritable(line_fd, True)
    return [_NODE, *_NODE_OPTIONS, "-e", _START_NODE]


def _put_in_memory(content: bytes) -> None:
    """Make descriptor 5 a file in memory with this content, open across the exec and at its start."""
    memory = os.memfd_create("run", 0)
    with open(memory, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(memory, 0, os.SEEK_SET)
    if memory != _FD:
        os.dup2(memory, _FD, inheritable=True)
        os.close(memory)


def _input_as_file() -> None:
    """Make standard input a file that the session fills for each cell: node cannot replace standard input later."""
    memory = os.memfd_create("input", os.MFD_CLOEXEC)
    os.dup2(memory, 0)
    os.close(memory)
