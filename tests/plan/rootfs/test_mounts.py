"""Where mounts go, and which are refused with what advice."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.rootfs.rows import Rows, rows
from ringfence.errors import PolicyError
from ringfence.plan.build import through_sources
from ringfence.plan.model import Bind, Op, Overlay
from ringfence.plan.rootfs import mounts, protected
from ringfence.plan.rootfs.host_view import view
from ringfence.plan.rootfs.interpreter import Interpreter
from ringfence.plan.rootfs.protected import HELD_DIRECTORIES, HELD_FILES
from ringfence.policy.model import Mount, Policy
from ringfence.shared import syscalls
from ringfence.values import replace

RO = {"rw": False, "idmap": False, "exec": True}


def python_in(*roots: str) -> Interpreter:
    return Interpreter(
        executable="/usr/bin/python3",
        command="/usr/bin/python3",
        version="3.11.2",
        prefix=os.path.dirname(roots[0]) if roots else "/usr",
        base_prefix="/usr",
        stdlib=(),
        site_packages=(),
        sys_path=(),
        roots=roots,
        programs=(),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a project folder of a user, with the usual modes."""
    os.chmod(tmp_path, 0o755)
    project = tmp_path / "project"
    project.mkdir()
    return project


def seen(
    *mounts: Mount,
    uid: int = 1000,
    roots: tuple[str, ...] = (),
    state: tuple[str, ...] = (),
    stored: tuple[str, ...] = (),
    home: str = "/home/nobody-of-that-name",
) -> Rows:
    """Return the rows of a view, without the inodes of the sources."""
    found = view(Policy(mounts=mounts), python_in(*roots), uid=uid, home=home, state=state, stored=stored)
    template, box = (tuple(map(_without_inode, ops)) for ops in (found.template, found.box))
    return rows(replace(found, template=template, box=box))


def _without_inode(op: Op) -> Op:
    if not isinstance(op, Bind | Overlay) or op.inode is None:
        return op
    info = os.stat(op.source)
    assert op.inode == (info.st_dev, info.st_ino)
    return replace(op, inode=None)


def added(shown: Rows) -> tuple[list[Any], list[Any]]:
    """The operations that the default view does not have."""
    default = seen()
    return [op for op in shown.template if op not in default.template], list(shown.box)


def refused(*mounts: Mount, **around: object) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        seen(*mounts, **around)  # type: ignore[arg-type]  # passed on as they are
    return caught.value


def test_a_read_only_folder_is_bound_at_its_target_in_the_template(folder: Path) -> None:
    assert added(seen(Mount(str(folder), "/data"))) == (
        [["dir", "data", 0o755], ["bind", str(folder), "data", RO]],
        [],
    )


def test_a_single_file_gets_a_file_to_be_mounted_on(folder: Path) -> None:
    (folder / "a.txt").write_text("")
    assert added(seen(Mount(str(folder / "a.txt"), "/data/a.txt"))) == (
        [["file", "data/a.txt", "", 0o644], ["bind", str(folder / "a.txt"), "data/a.txt", RO]],
        [],
    )


def test_what_lies_in_the_sandboxes_own_file_systems_is_mounted_after_them(folder: Path) -> None:
    """A template operation below /tmp would be covered by the sandbox's own /tmp."""
    for target in ("/workspace", "/workspace/in", "/tmp/in", "/var/tmp/in"):
        template, box = added(seen(Mount(str(folder), target)))
        assert template == []
        assert box[-1] == ["bind", str(folder), target.removeprefix("/var").lstrip("/"), RO]


def test_as_root_a_writable_folder_is_idmapped_and_waits_for_the_sandboxes_uid(folder: Path) -> None:
    template, box = added(seen(Mount(str(folder), "/data", mode="rw"), uid=0))
    assert ["dir", "data", 0o755] in template
    assert box[0] == ["bind", str(folder), "data", {"rw": True, "idmap": True, "exec": True}]


def test_as_root_a_folder_closed_to_others_is_idmapped(folder: Path) -> None:
    (folder / "private.txt").touch(mode=0o600)
    _, box = added(seen(Mount(str(folder), "/data"), uid=0))
    assert box == [["bind", str(folder), "data", {"rw": False, "idmap": True, "exec": True}]]


