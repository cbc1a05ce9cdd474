"""Secrets end to end: real programs in a real sandbox, a real TLS server outside, and the value nowhere but there."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import h11
import pytest

from accounts import OrdinaryUser
from gateway.desk import trusting
from gateway.servers import Answer, Loop, Roots, Seen, Server, echo, serving
from programs import read_program
from ringfence import Limits, Network, Policy, PolicyError, Rule, Sandbox, Secret
from ringfence.cli import main
from ringfence.gateway.service import service

HOST, OTHER = "api.example.com", "other.example.com"
VALUE = "sk-canary-" + base64.b32encode(os.urandom(15)).decode()
LIMITS = Limits(memory="2G", timeout_s=30, cpus=2, processes=256)


class Outside(NamedTuple):
    server: Server
    other: Server

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.server.port}"

    @property
    def other_url(self) -> str:
        return f"https://{OTHER}:{self.other.port}"

    def policy(self, *secrets: Secret, **network: object) -> Policy:
        given: dict[str, object] = {"allow": [f"{HOST}:{self.server.port}", f"{OTHER}:{self.other.port}"]} | network
        return Policy(network=Network(private=["127.0.0.0/8"], **given), secrets=secrets, limits=LIMITS)  # type: ignore[arg-type]  # of each test


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """Start two servers that the resolver knows. The gateway trusts their authority; the sandbox does not."""
    loop, roots = Loop(), Roots(tmp_path_factory.mktemp("roots"))
    resolver = service().resolver
    before, resolver.lookup = resolver.lookup, lambda _name, _port: ["127.0.0.1"]
    with serving(loop, roots.server(HOST)) as server, serving(loop, roots.server(OTHER)) as other:
        with trusting(roots.path):
            yield Outside(server, other)
    resolver.lookup = before
    loop.close()


@pytest.fixture(autouse=True)
def _fresh(outside: Outside) -> None:
    for one in (outside.server, outside.other):
        one.seen.clear()
        one.handler = echo


def _secret() -> Secret:
    return Secret("TOKEN", VALUE, hosts=[HOST], inject=("header", "query", "basic"))


@pytest.fixture(scope="module")
def box(outside: Outside) -> Iterator[Sandbox]:
    with Sandbox(policy=outside.policy(_secret())) as made:
        yield made


REQUESTS = "import os, requests; print(requests.get(url, headers={'X-Api-Key': os.environ['TOKEN']}).text)"
URLLIB = """
import os, urllib.request
asked = urllib.request.Request(url, headers={"X-Api-Key": os.environ["TOKEN"]})
print(urllib.request.urlopen(asked).read().decode())
"""
AIOHTTP = """
import aiohttp, asyncio, os
async def main():
    async with aiohttp.ClientSession() as session:
        async with session.get(url, headers={"X-Api-Key": os.environ["TOKEN"]}) as answer:
            print(await answer.text())
asyncio.run(main())
"""
NODE = "fetch(process.argv[1], {headers: {'x-api-key': process.env.TOKEN}}).then(r => r.text()).then(console.log)"
JAVA = """
import java.net.*; import java.io.*;
public class Get { public static void main(String[] a) throws Exception {
  HttpURLConnection c = (HttpURLConnection) new URL(a[0]).openConnection();
  c.setRequestProperty("X-Api-Key", System.getenv("TOKEN"));
  System.out.println(new String(c.getInputStream().readAllBytes())); } }
