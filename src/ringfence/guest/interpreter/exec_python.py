"""Starts guest code in an interpreter of its own: an address space that no zygote and no other sandbox shares.

The image need not hold our package. Therefore the text of the modules that run the code goes along with the job, as a
file in memory.
"""

from __future__ import annotations

import os

from ringfence.guest import job_modules
from ringfence.shared import fast_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.guest.guestd.protocols import Work

_FD = 5
_START = f"import os;_f=open({_FD},'rb');_f.seek(0);exec(compile(_f.read(),'<fresh>','exec'),{{'file':_f}})"
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
_texts: dict[str, str] = {}  # what `prepare` read


def prepare() -> None:
    """Read our own text, before there is a root without it."""
    _texts.update(job_modules.texts("bash", "runner", "session"))


def argv(job: Work, report_fd: int) -> list[str]:
    """Return the interpreter's command. Descriptor 5 holds the program; the job's line stays open across the exec."""
    is_session = job["kind"] == "session"
    begin = ("bash" if job["language"] == "bash" else "session") if is_session else "runner"
    memory = os.memfd_create("run", 0)
    text = _PROGRAM.format(
        texts=_texts,
        begin=begin,
        function="serve" if is_session else "run",
        report=report_fd,
        job=fast_stdlib.dumps(job).decode(),
    )
    with open(memory, "wb", closefd=False) as file:
        file.write(text.encode())
    if memory != _FD:
        os.dup2(memory, _FD, inheritable=True)
        os.close(memory)
    for line in (report_fd, report_fd + 1) if is_session else (report_fd,):
        os.set_inheritable(line, True)
    site = [] if job["sys_path"] is None else ["-S"]  # an image's own Python finds its packages itself
    return [str(job["executable"]), "-I", *site, "-c", _START]
