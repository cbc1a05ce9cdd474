"""The host's real resolver, in a network namespace with a DNS server, a metadata service and a packet capture."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip, for a network namespace"
)

SETUP = """
mount -t tmpfs tmpfs /run && echo "nameserver 127.0.0.53" > /run/resolv.conf && echo "hosts: dns" > /run/nsswitch.conf
mount --bind /run/resolv.conf "$(realpath /etc/resolv.conf)"
[ -e /etc/nsswitch.conf ] && mount --bind /run/nsswitch.conf /etc/nsswitch.conf
exec "$@"
"""


def test_only_permitted_names_are_looked_up_and_only_their_checked_addresses_are_dialled(tmp_path: Path) -> None:
    """G07, G08, G09: judged by the DNS server's log, the services' logs and the capture."""
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-ec", SETUP, "sh", sys.executable, str(HERE / "inside_namespace.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")},
        capture_output=True,
        text=True,
        timeout=50,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["guest"] == [
        *("there", "there", "403"),  # good, rebind when it is public, rebind when it is not
        *("403", "403"),  # metadata by name, and an address of this machine that is public by number
        *("403", "403", "403"),  # metadata and the public server by address, a name that is not permitted
        *["gaierror"] * 3,
        *("OSError", "OSError", "ConnectionRefusedError", "OSError", ""),
    ], told
    assert told["asked"] == ["good.test", "rebind.test", "rebind.test", "meta.test", "own.test"]
    assert (told["public"], told["own"], told["metadata"], told["exfil"]) == (2, 0, 0, 0)
    assert told["captured"]
    assert sorted(told["denials"]) == [
        ["169.254.169.254:80", "net.not-allowed", 1],
        ["93.184.216.34:80", "net.not-allowed", 1],
        ["evil.test:80", "net.not-allowed", 1],
        ["exfil-data.evil.test", "net.not-allowed", 2],
        ["exfil-data.good.test", "net.not-allowed", 2],
        ["good.test.evil.test", "net.not-allowed", 2],
        ["meta.test:80", "net.metadata-address", 1],
        ["own.test:80", "net.private-address", 1],
        ["rebind.test:80", "net.private-address", 1],
    ]