def test_a_copy_is_an_overlay_without_protection(folder: Path) -> None:
    shown = seen(Mount(str(folder), "/data", mode="copy"))
    assert added(shown)[1] == [["overlay", str(folder), "data", {"idmap": False}]]
    assert shown.protected == ()


@pytest.mark.parametrize("mode", ["ro", "copy", "rw"])
@pytest.mark.parametrize("path", ["link", "way/in", "link/../project/in"])
def test_a_source_that_leads_through_a_link_is_refused_in_every_mode(folder: Path, path: str, mode: str) -> None:
    """A11, L16: a guest could have made the link in an earlier run, and its target would be shown."""
    (folder / "in").mkdir()
    for name in ("link", "way"):
        (folder.parent / name).symlink_to(folder)
    source = Mount(f"{folder.parent}/{path}", "/data", mode=mode)  # type: ignore[arg-type]  # one of the three
    if ".." in path:  # a policy's paths are text: there is no link in this one
        assert any(op[1] == f"{folder}/in" for op in (*seen(source).template, *seen(source).box))
        return
    error = refused(source)
    link, real = f"{folder.parent}/{path.split('/', maxsplit=1)[0]}", os.path.realpath(f"{folder.parent}/{path}")
    assert (error.key, error.code, error.fix) == (
        "mounts[0].source",
        "link",
        f"name {real} itself, if that is what you mean",
    )
    assert f"{link} is a link to {folder}, and a guest could have made it" in str(error)
    seen(Mount(real, "/data", mode=mode))  # type: ignore[arg-type]  # as above


def test_the_inode_that_was_looked_at_goes_with_the_source(folder: Path) -> None:
    info = folder.stat()
    for mode in ("ro", "rw", "copy"):
        for uid in (0, 1000):
            policy = Policy(mounts=[Mount(str(folder), "/data", mode=mode)])
            shown = through_sources(view(policy, python_in(), uid=uid, home="/home/nobody-of-that-name"))
            named = [list(op.inode or ()) for op in shown.template if isinstance(op, Bind) and op.source == str(folder)]
            assert named == [[info.st_dev, info.st_ino]]
            assert not any(getattr(op, "inode", None) for op in shown.box)


SETTINGS = [".config/ringfence", ".config/ringfence/policies", ".config/ringfence/policies/deep"]


@pytest.mark.parametrize("source", SETTINGS)
def test_our_own_settings_are_never_writable(folder: Path, source: str) -> None:
    """L19"""
    (folder / SETTINGS[-1]).mkdir(parents=True)
    error = refused(Mount(f"{folder}/{source}", "/data", mode="rw"), home=str(folder))
    assert (error.key, error.fix) == ("mounts[0].mode", 'mode = "copy"')
    seen(Mount(f"{folder}/{source}", "/data", mode="copy"), home=str(folder))


@pytest.mark.parametrize(
    ("there", "mounted", "held"),
    [
        (".config/ringfence", "", ".config/ringfence"),
        (".config/ringfence", ".config", "ringfence"),
        (".config", ".config", "ringfence"),
        (".config", "", ".config/ringfence"),
        ("", "", ".config"),
    ],
)
def test_above_them_they_are_held_whether_they_are_there_or_not(
    folder: Path, there: str, mounted: str, held: str
) -> None:
    (folder / there).mkdir(parents=True, exist_ok=True)
    mount = Mount(f"{folder}/{mounted}", "/data", mode="rw", credentials=True)
    shown = seen(mount, home=str(folder))
    assert ["protect", f"data/{held}"] in shown.template
    (one,) = (one for one in shown.protected if one.path == os.path.join(folder, mounted, held))
    assert (one.directory, one.content, one.missing) == (True, "", there != ".config/ringfence")


