"""The ranges of ids in /etc/subuid and /etc/subgid."""

from __future__ import annotations

from pathlib import Path

from ringfence.host import uids


def test_lines_of_name_first_count_become_ranges_and_others_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text("alice:100000:65536\n# a comment\n\nbob:x:1\n1001:200000:10\n")
    assert uids._given_out(str(file)) == [(100_000, 165_535), (200_000, 200_009)]


def test_a_missing_file_gives_out_nothing(tmp_path: Path) -> None:
    assert uids._given_out(str(tmp_path / "none")) == []
