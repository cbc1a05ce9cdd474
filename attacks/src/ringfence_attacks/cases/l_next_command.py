"""L: persistence in links and files that a guest leaves in a shared folder for the next command, call or host program.

In each case the first sandbox has ended. Off: a careless program of the host uses the same path.
"""

from __future__ import annotations

import os
import subprocess
import sys

from ringfence import Mount, RingfenceError, Sandbox, SandboxLostError, UnsupportedError
from ringfence.plan.model import Bind, LinuxPlan
from ringfence.values import replace
from ringfence_attacks.arena import POLICY
from ringfence_attacks.case import ESCAPE, HOST_CODE, PERSIST, READ, WRITE, NotApplicable, Seen, attack, cases
from ringfence_attacks.host_programs import SOURCE, host_process
from ringfence_attacks.witnesses import environment, host_folder, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.plan.model import Op
    from ringfence.values import MountMode
    from ringfence_attacks.arena import Arm

_LABEL = "files: host paths"


def _outside(arm: Arm) -> str:
    """Make a folder of the host that no sandbox may reach, and return its path.

    It is open to any user: only that it is not shared keeps guests out.
    """
    folder = arm.enter(host_folder())
    os.chmod(folder, 0o777)
    return folder


def _planted(arm: Arm, links: Mapping[str, str]) -> None:
    """Let a guest make links in the arm's folder, and end its sandbox."""
    box = arm.sandbox(arm.shared(), whole=True)
    code = "for name, leads in links.items():\n    os.symlink(leads, top + '/' + name)"
    report = arm.python(code, box=box, top=arm.directory, links=dict(links))
    box.close()
    if not all(os.path.islink(f"{arm.directory}/{name}") for name in links):
        raise AssertionError(f"nothing was planted: {report.words()}")


def _careless(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


@attack("L15", "a file that a command writes is not written through a planted link", WRITE, off=HOST_CODE, label=_LABEL)
def written_for_the_caller(arm: Arm) -> Seen:
    """A command writes to the link with `--report`, and through a folder that became a link with `--net-log`.

    The report contains what the next guest printed: in a file that a shell reads, that text would run.
    """
    outside = _outside(arm)
    victims = [f"{outside}/{name}" for name in ("bashrc", "profile")]
    for victim in victims:
        _careless(victim, "# mine\n")
    _planted(arm, {"report.json": victims[0], "logs": outside})
    met = []
    for option, name in (("--report", "report.json"), ("--net-log", "logs/profile")):
        path = f"{arm.directory}/{name}"
        if arm.off:
            _careless(path, arm.canary)
            continue
        line = ["exec", option, path, "--allow-net", "host.invalid", "--", "echo", arm.canary]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ringfence", *line],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": SOURCE, "HOME": os.path.expanduser("~")},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            start_new_session=True,
        )
        met.append(f"{option}: exit {done.returncode}")
        if "is a link to" not in done.stderr:
            raise AssertionError(f"{option} was not refused for its link: {done.stderr[-300:]}")
    return Seen(any(text_of(victim) != "# mine\n" for victim in victims), "; ".join(met) or "written")


@attack("L15-export", "a snapshot is not exported through a planted link", WRITE, off=HOST_CODE, label=_LABEL)
def exported(arm: Arm) -> Seen:
    outside = _outside(arm)
    _planted(arm, {"out": outside})
    path = f"{arm.directory}/out/authorized_keys"
    if arm.off:
        _careless(path, arm.canary)
        return Seen(bool(os.listdir(outside)), "written")
    box = arm.sandbox(whole=True)
    try:
        box.snapshot().export(path)
    except OSError as error:
        return Seen(bool(os.listdir(outside)), str(error.strerror))
    return Seen(bool(os.listdir(outside)), "exported")


@attack("L16", "a planted link is not mounted as the folder that was named", READ, off=HOST_CODE, label=_LABEL)
def shown_instead(arm: Arm) -> Seen:
    """Mount the link in every mode that the backend has. Off: the caller's program resolves the path first, and mounts
    the folder that the link leads to."""
    outside = _outside(arm)
    _careless(f"{outside}/private", arm.canary)
    os.chmod(f"{outside}/private", 0o666)
    _planted(arm, {"build": outside})
    named = f"{arm.directory}/build"
    looted, met = [], []
    modes: tuple[MountMode, ...] = ("ro", "copy", "rw")
    for mode in modes:
        source = os.path.realpath(named) if arm.off else named
        policy = POLICY.replace(mounts=[Mount(source, "/data", mode=mode)])
        code = "steal('/data/private')\nattempt('write', spill, '/data/private', 'changed')"
        try:
            report = arm.python(code, box=arm.sandbox(policy, whole=True))
        except (NotApplicable, UnsupportedError):
            continue  # the backend does not have this mode
        except RingfenceError as error:
            met.append(f"{mode}: {error.code}")
            continue
        looted.append(report.looted)
    return Seen(arm.canary in "".join(looted) or text_of(f"{outside}/private") != arm.canary, "; ".join(met) or "shown")