def test_settings_that_are_kept_elsewhere_are_held_there_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both where the person's links lead, and where another variable says they are."""
    home = folder / "home"
    (home / ".config/ringfence/policies").mkdir(parents=True)
    (folder / "dots").mkdir()
    (folder / "dots/mine.toml").write_text("version = 1\n")
    (home / ".config/ringfence/policies/mine.toml").symlink_to(folder / "dots/mine.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", f"{folder}/xdg")
    (folder / "xdg").mkdir()
    for source, held in (("dots", "mine.toml"), ("xdg", "ringfence")):
        shown = seen(Mount(str(folder / source), "/data", mode="rw"), home=str(home))
        assert ["protect", f"data/{held}"] in shown.template
    (home / ".config/ringfence").rename(folder / "dots/ringfence")
    (home / ".config/ringfence").symlink_to(folder / "dots/ringfence")
    refused(Mount(str(folder / "dots/ringfence/policies"), "/data", mode="rw"), home=str(home))
    assert "symbolic link" in str(refused(Mount(str(home), "/data", mode="rw", credentials=True), home=str(home)))


def test_the_command_looks_for_policies_where_they_are_held() -> None:
    from ringfence.cli.settings import FOLDER

    assert FOLDER in [path.replace("/home/x", "~") for path in protected._settings("/home/x")]


def test_a_mount_inside_another_comes_after_it(folder: Path) -> None:
    (folder / "sub").mkdir()
    inner = folder.parent / "inner"
    inner.mkdir()
    template, _ = added(seen(Mount(str(inner), "/data/sub"), Mount(str(folder), "/data")))
    assert [op[2] for op in template if op[0] == "bind"] == ["data", "data/sub"]


def test_a_mount_inside_one_that_waits_for_the_sandbox_waits_too(folder: Path) -> None:
    (folder / "sub").mkdir()
    inner = folder.parent / "inner"
    inner.mkdir()
    _, box = added(seen(Mount(str(folder), "/data", mode="copy"), Mount(str(inner), "/data/sub")))
    assert [op[0] for op in box] == ["overlay", "bind"]


def test_a_mount_inside_another_is_never_made_on_the_host(folder: Path) -> None:
    error = refused(Mount(str(folder), "/data", mode="rw"), Mount(str(folder), "/data/new"))
    assert (error.key, error.fix) == (
        "mounts[1].target",
        f"make {folder}/new on the host, or choose a target outside",
    )


def test_a_target_that_leads_through_a_link_inside_another_mount_is_refused(folder: Path) -> None:
    """A11: what the guest of an earlier run left must not lead a mount elsewhere."""
    (folder / "out").symlink_to("/etc")
    assert refused(Mount(str(folder), "/data"), Mount(str(folder), "/data/out")).key == "mounts[1].target"


def test_two_mounts_with_one_target_are_refused(folder: Path) -> None:
    """The targets are the same even when only the guest's own links make them so."""
    error = refused(Mount(str(folder), "/tmp/in"), Mount("/usr/share", "/var/tmp/in"))
    assert (str(error), error.key) == ("mounts 0 and 1 have the same target /tmp/in", "mounts[1].target")


@pytest.mark.parametrize(
    "target", ["/usr", "/etc", "/bin", "/lib", "/tmp", "/run", "/var", "/var/run", "/usr/bin/new", "/.mask/x", "/.disk"]
)
def test_the_parts_of_every_sandbox_are_no_targets(folder: Path, target: str) -> None:
    assert refused(Mount(str(folder), target)).key == "mounts[0].target"


def test_more_mounts_than_a_view_can_hold_are_refused(folder: Path) -> None:
    assert refused(*(Mount(str(folder), f"/data/{number}") for number in range(101))).key == "mounts"


def test_a_file_takes_the_place_of_one_of_ours_but_not_of_a_folder(folder: Path) -> None:
    (folder / "hosts").write_text("")
    for name in ("hosts", "localtime"):
        shown = seen(Mount(str(folder / "hosts"), f"/etc/{name}"))
        made = [op for op in shown.template if f"etc/{name}" in op[1:3]]
        assert made == [["file", f"etc/{name}", "", 0o644], ["bind", str(folder / "hosts"), f"etc/{name}", RO]]
    for target in ("/workspace", "/opt", "/root"):
        error = refused(Mount(str(folder / "hosts"), target))
        assert (error.key, error.fix) == ("mounts[0].target", f'"{target}/hosts"')


