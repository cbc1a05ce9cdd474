"""K, C07 and F12: snapshots and workspaces on disk. Most controls are library code on the host."""

from __future__ import annotations

import os
import time

from ringfence import Policy, Sandbox, Snapshot, SnapshotError, UnsupportedError
from ringfence.backends.process.memory import capture
from ringfence.values import replace
from ringfence_attacks.arena import LIMITS, POLICY
from ringfence_attacks.case import DOS, ESCAPE, HOST_CODE, READ, SPOOF, WRITE, NotApplicable, Seen, attack, cases
from ringfence_attacks.witnesses import replaced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.plan.model import LinuxPlan
    from ringfence_attacks.arena import Arm

_MB = 1 << 20
_SIZE = 2 * _MB

_REWRITE = """
fd = os.open("/workspace/torn", os.O_RDWR | os.O_CREAT)
n = 0
tell(pid=os.getpid())
end = time.monotonic() + 8
while time.monotonic() < end:
    n = (n + 1) % 256
    os.pwrite(fd, bytes([n]) * size, 0)
    time.sleep(0.02)
"""


@attack(
    "C07",
    "a file in a snapshot has the content of one moment, or there is no snapshot",
    ESCAPE,
    off=HOST_CODE,
    label="read again",
)
def torn_file(arm: Arm) -> Seen:
    """A guest writes the file all the time. Off: a reader that does not check whether the file changed meanwhile."""
    box = arm.sandbox(whole=True)
    arm.spawn(_REWRITE, box=box, size=_SIZE)
    deadline = time.monotonic() + 4
    tried = 0
    while time.monotonic() < deadline:
        data = _read_carelessly(box) if arm.off else _read_snapshot(box)
        tried += bool(data)
        if len(set(data[:: 1 << 10])) > 1:
            return Seen(True, f"two states in one file at read {tried}")
        if not arm.off and tried > 20:
            break
    if not tried:
        raise AssertionError("every read was refused: that no read was torn proves nothing")
    return Seen(False, f"{tried} reads, each of one state or refused")


def _read_carelessly(box: Sandbox) -> bytes:
    try:
        return box.files.read("torn")
    except OSError:
        return b""


def _read_snapshot(box: Sandbox) -> bytes:
    try:
        made = box.snapshot()
    except SnapshotError:
        return b""
    try:
        tree, store = made._tree()  # noqa: SLF001  # the bytes as they are stored, before any restore
        found = tree.by_path.get("torn")
        return b"".join(store.read(found.text, found.size)) if found is not None else b""
    finally:
        made.delete()


@attack(
    "K06", "a snapshot is used under the policy it was taken under, and no other", WRITE, off=HOST_CODE, label="binding"
)
def another_policy(arm: Arm) -> Seen:
    """Else files that code with wide rights left would wait in a sandbox with narrow rights, or the reverse."""
    box = arm.sandbox(whole=True)
    box.files.write("left", arm.canary)
    made = box.snapshot()
    other = Policy(limits=replace(LIMITS, processes=LIMITS.processes - 1))
    if arm.off:
        made = _bound_anew(made, other)
    try:
        with Sandbox(policy=other, snapshot=made, backend="process") as next_box:
            text = next_box.files.read_text("left")
    except SnapshotError as error:
        return Seen(False, str(error))
    finally:
        made.delete()
    return Seen(text == arm.canary, "the files are there under another policy")


def _bound_anew(snapshot: Snapshot, policy: Policy) -> Snapshot:
    """Return the snapshot bound to `policy`, whatever policy it was taken under."""
    from ringfence.policy.image import Image
    from ringfence.snapshots.model import bound_to, make

    tree, _ = snapshot._tree()  # noqa: SLF001  # no public way leads past the binding
    assert snapshot._holder is not None  # noqa: SLF001  # as above
    return make(tree, snapshot._holder, bound_to("process", Image(), policy), policy)  # noqa: SLF001  # as above


@attack("K07", "an exported snapshot that was altered is refused", WRITE, off=HOST_CODE, label="digest")
def altered_file(arm: Arm) -> Seen:
    """An attacker replaces a program in the exported file. Off: a reader that does not check the bytes."""
    box = arm.sandbox(whole=True)
    box.files.write("tool", "x" * len(arm.canary))
    made = box.snapshot()
    path = os.path.join(arm.directory, "snapshot")
    made.export(path)
    made.delete()
    with open(path, "r+b") as file:
        data = file.read().replace(b"x" * len(arm.canary), arm.canary.encode())
        file.seek(0)
        file.write(data)
    other = arm.sandbox(whole=True)
    if arm.off:
        start = data.index(arm.canary.encode())
        other.files.write("tool", data[start : start + len(arm.canary)])
    else:
        try:
            loaded = Snapshot.load(path)
            other.rollback(loaded)
        except SnapshotError as error:
            return Seen(False, str(error))
    return Seen(other.files.read_text("tool") == arm.canary, "the altered file is in the sandbox")


