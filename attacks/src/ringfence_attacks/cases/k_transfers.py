"""K, F21, F22, C01: archives and trees that cross the boundary. Off: a careless program of the host transfers them."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import zipfile
import zlib

from ringfence import Limits, Mount, Policy
from ringfence.shared.tree_pack import TransferCaps
from ringfence.transfer.download import Landing
from ringfence_attacks.arena import LIMITS
from ringfence_attacks.case import DOS, HOST_CODE, READ, WRITE, Seen, attack, cases
from ringfence_attacks.races import Race, Swapping
from ringfence_attacks.witnesses import host_folder, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence_attacks.arena import Arm


def _tar(*members: tuple[str, bytes, str, bytes]) -> bytes:
    """Return a tar of members (name, type, link, content). The mode of every member has the set-uid bit."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, link, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.mode = kind, link, len(content), 0o4755
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def _lands(arm: Arm, stream: bytes) -> tuple[str, str]:
    """Write a tar that a hostile worker could send into a host folder, beside which is a file that must not change.

    Returns the text of that file, and what happened.
    """
    victim = arm.host_file("victim", text="as it was")
    place = os.path.join(arm.directory, "place")
    os.mkdir(place)
    if arm.off:
        with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
            if hasattr(tarfile, "fully_trusted_filter"):  # the default of every Python before 3.14
                archive.extraction_filter = staticmethod(tarfile.fully_trusted_filter)
            archive.extractall(place)  # noqa: S202  # the careless thing, in a folder of this arm
        return text_of(victim), "extracted"
    landing = Landing(place, "archive", folder=True, caps=TransferCaps(1 << 20, 100))
    try:
        landing.feed([stream])
        landing.finish()
    except OSError as error:
        return text_of(victim), f"{error.strerror}; left: {os.listdir(place)}"
    finally:
        landing.give_up()
    return text_of(victim), f"taken: {os.listdir(place)}"


_FILE, _LINK, _HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@attack(
    "K01",
    "a name with .. in a tar does not lead out of the target",
    WRITE,
    off=HOST_CODE,
    label="files: strict tar reader",
)
def dot_dot(arm: Arm) -> Seen:
    text, what = _lands(arm, _tar(("../victim", _FILE, "", arm.canary.encode())))
    return Seen(text != "as it was", what)


@attack("K01-absolute", "an absolute name in a tar is refused", WRITE, off=HOST_CODE, label="files: strict tar reader")
def absolute(arm: Arm) -> Seen:
    text, what = _lands(arm, _tar((f"{arm.directory}/victim", _FILE, "", arm.canary.encode())))
    return Seen(text != "as it was", what)


@attack(
    "K01-link",
    "nothing is written through a link that the same tar made",
    WRITE,
    off=HOST_CODE,
    label="files: O_NOFOLLOW",
)
def through_a_link(arm: Arm) -> Seen:
    stream = _tar(("out", _LINK, "..", b""), ("out/victim", _FILE, "", arm.canary.encode()))
    text, what = _lands(arm, stream)
    return Seen(text != "as it was", what)


@attack(
    "K01-hardlink", "a hard link in a tar leads to no file outside", WRITE, off=HOST_CODE, label="files: no hard links"
)
def through_a_hard_link(arm: Arm) -> Seen:
    """A write to the extracted name would reach the file that the hard link leads to."""
    stream = _tar(("in", _HARD, "../victim", b""))
    if arm.off:
        text, what = _lands(arm, stream)
        with open(os.path.join(arm.directory, "place", "in"), "w", encoding="utf-8") as file:
            file.write(arm.canary)
        return Seen(text_of(os.path.join(arm.directory, "victim")) != "as it was", what)
    text, what = _lands(arm, stream)
    return Seen(text != "as it was" or os.path.exists(os.path.join(arm.directory, "place", "in")), what)


@attack(
    "K01-device", "no device is made from a tar", WRITE, off=HOST_CODE, needs="root", label="files: strict tar reader"
)
def device(arm: Arm) -> Seen:
    _, what = _lands(arm, _tar(("null", tarfile.CHRTYPE, "", b"")))
    made = os.path.join(arm.directory, "place", "null")
    return Seen(os.path.exists(made), what)


@attack("K01-mode", "no set-uid bit comes out of a sandbox", WRITE, off=HOST_CODE, label="files: modes cut to 0777")
def special_bits(arm: Arm) -> Seen:
    _, what = _lands(arm, _tar(("tool", _FILE, "", b"x")))
    mode = os.stat(os.path.join(arm.directory, "place", "tool")).st_mode
    return Seen(bool(mode & 0o7000), f"{what}, mode {mode & 0o7777:o}")