@pytest.mark.parametrize("source", ["/", "/proc", "/proc/self", "/sys/kernel", "/dev", "/dev/shm"])
def test_the_root_and_the_kernels_file_systems_are_never_shown(source: str) -> None:
    assert refused(Mount(source, "/data", credentials=True)).key == "mounts[0].source"


@pytest.mark.needs_root
def test_a_folder_with_a_kernel_file_system_mounted_below_it_is_refused(folder: Path) -> None:
    """A bind is recursive: a chroot's /proc would come along and show the host's processes (kernel fact 9)."""
    if os.geteuid() != 0:
        pytest.skip("root is missing")
    (folder / "chroot" / "proc").mkdir(parents=True)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            syscalls.mount("proc", str(folder / "chroot" / "proc"), "proc", 0)
            try:
                seen(Mount(str(folder), "/data"))
            except PolicyError as error:
                code = 0 if error.key == "mounts[0].source" else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_source_that_is_missing_is_refused_with_advice(folder: Path) -> None:
    error = refused(Mount(str(folder / "none")))
    assert (str(error), error.key, error.fix) == (
        f"mount source {folder}/none cannot be used: No such file or directory",
        "mounts[0].source",
        "make it first, or correct the path",
    )


def test_pipes_are_refused_always_and_sockets_unless_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        assert refused(Mount("pipe", "/p", credentials=True)).key == "mounts[0].source"
        assert "credentials = true" in str(refused(Mount("s", "/s")).fix)
        assert ["bind", str(folder / "s"), "s", RO] in seen(Mount("s", "/s", credentials=True)).template


def test_a_folder_with_credentials_is_refused_until_they_are_hidden_or_accepted(folder: Path) -> None:
    (folder / ".ssh").mkdir()
    assert refused(Mount(str(folder), "/data"), home=str(folder)).fix == (
        f"mount only the folder that is needed, or hide them (--hide {folder}/.ssh), "
        "or accept it with credentials = true on mounts[0]"
    )
    hidden = seen(Mount(str(folder), "/data", hide=[".ssh"]), home=str(folder))
    assert ["overlay", str(folder), "data", {"idmap": False, "ro": True, "absent": [".ssh"]}] in hidden.template
    accepted = seen(Mount(str(folder), "/data", credentials=True), home=str(folder))
    assert ["bind", str(folder), "data", RO] in accepted.template


@pytest.mark.parametrize("source", ["/usr", "/etc/fonts", "/boot", "/var/spool", "/var"])
def test_the_hosts_system_is_never_writable(source: str) -> None:
    if os.path.isdir(source):
        assert refused(Mount(source, "/data", mode="rw")).key == "mounts[0].mode"


def test_our_own_state_is_never_shown(folder: Path) -> None:
    assert refused(Mount(str(folder), "/data"), state=(f"{folder}/state",)).key == "mounts[0].source"


@pytest.mark.parametrize("there", ["local/stored/runtime", "local", ""])
def test_what_we_keep_is_never_shown_and_held_where_a_home_is(folder: Path, there: str) -> None:
    """L19: guestd of containers lies there."""
    (folder / there).mkdir(parents=True, exist_ok=True)
    stored = f"{folder}/local/stored"
    if there.endswith("runtime"):
        for name in (stored, f"{stored}/runtime"):
            for mode in ("ro", "copy", "rw"):
                mount = Mount(name, "/data", mode=mode)
                assert refused(mount, stored=(stored,)).key == "mounts[0].source"
    shown = seen(Mount(str(folder), "/data", mode="rw"), stored=(stored,))
    assert ["protect", f"data/local{'/stored' if there else ''}"] in shown.template
    seen(Mount(str(folder), "/data"), stored=(stored,))


def absent(folder: Path, *names: str) -> list[object]:
    return ["overlay", str(folder), "data", {"idmap": False, "ro": True, "absent": list(names)}]


def test_hiding_what_is_not_there_waits_for_it_and_what_is_outside_is_refused(folder: Path) -> None:
    assert added(seen(Mount(str(folder), "/data", hide=["none"])))[0][-1] == absent(folder, "none")
    assert added(seen(Mount(str(folder), "/data", hide=["no/folder"])))[0][-1] == absent(folder, "no")
    (folder / "file").write_text("")
    assert added(seen(Mount(str(folder), "/data", hide=["file/in/the/way"])))[0][-1] == [
        "bind",
        str(folder),
        "data",
        RO,
    ]
    with pytest.raises(PolicyError):
        seen(Mount(str(folder), "/data", hide=["../other"]))


