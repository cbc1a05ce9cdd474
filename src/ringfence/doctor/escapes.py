"""Versions of engines and runtimes with a known way out of a container. Data, and one comparison."""

from __future__ import annotations

from ringfence.values import Struct, final


@final
class Escape(Struct):
    """`program` is open to it before version `fixed`, and from `since` on where a later line had a fix of its own."""

    program: str
    fixed: tuple[int, ...]
    cve: str
    how: str
    since: tuple[int, ...] = ()


_MASKED = "masked paths are swapped for links while a container starts"
_CONSOLE = "/dev/console is swapped for a link while a container starts"
_LABELS = "labels are written to a file of the guest's choice"

ESCAPES = (
    Escape("runc", (1, 0, 0), "CVE-2019-5736", "a guest overwrites runc itself through /proc/self/exe"),
    Escape("runc", (1, 1, 12), "CVE-2024-21626", "a working directory of /proc/self/fd/N is a folder of the host"),
    Escape("runc", (1, 2, 8), "CVE-2025-31133", _MASKED),
    Escape("runc", (1, 2, 8), "CVE-2025-52565", _CONSOLE),
    Escape("runc", (1, 2, 8), "CVE-2025-52881", _LABELS),
    Escape("runc", (1, 3, 3), "CVE-2025-31133", _MASKED, since=(1, 3)),
    Escape("runc", (1, 3, 3), "CVE-2025-52565", _CONSOLE, since=(1, 3)),
    Escape("runc", (1, 3, 3), "CVE-2025-52881", _LABELS, since=(1, 3)),
    Escape("docker", (18, 9, 2), "CVE-2019-5736", "the runc it comes with"),
    Escape("docker", (19, 3, 1), "CVE-2019-14271", "docker cp loads a library of the container's"),
    Escape("containerd", (1, 4, 3), "CVE-2020-15257", "the shim's socket is reached from the host's network"),
    Escape("containerd", (1, 6, 1), "CVE-2022-23648", "an image's volumes show files of the host"),
    Escape("podman", (4, 9, 4), "CVE-2024-1753", "a build mounts the host's root"),
    Escape("crun", (1, 4, 4), "CVE-2022-27650", "capabilities are inherited"),
)


def known(program: str, version: str) -> tuple[Escape, ...]:
    """Those that this version is open to, by its number alone: distributions mend older ones under the same number."""
    numbers = numbers_of(version)
    return tuple(each for each in ESCAPES if each.program == program and numbers and each.since <= numbers < each.fixed)


def numbers_of(version: str) -> tuple[int, ...]:
    """1.1.5+ds1 → (1, 1, 5). Empty when it starts with none."""
    found: list[int] = []
    for part in version.lstrip("v").split("."):
        digits = ""
        for letter in part:
            if not letter.isdigit():
                break
            digits += letter
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)
