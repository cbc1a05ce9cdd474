"""files where the process backend differs; what holds for every backend is in ringfence.testing.checks.files."""

from __future__ import annotations

from ringfence import Sandbox


def test_a_list_that_is_not_read_to_its_end_leaves_no_worker(box: Sandbox) -> None:
    box.run("for i in range(3000): open(f'f{i}', 'w').close()").check()
    for _ in range(30):
        for info in box.files.list():
            assert info.kind == "file"
            break
    code = "import os\nsum(p.isdigit() for p in os.listdir('/proc'))"
    assert box.run(code).value == "3"
