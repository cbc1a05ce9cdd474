"""Checks of the least that containment means. `ringfence attack` goes further."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import uuid

from ringfence import Mount, Policy, Sandbox
from ringfence.testing.model import MakeSandbox, in_box, python, with_maker

CONNECT = """
import socket, sys
try: socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=3); print("reached")
except OSError: print("refused")
"""
NAMES = """
import socket
try: print(socket.getaddrinfo("example.com", 443))
except OSError: print("unknown")
"""
WRITE = """
done = []
for d in ("/", "/usr", "/etc", "/dev", "/proc", "/sys", "/home", "/root", "/var", "/run", "/opt"):
    try: open(d + "/x", "w"); done.append(d)
    except OSError: pass
print(done)
"""
BECOME_ROOT = """
import os
r = [os.getuid() != 0]
try: os.setuid(0); r.append("root")
except OSError: r.append("refused")
print(r)
"""
COMMAND_LINES = """
import os
for p in filter(str.isdigit, os.listdir("/proc")):
    try: print(open(f"/proc/{p}/cmdline").read())
    except OSError: pass
"""


def the_hosts_files_do_not_exist(box: Sandbox) -> None:
    with tempfile.NamedTemporaryFile(prefix="conformance-") as file:
        file.write(b"host")
        file.flush()
        result = box.exec(["cat", file.name])
        assert os.path.exists(file.name)
    assert (result.ok, result.stdout) == (False, "")


def the_hosts_variables_are_not_there(make: MakeSandbox) -> None:
    marker = uuid.uuid4().hex
    os.environ["RINGFENCE_CONFORMANCE_SECRET"] = marker
    try:
        seen = python(make, "import os\nprint(dict(os.environ))").check().stdout
    finally:
        del os.environ["RINGFENCE_CONFORMANCE_SECRET"]
    assert marker not in seen


def a_listener_of_the_hosts_is_not_reached(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass
        assert box.exec(["python3", "-c", CONNECT, str(port)]).stdout == "refused\n"


def names_do_not_resolve(box: Sandbox) -> None:
    assert box.exec(["python3", "-c", NAMES]).stdout == "unknown\n"


def only_the_workspace_and_tmp_can_be_written(box: Sandbox) -> None:
    assert box.exec(["python3", "-c", WRITE]).stdout == "[]\n"
    assert (
        box.exec(["sh", "-c", "echo 1 > /workspace/f && echo 2 > /tmp/f && cat /workspace/f /tmp/f"]).stdout == "1\n2\n"
    )


def no_guest_is_root_or_can_become_it(box: Sandbox) -> None:
    assert box.exec(["python3", "-c", BECOME_ROOT]).stdout == "[True, 'refused']\n"


def the_hosts_processes_are_not_seen(box: Sandbox) -> None:
    marker = uuid.uuid4().hex
    command = [sys.executable, "-I", "-c", "print(flush=True); input()", marker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert marker in _command_lines(str(process.pid)), "the witness does not see it either"
            seen = box.exec(["python3", "-c", COMMAND_LINES]).check().stdout
        finally:
            process.kill()
    assert marker not in seen


def _command_lines(pid: str) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode("utf-8", "replace")


def one_sandbox_leaves_nothing_for_the_next(make: MakeSandbox) -> None:
    with make() as box:
        box.exec(["sh", "-c", "echo 1 > f; echo 2 > /tmp/left-behind"]).check()
    with make() as box:
        assert box.exec(["sh", "-c", "ls -A /workspace; ls -A /tmp | grep left-behind"]).stdout == ""


def a_mount_is_read_only_unless_it_says_so(make: MakeSandbox) -> None:
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        os.chmod(folder, 0o755)
        path = os.path.join(folder, "given")
        with open(path, "w") as file:
            file.write("host\n")
        os.chmod(path, 0o644)
        policy = Policy(mounts=[Mount(folder, "/data")])
        with make(policy=policy) as box:
            result = box.exec(["sh", "-c", "cat /data/given; echo guest > /data/given; echo guest > /data/new"])
        with open(path) as file:
            assert (result.stdout, file.read(), os.listdir(folder)) == ("host\n", "host\n", ["given"])


CHECKS = (
    in_box(the_hosts_files_do_not_exist),
    with_maker(the_hosts_variables_are_not_there),
    in_box(a_listener_of_the_hosts_is_not_reached),
    in_box(names_do_not_resolve),
    in_box(only_the_workspace_and_tmp_can_be_written),
    in_box(no_guest_is_root_or_can_become_it),
    in_box(the_hosts_processes_are_not_seen),
    with_maker(one_sandbox_leaves_nothing_for_the_next),
    with_maker(a_mount_is_read_only_unless_it_says_so),
)
