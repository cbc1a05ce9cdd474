"""The check of a sandbox's mount table: which mounts were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.shared import mount_check

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.shared.mount_check import Meant

ROOT = "20 1 0:30 / / ro - overlay overlay ro\n"


def told(folder: Path, wheres: list[str], targets: list[str]) -> str | None:
    rows = [f"{30 + number} 20 8:1 /x{number} {where} ro - ext4 /dev/x ro\n" for number, where in enumerate(wheres)]
    (folder / "mountinfo").write_text(ROOT + "".join(rows))
    meant: Meant = {"places": [], "targets": targets, "brought": [], "below": [], "flags": True}
    return mount_check.stray(meant, str(folder))


@pytest.mark.parametrize(
    ("where", "target", "asked_for"),
    [
        ("/tmp/work", "/var/tmp/work", True),  # /var/tmp is a link inside, mostly
        ("/var/tmp/venv", "/var/tmp/venv", True),  # and a folder where the caller's Python lies below it
        ("/tmp/work", "/tmp/work", True),
        ("/srv/secret", "/var/tmp/work", False),
        ("/tmp/other", "/var/tmp/work", False),
    ],
)
def test_a_mount_below_var_tmp_is_known_by_the_name_it_has_inside(
    tmp_path: Path, where: str, target: str, asked_for: bool
) -> None:
    assert (told(tmp_path, [where], [target]) is None) == asked_for


def test_a_mount_under_the_other_name_of_one_that_is_there_was_not_asked_for(tmp_path: Path) -> None:
    said = told(tmp_path, ["/var/tmp/work", "/tmp/work"], ["/var/tmp/work"])
    assert said == "/tmp/work is a mount that was not requested"
