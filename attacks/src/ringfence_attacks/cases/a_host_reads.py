"""A: the host reads files, links and folders that a guest made, through `files`.

In the arm "off" they are read as a careless program would read them.
"""

from __future__ import annotations

import time

from ringfence_attacks.case import DOS, HOST_CODE, SPOOF, Seen, attack, cases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm


@attack("A24", "a FIFO in place of a file does not hold up the reader", DOS, off=HOST_CODE, label="files: fstat")
def fifo(arm: Arm) -> Seen:
    box = arm.sandbox()
    arm.python('os.mkfifo("result.json")', box=box)
    started = time.monotonic()
    if arm.off:
        report = arm.exec(["cat", "result.json"], box=box, timeout_s=0.5)
        return Seen(report.status == "timeout", "an open without O_NONBLOCK waits for a writer")
    try:
        data = box.files.read("result.json")
    except OSError as error:
        return Seen(time.monotonic() - started > 2, f"files.read: {error.strerror}")
    return Seen(True, f"read {len(data)} bytes")


@attack("A25", "a link to an endless file is not copied out", DOS, off=HOST_CODE, label="files: regular files only")
def endless(arm: Arm) -> Seen:
    box = arm.sandbox()
    arm.python('os.symlink("/dev/zero", "result.bin")', box=box)
    if arm.off:
        report = arm.exec(["head", "-c", "20000000", "result.bin"], box=box)
        produced = report.result.usage.output_bytes if report.result else 0
        return Seen(produced == 20_000_000, f"{produced} bytes came")
    try:
        data = box.files.read("result.bin", size=20_000_000)
    except OSError as error:
        return Seen(False, f"files.read: {error.strerror}")
    return Seen(True, f"{len(data)} bytes came")


@attack("A26", "a sparse file of a TiB is not read into the host's memory", DOS, off=HOST_CODE, label="files: byte cap")
def sparse(arm: Arm) -> Seen:
    """The host reads ranges of the requested size; a read of the whole file is refused before memory is taken."""
    box = arm.sandbox()
    arm.python('os.truncate(os.open("big", os.O_CREAT | os.O_WRONLY), 1 << 40)', box=box)
    if arm.off:
        report = arm.exec(["wc", "-c", "big"], box=box, timeout_s=3)
        return Seen("1099511627776" in report.stdout, f"its size reads {report.stdout.strip()}")
    before = _peak_kib()
    try:
        box.files.read("big")
    except OSError as error:
        grown = (_peak_kib() - before) >> 10
        return Seen(grown > 64, f"files.read: {error.strerror}; the host's memory grew by {grown} MiB")
    return Seen(True, "it was read")


@attack("A27", "a tree of any depth is removed", DOS, off=HOST_CODE, label="files: no recursion")
def deep_tree(arm: Arm) -> Seen:
    box = arm.sandbox()
    arm.python(
        """
        for _ in range(1800):
            os.mkdir("d")
            os.chdir("d")
        """,
        box=box,
    )
    if arm.off:
        report = arm.python('import shutil; attempt("rmtree", shutil.rmtree, "/workspace/d")', box=box)
        return Seen(report.met.get("rmtree") not in (None, "ok"), report.words())
    box.files.remove("d", recursive=True)
    left = [info.path for info in box.files.list(".")]
    return Seen(bool(left), f"left: {left[:3]}")


@attack("A28", "strange file names are reported as they are", SPOOF, off=HOST_CODE, label="files: JSON lines")
def strange_names(arm: Arm) -> Seen:
    names = ["a\nb", "\x1b]0;title\x07", "\u202egnp.exe", "-rf", "..%2f", "n" * 255, " ", "\\", "${HOME}", "'\""]
    box = arm.sandbox()
    report = arm.python(
        """
        for name in names:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        os.close(os.open(b"\\xff\\xfe", os.O_CREAT | os.O_WRONLY))
        """,
        box=box,
        names=names,
    )
    if report.status != "ok":
        raise AssertionError(report.stderr)
    wanted = sorted([*names, "\udcff\udcfe"])
    if arm.off:
        listed = sorted(arm.exec(["ls", "-1"], box=box).stdout.splitlines())
    else:
        listed = sorted(info.path for info in box.files.list("."))
    return Seen(listed != wanted, f"{len(listed)} names came of {len(wanted)}")


def _peak_kib() -> int:
    """Return the peak memory of this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


CASES = cases(globals())
