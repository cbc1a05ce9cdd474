"""The attacks on what reads requests, as an ordinary user who has the packages of the extra `network`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from accounts import OrdinaryUser

PACKAGES = ("h11", "h2", "hpack", "hyperframe", "cryptography", "cffi", "_cffi_backend", "pycparser")
CASES = (
    "G08",
    "G11",
    "G11-tls",
    "G12",
    "G12-tls",
    "G13",
    "G14",
    "G23",
    "G23-headers",
    "G24",
    "I01",
    "I02",
    "I03",
    "I04",
    "I05",
)
CODE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from ringfence_attacks import run
print(json.dumps(run(sys.argv[1:]).to_dict()))
"""


@pytest.fixture
def with_packages(ordinary_user: OrdinaryUser) -> Iterator[OrdinaryUser]:
    with tempfile.TemporaryDirectory(prefix="rf-tests-") as folder:
        os.chmod(folder, 0o755)
        for name in PACKAGES:
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            place = Path(spec.origin)
            if place.name == "__init__.py":
                shutil.copytree(place.parent, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(place, folder)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        user = ordinary_user._replace(source=Path(f"{ordinary_user.source}{os.pathsep}{folder}"))
        if user.run("import h2.connection, h11, cryptography.x509").returncode:
            pytest.skip(f"the packages of {sys.version.split()[0]} do not fit the Python of an ordinary user")
        yield user


@pytest.mark.timeout(240)
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests of attacks already run as an ordinary user")
def test_every_attack_on_the_reading_of_requests_holds_as_an_ordinary_user(with_packages: OrdinaryUser) -> None:
    done = with_packages.run(CODE, *CASES, timeout_s=230)
    assert done.returncode == 0, done.stderr
    matrix = json.loads(done.stdout)
    assert (matrix["user"], [(row["id"], row["verdict"]) for row in matrix["attacks"]]) == (
        "user",
        [(name, "held") for name in CASES],
    )
