"""Checks of snapshots, rollback and forks: the files are those of one moment, and nothing is shared."""

from __future__ import annotations

import os
import tempfile

from ringfence import Limits, Policy, Sandbox, Snapshot, SnapshotError, UnsupportedError
from ringfence.testing.model import MakeSandbox, in_box, raises, with_maker

FILL = "mkdir -p d/e; echo one > f; echo two > d/e/g; chmod 750 d; ln -s ../f d/link; printf 'a\\0b' > d/bin"
SHOW = "find . -printf '%P %y %m %l\\n' | sort; cat f d/e/g; od -c d/bin"


def a_sandbox_from_a_snapshot_has_exactly_its_files(make: MakeSandbox) -> None:
    with make() as box:
        box.exec(["sh", "-c", FILL]).check()
        before = box.exec(["sh", "-c", SHOW]).check().stdout
        snapshot = box.snapshot()
    with make(snapshot=snapshot) as other:
        assert other.exec(["sh", "-c", SHOW]).stdout == before
    snapshot.delete()
    with raises(SnapshotError):
        make(snapshot=snapshot)


def rollback_makes_the_files_as_they_were_and_ends_what_runs(box: Sandbox) -> None:
    box.exec(["sh", "-c", FILL]).check()
    before = box.exec(["sh", "-c", SHOW]).check().stdout
    snapshot = box.snapshot()
    box.run("x = 1").check()
    process = box.spawn(["sleep", "60"])
    box.exec(["sh", "-c", "rm -r d; echo changed > f; mkdir new; echo more > new/h"]).check()
    box.rollback(snapshot)
    assert box.exec(["sh", "-c", SHOW]).stdout == before
    assert (process.running, box.run("'x' in globals()").value) == (False, "False")
    snapshot.delete()


def two_snapshots_are_compared(box: Sandbox) -> None:
    box.exec(["sh", "-c", "echo same > same; echo old > changed; echo x > gone"]).check()
    first = box.snapshot()
    box.exec(["sh", "-c", "echo new > changed; rm gone; echo y > added"]).check()
    second = box.snapshot()
    changes = {change.path: change for change in first.diff(second)}
    assert {path: change.kind for path, change in changes.items()} == {
        "added": "added",
        "changed": "changed",
        "gone": "removed",
    }
    assert "-old\n+new\n" in (changes["changed"].diff or "")
    first.delete()
    second.delete()


def an_export_comes_back_and_an_altered_one_is_refused(make: MakeSandbox) -> None:
    with tempfile.TemporaryDirectory() as folder, make() as box:
        path = os.path.join(folder, "kept")
        box.files.write("f", "content" * 1000)
        snapshot = box.snapshot()
        snapshot.export(path)
        loaded = Snapshot.load(path)
        assert loaded.digest == snapshot.digest
        with make(snapshot=loaded) as other:
            assert other.files.read_text("f") == "content" * 1000
        with open(path, "rb") as file:
            data = bytearray(file.read())
        for altered in (data[:-10], data[: len(data) // 2], _flipped(data)):
            with open(path, "wb") as file:
                file.write(altered)
            with raises(SnapshotError):
                Snapshot.load(path)
        snapshot.delete()
        loaded.delete()


def _flipped(data: bytearray) -> bytearray:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return changed


def a_snapshot_is_bound_to_its_policy(make: MakeSandbox) -> None:
    with make() as box:
        box.files.write("f", "x")
        snapshot = box.snapshot()
    with raises(SnapshotError, match="another policy"):
        make(snapshot=snapshot, policy=Policy(limits=Limits(memory="64M"))).start()
    snapshot.delete()


def a_fork_of_the_files_is_a_sandbox_of_its_own(box: Sandbox) -> None:
    box.files.write("f", "both")
    with box.fork(memory=False) as twin:
        box.files.write("f", "mine")
        twin.files.write("g", "its")
        assert (twin.files.read_text("f"), box.files.exists("g")) == ("both", False)
        assert (twin.id != box.id, twin.policy) == (True, box.policy)
    assert box.files.read_text("f") == "mine"


def a_fork_with_its_memory_is_made_or_refused_but_never_without(box: Sandbox) -> None:
    box.run("x = [1, 2]").check()
    try:
        twin = box.fork()
    except UnsupportedError:
        return
    with twin:
        twin.run("x.append(3)").check()
        assert (twin.run("x").value, box.run("x").value) == ("[1, 2, 3]", "[1, 2]")


CHECKS = (
    with_maker(a_sandbox_from_a_snapshot_has_exactly_its_files),
    in_box(rollback_makes_the_files_as_they_were_and_ends_what_runs),
    in_box(two_snapshots_are_compared),
    with_maker(an_export_comes_back_and_an_altered_one_is_refused),
    with_maker(a_snapshot_is_bound_to_its_policy),
    in_box(a_fork_of_the_files_is_a_sandbox_of_its_own),
    in_box(a_fork_with_its_memory_is_made_or_refused_but_never_without),
)