def test_hiding_a_link_hides_it_and_what_it_leads_to(folder: Path) -> None:
    (folder / "real").write_text("")
    (folder / "link").symlink_to("real")
    (folder / "out").symlink_to("/etc/hostname")
    assert added(seen(Mount(str(folder), "/data", hide=["link"])))[0][-1] == absent(folder, "link", "real")
    assert added(seen(Mount(str(folder), "/data", hide=["out"])))[0][-1] == absent(folder, "out")


@pytest.mark.parametrize("hidden", ["link", "way/real"])
def test_in_a_writable_mount_no_part_of_a_hidden_path_is_a_link(folder: Path, hidden: str) -> None:
    """The guest could replace the link, and the next sandbox would hide the new link's target."""
    (folder / "kept").mkdir()
    (folder / "kept" / "real").write_text("")
    (folder / "link").symlink_to("kept/real")
    (folder / "way").symlink_to("kept")
    error = refused(Mount(str(folder), "/data", "rw", hide=[hidden]))
    assert error.key == "mounts[0].hide"
    assert error.fix == "hide what it leads to ('kept/real'), or use mode \"copy\""
    assert held(folder, hide=["kept/real"])["kept"] == "pin"


def test_a_copy_of_a_folder_with_a_mount_below_is_refused_until_that_is_hidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer would show the files below that mount, which are covered on the host."""
    (folder / "a" / "below").mkdir(parents=True)
    monkeypatch.setattr(mounts, "mounts_of_host", lambda: [("/", "ext4"), (f"{folder}/a/below", "ext4")])
    error = refused(Mount(str(folder), "/data", "copy", hide=["x"]))
    assert (error.key, error.fix) == ("mounts[0].mode", 'hide = ["a/below"], unmount it, or use mode "ro"')
    shown = added(seen(Mount(str(folder), "/data", "copy", hide=["a"])))
    assert shown[1] == [["overlay", str(folder), "data", {"idmap": False, "absent": ["a"]}]]


def test_what_lies_in_something_hidden_is_hidden_with_it(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a-b").write_text("")
    assert added(seen(Mount(str(folder), "/data", hide=["a/b", "a", "a-b"])))[0][-1] == absent(folder, "a", "a-b")


def test_a_copy_without_hidden_files_has_a_layer_for_them(folder: Path) -> None:
    shown = added(seen(Mount(str(folder), "/data", "copy", hide=["x"])))
    assert shown[1] == [["overlay", str(folder), "data", {"idmap": False, "absent": ["x"]}]]


def test_a_layer_would_not_show_what_is_mounted_below_so_there_hide_covers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "key").write_text("")
    monkeypatch.setattr(mounts, "mounts_of_host", lambda: [("/", "ext4"), (f"{folder}/below", "ext4")])
    ops = added(seen(Mount(str(folder), "/data", hide=["key"])))[0]
    assert ops[-2:] == [["bind", str(folder), "data", RO], ["hide", "data/key"]]


# ── with the interpreter ─────────────────────────────────────────────────────────────────────────


def test_the_callers_own_python_inside_a_writable_mount_is_read_only(folder: Path) -> None:
    """The next start of Ringfence would import files that a guest wrote into that environment."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    _, box = added(seen(Mount(str(folder), mode="rw"), roots=(f"{folder}/.venv/bin",)))
    assert ["protect", f"{folder}/.venv"[1:]] in box


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("bin", "at its next start"),
        ("site", "at its next start"),
        ("site/h11", "at its next start"),
        ("site/h11.py", "at its next start"),
        ("site/other", None),
    ],
)
def test_what_the_callers_python_takes_at_its_next_start_is_never_writable(
    folder: Path, source: str, why: str | None
) -> None:
    """Its programs, its packages as a whole, and those that Ringfence imports (L18)."""
    (folder / "bin").mkdir()
    for name in ("h11", "other"):
        (folder / "site" / name).mkdir(parents=True)
    (folder / "site" / "h11.py").touch()
    python = replace(python_in(), programs=(str(folder / "bin"),), site_packages=(str(folder / "site"),))

    def asked() -> None:
        mount = Mount(str(folder / source), "/data", "rw")
        view(Policy(mounts=(mount,)), python, uid=1000, home="/home/nobody-of-that-name", state=(), stored=())

    if why is None:
        asked()
    else:
        with pytest.raises(PolicyError, match=why) as caught:
            asked()
        assert caught.value.key == "mounts[0].mode"


