"""K: single files that cross the boundary, through `files`. Archives and trees: k_transfers."""

from __future__ import annotations

import os
import time

from ringfence import Mount, Policy
from ringfence_attacks.arena import LIMITS
from ringfence_attacks.case import DOS, HOST_CODE, READ, SPOOF, WRITE, Seen, attack, cases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm


def _shared_folder(arm: Arm) -> str:
    """Make a host folder to share, beside the canary's file, which is not shared. Returns its path."""
    folder = os.path.join(arm.directory, "shared")
    os.mkdir(folder)
    return folder


@attack("K04", "a link that a guest left in a shared folder is followed inside only", READ, off=HOST_CODE)
def link_in_a_mount(arm: Arm) -> Seen:
    """Off: the host opens the name in the folder, as any program would."""
    canary = arm.host_file()
    folder = _shared_folder(arm)
    box = arm.sandbox(Policy(limits=LIMITS, mounts=[Mount(folder, mode="rw")]), whole=True)
    box.exec(["ln", "-s", canary, f"{folder}/out"]).check()
    try:
        if arm.off:
            with open(f"{folder}/out", encoding="utf-8") as file:
                text = file.read()
        else:
            text = box.files.read(f"{folder}/out").decode()
    except OSError as error:
        text = str(error)
    return Seen(arm.canary in text, text if arm.canary not in text else "the canary")


@attack(
    "K04-write",
    "a write through a link that a guest left in a shared folder does not change a host file",
    WRITE,
    off=HOST_CODE,
)
def write_through_a_link(arm: Arm) -> Seen:
    victim = arm.host_file(text="as it was")
    folder = _shared_folder(arm)
    box = arm.sandbox(Policy(limits=LIMITS, mounts=[Mount(folder, mode="rw")]), whole=True)
    box.exec(["ln", "-s", victim, f"{folder}/in"]).check()
    try:
        if arm.off:
            with open(f"{folder}/in", "w", encoding="utf-8") as file:
                file.write(arm.canary)
        else:
            box.files.write(f"{folder}/in", arm.canary)
    except OSError:
        pass  # refused; the host's file is the witness
    with open(victim, encoding="utf-8") as file:
        text = file.read()
    return Seen(text != "as it was", f"the host's file reads {text!r}")


_STRANGE = ("a\nb", "\x1b[2J", "\u202etxt", "-rf", "..%2f", "x" * 255, "\udcff\udcfe", "con", "A", "a")
_MAKE = """
for name in names:
    with open(b"/workspace/" + name.encode("utf-8", "surrogateescape"), "w") as file: file.write("x")
"""


@attack(
    "K03",
    "names with newlines, escapes, raw bytes or differing only in case come back as they are",
    SPOOF,
    off=HOST_CODE,
)
def strange_names(arm: Arm) -> Seen:
    """Off: names are read as lines of text, as `ls` prints them."""
    box = arm.sandbox(whole=True)
    arm.python(_MAKE, box=box, names=_STRANGE)
    if arm.off:
        lines = box.exec(["ls", "-1"]).stdout.splitlines()
        return Seen(sorted(lines) != sorted(_STRANGE), f"{len(lines)} lines for {len(_STRANGE)} names")
    listed = [info.path for info in box.files.list()]
    read = [box.files.read(name) == b"x" for name in listed if name.isprintable()]
    return Seen(sorted(listed) != sorted(_STRANGE) or not all(read), f"{len(listed)} of {len(_STRANGE)} names")


_SPARSE = """
fd = os.open("/workspace/sparse", os.O_WRONLY | os.O_CREAT)
os.ftruncate(fd, (1 << 62))
"""


@attack("K01-sparse", "a file with a size of 4 EiB is not read into memory", DOS, off=HOST_CODE)
def sparse_file(arm: Arm) -> Seen:
    """Off: a reader that allocates as many bytes as the file's size."""
    box = arm.sandbox(whole=True)
    arm.python(_SPARSE, box=box)
    size = box.files.stat("sparse").size
    if arm.off:
        return Seen(size > 1 << 60, f"a careless reader would make room for {size} bytes")
    before = time.monotonic()
    part = box.files.read("sparse", size=1 << 20)
    took = time.monotonic() - before
    return Seen(len(part) != 1 << 20 or took > 2, f"the first MiB of {size} bytes in {took:.2f} s")


_TREE = """
os.chdir("/workspace")
for _ in range(depth):
    os.mkdir("d")
    os.chdir("d")
"""


@attack("K01-deep", "a tree deeper than a recursive program can go is removed", DOS, off=HOST_CODE)
def deep_tree(arm: Arm) -> Seen:
    """Off: shutil.rmtree runs inside on the same tree."""
    box = arm.sandbox(whole=True)
    arm.python(_TREE, box=box, depth=1500)
    if arm.off:
        result = arm.run(box, "import shutil\nshutil.rmtree('/workspace/d')")
        return Seen(not result.ok, f"{result.status}: {result.exception.name if result.exception else ''}")
    before = time.monotonic()
    box.files.remove("d", recursive=True)
    took = time.monotonic() - before
    return Seen(box.files.exists("d") or took > 5, f"1500 levels gone in {took:.2f} s")


CASES = cases(globals())
