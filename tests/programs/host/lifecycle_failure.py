"""Register a function that fails and one that writes a word, then exit or fork: the first argument says which."""

import os
import sys

from ringfence.host import lifecycle


def fail() -> None:
    raise OSError(9, "Bad file descriptor")


def say() -> None:
    os.write(1, b"called")


if sys.argv[1] == "exit":
    lifecycle.at_exit(lifecycle.SANDBOXES, fail)
    lifecycle.at_exit(lifecycle.SANDBOXES, say)
else:
    lifecycle.after_fork(fail)
    lifecycle.after_fork(say)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
