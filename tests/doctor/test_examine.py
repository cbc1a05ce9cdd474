"""The promises of an examination on every host: deadlines, and the same report as table, JSON and script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import engines
import leftovers
from ringfence.backends import registry
from ringfence.backends.container import api as clients
from ringfence.doctor import BackendReport, Finding, Report, examination, examine, fixes, process
from ringfence.doctor import engines as engine_trials
from ringfence.errors import PolicyError, UnsupportedError
from ringfence.host import kernel_refusals
from ringfence.policy import Policy
from ringfence.values import frozen_map


@pytest.fixture(scope="module")
def report() -> Report:
    return examine()


def test_every_backend_of_this_version_is_reported_and_no_other(report: Report) -> None:
    assert [each.name for each in report.backends] == ["process", "container", "gvisor"]


def test_no_module_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("docker", "ringfence", "json", "socket"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    examine()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("program", "version", "expected"),
    [
        ("runc", "1.0.0-rc6", {"CVE-2024-21626", "CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}),
        ("runc", "0.1.1", {"CVE-2019-5736", "CVE-2024-21626", "CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}),
        ("runc", "1.1.12", {"CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}),
        ("runc", "1.3.2", {"CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}),
        ("runc", "1.2.8", set()),
        ("runc", "1.3.3", set()),
        ("docker", "18.09.1", {"CVE-2019-5736", "CVE-2019-14271"}),
        ("docker", "20.10.24+dfsg1", set()),
        ("podman", "4.3.1", {"CVE-2024-1753"}),
        ("runc", "unknown", set()),
    ],
)
def test_versions_with_a_known_escape_are_named(program: str, version: str, expected: set[str]) -> None:
    assert {each.cve for each in engine_trials.known(program, version)} == expected


@pytest.fixture(scope="module")
def docker() -> str:
    engine = engines.running("docker")
    if isinstance(engine, str):
        pytest.skip(engine)
    return engine.socket


def test_a_running_engine_is_found_its_versions_judged_and_a_sandbox_started(
    docker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{docker}")
    try:
        (found,) = examine(backends=["container"]).backends
    finally:
        clients.forget(clients.find())
    lines = {(what, state) for what, state, _, _ in found.lines}
    assert (found.works, ("engine", "ok") in lines, ("a whole sandbox", "ok") in lines) == (True, True, True)
    assert any("containerd" in detail for _, _, detail, _ in found.lines)


def test_an_installed_podman_is_started_as_a_launch_does_and_not_called_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(clients, "_found", {})
    monkeypatch.setattr(clients, "_candidates", lambda *_: [])
    monkeypatch.setattr("ringfence.host.programs.look_up", lambda _: SimpleNamespace(path="/usr/bin/podman", remark=""))
    monkeypatch.setattr(clients, "_own_service", lambda _: "it ended with status 125")
    (found,) = engine_trials._container().findings
    assert (found.detail, found.fix) == ("a service of Podman's: it ended with status 125", "podman system service")


def test_no_plan_is_made_for_a_podman_that_a_launch_could_not_speak_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(clients, "_found", {})
    monkeypatch.setattr(clients, "_candidates", lambda *_: [])
    monkeypatch.setattr("ringfence.host.programs.look_up", lambda _: SimpleNamespace(path="/usr/bin/podman", remark=""))
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(UnsupportedError, match="needs the Engine SDK, which is not installed"):
        clients.look()


def test_the_lines_are_what_was_tried_and_what_held(report: Report) -> None:
    whats = [what for what, *_ in report.backends[0].lines]
    tried = ["user namespaces", "all namespaces", "fresh /proc", "seccomp", "Landlock", "openat2", "pidfd", "memfd"]
    root = ["idmapped mounts"] if os.geteuid() == 0 else []
    held = ["files", "network", "processes", "syscalls", "privileges", "time", "cpu", "memory", "disk", "output"]
    assert whats == [
        *["kernel", "machine", "launcher"], *tried, *root, *["overlay", "cgroup", "a whole sandbox"],
        *held, "image build",
    ]  # fmt: skip


def test_everything_missing_on_the_process_backend_has_a_fix(report: Report) -> None:
    assert [line for line in report.backends[0].lines if line[1] == "missing" and line[3] is None] == []


def test_only_the_named_backends_are_reported(report: Report) -> None:
    some = examine(backends=["gvisor"])
    assert [each.name for each in some.backends] == ["gvisor"]
    assert some.auto == report.auto


def test_an_unknown_backend_is_an_error() -> None:
    for name in ("vm", "wasm", "remote", "proces"):  # no backend of this version, and no backend at all
        with pytest.raises(PolicyError, match=f"unknown backend '{name}'"):
            examine(backends=[name])


def test_a_policy_that_asks_for_a_kernel_of_its_own_is_not_kept_by_the_process_backend() -> None:
    found = examine(Policy(isolation="own-kernel"), ["process"])
    assert found.auto in (None, "gvisor")  # as this host has runsc or not
    assert found.backends[0].works
    assert "kernel" in found.rejected["process"]


def test_auto_is_one_that_was_seen_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("process", "container", "gvisor"):
        broken = BackendReport(name, False, (Finding("a whole sandbox", "missing", f"no {name}", "ringfence doctor"),))
        monkeypatch.setattr(registry.load_class(name), "doctor", lambda _, broken=broken: broken)
    monkeypatch.setattr(examination, "prepare", lambda *_: SimpleNamespace(plan=lambda: None))
    report = examine(None, ["process"])
    refused = {name: report.rejected[name] for name in ("process", "container", "gvisor")}
    assert (report.auto, refused) == (None, {name: f"no {name}" for name in refused})
    assert [each.fix for each in report.backends[0].findings] == [None]


def test_an_examination_leaves_nothing() -> None:
    before = leftovers.count()
    examine(backends=["process"])
    assert leftovers.wait_for_nothing(before) == []


def test_a_trial_that_hangs_or_crashes_is_an_answer() -> None:
    code = """
