"""A: files of the host, read or written from inside."""

from __future__ import annotations

from ringfence.attacks.case import READ, Seen, attack, cases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.attacks.arena import Arm


@attack("A01", "a host file is not read by its absolute path", READ, off="view")
def absolute_path(arm: Arm) -> Seen:
    path = arm.host_file()
    told = arm.python(
        """
        for place in (path, "/mnt" + path, "/root/.ssh/id_rsa", "/home", "/etc/shadow"):
            steal(place)
        """,
        path=path,
    )
    return arm.stolen(told)


CASES = cases(globals())