@attack("K01-inside", "a tar unpacked inside stays below its target there", WRITE, off=HOST_CODE, label="files.unpack")
def unpacked_inside(arm: Arm) -> Seen:
    box = arm.sandbox(whole=True)
    box.files.write("victim", "as it was")
    box.files.mkdir("place")
    stream = _tar(("out", _LINK, "/workspace", b""), ("out/victim", _FILE, "", arm.canary.encode()))
    what = "extracted"
    if arm.off:
        box.exec(["python3", "-c", _CARELESS_TAR], cwd="place", stdin=stream).check()
    else:
        try:
            box.files.unpack(stream, "place")
        except OSError as error:
            what = str(error.strerror)
    return Seen(box.files.read_text("victim") != "as it was", what)


_CARELESS_TAR = """
import io, sys, tarfile
archive = tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read()))
if hasattr(tarfile, "fully_trusted_filter"): archive.extraction_filter = staticmethod(tarfile.fully_trusted_filter)
archive.extractall()
"""
_CARELESS_ZIP = """
import io, sys, zipfile
archive = zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read()))
for name in archive.namelist():
    with open(name.replace(chr(92), "/"), "wb") as file: file.write(archive.read(name))
"""


@attack(
    "K02",
    "a name with .. in a zip does not lead out of the target",
    WRITE,
    off=HOST_CODE,
    label="files: strict zip reader",
)
def zip_slip(arm: Arm) -> Seen:
    return _zip_named(arm, "../victim")


@attack(
    "K02-backslash",
    "a name with another system's separator does not lead out of the target",
    WRITE,
    off=HOST_CODE,
    label="files: strict zip reader",
)
def zip_backslash(arm: Arm) -> Seen:
    return _zip_named(arm, "..\\victim")


def _zip_named(arm: Arm, name: str) -> Seen:
    box = arm.sandbox(whole=True)
    box.files.write("victim", "as it was")
    box.files.mkdir("place")
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(name, arm.canary)
    what = "extracted"
    if arm.off:
        box.exec(["python3", "-c", _CARELESS_ZIP], cwd="place", stdin=data.getvalue()).check()
    else:
        try:
            box.files.unpack(data.getvalue(), "place", format="zip")
        except OSError as error:
            what = str(error.strerror)
    return Seen(box.files.read_text("victim") != "as it was", what)


@attack(
    "F21", "archives are unpacked only up to the limits", DOS, off=HOST_CODE, label="files: the quota, and byte caps"
)
def bomb(arm: Arm) -> Seen:
    """Unpack 64 MB from an archive of 64 kB in a sandbox with a disk of 8 MB."""
    content = b"x" * (64 << 20)
    if arm.off:
        produced = len(zlib.decompress(zlib.compress(content)))
        return Seen(produced > 8 << 20, f"a careless reader holds {produced >> 20} MB")
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", content)
    box = arm.sandbox(whole=True)
    try:
        box.files.unpack(data.getvalue(), format="zip")
    except OSError as error:
        left = box.files.usage()
        return Seen(left.bytes > 0 or left.files > 0, f"{error.strerror}; {left.bytes} bytes left")
    return Seen(True, "it was unpacked")


_MANY = """
for i in range(9000): os.close(os.open(f"{i:05}" + "n" * 200, os.O_CREAT | os.O_WRONLY))
"""


@attack("F22", "a long listing comes in pages, and is complete", DOS, off=HOST_CODE, label="files: pages")
def many_files(arm: Arm) -> Seen:
    """Off: the names come as one output, which has a cap."""
    policy = Policy(limits=Limits(timeout_s=20, memory="256M", disk="8M", disk_files=9500))
    box = arm.sandbox(policy, whole=True)
    arm.python(_MANY, box=box, timeout_s=15)
    if arm.off:
        result = box.exec(["ls", "-1"])
        return Seen(result.truncated, f"{len(result.stdout.splitlines())} lines came of 9000")
    count = sum(1 for _ in box.files.list())
    return Seen(count != 9000, f"{count} names came of 9000")


@attack(
    "K04-download",
    "a link in a downloaded tree is not followed on the host",
    READ,
    off=HOST_CODE,
    label="files.download",
)
def fetched_link(arm: Arm) -> Seen:
    """The tree is in a shared folder, where a guest made a link to a host file that the guest cannot read."""
    canary = arm.host_file()
    tree = os.path.join(arm.directory, "tree")
    os.mkdir(tree)
    os.chmod(tree, 0o777)
    box = arm.sandbox(arm.shared(), whole=True)
    box.exec(["ln", "-s", canary, f"{tree}/result"]).check()
    got = os.path.join(arm.directory, "got")
    try:
        if arm.off:
            shutil.copytree(tree, got)
        else:
            box.files.download(tree, got)
    except OSError as error:
        return Seen(os.path.exists(got), str(error.strerror))
    return Seen(arm.canary in text_of(f"{got}/result"), f"fetched: {os.listdir(got)}")