"""


def _python(code: str) -> list[str]:
    return ["python3", "-c", "import sys; url = sys.argv[1]\n" + code]


CLIENTS: dict[str, tuple[list[str], str]] = {  # command, and what it may speak
    "curl h2": (["sh", "-c", 'curl -sS --http2 -H "X-Api-Key: $TOKEN" "$0"'], "h2"),
    "curl h1": (["sh", "-c", 'curl -sS --http1.1 -H "X-Api-Key: $TOKEN" "$0"'], "http/1.1"),
    "curl without proxy": (["sh", "-c", 'curl -sS --noproxy "*" -H "X-Api-Key: $TOKEN" "$0"'], "h2"),
    "curl over SOCKS": (["sh", "-c", 'curl -sS -x socks5h://127.0.0.1:3128 -H "X-Api-Key: $TOKEN" "$0"'], "h2"),
    "wget": (["sh", "-c", 'wget -qO- --header "X-Api-Key: $TOKEN" "$0"'], "http/1.1"),
    "requests": (_python(REQUESTS), "http/1.1"),
    "urllib": (_python(URLLIB), "http/1.1"),
    "aiohttp": (_python(AIOHTTP), "http/1.1"),
    "node fetch": (["node", "-e", NODE], "http/1.1 h2"),  # since Node 24 the second
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_without_any_set_up_sends_the_value_and_never_sees_it(
    outside: Outside, box: Sandbox, name: str
) -> None:
    command, protocol = CLIENTS[name]
    if name == "wget" and shutil.which("wget") is None:
        pytest.skip("no wget here")
    result = box.exec([*command, f"{outside.url}/echo"]).check()
    (seen,) = outside.server.seen
    assert (seen.protocol in protocol.split(), seen.header("x-api-key")) == (True, VALUE)
    assert ["x-api-key", "*" * len(VALUE)] in [[name.lower(), value] for name, value in json.loads(result.stdout)]
    assert VALUE not in json.dumps(result.to_dict())


def test_java_trusts_the_sandboxs_authority(outside: Outside, box: Sandbox) -> None:
    box.files.write("Get.java", JAVA)
    result = box.exec(["java", "Get.java", f"{outside.url}/java"])
    if "No such file" in result.stderr or result.reason == "not-found":
        pytest.skip("no java here")
    assert [seen.header("x-api-key") for seen in outside.server.seen] == [VALUE], result.stderr


GO = read_program("gateway/secrets_inside_go.go")


@pytest.fixture(scope="module")
def go_program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a Go program, which has its own resolver and TLS, and no libc."""
    if shutil.which("go") is None:
        pytest.skip("no go here")
    folder = tmp_path_factory.mktemp("go")
    (folder / "get.go").write_text(GO)
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-p=2",
    }
    subprocess.run(["go", "build", "-o", "get", "get.go"], cwd=folder, env=env, check=True, timeout=300)
    return (folder / "get").read_bytes()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["by proxy", "by name"])
def test_go_trusts_the_sandboxs_authority(outside: Outside, box: Sandbox, go_program: bytes, way: str) -> None:
    box.files.write("get", go_program)
    env = {"NO_PROXY": "*"} if way == "by name" else {}
    result = box.exec(["sh", "-c", f"chmod +x get && ./get {outside.url}/go"], env=env)
    assert [(seen.protocol, seen.header("x-api-key")) for seen in outside.server.seen] == [("h2", VALUE)], result.stdout
    assert VALUE not in result.stdout