def test_the_callers_own_python_inside_a_copy_is_the_copy(folder: Path) -> None:
    (folder / ".venv" / "bin").mkdir(parents=True)
    template, box = added(seen(Mount(str(folder), mode="copy"), roots=(f"{folder}/.venv/bin",)))
    assert [op[0] for op in (*template, *box)] == ["dir", "overlay"]


def test_a_target_over_the_interpreter_is_refused(folder: Path) -> None:
    python = folder.parent / "python" / "bin"
    python.mkdir(parents=True)
    assert refused(Mount(str(folder), str(python.parent)), roots=(str(python),)).key == "mounts[0].target"


# ── protected names ──────────────────────────────────────────────────────────────────────────────


def held(folder: Path, **more: object) -> dict[str, str]:
    """Return, by relative path, the protection that the plan gives the path."""
    shown = seen(Mount(str(folder), "/data", mode="rw", **more))  # type: ignore[arg-type]  # passed on as they are
    ops = [op for op in (*shown.template, *shown.box) if op[0] in ("pin", "protect")]
    return {str(op[1]).removeprefix("data/"): str(op[0]) for op in ops}


ALWAYS = dict.fromkeys((*HELD_FILES, *HELD_DIRECTORIES), "protect")


def test_without_a_repository_no_git_folder_is_made(folder: Path) -> None:
    assert held(folder) == ALWAYS


def test_in_a_repository_hooks_config_and_commondir_are_held_and_git_is_pinned(folder: Path) -> None:
    (folder / ".git").mkdir()
    own = {".git/hooks": "protect", ".git/config": "protect", ".git/commondir": "protect"}
    assert held(folder) == ALWAYS | {".git": "pin"} | own


def test_the_folder_that_hooks_were_moved_to_is_held(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / "tools" / "hooks").mkdir(parents=True)
    (folder / ".git" / "config").write_text("[core]\n\thooksPath = tools/hooks\n")
    assert held(folder)["tools/hooks"] == "protect"
    assert held(folder)["tools"] == "pin"


def test_what_git_would_take_for_hooks_or_configuration_is_held_before_it_exists(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / "there").mkdir()
    config = "[core]\nhooksPath = new/hooks\n[include]\npath = ../.gitconfig-project\npath = ../there/config\n"
    (folder / ".git" / "config").write_text(config)
    done = {name: what for name, what in held(folder).items() if name not in ALWAYS and not name.startswith(".git/")}
    assert done == {
        ".git": "pin",
        "new": "protect",
        ".gitconfig-project": "protect",
        "there": "pin",
        "there/config": "protect",
    }


def test_submodules_are_held_as_repositories_are(folder: Path) -> None:
    for name in ("HEAD", "objects", "refs"):
        (folder / ".git" / "modules" / "a" / name).mkdir(parents=True)
    done = held(folder)
    assert (done[".git/modules/a"], done[".git/modules/a/hooks"], done[".git/modules/a/config"]) == (
        "pin",
        "protect",
        "protect",
    )


def test_a_submodule_stays_one_whatever_a_guest_does_to_it(folder: Path) -> None:
    """The files that mark a submodule cannot be moved; a folder above that looks like a repository is searched too."""
    own = folder / ".git" / "modules" / "libs" / "a"
    for name in ("objects", "refs"):
        (own / name).mkdir(parents=True)
        (own.parent / name).mkdir()
    done = held(folder)
    whole = {"hooks": "protect", "config": "protect", "objects": "pin", "refs": "pin"}
    assert {name: done[f".git/modules/libs/a/{name}"] for name in whole} == whole


def test_among_too_many_folders_all_submodules_are_read_only(folder: Path) -> None:
    for number in range(1100):
        (folder / ".git" / "modules" / str(number)).mkdir(parents=True)
    assert held(folder)[".git/modules"] == "protect"


