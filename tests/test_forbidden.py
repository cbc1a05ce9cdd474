"""Code that is forbidden: ways to turn bytes into code (J09), waits for the caller's children, stray words."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ringfence"
ATTACKS = ROOT / "attacks" / "src"

FORBIDDEN_MODULES = frozenset(
    ["cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve", "torch", "yaml"]
)
FORBIDDEN_BUILTINS = frozenset(["__import__", "compile", "eval", "exec"])
FORBIDDEN_CALLS = frozenset(
    """
    asyncio.create_subprocess_shell importlib.import_module os.popen os.system os.wait os.wait3 pty.spawn
    runpy.run_module runpy.run_path subprocess.getoutput subprocess.getstatusoutput
    """.split()  # noqa: SIM905  # a column of words reads better than a column of quotes
)


class Allowance(NamedTuple):
    where: str  # a file, or a folder with a closing slash, below src/ringfence or attacks/src
    what: str
    why: str


ALLOWED = (
    Allowance("guest/", "compile", "inside the box, running the guest's code is the job"),
    Allowance("guest/", "exec", "inside the box, running the guest's code is the job"),
    Allowance("guest/", "eval", "inside the box, a cell's last expression has a value"),
    Allowance("guest/", "__import__", "preloading: names from the caller's Image, before any guest byte"),
    Allowance("guest/", "importlib.import_module", "preloading: names from the caller's Image, before any guest byte"),
    Allowance("guest/", "waitpid(-1)", "PID 1 of a sandbox reaps what is left to it; none of it is the caller's"),
    Allowance("guest/", "SIGCHLD handler", "processes of ours alone: no guestd or PID 1 shares one with the caller"),
    Allowance(
        "ringfence_attacks/cases/l_imports.py",
        "Python that reads the working directory",
        "a guest wrote there: what the command does about it is what is tried",
    ),
    Allowance("__init__.py", "__import__", "lazy exports: from a fixed table, never a name from outside"),
    Allowance("backends/registry.py", "__import__", "our own backends: from a fixed table, never a name from outside"),
    Allowance("types.py", "__import__", "lazy exports: from a fixed table, never a name from outside"),
)  # fmt: skip


class Finding(NamedTuple):
    where: str
    line: int
    what: str


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_number(node: ast.expr, number: int) -> bool:
    try:
        return bool(ast.literal_eval(node) == number)
    except ValueError:
        return False


def is_true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and not node.value)


def other_names(tree: ast.AST) -> dict[str, str]:
    """Return what `from os import system` and `import os as o` make another name of, by that name."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found


def findings_in_call(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    first, dot, rest = dotted(call.func).partition(".")
    name = (names.get(first, first) + dot + rest).removeprefix("builtins.")
    last = name.rpartition(".")[2]
    if name in FORBIDDEN_BUILTINS:
        yield name
    if name in FORBIDDEN_CALLS:
        yield name
    if last in ("waitpid", "wait4") and call.args and (is_number(call.args[0], -1) or is_number(call.args[0], 0)):
        yield "waitpid(-1)"
    if last == "waitid" and call.args and dotted(call.args[0]).endswith("P_ALL"):
        yield "waitpid(-1)"
    if last == "signal" and call.args and dotted(call.args[0]).endswith("SIGCHLD"):
        yield "SIGCHLD handler"
    for keyword in call.keywords:
        if keyword.arg in ("shell", "allow_pickle") and is_true(keyword.value):
            yield f"{keyword.arg}=True"


def findings_in_list(words: ast.List) -> Iterator[str]:
    """A Python that is started without -I or -P takes modules from the working directory, where a guest may write."""
    if not words.elts or dotted(words.elts[0]) != "sys.executable":
        return
    first = words.elts[1] if len(words.elts) > 1 else None
    if not (isinstance(first, ast.Constant) and first.value in ("-I", "-P")):
        yield "Python that reads the working directory"


def findings_in(text: str, where: str) -> list[Finding]:
    found: list[Finding] = []
    tree = ast.parse(text)
    names_of = other_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            found.extend(Finding(where, node.lineno, what) for what in findings_in_call(node, names_of))
            continue
        elif isinstance(node, ast.List):
            found.extend(Finding(where, node.lineno, what) for what in findings_in_list(node))
            continue
        else:
            continue
        found.extend(Finding(where, node.lineno, n) for n in names if n.split(".")[0] in FORBIDDEN_MODULES)
    return found


def covers(allowance: Allowance, finding: Finding) -> bool:
    folder = allowance.where.endswith("/")
    inside = finding.where.startswith(allowance.where) if folder else finding.where == allowance.where
    return inside and finding.what == allowance.what


def test_no_bytes_become_code_and_no_child_of_the_caller_is_reaped() -> None:
    found = [
        finding
        for source in (SOURCE, ATTACKS)
        for path in sorted(source.rglob("*.py"))
        for finding in findings_in(path.read_text(), path.relative_to(source).as_posix())
        if not any(covers(allowance, finding) for allowance in ALLOWED)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import pickle", ["pickle"]),
        ("from yaml import load", ["yaml"]),
        ("eval(x)", ["eval"]),
        ("__import__(name)", ["__import__"]),
        ("importlib.import_module(name)", ["importlib.import_module"]),
        ("os.system(line)", ["os.system"]),
        ("subprocess.run(line, shell=True)", ["shell=True"]),
        ("np.load(file, allow_pickle=flag)", ["allow_pickle=True"]),
        ("os.waitpid(-1, 0)", ["waitpid(-1)"]),
        ("os.waitpid(0, 0)", ["waitpid(-1)"]),
        ("from os import system\nsystem(line)", ["os.system"]),
        ("import os as o\no.system(line)", ["os.system"]),
        ("from importlib import import_module as load\nload(name)", ["importlib.import_module"]),
        ("import builtins\nbuiltins.exec(text)", ["exec"]),
        ("subprocess.getoutput(line)", ["subprocess.getoutput"]),
        ("os.waitid(os.P_ALL, 0, os.WEXITED)", ["waitpid(-1)"]),
        ("signal.signal(signal.SIGCHLD, f)", ["SIGCHLD handler"]),
        ('subprocess.run([sys.executable, "-c", code])', ["Python that reads the working directory"]),
        ("argv = [sys.executable, *words]", ["Python that reads the working directory"]),
        ('subprocess.run([sys.executable, "-P", "-c", code]); [sys.executable, "-I", "-S"]', []),
        ("box.exec(argv); re.compile(x); subprocess.run(argv, shell=False); os.waitpid(pid, 0)", []),
    ],
)
def test_the_reader_of_code_sees_each_kind(text: str, what: list[str]) -> None:
    assert [finding.what for finding in findings_in(text, "x.py")] == what


