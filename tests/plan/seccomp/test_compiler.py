"""The seccomp filters: the compiled programs equal their table, and the kernel answers as the table says.

How it could be bypassed: another ABI, a number nobody listed, rubbish in the upper half of a register, a mode that
only counts with a flag. Each has a case here in an interpreter of classic BPF and, where it is safe, in the kernel.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.seccomp.data.seccomp_cases import ALLOW, CASES, ENOSYS, EPERM, HIGH, KILL, Args
from ringfence.errors import UnsupportedError
from ringfence.plan.seccomp import compiler, table
from ringfence_attacks.controls import seccomp_program

X86_64, I386 = 0xC000003E, 0x40000003
HERE = Path(__file__).parent
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
NR = table.numbers()
NAMES = {number: name for name, number in NR.items()}


def interpret(program: bytes, arch: int, number: int, args: Args) -> int:
    """Runs the program as the kernel would; fails on anything the kernel's checker would refuse."""
    padded = (*args, *(0,) * (6 - len(args)))
    data = struct.pack("=IIQ6Q", number, arch, 0, *(arg & 0xFFFFFFFFFFFFFFFF for arg in padded))
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = position = 0
    while True:
        operation, yes, no, value = code[position]
        position += 1
        match operation:
            case 0x20:
                assert value % 4 == 0
                accumulator = struct.unpack_from("=I", data, value)[0]
            case 0x54:
                accumulator &= value
            case 0x05:
                position += value
            case 0x15:
                position += yes if accumulator == value else no
            case 0x35:
                position += yes if accumulator >= value else no
            case 0x45:
                position += yes if accumulator & value else no
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"instruction {operation:#x} is not one of ours")


def _holds(check: table.Check, args: Args) -> bool:
    operation, offset, mask, values = check
    argument, upper = divmod(offset - 16, 8)
    value = args[argument] if argument < len(args) else 0
    word = (value >> (32 if upper else 0)) & mask
    match operation:
        case "in":
            return word in values
        case "not-in":
            return word not in values
        case "any-bit":
            return word != 0
        case _:
            raise AssertionError(operation)


def by_table(layer: str, number: int, args: Args, without: frozenset[str]) -> table.Verdict:
    """Return the table's verdict, read clause by clause: the second opinion on the compiler."""
    rest = table.UNKNOWN if layer == "guest" else (((), table.ALLOW),)
    rules = table.guest_rules() if layer == "guest" else table.last_rules()
    if number & 0x40000000 and "abi" not in without:
        return (KILL, "abi")
    for checks, verdict in rules.get(NAMES.get(number, ""), rest):
        last = not checks
        if verdict[1] in without:
            if last:
                return table.ALLOW
        elif all(_holds(check, args) for check in checks):
            return verdict
    raise AssertionError("a rule without an end")


def programs(without: frozenset[str] = frozenset()) -> dict[str, bytes]:
    if not without:
        return {"guest": compiler.guest_filter(), "last": compiler.last_layer()}
    return {layer: seccomp_program(layer, without) for layer in ("guest", "last")}


def verdict(name: str, *args: int, layer: str = "guest") -> int:
    return interpret(programs()[layer], X86_64, NR[name], args)


def _words_of_interest() -> list[int]:
    """Every value and mask the table compares with, plain, with neighbours, and with rubbish above bit 31."""
    found = {0, 1, 0xFFFFFFFF}
    for rule in (*table.guest_rules().values(), *table.last_rules().values()):
        for checks, _ in rule:
            for _, _, mask, values in checks:
                found.update((mask, *values))
    near = {(value + step) & 0xFFFFFFFF for value in found for step in (-1, 0, 1)}
    return sorted(near) + [value | HIGH for value in sorted(near)]


WORDS = _words_of_interest()
CONDITIONAL = sorted(NR[name] for name, rule in {**table.guest_rules(), **table.last_rules()}.items() if len(rule) > 1)
# One word everywhere: with it each clause of the table is met by some sample, which a test below asserts.
ARGUMENTS: list[Args] = [(), *((word,) * 6 for word in WORDS)]
SAMPLES: list[tuple[int, Args]] = [
    *((number, ()) for number in range(1024)),
    *((number, args) for number in CONDITIONAL for args in ARGUMENTS),
    (0x40000000 | NR["getpid"], ()),
    (NR["socket"], (2, 1, 132)),
    (NR["socket"], (17, 3, 0)),
    (NR["sched_setscheduler"], (0, 1, 0)),
    (NR["open"], (0, 0o101, 0o4755)),
    (NR["openat"], (0, 0, 0o101, 0o2755)),
    (NR["seccomp"], (1, 8, 0)),
]