def test_a_git_file_is_held(folder: Path) -> None:
    (folder / ".git").write_text("gitdir: /elsewhere\n")
    assert held(folder)[".git"] == "protect"


def test_names_of_the_policy_are_held_with_their_ancestors(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    done = held(folder, protect=["a/b/deploy.sh"])
    assert (done["a"], done["a/b"], done["a/b/deploy.sh"]) == ("pin", "pin", "protect")


def test_ancestors_are_pinned_before_what_lies_in_them_is_protected(folder: Path) -> None:
    (folder / ".git").mkdir()
    shown = seen(Mount(str(folder), "/data", mode="rw"))
    names = [str(op[1]) for op in shown.template if op[0] in ("pin", "protect")]
    assert names.index("data/.git") < names.index("data/.git/hooks")


def test_a_link_cannot_be_held_and_is_refused(folder: Path) -> None:
    (folder / ".vscode").symlink_to("elsewhere")
    assert refused(Mount(str(folder), "/data", mode="rw")).fix == (
        'use mode "copy", or replace the link by what it leads to'
    )


def test_a_protected_folder_itself_is_never_writable(folder: Path) -> None:
    (folder / ".git" / "hooks").mkdir(parents=True)
    assert refused(Mount(str(folder / ".git" / "hooks"), "/data", mode="rw")).key == "mounts[0].mode"


def git_directory(path: Path) -> Path:
    for name in ("objects", "refs"):
        (path / name).mkdir(parents=True)
    return path


@pytest.mark.parametrize("config", ["[core]\n\thooksPath = tools/hooks\n", '[core] hookspath = "tools/hooks"\n'])
def test_hooks_of_a_repository_around_the_mount_are_held(folder: Path, config: str) -> None:
    (git_directory(folder / ".git") / "config").write_text(config)
    (folder / "tools" / "hooks" / "deep").mkdir(parents=True)
    (folder / "src").mkdir()
    assert held(folder / "tools") == ALWAYS | {"hooks": "protect"}
    assert held(folder / "src") == ALWAYS
    for inside in ("hooks", "hooks/deep"):
        error = refused(Mount(str(folder / "tools" / inside), "/data", mode="rw"))
        assert (error.key, "core.hooksPath" in str(error)) == ("mounts[0].mode", True)


def test_hooks_of_a_linked_worktree_around_the_mount_are_held(folder: Path) -> None:
    (git_directory(folder / "main" / ".git") / "config").write_text("[core]\n\thooksPath = tools/hooks\n")
    own = folder / "main" / ".git" / "worktrees" / "tree"
    own.mkdir(parents=True)
    (own / "commondir").write_text("../..\n")
    (folder / "tree" / "tools" / "hooks").mkdir(parents=True)
    (folder / "tree" / ".git").write_text(f"gitdir: {own}\n")
    assert held(folder / "tree" / "tools") == ALWAYS | {"hooks": "protect"}
    assert held(folder / "tree")["tools/hooks"] == "protect"


def test_a_git_directory_in_the_mount_of_a_repository_around_it_is_held(folder: Path) -> None:
    git_directory(folder / "tools" / "real")
    (folder / ".git").write_text("gitdir: tools/real\n")
    assert held(folder / "tools")["real/hooks"] == "protect"


def test_what_our_python_runs_at_its_start_is_held_in_folders_of_its_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("src", "other"):
        (folder / place).mkdir()
        (folder / place / "sitecustomize.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder / "src"), str(folder / "missing"), "src"])
    assert held(folder) == ALWAYS | {"src": "pin", "src/sitecustomize.py": "protect"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [".git", ".git/commondir", ".git/config", ".git/modules/a/commondir"])
def test_a_pipe_that_a_guest_left_in_place_of_a_file_of_gits_is_not_waited_for(folder: Path, name: str) -> None:
    left = folder / "mine" / name
    for place in {folder / "mine" / ".git", left.parent} if name != ".git" else ():
        git_directory(place)
    left.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(left)
    if name == ".git":  # at the top of a mount none is shown at all
        with pytest.raises(PolicyError, match="named pipe"):
            held(folder / "mine")
        return
    assert held(folder / "mine")[name] == "protect"


def test_a_device_that_a_link_of_a_guests_leads_to_is_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / ".git").symlink_to("/dev/ptmx")  # a process that opens it makes a terminal
    opened: list[object] = []
    real = os.open

    def noted(path: str, *args: Any, **options: Any) -> int:
        opened.append(path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", noted)
    refused(Mount(str(folder / "mine"), "/data", mode="rw"))
    assert "ptmx" not in str(opened)
    assert not any(str(path).endswith(".git") for path in opened)


def test_where_a_guest_wrote_nul_into_a_file_of_gits_it_ends_there_as_for_git(folder: Path) -> None:
    git_directory(folder / ".git")
    common = git_directory(folder / "elsewhere")
    (git_directory(folder / ".git" / "modules" / "a") / "commondir").write_text("../../../elsewhere\0x\n")
    assert held(folder)["elsewhere/hooks"] == "protect"
    (folder / ".git").rename(folder / "moved")
    (folder / ".git").write_bytes(f"gitdir: {common}\0x".encode())
    assert held(folder / "elsewhere")["hooks"] == "protect"


@pytest.mark.parametrize("source", [".git/modules", ".git/modules/libs"])
def test_submodules_are_held_where_the_mount_is_among_them(folder: Path, source: str) -> None:
    git_directory(folder / ".git")
    own = git_directory(folder / ".git" / "modules" / "libs" / "a")
    done = held(folder / source)
    whole = {"hooks": "protect", "config": "protect", "commondir": "protect", "objects": "pin", "refs": "pin"}
    below = own.relative_to(folder / source)
    assert {name: done.get(f"{below}/{name}") for name in whole} == whole


@pytest.mark.parametrize(
    "source", ["modules/a/hooks", "modules/a/hooks/deep", "modules/a/worktrees", "worktrees", "worktrees/tree"]
)
def test_what_is_held_in_a_git_directory_is_never_a_writable_source(folder: Path, source: str) -> None:
    git_directory(folder / ".git")
    git_directory(folder / ".git" / "modules" / "a")
    (folder / ".git" / source).mkdir(parents=True)
    assert refused(Mount(str(folder / ".git" / source), "/data", mode="rw")).key == "mounts[0].mode"


def test_among_too_many_submodules_no_source_is_writable(folder: Path) -> None:
    for number in range(1100):
        (folder / ".git" / "modules" / "a" / str(number)).mkdir(parents=True)
    assert ".git/modules" in str(refused(Mount(str(folder / ".git" / "modules" / "a"), "/data", mode="rw")))


def test_the_guests_git_does_not_see_placeholders(folder: Path) -> None:
    files = {op[1]: op[2] for op in seen(Mount(str(folder), "/data", mode="rw")).template if op[0] == "file"}
    assert files["etc/gitconfig"] == "[core]\n\texcludesFile = /etc/gitexclude\n"
    assert "/.mcp.json\n" in str(files["etc/gitexclude"])


def test_what_nobody_can_make_needs_no_placeholder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert held(folder) == {}


def test_a_folder_that_its_owner_could_make_writable_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest has the owner's rights: it would make the folder writable, and then the file."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert refused(Mount(str(folder), "/data", mode="rw")).key == "mounts[0].protect"


NAMES = st.text(st.sampled_from("ab./\\ -~\x00\n\u202eé"), max_size=12)


@settings(max_examples=300, deadline=None)
@given(target=NAMES, hide=st.lists(NAMES, max_size=2), protect=st.lists(NAMES, max_size=2))
def test_any_text_is_a_place_inside_or_a_policy_error(target: str, hide: list[str], protect: list[str]) -> None:
    """Whatever is written, no operation leaves the new root (A21)."""
    try:
        shown = seen(Mount("/usr/share/doc", f"/{target}", mode="ro", hide=hide, protect=protect))
    except PolicyError:
        return
    for op in (*shown.template, *shown.box):
        place = str(op[2] if op[0] in ("bind", "symlink", "overlay") else op[1])
        assert not place.startswith("/")
        assert ".." not in place.split("/")
        assert "\0" not in place