def test_git_clones_with_a_token_it_never_holds(outside: Outside, box: Sandbox, tmp_path: Path) -> None:
    """A repository as plain files, as git's dumb protocol wants it, behind basic authentication."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for command in (
        ["init", "-q", "-b", "main"],
        ["commit", "-q", "--allow-empty", "-m", "first"],
        ["update-server-info"],
    ):
        subprocess.run([*git, *command], check=True)
    wanted = "Basic " + base64.b64encode(f"me:{VALUE}".encode()).decode()

    def files(seen: Seen) -> Answer:
        if seen.header("authorization") != wanted:
            return Answer(401, [(b"www-authenticate", b'Basic realm="git"'), (b"content-length", b"0")])
        path = tmp_path / ".git" / seen.target.partition("?")[0].removeprefix("/repo.git/")
        return Answer(parts=[path.read_bytes()]) if path.is_file() else Answer(404, [(b"content-length", b"0")])

    outside.server.handler = files
    address = outside.url.replace("https://", "https://me:$TOKEN@")
    result = box.exec(["sh", "-c", f"git clone -q {address}/repo.git && git -C repo log --format=%s"])
    assert result.stdout == "first\n", result.stderr
    assert VALUE not in result.stdout + result.stderr


def test_the_placeholder_is_all_there_is_inside(outside: Outside, box: Sandbox) -> None:
    shown = box.exec(
        ["sh", "-c", "env; cat /proc/*/environ /proc/*/cmdline /tmp/.ringfence/* 2>/dev/null"]
    ).stdout_bytes
    assert VALUE.encode() not in shown
    assert b"TOKEN=rf-secret-TOKEN-" in shown
    assert b"PRIVATE KEY" not in shown


def test_a_placeholder_to_another_host_is_a_denial_that_says_so(outside: Outside) -> None:
    rules = [Rule(f"{OTHER}:{outside.other.port}", methods=["GET"])]
    policy = outside.policy(_secret(), allow=[f"{HOST}:{outside.server.port}"], rules=rules)
    with Sandbox(policy=policy) as box:
        command = f'curl -sS -H "Authorization: $TOKEN" {outside.other_url}/ -w "%{{http_code}}"'
        result = box.exec(["sh", "-c", command])
        log = box.network.log()
    assert outside.other.seen == []
    assert result.stdout.endswith("403")
    (denial,) = result.denials
    assert (denial.kind, denial.target, denial.code) == ("secret", f"{OTHER}:{outside.other.port}", "secret.other-host")
    assert denial.allow == f'hosts = [..., "{OTHER}"] in the secret TOKEN'
    assert [(one.verdict, one.code, one.method, one.path, one.status) for one in log] == [
        ("denied", "secret.other-host", "GET", "/", 403)
    ]


def test_a_host_whose_tls_is_not_read_sees_the_placeholder_at_most(outside: Outside, box: Sandbox) -> None:
    box.exec(["sh", "-c", f'curl -ksS -H "Authorization: $TOKEN" {outside.other_url}/']).check()
    (seen,) = outside.other.seen
    assert (seen.header("authorization") or "").startswith("rf-secret-TOKEN-")


def test_a_redirect_to_another_host_does_not_take_the_value_along(outside: Outside, box: Sandbox) -> None:
    url = f"{outside.url}/redirect?to={outside.other_url}/"
    box.exec(["sh", "-c", f'curl -ksSL --location-trusted -H "Authorization: $TOKEN" "{url}"']).check()
    assert outside.server.seen[0].header("authorization") == VALUE
    assert VALUE not in str(outside.other.seen[0].headers)


def test_the_value_is_in_nothing_that_a_caller_or_log_can_see(
    outside: Outside, capfd: pytest.CaptureFixture[str]
) -> None:
    """Results, denials, log, plan, explanations, errors, reprs, this process's own output (I03)."""
    policy = outside.policy(_secret())
    shown: list[object] = [policy, policy.explain(), policy.digest, repr(policy.secrets)]
    with Sandbox(policy=policy) as box:
        url = outside.url
        script = f"""
            curl -sS -v -H "Authorization: $TOKEN" {url}/echo {url}/in-header {url}/in-pieces {url}/gzip
            curl -sS -v "{url}/q?key=$TOKEN" -u "me:$TOKEN" -d "$TOKEN"
            curl -sS -v --http1.1 -H "Authorization: $TOKEN" {url}/echo {url}/in-header
            curl -sS -H "Authorization: $TOKEN" {outside.other_url}/
            python3 -c 'import os, urllib.request; urllib.request.urlopen("{url}/" + chr(10) + os.environ["TOKEN"])'
        """
        result = box.exec(["sh", "-c", script])
        shown += [result.to_dict(), result.render(), repr(result), box.network.log(), box.network.summary()]
        shown += [box.denials(), box.plan().explain(), repr(box.enforcement), repr(box), vars(box).keys()]
        try:
            result.check()
        except Exception as error:  # its words are looked at too
            shown.append(repr(error))
    assert len(outside.server.seen) >= 6
    assert [seen.header("authorization") for seen in outside.server.seen[:3]] == [VALUE] * 3
    out, err = capfd.readouterr()
    everything = "\n".join([*map(str, shown), out, err])
    forms = [VALUE, VALUE[4:], base64.b64encode(f"me:{VALUE}".encode()).decode()[4:-2], VALUE.encode().hex()]
    assert [form for form in forms if form in everything] == []


def test_rules_with_paths_hold_inside(outside: Outside) -> None:
    rule = Rule(f"{HOST}:{outside.server.port}", methods=["GET"], paths=["/v1/public/"])
    with Sandbox(policy=outside.policy(allow=[], rules=[rule])) as box:
        urls = [f"{outside.url}{path}" for path in ("/v1/public/a", "/v1/private", "/v1/public/%2e%2e/private")]
        form = "%{http_code}\\n"
        result = box.exec(["curl", "-sS", "--path-as-is", "-o", "/dev/null", "-w", form, *_each(urls)])
        posted = box.exec(["curl", "-sS", "-d", "x", urls[0]])
    assert result.stdout.split() == ["200", "403", "403"]
    assert json.loads(posted.stdout)["code"] == "net.method"
    assert [seen.target for seen in outside.server.seen] == ["/v1/public/a"]
    assert {denial.code for denial in result.denials} == {"net.path"}


