"""The libraries and files that a listed program needs."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.rootfs.rows import rows
from ringfence.errors import PolicyError
from ringfence.plan.rootfs import commands
from ringfence.plan.rootfs.commands import Closure, closure, roots_without_programs
from ringfence.plan.rootfs.host_view import view
from ringfence.plan.rootfs.interpreter import Interpreter, interpreter
from ringfence.policy.model import Policy
from ringfence.values import replace


def brought(*names: str) -> Closure:
    return closure(names, interpreter())


def by_linker(path: str) -> set[str]:
    """The libraries that the dynamic linker itself loads for `path`."""
    printed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    words = [word for line in printed.splitlines() for word in line.split() if word.startswith("/")]
    return {os.path.realpath(word) for word in words}


@pytest.mark.parametrize("name", ["ls", "git", "bash"])
def test_a_binary_brings_exactly_the_libraries_its_linker_loads(name: str) -> None:
    path = f"/usr/bin/{name}"
    if not os.path.exists(path):
        pytest.skip(f"{name} is missing")
    program = next(one for one in brought(name).programs if one.name == name)
    assert set(program.files) == {os.path.realpath(path)} | by_linker(path)
    assert program.missing == ()


def test_a_link_is_followed_through_alternatives_and_every_step_is_kept() -> None:
    """Kernel fact 15: without the steps awk and java are ENOENT on Debian."""
    if not os.path.islink("/etc/alternatives/awk"):
        pytest.skip("/etc/alternatives is missing")
    program = brought("awk").programs[0]
    assert program.links[:2] == (
        ("/usr/bin/awk", "/etc/alternatives/awk"),
        ("/etc/alternatives/awk", os.readlink("/etc/alternatives/awk")),
    )
    assert os.path.realpath("/usr/bin/awk") in program.files


def test_a_script_brings_its_interpreter_and_what_env_looks_up(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/usr/bin/env -S sh -e\n")
    (tmp_path / "tool").chmod(0o755)
    python = replace(interpreter(), programs=(str(tmp_path),))
    assert [program.name for program in closure(("tool",), python).programs] == ["tool", "env", "sh"]


def test_python_is_the_callers_interpreter() -> None:
    found = brought("python3")
    assert found.python
    assert found.programs[0].path == interpreter().command
    assert interpreter().executable in found.files


def test_git_brings_its_own_programs_and_a_shell() -> None:
    found = brought("git")
    if not os.path.isdir("/usr/lib/git-core"):
        pytest.skip("/usr/lib/git-core is missing")
    assert "/usr/lib/git-core" in found.directories
    assert "sh" in [program.name for program in found.programs]


def test_an_unknown_name_is_an_error_that_names_near_ones() -> None:
    with pytest.raises(PolicyError) as caught:
        brought("ls", "bassh")
    assert caught.value.key == "commands[1]"
    assert "bash" in str(caught.value.fix)


def test_the_explanation_names_each_program_and_what_it_brings() -> None:
    lines = brought("git").explain_lines()
    assert lines[0] == "git: /usr/bin/git"
    assert any(line.startswith("  starts: sh") for line in lines)


def test_without_python_among_the_commands_no_program_of_the_interpreter_is_shown() -> None:
    python = interpreter()
    shown = rows(view(Policy(commands=["ls"]), python, uid=1000, home="/nonexistent"))
    places = [str(op[2] if op[0] in ("bind", "symlink") else op[1]) for op in (*shown.template, *shown.box)]
    assert [place for place in places if place.rsplit("/", 1)[-1].startswith("python3.") and "/bin/" in place] == []
    assert "usr" not in [op[2] for op in shown.template if op[0] == "bind"]


def test_folders_of_programs_hold_only_what_was_named() -> None:
    shown = rows(view(Policy(commands=["ls"]), interpreter(), uid=1000, home="/nonexistent"))
    names = [str(op[2]) for op in shown.template if op[0] in ("bind", "symlink")]
    assert [name for name in names if "/bin/" in name or "/sbin/" in name] == ["usr/bin/ls"]


def test_an_interpreter_in_a_shared_store_cannot_be_limited() -> None:
    python: Interpreter = replace(interpreter(), roots=("/nix/store",))
    with pytest.raises(PolicyError) as caught:
        roots_without_programs(python, Closure(programs=(), python=True))
    assert caught.value.key == "commands"


def test_a_library_beside_its_program_is_found_by_origin(tmp_path: Path) -> None:
    (tmp_path / "libx.so").write_text("")
    assert commands.find_library("libx.so", (str(tmp_path),), {}) == str(tmp_path / "libx.so")
    assert commands.find_library("libx.so", (), {}) is None


def test_the_linkers_cache_is_read() -> None:
    if not os.path.exists("/etc/ld.so.cache"):
        pytest.skip("/etc/ld.so.cache is missing")
    found = commands.linker_cache()
    libc = next(path for path in by_linker("/usr/bin/ls") if os.path.basename(path).startswith("libc.so"))
    assert os.path.realpath(found["libc.so.6"]) == libc


HEADER = b"\x7fELF\x02\x01" + bytes(26) + struct.pack("<Q", 64) + bytes(14) + struct.pack("<HH", 56, 3) + bytes(6)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_a_malformed_file_needs_nothing_and_breaks_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, headed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(HEADER + data if headed else data)
    assert isinstance(commands.needs(str(path)), commands.Needs)