@attack(
    "L16-swapped",
    "a folder that is exchanged after it was checked is not mounted",
    READ,
    off=HOST_CODE,
    label="inode of the source",
)
def exchanged(arm: Arm) -> Seen:
    """Exchange the folder for a link between the plan and the mount, as a guest of another sandbox could.

    Off: the sandbox mounts whatever is at the path by then.
    """
    outside = _outside(arm)
    _careless(f"{outside}/private", arm.canary)
    named = f"{arm.directory}/build"
    os.mkdir(named)
    made = Sandbox(policy=POLICY.replace(mounts=[Mount(named, "/data")]), backend="process")
    launcher = made._launcher  # noqa: SLF001  # no public call stops between plan and mount
    plan = launcher.sandbox_plan()
    assert isinstance(plan, LinuxPlan)
    if arm.off:
        launcher._plan = replace(plan, template=tuple(map(_without_inode, plan.template)))  # noqa: SLF001  # as above
    os.rmdir(named)
    os.symlink(outside, named)
    try:
        return arm.stolen(arm.python("steal('/data/private')", box=arm.enter(made)))
    except SandboxLostError as error:
        return Seen(False, error.code)


def _without_inode(op: Op) -> Op:
    return replace(op, inode=None) if isinstance(op, Bind) else op


@attack(
    "L17",
    "a transfer does not go through a link that an earlier sandbox left",
    READ,
    off=HOST_CODE,
    label=_LABEL,
)
def transferred(arm: Arm) -> Seen:
    """Upload from a planted link, and download to a path through a planted link."""
    outside = _outside(arm)
    _careless(f"{outside}/private", arm.canary)
    _planted(arm, {"build": outside, "data.csv": f"{outside}/private"})
    box = arm.sandbox(whole=True)
    box.files.write("mine", arm.canary)
    met = []
    for number, name in enumerate(("build/private", "data.csv", "build")):
        path = f"{arm.directory}/{name}"
        try:
            if arm.off:
                box.files.upload(os.path.realpath(path), f"up{number}")
            else:
                box.files.upload(path, f"up{number}")
        except OSError as error:
            met.append(str(error.strerror))
    try:
        if arm.off:
            _careless(f"{arm.directory}/build/new", box.files.read_text("mine"))
        else:
            box.files.download("mine", f"{arm.directory}/build/new")
    except OSError as error:
        met.append(str(error.strerror))
    looted = box.exec(["sh", "-c", "cat up*; cat up*/*"]).stdout
    leaked = arm.canary in looted or sorted(os.listdir(outside)) != ["private"]
    return Seen(leaked, f"{len(met)} of 4 refused" + (f": {met[0]}" if met else ""))


@attack("L19", "a guest does not write the policies that a user saved under a name", PERSIST, off="protect")
def own_policies(arm: Arm) -> Seen:
    """The folder that contains the policies is shared. One policy exists, and another does not exist yet."""
    written = []
    with environment("XDG_CONFIG_HOME", arm.directory):
        for name, there in (("ringfence/policies/mine.toml", True), ("ringfence/policies/new.toml", False)):
            path = f"{arm.directory}/{name}"
            if there:
                arm.host_file(name, "version = 1\n", mode=0o666)
                for folder in ("ringfence", "ringfence/policies"):
                    os.chmod(f"{arm.directory}/{folder}", 0o777)
            report = arm.python(
                """
                os.makedirs(os.path.dirname(path), exist_ok=True)
                attempt(path, spill, path, canary, os.O_CREAT)
                """,
                box=arm.sandbox(arm.shared()),
                path=path,
                canary=arm.canary,
            )
            written.append((arm.canary in text_of(path), report.words()))
    return Seen(any(done for done, _ in written), "; ".join(words for _, words in written))


@attack(
    "L15-report",
    "new links that lead out of a shared folder are reported at the end",
    PERSIST,
    off=HOST_CODE,
    label="end scan",
)
def links_told(arm: Arm) -> Seen:
    """Links are reported, as programs of the host may follow them; many dead links must not hide one. Off: no scan."""
    outside = _outside(arm)
    box = arm.sandbox(arm.shared())
    arm.python(
        """
        os.makedirs(top + "/sub/deep")
        os.symlink(outside, top + "/sub/deep/zlink")
        for number in range(1200):
            os.symlink("/nowhere/" + str(number), top + "/a" + str(number))
        """,
        box=box,
        top=arm.directory,
        outside=outside,
    )
    there = os.path.islink(f"{arm.directory}/sub/deep/zlink")
    if arm.off:
        return Seen(there, "planted" if there else "not planted")
    box.close()
    reported = [denial for denial in box.denials() if denial.code == "mount.link-out"]
    named = any(denial.target.endswith("/sub/deep/zlink") and outside in denial.message for denial in reported)
    return Seen(there and not named, f"{len(reported)} reported")


@attack("L12-report", "new files that shadow modules are reported at the end", ESCAPE, off=HOST_CODE, label="end scan")
def shadows_told(arm: Arm) -> Seen:
    """Ringfence does not change the caller's own imports: a script in the folder imports from there. On: the file is
    reported. Off: it is not."""
    box = arm.sandbox(arm.shared())
    code = "spill(top + '/hashlib.py', 'print(' + repr(canary) + ')', os.O_CREAT)"
    arm.python(code, box=box, top=arm.directory, canary=arm.canary)
    box.close()
    ran_by = f"import sys; sys.path.insert(0, {arm.directory!r}); import hashlib"  # as for a script in that folder
    done = host_process(ran_by)
    ran = arm.canary in done.stdout
    if arm.off:
        return Seen(ran, "it ran" if ran else "it did not run")
    reported = [denial.target for denial in box.denials() if denial.code == "mount.import-shadow"]
    return Seen(ran and f"{arm.directory}/hashlib.py" not in reported, f"reported: {', '.join(reported) or 'nothing'}")


CASES = cases(globals())