@attack(
    "K04-target",
    "a download does not write through a link at its target",
    WRITE,
    off=HOST_CODE,
    label="files.download",
)
def planted_target(arm: Arm) -> Seen:
    victim = arm.host_file("victim", text="as it was")
    box = arm.sandbox(arm.shared(), whole=True)
    box.files.write("result", arm.canary)
    box.exec(["ln", "-s", victim, f"{arm.directory}/result"]).check()
    what = "written"
    try:
        if arm.off:
            with open(f"{arm.directory}/result", "wb") as file:
                file.write(box.files.read("result"))
        else:
            box.files.download("result", f"{arm.directory}/result")
    except OSError as error:
        what = str(error.strerror)
    return Seen(text_of(victim) != "as it was", what)


@attack(
    "K04-way",
    "a link that a guest planted on the way to a target is not followed",
    WRITE,
    off=HOST_CODE,
    label="files: host paths",
)
def planted_way(arm: Arm) -> Seen:
    """The caller names a folder below a shared folder; a guest made the name a link to a folder that is not shared."""
    outside = arm.enter(host_folder())
    os.chmod(outside, 0o777)
    box = arm.sandbox(arm.shared(), whole=True)
    box.files.write("tree/file", arm.canary)
    box.exec(["ln", "-s", outside, f"{arm.directory}/out"]).check()
    met = []
    for target in (f"{arm.directory}/out", f"{arm.directory}/out/deeper"):
        try:
            if arm.off:
                os.makedirs(target, exist_ok=True)
                with open(f"{target}/file", "wb") as file:
                    file.write(box.files.read("tree/file"))
            else:
                box.files.download("tree", target)
        except OSError as error:
            met.append(str(error.strerror))
    return Seen(bool(os.listdir(outside)), "; ".join(met) or "written")


@attack(
    "K04-upload",
    "an upload does not read through a link that a guest planted",
    READ,
    off=HOST_CODE,
    label="files: host paths",
)
def planted_source(arm: Arm) -> Seen:
    canary = arm.host_file()
    os.chmod(arm.directory, 0o755)
    shared = os.path.join(arm.directory, "shared")
    os.mkdir(shared)
    os.chmod(shared, 0o777)
    box = arm.sandbox(Policy(limits=LIMITS, mounts=[Mount(shared, mode="rw")]), whole=True)
    box.exec(["ln", "-s", canary, f"{shared}/data.csv"]).check()
    try:
        if arm.off:
            with open(f"{shared}/data.csv", "rb") as file:
                box.files.write("data.csv", file)
        else:
            box.files.upload(f"{shared}/data.csv", "data.csv")
    except OSError as error:
        return Seen(box.files.exists("data.csv"), str(error.strerror))
    return Seen(arm.canary in box.files.read_text("data.csv"), "uploaded")


@attack(
    "C01-download", "a folder swapped for a link does not lead a download outside", WRITE, off=HOST_CODE, label="openat"
)
def swapped_on_download(arm: Arm) -> Seen:
    swapping = Swapping(arm, whole=True)
    swapping.box.files.write("tree/place/file", "mine")
    race = Race()

    def download() -> None:
        if arm.off:
            with open(f"{swapping.place}/file", "w", encoding="utf-8") as file:
                file.write("mine")
        else:
            swapping.box.files.download("tree", arm.directory)

    while race.goes_on():
        race.attempt(download)
        race.wins += swapping.was_changed()
    return race.judge("downloads that landed outside")


@attack(
    "C01-upload", "a folder swapped for a link does not lead an upload outside", READ, off=HOST_CODE, label="openat"
)
def swapped_on_upload(arm: Arm) -> Seen:
    race, swapping = Race(), Swapping(arm, whole=True)
    files = swapping.box.files

    def upload() -> bool:
        if arm.off:
            return arm.canary in text_of(f"{swapping.place}/file")
        files.upload(arm.directory, "copy")
        try:
            return any(files.search(arm.canary, "copy"))
        finally:
            files.remove("copy", recursive=True)

    while race.goes_on():
        race.attempt(upload)
    return race.judge("uploads that carried the canary")


CASES = cases(globals())
