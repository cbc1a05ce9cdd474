"""Which imports are Ringfence's own, and which places a guest could have written to (L12).

Its own: asked for by code in the package, however far down. The test acts as that code by a file name. What a guest
left is a module with a mark in it; that one was really found is seen by its twin, which the caller's own import gets.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import py_compile
import re
import signal
import sys
import threading
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringfence import Mount, Policy, Sandbox, UnsupportedError
from ringfence.gateway.secrets import trust
from ringfence.host import import_path
from ringfence.plan.rootfs.interpreter import HELPERS
from ringfence.shared.tree_pack import TransferCaps
from ringfence.transfer.download import Landing
from test_imports import all_imports

GUESTS = "mark = 'guest'\n"


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the import state: the library never drops a folder that was shown writable."""
    monkeypatch.setattr(import_path, "_written", import_path.WritableFolders())
    monkeypatch.setattr(import_path, "_kinds", {})
    path, finders, modules = sys.path[:], sys.meta_path[:], set(sys.modules)
    yield
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """Make a mount that a guest may write to, with a module that a guest left. The mount is not yet in the path."""
    folder = tmp_path / "mount"
    folder.mkdir()
    (folder / "rf_left.py").write_text(GUESTS)
    return folder


def as_ours(code: str, **given: object) -> dict[str, Any]:
    """Run code of Ringfence's own."""
    names: dict[str, Any] = {"__name__": "ringfence.made_up", **given}
    exec(compile(code, f"{import_path._PACKAGE}made_up.py", "exec"), names)
    return names


def is_found(name: str = "rf_left") -> bool:
    """Return whether an import by Ringfence's own code finds the module."""
    try:
        as_ours(f"import {name}")
    except ModuleNotFoundError:
        return False
    return True


def test_what_a_guest_left_is_the_callers_to_import_and_not_ours(mount: Path) -> None:
    sys.path.insert(0, str(mount))
    import_path.shown_writable([str(mount)])
    assert not is_found()
    assert importlib.import_module("rf_left").mark == "guest"


def test_a_folder_that_no_guest_was_shown_is_used(mount: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(mount))
    import_path.shown_writable([str(tmp_path / "another")])
    assert is_found()


def test_a_folder_is_left_out_by_whichever_way_it_came_into_the_path_and_when(mount: Path, tmp_path: Path) -> None:
    import_path.shown_writable([str(mount)])
    (tmp_path / "link").symlink_to(mount)
    (mount / "sub").mkdir()
    (mount / "sub/rf_left.py").write_text(GUESTS)
    (mount / "out").symlink_to(tmp_path / "elsewhere")  # the guest's own link, which it can turn at any time
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/rf_left.py").write_text(GUESTS)
    (tmp_path / "file").mkdir()
    (tmp_path / "file/rf_left.py").symlink_to(mount / "rf_left.py")
    with zipfile.ZipFile(mount / "lib.zip", "w") as archive:
        archive.writestr("rf_left.py", GUESTS)
    before = sys.path[:]
    for entry in ("link", "mount/sub", "mount/out", "mount/../mount", "file", "mount/lib.zip"):
        sys.path[:] = [str(tmp_path / entry), *before]
        assert (entry, is_found()) == (entry, False)