def _each(urls: list[str]) -> list[str]:
    return [word for index, url in enumerate(urls) for word in (["-o", "/dev/null", url] if index else [url])]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Secret("T", "x" * 20, hosts=[]), "is empty: the secret would never be used"),
        (lambda: Secret("T", "", hosts=[HOST]), "must have 1 to"),
        (lambda: Policy(secrets=[Secret("T", "x" * 20, hosts=[HOST])]), "is not reachable under network"),
        (
            lambda: Policy(network=Network(allow=[HOST]), secrets=[Secret("T", "x" * 20, hosts=[HOST])] * 2),
            "is named twice",
        ),
        (
            lambda: Policy(network=Network(allow=[HOST], deny=[HOST]), secrets=[Secret("T", "x" * 20, hosts=[HOST])]),
            "is denied by network.deny",
        ),
        (
            lambda: Sandbox(
                policy=Policy(network=Network(allow=[HOST]), secrets=[Secret("T", "hunter2", hosts=[HOST])])
            ),
            "fewer than 8 characters",
        ),
    ],
)
def test_secrets_that_could_not_work_are_refused_before_anything_starts(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(PolicyError, match=words) as caught:
        make()
    assert "hunter2" not in str(caught.value)
    assert caught.value.fix or words == "must have 1 to"


def test_rules_that_need_reading_cannot_be_added_to_a_sandbox_that_trusts_nobody(outside: Outside) -> None:
    rule = Rule(f"{HOST}:{outside.server.port}", paths=["/v1/"])
    network = Network(rules=[rule], private=["127.0.0.0/8"])
    with Sandbox(policy=outside.policy()) as box:
        with pytest.raises(PolicyError, match="nothing inside trusts its gateway"):
            box.network.set(network)


def test_the_command_takes_a_variable_of_the_host_and_shows_it_nowhere(
    outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKEN", VALUE)
    policy = tmp_path / "policy.toml"
    policy.write_text(f'version = 1\n[network]\nallow = ["{HOST}:{outside.server.port}"]\nprivate = ["127.0.0.0/8"]\n')
    log, report = tmp_path / "net.jsonl", tmp_path / "report.json"
    options = ["--policy", str(policy), "--secret", f"TOKEN@{HOST}", "--net-log", str(log), "--report", str(report)]
    command = f'curl -sS -H "Authorization: $TOKEN" {outside.url}/echo?$TOKEN'
    assert main(["exec", *options, "--", "sh", "-c", command]) == 0
    assert outside.server.seen[0].header("authorization") == VALUE
    out, err = capfd.readouterr()
    assert "*" * len(VALUE) in out
    assert json.loads(log.read_text())["path"] == "/echo"
    assert VALUE not in out + err + log.read_text() + report.read_text()


def test_a_live_copy_goes_on_with_the_placeholder_it_holds(outside: Outside) -> None:
    ask = f"""
request = urllib.request.Request("{outside.url}/copy", headers={{"Authorization": token}})
print(urllib.request.urlopen(request, context=context).status)
"""
    with Sandbox(policy=outside.policy(_secret())) as box:
        begin = "import os, ssl, urllib.request; token, context = os.environ['TOKEN'], ssl.create_default_context()"
        box.run(begin).check()
        with box.fork() as twin:
            assert [one.run(ask).check().stdout for one in (box, twin)] == ["200\n"] * 2
            told = twin.exec(["sh", "-c", "echo $TOKEN"]).stdout
            assert told == box.exec(["sh", "-c", "echo $TOKEN"]).stdout
    assert [seen.header("authorization") for seen in outside.server.seen] == [VALUE] * 2


_WITHOUT_PACKAGES = """
from ringfence import Network, Policy, Sandbox, Secret, UnsupportedError
policy = Policy(network=Network(allow=["a.com"]), secrets=[Secret("T", "x" * 20, hosts=["a.com"])])
try:
    Sandbox(policy=policy)
except UnsupportedError as error:
    print(error.code, "|", error, "|", error.fix)
"""


def test_a_host_without_the_packages_says_so_before_anything_starts() -> None:
    source = Path(__file__).resolve().parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-S", "-c", _WITHOUT_PACKAGES],
        env={"PYTHONPATH": str(source), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    code, message, fix = done.stdout.strip().split(" | ")
    assert code == "network-packages"
    assert "cryptography, h11, h2" in message
    assert fix == "pip install 'ringfence-sandbox[network]'"


_PACKAGES = ("cryptography", "_cffi_backend*", "cffi", "h11", "h2", "hpack", "hyperframe", "pycparser")
_AS_USER = read_program("gateway/secrets_inside_as_user.py")


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above already run as an ordinary user")
def test_it_is_the_same_for_an_ordinary_user(ordinary_user: OrdinaryUser) -> None:
    """The packages are copied to a folder that the user can read."""
    installed = Path(h11.__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="rf-tests-") as folder:
        for pattern in _PACKAGES:
            for found in installed.glob(pattern):
                copy = shutil.copytree if found.is_dir() else shutil.copy
                copy(found, Path(folder) / found.name)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        script = Path(folder) / "script.py"
        script.write_text(_AS_USER)
        script.chmod(0o644)
        done = ordinary_user.run(script, folder)
    assert done.stdout.split() == ["True", "ok", "True", "False"], done.stderr