@pytest.mark.parametrize("layer", ["guest", "last"])
def test_the_compiled_filter_is_the_table_for_every_number(layer: str) -> None:
    program = programs()[layer]
    seen = {number: interpret(program, X86_64, number, ()) for number in range(1024)}
    assert seen == {number: by_table(layer, number, (), frozenset())[0] for number in range(1024)}


@pytest.mark.parametrize("layer", ["guest", "last"])
@settings(max_examples=300, deadline=None)
@given(
    number=st.one_of(st.sampled_from(CONDITIONAL), st.integers(0, 0xFFFFFFFF)),
    args=st.tuples(*[st.one_of(st.sampled_from(WORDS), st.integers(0, 2**64 - 1))] * 6),
    without=st.frozensets(st.sampled_from(compiler.CONTROLS), max_size=2),
)
def test_the_compiled_filter_is_the_table_for_any_arguments(
    layer: str, number: int, args: Args, without: frozenset[str]
) -> None:
    assert interpret(programs(without)[layer], X86_64, number, args) == by_table(layer, number, args, without)[0]


def test_the_samples_reach_every_control() -> None:
    met = {by_table(layer, number, args, frozenset())[1] for layer in ("guest", "last") for number, args in SAMPLES}
    assert met - {""} == set(compiler.CONTROLS)


@pytest.mark.parametrize("control", compiler.CONTROLS)
def test_a_control_left_out_opens_its_own_calls_and_no_others(control: str) -> None:
    whole, holed = programs(), programs(frozenset({control}))
    changed: set[str] = set()
    opened = 0
    for layer in ("guest", "last"):
        for number, args in SAMPLES:
            after = interpret(holed[layer], X86_64, number, args)
            if interpret(whole[layer], X86_64, number, args) != after:
                changed.add(by_table(layer, number, args, frozenset())[1])
                opened += after == ALLOW
    assert changed == {control}
    assert opened > 0


def test_an_unknown_control_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such seccomp control: nonsense"):
        seccomp_program("guest", frozenset({"nonsense"}))


@pytest.mark.parametrize("layer", ["guest", "last"])
@pytest.mark.parametrize("arch", [I386, 0, 0xC00000B7])
def test_another_machine_abi_is_killed_whatever_the_number(layer: str, arch: int) -> None:
    assert {interpret(programs()[layer], arch, number, ()) for number in range(512)} == {KILL}
    assert interpret(programs(frozenset({"abi"}))[layer], arch, 1, ()) == ALLOW


@pytest.mark.parametrize("layer", ["guest", "last"])
def test_x32_is_killed_whatever_the_number(layer: str) -> None:
    assert {interpret(programs()[layer], X86_64, 0x40000000 | number, ()) for number in range(600)} == {KILL}


def test_programs_are_small_and_jump_only_inside_themselves() -> None:
    for program in programs().values():
        code = list(struct.iter_unpack("=HBBI", program))
        assert len(code) < 400
        for position, (operation, yes, no, value) in enumerate(code):
            steps = {0x05: [value], 0x06: []}.get(operation, [yes, no] if operation & 7 == 5 else [0])
            assert all(position + 1 + step < len(code) for step in steps)


@pytest.mark.parametrize(("name", "args", "expected"), CASES)
def test_a_call_gets_the_verdict_written_by_hand(name: str, args: Args, expected: int) -> None:
    assert verdict(name, *args) == expected


def test_the_last_layer_takes_openat2_leases_and_clone_parent_and_nothing_else() -> None:
    assert verdict("openat2", layer="last") == ENOSYS
    assert verdict("clone", 0x8011, layer="last") == EPERM
    assert verdict("clone", HIGH | 0x8000, layer="last") == EPERM
    assert verdict("clone", 0x3D0F00, layer="last") == ALLOW
    assert {verdict("fcntl", 3, command, layer="last") for command in (1024, 1026, 1040, HIGH | 1024)} == {EPERM}
    others = set(range(1100)) - {1024, 1026, 1040}
    assert {verdict("fcntl", 3, command, layer="last") for command in others} == {ALLOW}
    rest = {interpret(programs()["last"], X86_64, number, ()) for number in range(1024) if number != NR["openat2"]}
    assert rest == {ALLOW}


