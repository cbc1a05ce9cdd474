"""System calls that are written down and made in a row: by machine code, or where that cannot be, by Python."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accounts import OrdinaryUser
from programs import read_program
from ringfence.guest.launch import syscall_rows as programs
from ringfence.guest.launch.syscall_rows import CODE, Hole, RowProgram, Slot, room

SOURCE = Path(__file__).resolve().parents[3] / "src" / "ringfence"
OPENAT, WRITE, CLOSE, KILL = 257, 1, 3, 62
AT_FDCWD = -100
PROBE = read_program("guest/syscall_rows_probe.py")


def writer(program: RowProgram) -> int:
    """Add rows that open /dev/null, write four bytes to the file, and close it."""
    opened = program.call(OPENAT, AT_FDCWD, b"/dev/null", os.O_WRONLY, what="open")
    written = program.call(WRITE, 0, b"four", 4, what="write", least=4)
    closed = program.call(CLOSE, 0, what="close")
    program.store(opened, Slot(written, 0), Slot(closed, 0))
    return closed


def both() -> list[RowProgram]:
    native = programs.routine()
    assert native is not None
    return [RowProgram(native), RowProgram(None)]


def test_the_machine_code_is_what_its_listing_says(tmp_path: Path) -> None:
    if shutil.which("as") is None or shutil.which("objcopy") is None:
        pytest.skip("no assembler (binutils)")
    lines = (
        (SOURCE / "guest" / "launch" / "syscall_rows.py")
        .read_text()
        .partition("# The routine:")[2]
        .partition("CODE =")[0]
    )
    listing = [line[1:] for line in lines.splitlines() if line.startswith("#  ")]
    (tmp_path / "r.s").write_text(".intel_syntax noprefix\n" + "\n".join(listing).replace(";", "\n") + "\n")
    subprocess.run(["as", "--64", "-o", tmp_path / "r.o", tmp_path / "r.s"], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", tmp_path / "r.o", tmp_path / "r"], check=True)
    assert (tmp_path / "r").read_bytes().hex() == CODE.hex()


def test_a_result_becomes_an_argument_of_two_later_calls() -> None:
    before = os.listdir("/proc/self/fd")
    for program in both():
        writer(program)
        program.seal()
        program.run_all()
        program.run_all()
    assert os.listdir("/proc/self/fd") == before


def test_a_failure_ends_the_run_and_is_told_by_the_name_of_its_call() -> None:
    for program in both():
        program.call(OPENAT, AT_FDCWD, b"/nowhere", os.O_RDONLY, what="open /nowhere")
        program.call(KILL, Hole("never reached"), 9, what="kill")
        program.seal()
        with pytest.raises(FileNotFoundError) as failed:
            program.run_all()
        assert str(failed.value) == "[Errno 2] No such file or directory [open /nowhere]"


def test_what_python_does_between_rows_may_fail_and_is_told_as_a_rows_failure_is() -> None:
    """The rows run in a new process: an exception would go up the stack of the process that made it."""
    for program in both():
        first = program.stop(lambda: os.stat("/no/such"))
        writer(program)
        program.seal()
        assert program.run() == first
        error = program.failure(first)
        assert error is not None
        assert (error.errno, error.filename) == (errno.ENOENT, "/no/such")


def test_a_mount_that_cannot_be_made_is_refused_with_the_step_that_failed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts a file system that cannot be idmapped")
    code = read_program("guest/syscall_rows_no_mount.py")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "mount_setattr" in done.stdout, done
    assert "it ended" not in done.stdout


def test_a_result_that_is_less_than_needed_is_a_failure() -> None:
    for program in both():
        program.call(WRITE, Hole("pipe"), b"four", 4, what="write", least=5)
        program.seal()
        ends = os.pipe()
        program.fill("pipe", ends[1])
        with pytest.raises(OSError, match="write") as failed:
            program.run_all()
        assert failed.value.errno == errno.EPIPE
        assert os.read(ends[0], 10) == b"four"
        for fd in ends:
            os.close(fd)


def test_rows_branch_on_zero_and_on_failure() -> None:
    for program in both():
        seen: list[str] = []
        asked = program.call(KILL, os.getpid(), 0, what="kill")  # 0: it is there
        program.stop(lambda seen=seen: seen.append("left out"))  # type: ignore[misc]  # a default binds it
        there = program.stop(lambda seen=seen: seen.append("there"))  # type: ignore[misc]  # the same
        program.if_zero(asked, there)
        refused = program.call(CLOSE, -1, what="close")
        program.stop(lambda seen=seen: seen.append("left out"))  # type: ignore[misc]  # the same
        failed = program.stop(lambda seen=seen: seen.append("failed"))  # type: ignore[misc]  # the same
        program.if_failed(refused, failed)
        program.seal()
        program.run_all()
        assert seen == ["there", "failed"]


def test_memory_is_compared_byte_by_byte() -> None:
    native = both()[0]
    place = room(16)
    seen: list[int] = []
    native.compare(place, bytes(16), 16, unequal=2)
    native.stop(lambda: seen.append(0))
    native.stop(lambda: seen.append(1))
    native.seal()
    native.run_all()
    memoryview(place).cast("B")[15] = 1
    native.run_all()
    assert seen == [0, 1, 1]


def copied(tmp_path: Path, change: str) -> Path:
    """The package with a line at the end of `guest/launch/syscall_rows.py`."""
    root = tmp_path / "root"
    shutil.copytree(SOURCE, root / "ringfence", ignore=shutil.ignore_patterns("__pycache__"))
    with (root / "ringfence" / "guest" / "launch" / "syscall_rows.py").open("a") as file:
        file.write(change)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.name == "launch" else 0o644)
    return root


def probed(python: str, root: Path) -> list[object]:
    ran = subprocess.run([python, "-c", PROBE, str(root)], capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    return [found[0], found[1], json.loads(found[2]), *found[3:]]


NO_MEMORY_TO_EXECUTE = "\n\ndef routine():\n    return None\n"


def test_where_nothing_in_memory_can_be_executed_python_makes_the_same_sandbox(tmp_path: Path) -> None:
    ours = probed(sys.executable, SOURCE.parent)
    assert probed(sys.executable, copied(tmp_path, NO_MEMORY_TO_EXECUTE)) == [False, *ours[1:]]
    assert [ours[0], ours[1], *ours[3:]] == [True, "", "ok", "timeout", "2"]


def test_an_ordinary_user_gets_the_same_sandbox_without_machine_code_too(
    ordinary_user: OrdinaryUser,
) -> None:
    found: list[list[object]] = []
    for change in ("", NO_MEMORY_TO_EXECUTE):
        root = ordinary_user.home / f"program{len(found)}"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(ordinary_user.source, root)
        with (root / "ringfence" / "guest" / "launch" / "syscall_rows.py").open("a") as file:
            file.write(change)
        ran = ordinary_user.run(PROBE, str(root))
        shutil.rmtree(root)
        assert ran.returncode == 0, ran.stderr
        said = json.loads(ran.stdout)
        found.append([said[1], json.loads(said[2]), *said[3:]])
    assert found[0] == found[1]
