"""Start programs on the host for a case: a supervisor that may be killed, and a command on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import ringfence
from ringfence.host.zygote_start import own_package

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(ringfence.__file__)))


def host_process(code: str, *, timeout_s: float = 20, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python code that uses Ringfence in a separate process, with `path` as PATH."""
    return subprocess.run(
        [sys.executable, "-I", "-c", f"{own_package()}\n{code}"],
        env={
            "PATH": path or os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": os.path.expanduser("~"),
            **{name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ},
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        start_new_session=True,
    )


_ON_TERMINAL = "import os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\nos.execvp(sys.argv[2], sys.argv[2:])\n"


def under_terminal(argv: list[str], *, typed: str, timeout_s: float = 8) -> str:
    """Run `argv` on a controlling terminal where `typed` was typed. Returns its output, which goes to a pipe."""
    main, other = pty.openpty()
    try:
        with subprocess.Popen(
            [sys.executable, "-I", "-c", _ON_TERMINAL, os.ttyname(other), *argv],
            env={
                "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
                "HOME": os.path.expanduser("~"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            os.write(main, typed.encode())
            return _output(process, main, timeout_s)
    finally:
        os.close(main)
        os.close(other)


def _output(process: subprocess.Popen[bytes], main: int, timeout_s: float) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    out = process.stdout.fileno()
    data = b""
    while time.monotonic() < deadline:
        ready = select.select([out, main], [], [], 0.1)[0]
        if main in ready:
            os.read(main, 4096)  # the echo
        if out in ready:
            chunk = os.read(out, 4096)
            if not chunk:
                break
            data += chunk
    process.kill()
    return data.decode("utf-8", "replace")