import json, os, signal, time
from ringfence.guest.launch.trials import attempt
hang = attempt(lambda: time.sleep(60), timeout_s=0.2)
crash = attempt(lambda: os.kill(os.getpid(), signal.SIGSEGV))
print(json.dumps([hang, crash]))
"""
    env = {**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, env=env)
    assert json.loads(done.stdout) == [
        {"ok": False, "detail": "no answer in 0.2 s", "errno": None},
        {"ok": False, "detail": "the trial ended with status -11", "errno": None},
    ]


@pytest.mark.parametrize("below", ["/tmp", "/var/tmp"])
def test_the_trials_say_the_same_where_the_code_lies_below_a_folder_of_temporary_files(below: str) -> None:
    """A trial that mounts over the code that it is still importing fails, and says that a namespace is missing."""

    def trial_states(package: Path) -> dict[str, bool]:
        argv = [os.path.realpath(sys.executable), "-I", "-S", str(package / "guest/launch/trials.py")]
        done = subprocess.run(argv, env=process.trial_environment(), capture_output=True, text=True, timeout=55)
        assert done.returncode == 0, done.stderr
        return {said["trial"]: said["ok"] for said in map(json.loads, done.stdout.splitlines())}

    source = Path(process.__file__).parents[1]
    with tempfile.TemporaryDirectory(dir=below) as folder:
        copy = Path(folder, "src", "ringfence")
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        assert trial_states(copy) == trial_states(source)


def test_a_whole_run_that_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_WHOLE_S", 0.01)
    assert process.run_whole() == process.Answer(False, "no answer in 0.01 s")


def test_json_and_script_come_from_the_same_findings() -> None:
    findings = (
        Finding("a", "ok", "fine"),
        Finding("b", "missing", "gone", "make b", "mk b"),
        Finding("c", "weaker", "less", "make b", "mk b"),
        Finding("d", "missing", "by hand", "ask somebody"),
    )
    report = Report((BackendReport("process", False, findings),), None, frozen_map({"process": "gone"}))
    assert report.fixes() == ["mk b"]
    assert report.to_dict() == {
        "auto": None,
        "rejected": {"process": "gone"},
        "backends": [
            {
                "name": "process",
                "works": False,
                "lines": [
                    {"what": "a", "state": "ok", "detail": "fine", "fix": None},
                    {"what": "b", "state": "missing", "detail": "gone", "fix": "make b"},
                    {"what": "c", "state": "weaker", "detail": "less", "fix": "make b"},
                    {"what": "d", "state": "missing", "detail": "by hand", "fix": "ask somebody"},
                ],
            }
        ],
        "fixes": ["mk b"],
    }


@pytest.mark.parametrize(
    ("release", "state"),
    [
        ("5.10.0-28-amd64", "missing"),
        ("5.12.1", "weaker"),
        ("5.14.0-362.el9", "ok"),
        ("6.18.44-x", "ok"),
        ("7.0", "ok"),
    ],
)
def test_an_old_kernel_is_said_to_be_old(release: str, state: str) -> None:
    assert process._kernel(release).state == state


def test_another_machine_is_refused_before_anything_is_tried() -> None:
    assert process._machine("aarch64").state == "missing"


@pytest.mark.parametrize(
    ("family", "command"),
    [
        ({"ubuntu", "debian"}, "sudo apt-get install qemu-system-x86"),
        ({"fedora"}, "sudo dnf install qemu-system-x86-core"),
        (set(), "install qemu-system-x86 (Debian), qemu-system-x86-core (Fedora)"),
    ],
)
def test_a_package_is_named_as_the_distribution_names_it(
    family: set[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixes, "distribution", lambda: frozenset(family))
    assert fixes.install("qemu-system-x86", "qemu-system-x86-core") == command


def test_a_path_cannot_break_out_of_the_profile() -> None:
    assert 'ringfence-launch "/a\\"b/\\*/\\{c\\}/launch" flags' in fixes.profile_for('/a"b/*/{c}/launch')
    assert fixes.profile_for("/a\nEOF\nreboot\n").startswith("# ")


GROUPS = [
    pytest.param(
        "v2", True, ["cpu"], None, "ringfence doctor --fix | sudo sh   # systemd", "delegate.conf", id="scope"
    ),
    pytest.param("v1", False, [], None, "start the kernel with systemd.unified_cgroup_hierarchy=1", "# start", id="v1"),
    pytest.param("v2", False, [], "docker", "limit the container itself: docker run", "# limit", id="container"),
]


@pytest.mark.parametrize(("mode", "ok", "lacks", "engine", "fix", "script"), GROUPS)
def test_a_user_without_every_controller_is_told_how_to_get_them(
    mode: str, ok: bool, lacks: list[str], engine: str | None, fix: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(kernel_refusals, "container", lambda: engine)
    found = process._cgroup(process.Answer(ok, mode, None, {"mode": mode, "lacks": lacks}))
    assert (found.state, str(found.fix).startswith(fix), script in str(found.script)) == ("weaker", True, True)


@pytest.mark.parametrize(
    ("text", "number", "code"),
    [
        ("[Errno 28] No space left on device [unshare 0x10020000]", 28, "namespaces-used-up"),
        (
            "PID 1 could not be set up: [Errno 1] Operation not permitted [mount proc proc on /proc]",
            None,
            "proc-masked",
        ),
        ("[Errno 38] Function not implemented [mount_setattr x]", 38, "kernel"),
        ("[Errno 95] Operation not supported [mount overlay]", 95, "build"),
        ("something else", None, "start"),
    ],
)
def test_a_refused_step_has_a_cause(text: str, number: int | None, code: str) -> None:
    assert kernel_refusals.cause(text, number).code == code


@pytest.mark.parametrize("engine", ["docker", "podman", "kubernetes"])
def test_a_container_gets_the_flags_of_its_own_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_refusals, "container", lambda: engine)
    fix = kernel_refusals.container_fix()
    unmask = {"docker": "systempaths=unconfined", "podman": "unmask=ALL", "kubernetes": "procMount: Unmasked"}[engine]
    assert (unmask in fix, unmask in kernel_refusals.proc_fix(), "seccomp" in fix) == (True, True, True)


def test_a_folder_that_cannot_be_entered_is_not_taken_for_a_refused_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused = "[Errno 13] Permission denied [mount bind {} on /]"
    assert kernel_refusals.cause(refused.format("/home/other"), 13).code == "mount-source"
    assert kernel_refusals.cause(refused.format(""), 13).code == "userns-restricted"
