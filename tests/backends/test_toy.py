"""A backend of another distribution works as our own do: found by its entry point, checked by the conformance suite."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import ringfence
from accounts import OrdinaryUser, let_others_through
from ringfence import Image, Limits, Mount, Network, Policy, Sandbox, UnsupportedError
from ringfence.backends import engine, registry
from ringfence.backends.auto import prepare
from ringfence.doctor import examine
from ringfence.host import state
from ringfence.plan.model import TmpfsOptions
from ringfence.testing.conformance import CHECKS, Check, check, main
from ringfence.values import replace
from strangers import TOY, install_toy

if TYPE_CHECKING:
    from ringfence.backends import Backend

ROOT = Path(__file__).resolve().parents[2]
# Of these each check runs; of all others in `make proof`.
QUICK = ("isolation.", "lifecycle.", "disk.", "refusals.", "code.", "limits.exactly", "limits.threads")
ORDINARY = """
import sys; sys.path.insert(0, sys.argv[1])
import ringfence, ringfence_toy
from ringfence.testing.conformance import check
make = lambda **given: ringfence.Sandbox(backend="toy", **given)
report = check(make, without=ringfence_toy.WITHOUT, only=sys.argv[2:])
print(report.explain())
sys.exit(not report.ok)
"""
DYING = """
import os, ringfence
box = ringfence.Sandbox(backend="toy").start()
process = box.spawn(["sh", "-c", "setsid sleep 4711 & echo up; sleep 4711"])
next(iter(process))
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def toy(installed: Path) -> Iterator[ModuleType]:
    """The module of the installed distribution, which the registry finds."""
    sys.path.insert(0, str(installed))
    import ringfence_toy

    assert str(ringfence_toy.__file__).startswith(str(installed))
    report = ringfence_toy.Toy().doctor()
    if not report.works:
        pytest.skip(f"the toy does not work here: {report.findings[-1].detail}")
    yield ringfence_toy
    sys.path.remove(str(installed))
    del sys.modules["ringfence_toy"]


def made_by(backend: Backend) -> Any:
    return lambda **kwargs: Sandbox(backend=backend, **kwargs)


@pytest.mark.usefixtures("toy")
def test_it_is_found_by_its_name_and_runs_code() -> None:
    result = ringfence.run("print(6*7)", backend="toy")  # type: ignore[arg-type]  # another distribution's name
    assert (result.status, result.stdout, result.backend) == ("ok", "42\n", "toy")
    assert result.enforcement.weaker == ("cpu", "memory")


@pytest.mark.usefixtures("toy")
def test_the_command_knows_it(installed: Path) -> None:
    def said(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(installed)}
        command = [sys.executable, "-m", "ringfence", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)

    ran = said("run", "--backend", "toy", "-c", "print(6*7)")
    assert (ran.returncode, ran.stdout) == (0, "42\n")
    done = said("doctor", "--json", "toy")
    (report,) = json.loads(done.stdout)["backends"]
    assert (report["name"], report["works"]) == ("toy", True)
    assert [each["what"] for each in report["lines"]] == ["util-linux", "a whole sandbox"]
    assert said("doctor", "toy").stdout.startswith("toy: works\n")
    wrong = said("run", "--backend", "toi", "-c", "1")
    assert "did you mean --backend toy?" in wrong.stderr


@pytest.mark.usefixtures("toy")
def test_doctor_reports_it_after_our_own_and_auto_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in registry.names():
        broken = ringfence.doctor.BackendReport(name, False, ())
        monkeypatch.setattr(registry.load_class(name), "doctor", lambda _, broken=broken: broken)
    found = examine()
    assert [each.name for each in found.backends] == [*registry.names(), "toy"]
    assert (found.auto, found.backends[-1].works) == (None, True)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("policy", "image", "said"),
    [
        (Policy(commands=["ls"]), "host", "does not keep a list of commands"),
        (Policy(network=Network(allow=["a.example"])), "host", "does not keep a network"),
        (Policy(mounts=[Mount("/srv", mode="rw")]), "host", "does not keep mounts that can be changed"),
        (Policy(limits=Limits(on_idle="pause")), "host", "does not keep on_idle = 'pause'"),
        (Policy(strict=True), "host", "enforces cpu, memory less well"),
        (Policy(isolation="own-kernel"), "host", "a kernel of its own"),
    ],
)
def test_what_it_does_not_keep_is_refused_before_a_start(policy: Policy, image: str | Image, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        Sandbox(backend="toy", policy=policy, image=image).plan()  # type: ignore[arg-type]  # as above
    assert said in str(caught.value)


# ── conformance ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, id=str(one), marks=() if one.name.startswith(QUICK) else pytest.mark.proof) for one in CHECKS],
)
def test_it_keeps_what_it_claims(toy: ModuleType, one: Check) -> None:
    lacking = [f"{need}: {toy.WITHOUT[need]}" for need in one.needs if need in toy.WITHOUT]
    if lacking:
        pytest.skip(f"declared not applicable: {'; '.join(lacking)}")
    one.act(made_by(toy.Toy()))