@attack(
    "K07-digest", "no sandbox gets another's file by naming its digest", READ, off=HOST_CODE, label="own content only"
)
def content_of_another(arm: Arm) -> Seen:
    """A guest knows the digest of another sandbox's file and makes the worker inside report that digest as its own.

    Off: a store that returns content to anyone with its digest.
    """
    import json

    from ringfence.shared.stamps import DONE, ENTRY, RECORD
    from ringfence.snapshots.content import Holder, own_store
    from ringfence.snapshots.manifest import caps_of, hasher
    from ringfence.snapshots.take import Lineage, Taking

    box = arm.sandbox(whole=True)
    box.files.write("secret", arm.canary)
    made = box.snapshot()
    whole = hasher()
    whole.update(arm.canary.encode())
    digest, size = whole.hexdigest(), len(arm.canary)
    taking = Taking(own_store(), caps_of(LIMITS), Lineage(Holder(own_store())), contents=True)
    row = json.dumps({"row": ["mine", "f", 0o644, 0, size, digest], "stamp": ""}).encode()
    end = json.dumps({"top": ""}).encode()
    try:
        if not arm.off:
            taking.feed(RECORD.pack(ENTRY, len(row)) + row + RECORD.pack(DONE, len(end)) + end)
            taking.finish()
        text = b"".join(own_store().read(digest, size)).decode()
    except SnapshotError as error:
        return Seen(False, str(error))
    finally:
        taking.close()
        made.delete()
    return Seen(text == arm.canary, "the other's file")


def _larger_image(plan: LinuxPlan, _: Arm) -> LinuxPlan:
    """Return the plan with a disk image larger than the policy's limits."""
    return replace(plan, disk=(64 * _MB, 20_000))


_FILL = """
fd = os.open("/workspace/big", os.O_WRONLY | os.O_CREAT, 0o644)
try:
    for _ in range(24): os.write(fd, bytes(1 << 20))
except OSError as error:
    tell(tried="write", met=errno.errorcode[error.errno])
made = 0
try:
    for made in range(2600): os.mkdir(f"/workspace/{made}")
except OSError as error:
    tell(tried="create", met=errno.errorcode[error.errno])
"""


@attack(
    "F12-disk",
    "a workspace on disk holds as many bytes and files as the limits say",
    DOS,
    off=_larger_image,
    needs="root",
    label="image",
)
def fill_image(arm: Arm) -> Seen:
    try:
        box = arm.sandbox(POLICY, workspace="disk")
    except UnsupportedError as error:
        raise NotApplicable(str(error)) from None
    report = arm.python(_FILL, box=box)
    found = list(box.files.list())
    size = box.files.stat("big").size
    return Seen(size > 8 * _MB or len(found) > 2000, f"{size // _MB} MB of 8, {len(found)} of 2000; {report.words()}")


_RANDOM = "(random.random(), os.urandom(8), uuid.uuid4(), ssl.RAND_bytes(8), sequence.random())"


@attack("K05", "two copies of one session have different randomness", SPOOF, off=HOST_CODE, label="new seeds")
def shared_randomness(arm: Arm) -> Seen:
    """Start two sandboxes from one snapshot of memory. Off: a generator that the guest seeded itself, which gets no new
    seed."""
    box = arm.sandbox(whole=True)
    box.run("import os, random, ssl, uuid\nsequence = random.Random(5)").check()
    try:
        made = box.snapshot(memory=True)
    except UnsupportedError as error:
        raise NotApplicable(f"memory cannot be copied here: {error}") from None
    values = []
    try:
        for _ in range(2):
            with Sandbox(policy=box.policy, snapshot=made, backend="process") as copy:
                values.append((copy.run(_RANDOM).value or "").strip("()").split(", "))
    finally:
        made.delete()
    compared = values[0] if arm.off else values[0][:-1]
    found = [value for value in compared if value in values[1]]
    return Seen(bool(found), f"{len(found)} of {len(values[0])} the same")


_KEEPS_A_STATE = """
import mmap, os
state = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
state.madvise(18)  # MADV_WIPEONFORK, as libc has it for the state of its getrandom
state[:32] = canary
"""


@attack(
    "K05-state",
    "a copy of a session has no generator's state of the original",
    SPOOF,
    off=HOST_CODE,
    label="wiped as by a fork",
)
def shared_state(arm: Arm) -> Seen:
    """Libraries keep a generator's state in memory that the kernel empties in a fork; a copy must empty it too."""
    if arm.off:
        arm.enter(replaced(capture, "wiped_on_fork", lambda _: frozenset()))
    box = arm.sandbox(whole=True)
    box.run(f"canary = {arm.canary.encode()!r}\n{_KEEPS_A_STATE}\ndel canary").check()
    try:
        copy = arm.enter(box.fork())
    except UnsupportedError as error:
        raise NotApplicable(f"memory cannot be copied here: {error}") from None
    found = str(copy.run("bytes(state[:32])").value)
    return Seen(arm.canary in found, f"the copy's: {found[:40]}")


CASES = cases(globals())