# Who starts a program of the host by a bare name lets PATH choose it (L18): `backends/host_programs.py` finds them all.
LOOKS_UP = frozenset(
    [
        "shutil.which",
        "os.execvp",
        "os.execvpe",
        "os.execlp",
        "os.execlpe",
        "os.posix_spawnp",
        "os.spawnvp",
        "os.spawnlp",
    ]
)
STARTS = frozenset(
    ["run", "Popen", "call", "check_call", "check_output", "create_subprocess_exec", "posix_spawn", "execv", "execve"]
)
LOOKED_UP_INSIDE = ("guest/", "testing/")  # in a sandbox


def by_bare_name(text: str) -> list[str]:
    """Calls that look a program up themselves, and lists of words that begin with a bare name in a module that starts
    programs."""
    found = []
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    starts = any(
        dotted(call.func).startswith(("subprocess.", "os.", "asyncio."))
        and dotted(call.func).rpartition(".")[2] in STARTS
        for call in calls
    )
    for call in calls:
        name = dotted(call.func)
        if name in LOOKS_UP or name == "which":
            found.append(name)
    for node in ast.walk(tree):
        if starts and isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1:
            first = node.elts[0]
            word = first.value if isinstance(first, ast.Constant) else None
            if isinstance(word, str) and word in PROGRAMS:
                found.append(word)
    return found


# That our host code starts, or did.
PROGRAMS = frozenset(
    """
    docker git mkfs.ext4 mmdebstrap mount newgidmap newuidmap node npm nsenter pip podman python python3
    qemu-system-x86_64 rm runsc sh systemctl systemd-run tar true umount unshare zstd
    """.split()  # noqa: SIM905  # a column of words reads better than a column of quotes
)
THROUGH_THE_ONE = {
    "backends/container/api.py": ["docker", "podman", "docker", "podman"],  # names of engines with their sockets
    "cli/notes.py": ["which"],  # tells a person where a program is that the guest did not find; starts nothing
    "images/store.py": ["rm"],  # handed to `host.programs.look_up`
    "images/importer.py": ["docker"],  # names of engines
}


def test_every_program_of_the_host_is_found_by_the_one_look_up() -> None:
    found = {
        where: names
        for path in sorted(SOURCE.rglob("*.py"))
        if not (where := path.relative_to(SOURCE).as_posix()).startswith(LOOKED_UP_INSIDE)
        and (names := by_bare_name(path.read_text()))
    }
    assert found == THROUGH_THE_ONE


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('shutil.which("runsc")', ["shutil.which"]),
        ('which("mkfs.ext4", path=places)', ["which"]),
        ("os.execvp(argv[0], argv)", ["os.execvp"]),
        ('subprocess.run(["zstd", "-dcq"])', ["zstd"]),
        ('command = ["npm", "install"]\nsubprocess.Popen(command)', ["npm"]),
        ('_ALONE = ("unshare", "--pid")\nsubprocess.run([*_ALONE, *words])', ["unshare"]),
        ('subprocess.run(["/bin/sh", "-c", text]); box.exec(["python3", name])', ["python3"]),
        ('box.exec(["npm", "test"])', []),
    ],
)
def test_the_reader_of_code_sees_each_look_up(text: str, what: list[str]) -> None:
    assert by_bare_name(text) == what


# A bracket in each word keeps this file, and any other search for them, from finding itself.
STRAY_WORDS = re.compile(
    r"/wor[k]/(main|shared|steering|\.library)|/far[m]/|py[p]i\.org|python[h]osted\.org|[n]pmjs\.org|deb\.[d]ebian\.org"
    r"|suba[g]ent|developers? [s]ession|\bC[E]O\b",
    re.IGNORECASE,
)


def tracked_files() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive: all of it was shipped
        return [p for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts and ".git" not in p.parts]
    return [p for name in listed.decode().split("\0") if name and (p := ROOT / name).is_file()]


def test_no_file_names_a_machine_a_registry_or_how_it_was_made() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if STRAY_WORDS.search(line)
    ]
    assert found == []


def test_a_lock_file_holds_hashes_and_no_address() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        lines = path.read_text().splitlines()
        assert [
            line for line in lines if "://" in line or (line.lstrip().startswith("--") and "--hash=" not in line)
        ] == []
        pins = [line for line in lines if re.match(r"[A-Za-z0-9]", line)]
        assert pins, path
        assert [line for line in pins if "==" not in line or not line.endswith("\\")] == []