def test_every_rule_names_a_known_call_and_a_known_control() -> None:
    rules = [*table.guest_rules().items(), *table.last_rules().items()]
    assert {name for name, _ in rules} <= set(NR)
    named = {clause[1][1] for _, rule in rules for clause in rule} | {"abi", "unknown"}
    assert named - {""} == set(compiler.CONTROLS)
    assert {control for control, _ in table.CONDITIONS} <= set(compiler.CONTROLS)


def test_a_call_is_in_one_list_only() -> None:
    listed = [*table._ALLOWED.split(), *table._conditional()]
    for _, _, names in table._REFUSED:
        listed += names.split()
    assert sorted(listed) == sorted(set(listed))


def test_the_numbers_are_the_kernel_headers() -> None:
    if not HEADER.exists():
        pytest.skip(f"no {HEADER}")
    header = {name: int(number) for name, number in re.findall(r"__NR_(\w+) (\d+)", HEADER.read_text())}
    assert {name: NR.get(name) for name in header} == header


def test_the_description_is_the_golden_one() -> None:
    assert "\n".join(compiler.describe()) + "\n" == (HERE / "data" / "seccomp.txt").read_text()


def test_another_machine_is_unsupported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6", "1", "aarch64")))
    with pytest.raises(UnsupportedError, match="no system call table for aarch64") as caught:
        compiler.guest_filter()
    assert (caught.value.code, caught.value.fix) == (
        "machine",
        "use a machine with x86-64: the other backends need the table too",
    )


def test_the_launch_path_pays_for_struct_alone() -> None:
    source = str(Path(compiler.__file__).parents[3])
    snippet = (
        f"import os, sys; sys.path.insert(0, {source!r}); before = set(sys.modules)\n"
        "from ringfence.plan.seccomp import compiler as seccomp; seccomp.guest_filter(); seccomp.last_layer()\n"
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('ringfence')))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", snippet], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout.replace("'", '"'))) <= {"__future__", "_struct", "struct"}


# In the kernel.