@pytest.mark.parametrize("entry", ["", "."])
def test_the_working_directory_is_not_looked_into(
    mount: Path, tmp_path: Path, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory is left out even if no guest may write there: the next `chdir` may lead elsewhere."""
    monkeypatch.chdir(mount)
    sys.path.insert(0, entry)
    import_path.guard()
    assert not is_found()


def test_a_mount_within_a_folder_of_the_path_is_no_part_of_it(tmp_path: Path) -> None:
    """A package's folder, one file, and where compiled files lie."""
    for name in ("rf_pack", "__pycache__"):
        (tmp_path / name).mkdir()
    (tmp_path / "rf_pack/__init__.py").touch()
    (tmp_path / "rf_pack/part.py").write_text(GUESTS)
    (tmp_path / "rf_file.py").write_text(GUESTS)
    (tmp_path / "rf_cached.py").write_text("mark = 'ours'\n")
    sys.path.insert(0, str(tmp_path))
    for shown, name in (("rf_pack", "rf_pack.part"), ("rf_file.py", "rf_file"), ("__pycache__", "rf_cached")):
        import_path.shown_writable([str(tmp_path / shown)])
        assert (name, is_found(name)) == (name, False)


def test_what_is_held_read_only_in_a_mount_is_used(mount: Path) -> None:
    """An environment in a project that is shown as a whole, unless another guest was shown that, too."""
    packages = mount / ".venv/site-packages"
    packages.mkdir(parents=True)
    (packages / "rf_installed.py").touch()
    sys.path.insert(0, str(packages))
    import_path.shown_writable([str(mount)], [str(packages)])
    assert is_found("rf_installed")
    del sys.modules["rf_installed"]
    import_path.shown_writable([str(packages)])
    assert not is_found("rf_installed")


def test_a_finder_of_somebody_elses_does_not_lead_there(mount: Path) -> None:
    """Editable installations have a finder that knows a folder for a name."""

    class Editable:
        @staticmethod
        def find_spec(name: str, *_: object) -> ModuleSpec | None:
            found = name == "rf_left"
            return importlib.util.spec_from_file_location(name, mount / "rf_left.py") if found else None

    sys.meta_path.insert(0, Editable())
    import_path.shown_writable([str(mount)])
    assert not is_found()
    assert importlib.import_module("rf_left").mark == "guest"


def test_a_compiled_file_of_the_guests_beside_a_good_one_is_not_run(tmp_path: Path) -> None:
    good = tmp_path / "rf_cached.py"
    good.write_text("mark = 'ours!'\n")
    cached = Path(importlib.util.cache_from_source(str(good)))
    (tmp_path / "left.py").write_text("mark = 'guest'\n")
    status = good.stat()
    os.utime(tmp_path / "left.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    py_compile.compile(str(tmp_path / "left.py"), str(cached), dfile=str(good))
    sys.path.insert(0, str(tmp_path))
    assert importlib.import_module("rf_cached").mark == "guest"
    del sys.modules["rf_cached"]
    import_path.shown_writable([str(cached.parent)])
    assert not is_found("rf_cached")


def test_what_works_for_us_is_us(mount: Path, tmp_path: Path) -> None:
    """The standard library counts as Ringfence's code, and so do Ringfence's packages wherever they are installed."""
    (tmp_path / "h11.py").write_text("def ask():\n    import rf_left\n")
    helper = ModuleType("h11")
    exec(compile((tmp_path / "h11.py").read_text(), str(tmp_path / "h11.py"), "exec"), vars(helper))
    sys.path.insert(0, str(mount))
    import_path.shown_writable([str(mount)])
    for code in ("import importlib; importlib.import_module('rf_left')", "helper.ask()"):
        with pytest.raises(ModuleNotFoundError, match="that a guest can write"):
            as_ours(code, helper=helper)
    helper.ask()  # for the caller


def test_what_the_caller_has_us_call_is_the_callers(mount: Path) -> None:
    """The caller's own function, a function of an installed package, told apart by the place of the call, and a signal
    handler."""
    sys.path.insert(0, str(mount))
    import_path.shown_writable([str(mount)])

    def tool() -> object:
        del sys.modules["rf_left"]
        return importlib.import_module("rf_left").mark

    importlib.import_module("rf_left")
    assert as_ours("told = tool()", tool=tool)["told"] == "guest"
    del sys.modules["rf_left"]
    given = {"own": import_path.callers_own, "tool": importlib.import_module}
    assert as_ours("told = own(tool, 'rf_left')", **given)["told"].mark == "guest"

    told: list[object] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: told.append(tool()))
    try:
        as_ours("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == ["guest"]


def test_a_thread_of_the_standard_librarys_own_finds_no_guests_module_for_its_names(mount: Path) -> None:
    """In a thread of an event loop's executor no code of Ringfence or the caller is on the stack."""
    for name in ("colorsys", "rf_other"):
        (mount / f"{name}.py").write_text(GUESTS)
        sys.modules.pop(name, None)
    sys.path.insert(0, str(mount))
    import_path.shown_writable([str(mount)])
    for name in ("colorsys", "rf_other"):
        thread = threading.Thread(target=importlib.import_module, args=(name,))
        thread.start()
        thread.join()
    assert not hasattr(sys.modules["colorsys"], "mark")
    assert sys.modules["rf_other"].mark == "guest"


def test_a_package_that_only_a_guest_has_counts_as_missing(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_PACKAGES", ("rf_left",))
    sys.path.insert(0, str(mount))
    trust.check_packages()
    import_path.shown_writable([str(mount)])
    with pytest.raises(UnsupportedError, match="rf_left is not installed"):
        trust.check_packages()


def test_the_finder_stands_first_again_after_another_came(mount: Path) -> None:
    import_path.shown_writable([str(mount)])
    sys.meta_path.insert(0, sys.meta_path[-1])
    import_path.shown_writable([str(mount)])
    assert [finder is import_path._finder for finder in sys.meta_path[:2]] == [True, False]
    assert sum(finder is import_path._finder for finder in sys.meta_path) == 1


def test_a_finder_that_came_since_the_start_does_not_stand_first_in_the_next_call(mount: Path) -> None:
    """The caller's finder searches the path: Ringfence's next call used to find a guest's module there."""
    with Sandbox(policy=Policy(mounts=[Mount(mount, mode="rw")])) as box:
        sys.meta_path.insert(0, sys.meta_path[-1])
        list(box.files.list("/"))
        assert sys.meta_path[0] is import_path._finder


def test_it_is_told_which_folders_of_the_path_a_mount_opens(mount: Path, tmp_path: Path) -> None:
    (mount / "src").mkdir()
    (mount / "venv").mkdir()
    sys.path[:0] = [str(mount), str(mount / "src"), str(mount / "venv"), str(tmp_path)]
    held = [str(mount / "venv")]
    assert import_path.importable([str(mount)], held) == [str(mount), str(mount / "src")]
    assert import_path.guests_folders() == []
    import_path.shown_writable([str(mount)], held)
    assert import_path.guests_folders() == [str(mount), str(mount / "src")]


def test_a_path_with_what_is_no_folder_and_a_working_directory_that_is_gone_are_no_error(
    mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    sys.path[:0] = ["", None, tmp_path / "mount"]  # type: ignore[list-item]  # as programs have it
    assert import_path.importable([str(mount)]) == [str(mount)]
    import_path.shown_writable([str(mount)])
    assert (import_path.guests_folders(), is_found()) == ([str(mount)], False)


def test_a_verdict_that_another_thread_was_about_to_write_down_is_not_kept(
    mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = import_path.guest_can_write

    def slow(path: str) -> bool:
        found = whole(path)
        monkeypatch.setattr(import_path, "guest_can_write", whole)
        import_path.shown_writable([str(mount)])
        return found

    monkeypatch.setattr(import_path, "guest_can_write", slow)
    assert not import_path._verdict(str(mount))
    assert import_path._verdict(str(mount))


def test_nothing_is_preloaded_from_where_a_guest_can_write(mount: Path, tmp_path: Path) -> None:
    import_path.shown_writable([str(mount)])
    folders = (str(mount), str(tmp_path), "/usr/lib")  # the second holds the first
    assert import_path.untouched(folders) == ("/usr/lib",)


def test_every_package_that_works_for_us_is_known_with_what_it_needs() -> None:
    """inspect-ai calls Ringfence, not the other way round."""
    foreign = {one.imported.split(".")[0] for one in all_imports()} - set(sys.stdlib_module_names)
    ours = {"ringfence", "inspect_ai", "pydantic"}
    private = {name for name in foreign if name.startswith("_")} | {"compression"}  # of other versions of Python
    assert foreign - ours - private - HELPERS == set()
    waiting, seen = [name for name in HELPERS if name in foreign], set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # its name as a distribution is another, or this environment lacks the extra
        needs = [need for need in needs if "extra ==" not in need]
        plain = {re.split(r"[^A-Za-z0-9._-]", need)[0].replace("-", "_") for need in needs}
        waiting += [need for need in plain - seen if importlib.util.find_spec(need) is not None]
    assert seen - HELPERS == set()


def test_a_folder_that_a_download_fills_is_left_out_and_one_for_a_single_file_is_not(tmp_path: Path) -> None:
    """Files in a downloaded folder have names that the guest chose; a single file has the caller's name."""
    for name, folder in (("tree", True), ("file", False)):
        (tmp_path / name).mkdir()
        Landing(tmp_path / name, "src/name", folder=folder, caps=TransferCaps(1 << 20, 50)).give_up()
        assert (name, import_path.guest_can_write(str(tmp_path / name / "rf_left.py"))) == (name, folder)


def test_whether_a_package_is_there_is_asked_in_one_place() -> None:
    """`find_spec` raises where the answer is the finder's: who asks otherwise would have to know."""
    source = Path(import_path.__file__).parents[1]
    asking = [path.name for path in source.rglob("*.py") if "import find_spec" in path.read_text()]
    asking += [path.name for path in source.rglob("*.py") if "importlib.util.find_spec" in path.read_text()]
    assert asking == ["import_path.py"]
