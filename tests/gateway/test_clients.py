"""Programs that people use reach a permitted host without set-up, over TLS that the gateway does not read."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from accounts import OrdinaryUser
from gateway.servers import Answer, Handler, Seen
from gateway.world import World
from programs import read_program
from ringfence import Sandbox

TRUST = dict.fromkeys(
    ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "NODE_EXTRA_CA_CERTS"), "/workspace/roots.pem"
)


def files(folder: Path) -> Handler:
    """Serve the files of a folder, with an index for a directory."""

    def handle(seen: Seen) -> Answer:
        path = folder / seen.target.partition("?")[0].strip("/")
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            return Answer(404, [(b"content-length", b"0")])
        data = path.read_bytes()
        kind = {".html": b"text/html", ".json": b"application/json"}.get(path.suffix, b"application/octet-stream")
        return Answer(headers=[(b"content-length", str(len(data)).encode()), (b"content-type", kind)], parts=[data])

    return handle


def ran(box: Sandbox, *argv: str) -> str:
    result = box.exec(list(argv), env=TRUST, timeout_s=20)
    assert result.ok, result.stderr
    assert result.denials == ()
    return result.stdout


def test_requests_and_aiohttp_and_urllib(internet: World) -> None:
    code = """
import sys, asyncio, urllib.request, requests, aiohttp
url = sys.argv[1]
print(requests.post(url, data="one").text)
print(urllib.request.urlopen(url, b"two").read().decode())
async def main():
    for trust_env in (False, True):
        async with aiohttp.ClientSession(trust_env=trust_env) as session, session.post(url, data="three") as answer:
            print(await answer.text())
asyncio.run(main())
"""
    with internet.https("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        out = ran(box, "python3", "-c", code, f"https://web.test:{server.port}/body")
        assert out == "one\ntwo\nthree\nthree\n"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_node_fetch_which_knows_no_proxy(internet: World) -> None:
    with internet.https("web.test") as server, internet.sandbox(internet.policy(f"web.test:{server.port}")) as box:
        code = f"fetch('https://web.test:{server.port}/body', {{method: 'POST', body: 'hi'}})"
        assert ran(box, "node", "-e", code + ".then(r => r.text()).then(console.log)") == "hi\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_clones_over_https(internet: World, tmp_path: Path) -> None:
    def git(*argv: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@t.test", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, *argv], cwd=tmp_path, check=True, capture_output=True)

    git("init", "source")
    (tmp_path / "source/file").write_text("content\n")
    git("-C", "source", "add", "file")
    git("-C", "source", "commit", "-m", "one")
    git("clone", "--bare", "source", "repo.git")
    git("-C", "repo.git", "update-server-info")
    with internet.https("git.test", handler=files(tmp_path)) as server:
        with internet.sandbox(internet.policy(f"git.test:{server.port}")) as box:
            ran(box, "git", "clone", "-q", f"https://git.test:{server.port}/repo.git", "clone")
            assert box.files.read_text("clone/file") == "content\n"


def wheel(folder: Path) -> None:
    name, info = "rfdemo-1.0-py3-none-any.whl", "rfdemo-1.0.dist-info"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("rfdemo.py", "answer = 42\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rfdemo\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (folder / "simple/rfdemo").mkdir(parents=True)
    (folder / "simple/rfdemo/index.html").write_text(f'<a href="/{name}">{name}</a>')
    (folder / name).write_bytes(made.getvalue())


def test_pip_installs_from_an_index(internet: World, tmp_path: Path) -> None:
    wheel(tmp_path)
    with internet.https("pypi.test", handler=files(tmp_path)) as server:
        with internet.sandbox(internet.policy(f"pypi.test:{server.port}")) as box:
            index = f"https://pypi.test:{server.port}/simple"
            pip = ("python3", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir")
            ran(box, *pip, "--target", "lib", "--index-url", index, "rfdemo")
            assert box.files.read_text("lib/rfdemo.py") == "answer = 42\n"


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_installs_from_a_registry(internet: World, tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in (("package.json", '{"name": "rfdemo", "version": "1.0.0"}'), ("index.js", "exports.x = 1")):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    data = made.getvalue()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    (tmp_path / "rfdemo.tgz").write_bytes(data)
    with internet.https("npm.test", handler=files(tmp_path)) as server:
        registry = f"https://npm.test:{server.port}"
        dist = {"tarball": f"{registry}/rfdemo.tgz", "integrity": integrity}
        about = {"name": "rfdemo", "version": "1.0.0", "dist": dist}
        whole = {"name": "rfdemo", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": about}}
        (tmp_path / "rfdemo").mkdir()
        (tmp_path / "rfdemo/index.html").write_text(json.dumps(whole))
        with internet.sandbox(internet.policy(f"npm.test:{server.port}")) as box:
            ran(box, "npm", "install", "--registry", registry, "--no-audit", "--no-fund", "--silent", "rfdemo")
            assert box.files.read_text("node_modules/rfdemo/index.js") == "exports.x = 1"


AS_USER = read_program("gateway/clients_as_user.py")


def test_it_is_the_same_for_an_ordinary_user(ordinary_user: OrdinaryUser) -> None:
    done = ordinary_user.run(AS_USER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "b'hello you'",
        "<urlopen error Tunnel connection failed: 403 Refused by Ringfence>",
        "gaierror",
        " [('evil.test:443', 'net.not-allowed'), ('evil.test', 'net.not-allowed')] ",
    ]