def under_filter(
    *words: str, without: frozenset[str] = frozenset(), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    filters = json.dumps([program.hex() for program in programs(without).values()])
    command = [sys.executable, str(HERE / "data" / "under_filter.py"), filters, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=cwd)


def answers(calls: list[list[int | str]], without: frozenset[str] = frozenset()) -> list[list[int]]:
    done = under_filter("call", json.dumps(calls), without=without)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# (control, call, arguments, errno of the filter). The arguments are such that the kernel itself answers otherwise and
# does nothing, even to root: nothing of these names exists, and no descriptor is -1.
KERNEL: list[tuple[str, str, list[int | str], int]] = [
    ("namespaces", "unshare", [0], errno.EPERM),
    ("namespaces", "setns", [-1, 0], errno.EPERM),
    # CLONE_NEWNS with CLONE_FS and CLONE_SIGHAND without CLONE_VM: the kernel's own answer is EINVAL.
    ("namespaces", "clone", [0x20A00], errno.EPERM),
    ("namespaces", "clone", [HIGH - 2**64 | 0x20A00], errno.EPERM),
    ("clone3", "clone3", [0, 0], errno.ENOSYS),
    ("io-uring", "io_uring_enter", [-1, 0, 0, 0, 0, 0], errno.ENOSYS),
    ("aio", "io_destroy", [0], errno.ENOSYS),
    ("mounts", "mount", ["none", "/no/such/place", "tmpfs", 0, 0], errno.EPERM),
    ("mounts", "umount2", ["/no/such/place", 0], errno.EPERM),
    ("mounts", "chroot", ["/no/such/place"], errno.EPERM),
    ("mounts", "open_tree", [-1, "no-such-place", 0], errno.EPERM),
    ("keyring", "keyctl", [9999, 0, 0, 0, 0], errno.EPERM),
    ("perf", "perf_event_open", [0, 0, -1, -1, 0], errno.EPERM),
    ("userfaultfd", "userfaultfd", [1], errno.EPERM),
    ("ptrace", "process_vm_readv", [0, 0, 0, 0, 0, 1], errno.EPERM),
    ("ptrace", "pidfd_getfd", [-1, 0, 0], errno.EPERM),
    ("handles", "name_to_handle_at", [-1, "no-such-place", 0, 0, 0], errno.EPERM),
    ("clock", "clock_settime", [9999, 0], errno.EPERM),
    ("numa", "set_mempolicy", [9999, 0, 0], errno.EPERM),
    ("memory", "vmsplice", [-1, 0, 0, 0], errno.EPERM),
    ("admin", "quotactl_fd", [-1, 0, 0, 0], errno.EPERM),
    ("realtime", "sched_setattr", [0, 0, 0], errno.EPERM),
    ("socket-families", "socket", [16, 3, 6], errno.EAFNOSUPPORT),
    ("socket-families", "socketpair", [2, 1, 0, 0], errno.EAFNOSUPPORT),
    ("terminal", "ioctl", [-1, 0x5412, 0], errno.EPERM),
    ("terminal", "ioctl", [-1, HIGH - 2**64 | 0x5412, 0], errno.EPERM),
    ("ioctl", "ioctl", [-1, 0x40086602, 0], errno.EPERM),
    ("prctl", "prctl", [0x59616D61, 0, 0, 0, 0], errno.EPERM),
    ("listener", "seccomp", [1, 8, 0], errno.EPERM),
    ("personality", "personality", [0x0040000], errno.EPERM),
    ("prlimit", "prlimit64", [0x7FFFFFFF, 7, 0, 0], errno.EPERM),
    ("prlimit", "prlimit64", [2**32, 7, 0, 0], errno.EPERM),
    ("setid-bits", "chmod", ["/no/such/place", 0o4755], errno.EPERM),
    ("setid-bits", "open", ["/no/such/place", 0o101, 0o4755], errno.EPERM),
    ("setid-bits", "fchmodat2", [-1, "no-such-place", 0o2755, 0], errno.EPERM),
    ("ioctl", "ioctl", [-1, 0x8982, 0], errno.EPERM),
    ("bpf", "setsockopt", [-1, 1, 26, 0, 0], errno.EPERM),
    ("socket-families", "setsockopt", [-1, 6, 31, 0, 0], errno.EPROTONOSUPPORT),
    ("devices", "mknod", ["/no/such/place", 0o20666, 0], errno.EPERM),
    ("openat2", "openat2", [-1, "no-such-place", 0, 0], errno.ENOSYS),
    # CLONE_PARENT with CLONE_SIGHAND without CLONE_VM: EINVAL by the kernel.
    ("clone-parent", "clone", [0x8800], errno.EPERM),
    ("unknown", "remap_file_pages", [1, 0, 0, 0, 0], errno.ENOSYS),
]
PRIVILEGED: list[tuple[str, str, list[int | str], int]] = [
    ("bpf", "bpf", [9999, 0, 0], errno.EPERM),
    ("modules", "delete_module", ["no_such_module_at_all", 0o4000], errno.EPERM),
    ("syslog", "syslog", [9999, 0, 0], errno.EPERM),
]


@pytest.mark.parametrize(("control", "name", "args", "expected"), KERNEL)
def test_the_kernel_refuses_by_the_filter_and_answers_otherwise_without_it(
    control: str, name: str, args: list[int | str], expected: int
) -> None:
    call: list[list[int | str]] = [[NR[name], *args]]
    assert answers(call) == [[-1, expected]]
    assert answers(call, frozenset({control})) != [[-1, expected]]


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel itself answers EPERM to an ordinary user")
@pytest.mark.parametrize(("control", "name", "args", "expected"), PRIVILEGED)
def test_the_kernel_refuses_root_by_the_filter_and_answers_otherwise_without_it(
    control: str, name: str, args: list[int | str], expected: int
) -> None:
    call: list[list[int | str]] = [[NR[name], *args]]
    assert answers(call) == [[-1, expected]]
    assert answers(call, frozenset({control})) != [[-1, expected]]


def test_the_kernel_kills_an_x32_call_and_not_without_the_control() -> None:
    call = json.dumps([[0x40000000 | NR["getpid"]]])
    assert under_filter("call", call).returncode == -signal.SIGSYS
    assert under_filter("call", call, without=frozenset({"abi"})).returncode == 0


def test_the_kernel_kills_a_32_bit_call_and_not_without_the_control() -> None:
    open_arm = under_filter("call", '[["int80"]]', without=frozenset({"abi"}))
    if open_arm.returncode == -signal.SIGSEGV:
        pytest.skip("this kernel has no 32-bit entry (CONFIG_IA32_EMULATION)")
    assert (open_arm.returncode, open_arm.stdout) == (0, "[1, 0]\n")
    assert under_filter("call", '[["int80"]]').returncode == -signal.SIGSYS


def test_a_set_uid_file_is_made_only_without_the_control(tmp_path: Path) -> None:
    target = tmp_path / "tool"
    target.touch(mode=0o755)
    call: list[list[int | str]] = [[NR["chmod"], str(target), 0o4755]]
    assert answers(call) == [[-1, errno.EPERM]]
    assert target.stat().st_mode & 0o7777 == 0o755
    assert answers(call, frozenset({"setid-bits"})) == [[0, 0]]
    assert target.stat().st_mode & 0o7777 == 0o4755


PYTHON = {
    "threads": "import threading; t = [threading.Thread(target=print, args=('ok',)) for _ in range(4)];"
    "[x.start() for x in t]; [x.join() for x in t]",
    "subprocess": "import subprocess; print(subprocess.run(['/bin/sh', '-c', 'echo ok'], capture_output=True).stdout)",
    "posix_spawn": "import os; p = os.posix_spawn('/bin/true', ['true'], {}); print(os.waitpid(p, 0)[1])",
    "multiprocessing": "import multiprocessing as m\nif __name__ == '__main__':\n"
    " for kind in ('fork', 'spawn', 'forkserver'):\n"
    "  with m.get_context(kind).Pool(2) as p: print(p.map(abs, [-1, -2]))",
    "sqlite3": "import sqlite3; c = sqlite3.connect('x.db'); c.execute('pragma journal_mode=wal');"
    "c.execute('create table t (a)'); c.execute('insert into t values (1)'); c.commit(); print('ok')",
    "asyncio": "import asyncio\nasync def main():\n"
    " s = await asyncio.start_server(lambda r, w: w.close(), '127.0.0.1', 0)\n"
    " r, w = await asyncio.open_connection(*s.sockets[0].getsockname()); await r.read()\n"
    " p = await asyncio.create_subprocess_exec('/bin/true'); print(await p.wait())\nasyncio.run(main())",
    "files": "import os, shutil, tempfile; d = tempfile.mkdtemp(); open(d + '/a', 'w').write('x');"
    "shutil.copy2(d + '/a', d + '/b'); os.chmod(d + '/b', 0o600); shutil.rmtree(d); print('ok')",
    "terminal": "import pty, os; print(pty.spawn(['/bin/echo', 'ok']) if os.isatty(0) else os.openpty())",
    "numpy": "import numpy; a = numpy.ones((300, 300)); print((a @ a).sum())",
}


@pytest.mark.parametrize("work", PYTHON)
def test_python_works_under_the_filter(work: str, tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(PYTHON[work])
    done = under_filter("run", sys.executable, str(script), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


NODE = """
const {Worker} = require('worker_threads'), {execFileSync} = require('child_process');
require('os').networkInterfaces(); require('fs').writeFileSync('a', 'b'); require('fs').copyFileSync('a', 'c');
new Worker('1', {eval: true}).on('exit', c => console.log(c, execFileSync('/bin/echo', ['ok']).toString()));
"""
GIT = "git init -q . && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && git gc -q && git log"
C = "echo 'int main(){return 0;}' > a.c && gcc -O1 -o a a.c && ./a && echo ok"
SHELL = (
    "a=$(echo ok | cat) && (exec 3<<<$a; cat <&3) && sleep 0 & wait && cp -a /bin/true t && tar cf t.tar t && echo ok"
)
PROGRAMS = {
    "node": ["-e", NODE],
    "java": ["-version"],
    "bash": ["-c", SHELL],
    "perl": ["-e", 'print `echo ok`; open(F, ">x") or die; use Socket; socket(S, PF_INET, SOCK_STREAM, 0) or die'],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_works_under_the_filter(program: str, tmp_path: Path) -> None:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program}")
    done = under_filter("run", path, *PROGRAMS[program], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr


@pytest.mark.parametrize(("program", "script"), [("git", GIT), ("gcc", C)])
def test_a_tool_works_under_the_filter(program: str, script: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")
    done = under_filter("run", "/bin/sh", "-c", script, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
