"""Compare importing an image archive with unpacking the same archive with tar."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.measuring import Row, alternate, compared, output_of, seconds
from benchmarks.starting import command

_numbers = itertools.count(1)


def importing(count: int, megabytes: int) -> Row:
    """Measure both from the shell, with the start of Python, every digest and every check; neither finds old files."""
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", dir="/var/tmp") as folder:
        place = Path(folder)
        archive = _archive(place, megabytes << 20)
        kept = {name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH") if name in os.environ}

        def ours() -> float:
            data = place / f"store{next(_numbers)}"
            env = {**kept, "XDG_DATA_HOME": str(data)}
            took = seconds(lambda: output_of([*command(), "image", "import", "one", str(archive)], env))
            shutil.rmtree(data)
            return took

        def theirs() -> float:
            out = place / f"out{next(_numbers)}"
            out.mkdir()
            took = seconds(lambda: output_of([shutil.which("tar") or "tar", "-C", str(out), "-xf", str(archive)], kept))
            shutil.rmtree(out)
            return took

        mine, bare = alternate(count, ours, theirs, warm_up=1)
    return compared(f"import of a tar of {megabytes} MB", 2.0, mine, bare, "tar -x of the same")


def _archive(place: Path, size: int) -> Path:
    """Pack files of the host's /usr, until their sizes add up to `size`."""
    names, total = [], 0
    for directory, below, files in itertools.chain(os.walk("/usr/bin"), os.walk("/usr/lib")):  # a root has programs
        below.sort()
        for name in sorted(files):
            path = os.path.join(directory, name)
            if total < size and os.path.isfile(path) and not os.path.islink(path):
                names.append(path[1:])
                total += os.path.getsize(path)
    listed = place / "names"
    listed.write_text("".join(f"{name}\n" for name in names))
    archive = place / "root.tar"
    tar = [shutil.which("tar") or "tar", "-C", "/", "--hard-dereference", "-T", str(listed), "-cf", str(archive)]
    subprocess.run(tar, check=True)
    return archive
