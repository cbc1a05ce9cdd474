"""A folder in a writable mount that is exchanged for a link while an engine builds a sandbox with the folder.

The moments are the worst ones: a link when the engine looks for what to bind, and the folder again when it is done.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from accounts import let_others_through
from backends.container import equipped
from backends_declared import DECLARED, missing
from ringfence import Mount, Policy, Sandbox, SandboxLostError
from ringfence.backends import Container
from ringfence.backends.container import backend as container
from ringfence.backends.engine.box import EngineBox
from ringfence.backends.gvisor.backend import GvisorWall
from ringfence.values import replace

if TYPE_CHECKING:
    from ringfence.values import MountMode

WAYS = ["container", "container, by guestd", "podman", "podman, by guestd", "gvisor", "container, runsc"]


@pytest.fixture(scope="module", params=WAYS)
def make(request: pytest.FixtureRequest) -> Callable[..., Sandbox]:
    name, _, by_guestd = request.param.partition(",")
    reason = missing(name)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    equipped.skip_unless_root()
    made = DECLARED[name].make()
    if by_guestd == " runsc":
        by_guestd = ""
        backend = DECLARED[name].backend()
        assert isinstance(backend, Container)
        under_runsc = replace(backend, runtime="runsc")
        if shutil.which("runsc") is None:
            pytest.skip("runsc is not installed")

        def made(**kwargs: Any) -> Sandbox:
            return Sandbox(backend=under_runsc, **kwargs)

    with made():  # the engine's own things are there before a test counts what is left
        pass
    return lambda **kwargs: _Looking(made(**kwargs), by_guestd=bool(by_guestd))  # type: ignore[return-value]  # it stands for one


class _Looking:
    """A sandbox that is started with the way of looking that a test is for."""

    def __init__(self, box: Sandbox, *, by_guestd: bool) -> None:
        self._box = box
        self._by_guestd = by_guestd

    def __enter__(self) -> Sandbox:
        with pytest.MonkeyPatch.context() as patch:
            if self._by_guestd:  # as for a caller that is not root
                patch.setattr(container, "_may_look", lambda _: False)
            return self._box.__enter__()

    def __exit__(self, *about: Any) -> None:
        self._box.__exit__(*about)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    let_others_through(tmp_path)
    folder = tmp_path / "project"
    for name in (".git/objects", ".git/refs", ".git/hooks", ".vscode"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("the host's")
    for path in (folder, *folder.rglob("*"), tmp_path / "outside", tmp_path / "outside" / "secret"):
        os.chown(path, 1000, 1000)
    return folder


def when_built(patch: pytest.MonkeyPatch, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call the functions `before` the engine gets its request and `after` everything is mounted."""

    def first(old: Callable[..., Any]) -> Callable[..., Any]:
        def new(*args: Any, **kwargs: Any) -> Any:
            before()
            return old(*args, **kwargs)

        return new

    def begin(box: EngineBox, *args: Any, old: Callable[..., None] = EngineBox.begin, **kwargs: Any) -> None:
        if box.backend != "gvisor":
            after()
        old(box, *args, **kwargs)
        after()  # runsc mounts while we wait for guestd

    patch.setattr(container, "_start", first(container._start))
    patch.setattr(GvisorWall, "start", first(GvisorWall.start))
    patch.setattr(EngineBox, "begin", begin)


@pytest.mark.parametrize("name", [".git", ".git/objects", ".git/hooks", ".vscode"])
@pytest.mark.parametrize("back", [True, False], ids=["and back", "for good"])
def test_what_lies_outside_is_never_shown(
    make: Callable[..., Sandbox], project: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, back: bool
) -> None:
    place, aside, outside = project / name, project / "aside", project.parent / "outside"

    def to_link() -> None:
        place.rename(aside)
        place.symlink_to(outside)

    def to_folder() -> None:
        if back and place.is_symlink():
            place.unlink()
            aside.rename(place)

    def look() -> str:
        with make(policy=Policy(mounts=[Mount(project, target="/p", mode="rw")])) as box:
            script = f"cat /p/{name}/secret {outside}/secret; echo mine > /p/{name}/new; echo mine > {outside}/new"
            return box.exec(["sh", "-c", script]).stdout

    when_built(monkeypatch, to_link, to_folder)
    with pytest.raises(SandboxLostError):
        pytest.fail(f"it started, and showed {look()!r}")
    made = {path.name: path.stat().st_size for path in outside.rglob("*") if path.is_file()}
    assert made.pop("secret") == len("the host's")
    assert set(made.values()) <= {0}  # Podman makes mount points before we see where


@pytest.mark.parametrize("mode", ["ro", "rw"])
@pytest.mark.parametrize("back", [True, False], ids=["and back", "for good"])
def test_nor_is_it_when_the_source_itself_is_exchanged(
    make: Callable[..., Sandbox], project: Path, monkeypatch: pytest.MonkeyPatch, mode: MountMode, *, back: bool
) -> None:
    """L16: another sandbox may write to the folder, this sandbox only reads it; exchanged after the plan's check."""
    place, aside, outside = project / "build", project / "aside", project.parent / "outside"
    place.mkdir()
    os.chown(place, 1000, 1000)

    def to_link() -> None:
        place.rename(aside)
        place.symlink_to(outside)

    def to_folder() -> None:
        if back and place.is_symlink():
            place.unlink()
            aside.rename(place)

    when_built(monkeypatch, to_link, to_folder)
    with pytest.raises(SandboxLostError), make(policy=Policy(mounts=[Mount(place, target="/p", mode=mode)])) as box:
        pytest.fail(f"it started, and showed {box.exec(['ls', '/p']).stdout!r}")


@pytest.mark.parametrize("mode", ["ro", "rw"])
def test_what_is_another_folder_since_the_plan_is_not_shown(
    make: Callable[..., Sandbox], project: Path, mode: MountMode
) -> None:
    place = project / "build"
    place.mkdir()
    os.chown(place, 1000, 1000)
    looking = make(policy=Policy(mounts=[Mount(place, target="/p", mode=mode)]))
    looking._box.plan()  # type: ignore[union-attr]  # of _Looking
    place.rename(project / "aside")
    place.mkdir()
    with pytest.raises(SandboxLostError) as caught, looking:
        pass
    assert caught.value.code == "mounts-changed"


def test_another_folder_in_its_place_is_refused_and_named(
    make: Callable[..., Sandbox], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange() -> None:
        (project / ".git" / "objects").rename(project / "aside")
        (project / ".git" / "objects").mkdir()

    when_built(monkeypatch, exchange, lambda: None)
    with (
        pytest.raises(SandboxLostError, match=re.escape("/p/.git/objects is not what it was")),
        make(policy=Policy(mounts=[Mount(project, target="/p", mode="rw")])),
    ):
        pass


def test_a_folder_that_nobody_changes_is_shown(make: Callable[..., Sandbox], project: Path) -> None:
    (project / "kept").mkdir()
    mounts = [
        Mount(project, target="/p", mode="rw", hide=[".vscode"], protect=["kept"]),
        Mount(project.parent / "outside", target="/tmp/o", mode="rw"),
    ]
    with make(policy=Policy(mounts=mounts)) as box:
        done = box.exec(["sh", "-c", "echo 1 > /p/.git/objects/new; echo 1 > /p/kept/new; cat /tmp/o/secret"])
        assert done.stdout == "the host's"
        assert (project / ".git" / "objects" / "new").exists()
        assert not (project / "kept" / "new").exists()