@pytest.mark.usefixtures("toy")
def test_it_keeps_as_much_for_an_ordinary_user(installed: Path, ordinary_user: OrdinaryUser) -> None:
    for folder in (installed, installed.parent):
        let_others_through(folder)
    done = ordinary_user.run(ORDINARY, str(installed), *QUICK[:3])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_the_suite_counts_what_it_does_not_claim(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    without = [word for name, why in toy.WITHOUT.items() for word in ("--without", f"{name}={why}")]
    assert main(["--backend", "toy", *without, "lifecycle.it_goes", "limits.usage"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "not-applicable: limits.usage_grows_with_what_is_used: usage: nothing outside counts CPU time and memory",
        "1 passed, 0 failed, 1 not-applicable",
    ]


def test_a_claim_that_is_not_kept_fails_the_suite(toy: ModuleType) -> None:
    """The twin of the test above: the same backend, which now claims to measure use, and to pause."""
    for name, some in (("usage", "limits.usage"), ("pause", "reaching.a_paused_sandbox_does_nothing")):
        without = {key: why for key, why in toy.WITHOUT.items() if key != name}
        report = check(made_by(toy.Toy()), without=without, only=[some])
        assert report.of("failed"), name
        assert not report.ok


def test_a_twin_that_isolates_less_fails_the_suite(toy: ModuleType) -> None:
    class SharesTheNetwork(toy.Toy):  # type: ignore[misc, name-defined]  # loaded as the program runs
        @property
        def namespaces(self) -> tuple[str, ...]:
            return tuple(name for name in super().namespaces if name != "net")

    class CountsFilesBadly(toy.Toy):  # type: ignore[misc, name-defined]  # the same
        def plan(self, policy: Policy, image: Any, facts: Any) -> Any:
            wide = TmpfsOptions(*["size=100m,nr_inodes=20000"] * 3)
            return replace(super().plan(policy, image, facts), sizes=wide)

    for twin, only in (
        (SharesTheNetwork(), "isolation.a_listener"),
        (CountsFilesBadly(), "disk.exactly_so_many_names"),
    ):
        assert check(made_by(twin), without=toy.WITHOUT, only=[only]).of("failed"), only


def test_a_backend_that_isolates_less_must_be_asked_for_by_its_isolation(toy: ModuleType) -> None:
    class Weak(toy.Toy):  # type: ignore[misc, name-defined]  # as above
        @property
        def isolation(self) -> str:
            return "runtime"

    with pytest.raises(
        UnsupportedError, match="isolation = shared-kernel; the toy backend has runtime alone"
    ) as caught:
        prepare(Weak(), "host", Policy())
    assert [each.fix for each in caught.value.missing] == ['isolation = "runtime"']
    assert ringfence.run("print(1)", backend=Weak(), policy=Policy(isolation="runtime")).ok


# ── who dies when ────────────────────────────────────────────────────────────────────────────────


def guests() -> list[str]:
    """Processes that only a sandbox of DYING has."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [pid] if b"4711" in words else []
    return found


def test_after_kill_9_no_guest_lives_and_the_next_start_removes_the_files(toy: ModuleType, installed: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", DYING], env=env, timeout=30)
    assert done.returncode == -9
    deadline = time.monotonic() + 10
    while guests() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert guests() == []
    folder = Path(state.disk_directory("backend-toy"))
    assert len([*folder.iterdir()]) == 1
    with Sandbox(backend=toy.Toy()):
        assert len([*folder.iterdir()]) == 1, "its own"
    assert [*folder.iterdir()] == []


def test_a_start_that_fails_says_why_and_leaves_nothing(toy: ModuleType) -> None:
    class Fails(toy.Toy):  # type: ignore[misc, name-defined]  # as above
        @property
        def namespaces(self) -> tuple[str, ...]:
            return ("no-such-namespace",)

    with pytest.raises(ringfence.SandboxLostError, match=r"ended while it was built: .*unshare"):
        Sandbox(backend=Fails()).start()
    assert [*Path(state.disk_directory("backend-toy")).iterdir()] == []


# ── the page that walks through it ───────────────────────────────────────────────────────────────


def test_what_the_page_shows_of_the_toy_is_the_toy() -> None:
    """Its pieces of code, but for the test that a reader would write."""
    page = (ROOT / "docs" / "how-to" / "add-a-backend.md").read_text()
    source = "\n".join(path.read_text() for path in (*TOY.glob("*.toml"), *TOY.rglob("__init__.py")))
    pieces = [
        piece for kind, piece in re.findall(r"```(python|toml)\n(.*?)```", page, re.DOTALL) if "pytest" not in piece
    ]
    assert len(pieces) == 6
    assert [piece for piece in pieces if piece not in source] == []


def test_the_page_and_the_package_name_the_same_helpers() -> None:
    page = (ROOT / "docs" / "how-to" / "add-a-backend.md").read_text()
    used = set(re.findall(r"engine\.(\w+)", (TOY / "src" / "ringfence_toy" / "__init__.py").read_text()))
    assert used <= {*engine.__all__}
    assert {name for name in engine.__all__ if name not in page} <= {"BoxBind", "Skeleton"}
