"""G: HTTP requests to a permitted host, which the gateway reads because of a rule or a secret.

The arm without the control permits the host as a whole: TLS passes unread, and whatever the guest sends arrives.
"""

from __future__ import annotations

import contextlib

from ringfence_attacks.case import HOST_CODE, LEAK, Seen, attack, cases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.policy.model import Policy
    from ringfence_attacks.arena import Arm
    from ringfence_attacks.tls_server import Echo

_LABEL = "requests are read"


def _ruled(arm: Arm, server: Echo) -> Policy:
    from ringfence.policy.model import Rule
    from ringfence_attacks import tls_server

    if arm.off:
        return tls_server.policy(server)
    rule = Rule(f"{tls_server.HOST}:{server.port}", methods=["GET", "POST"], paths=["/public/"])
    return tls_server.policy(server, rules=(rule,), allow=())


def _sent(arm: Arm, requests: dict[str, str], mark: str) -> Seen:
    """Send the requests. The attack succeeds when the mark is in the bytes that the server received."""
    from ringfence_attacks import tls_server

    server = tls_server.echo(arm)
    code = "for name, asked in requests.items(): attempt(name, fetch, host, port, asked.replace('PORT', str(port)))"
    report = arm.python(
        tls_server.FETCH + code, policy=_ruled(arm, server), host=tls_server.HOST, port=server.port, requests=requests
    )
    return Seen(mark.encode() in server.heard, f"{len(server.heard)} bytes heard; {report.words()}")


@attack(
    "G11-tls",
    "inside TLS, Host and target agree with what was permitted",
    LEAK,
    off=HOST_CODE,
    needs="network",
    label=_LABEL,
)
def fronting(arm: Arm) -> Seen:
    mark = f"{arm.canary[:12]}.example.com"
    first = "GET /public/a HTTP/1.1\r\nHost: api.example.com:PORT\r\n\r\n"
    requests = {
        "other Host": f"GET /public/ HTTP/1.1\r\nHost: {mark}\r\n\r\n",
        "two Hosts": f"GET /public/ HTTP/1.1\r\nHost: api.example.com:PORT\r\nHost: {mark}\r\n\r\n",
        "absolute": f"GET https://{mark}/public/ HTTP/1.1\r\nHost: api.example.com:PORT\r\n\r\n",
        "kept connection": f"{first}GET /public/ HTTP/1.1\r\nHost: {mark}\r\n\r\n",
        "user": f"GET https://api.example.com@{mark}/public/ HTTP/1.1\r\nHost: api.example.com:PORT\r\n\r\n",
    }
    return _sent(arm, requests, mark)


@attack("G12-tls", "inside TLS, requests cannot be smuggled", LEAK, off=HOST_CODE, needs="network", label=_LABEL)
def smuggling(arm: Arm) -> Seen:
    mark = arm.canary
    inner = f"GET /{mark} HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
    start = "POST /public/ HTTP/1.1\r\nHost: api.example.com:PORT\r\n"
    both = f"{start}Content-Length: {len(inner) + 5}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}"
    requests = {
        "CL.TE": both,
        "TE.TE": f"{start}Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n{inner}",
        "two lengths": f"{start}Content-Length: 0\r\nContent-Length: {len(inner)}\r\n\r\n{inner}",
        "folded": f"{start}X-A: b\r\n Transfer-Encoding: chunked\r\n\r\n{inner}",
        "bare LF": f"{start}X-A: b\nTransfer-Encoding: chunked\n\n{inner}",
        "space": f"{start}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{inner}",
        "pipelined": f"GET /public/a HTTP/1.1\r\nHost: api.example.com:PORT\r\n\r\n{inner}",
    }
    return _sent(arm, requests, mark)


@attack(
    "G23",
    "every spelling of a path or method is compared in one form",
    LEAK,
    off=HOST_CODE,
    needs="network",
    label=_LABEL,
)
def spellings(arm: Arm) -> Seen:
    mark = arm.canary
    end = " HTTP/1.1\r\nHost: api.example.com:PORT\r\nConnection: close\r\n"
    ways = ("../", "%2e%2e/", "..%2f", "..%5c", "..\\", "%252e%252e/", "..;/", "./../", "x//../../", "%2E%2E%2F")
    requests = {way: f"GET /public/{way}{mark}{end}\r\n" for way in ways}
    requests["method"] = f"DELETE /public/{mark}{end}\r\n"
    requests["override"] = f"GET /public/{mark}{end}X-HTTP-Method-Override: DELETE\r\n\r\n"
    requests["body"] = f"GET /public/{end}Content-Length: {len(mark)}\r\n\r\n{mark}"
    requests["trace"] = f"TRACE /public/{mark}{end}\r\n"
    return _sent(arm, requests, mark)


_REWRITING_HEADERS = (
    *("X-Original-URL", "x-rewrite-url", "X_Original_URI", "X-Forwarded-Uri", "X_FORWARDED_PATH", "X-Forwarded-Prefix"),
    *("X-Envoy-Original-Path", "X-Replaced-Path", "X-Ms-Original-Url", "Script-Name", "Path_Info", "Destination"),
    *("x-amz-copy-source", "X-HTTP-Method-Override", "X_HTTP_METHOD", "X-Method-Override", "X-Forwarded-Method"),
)


@attack(
    "G23-headers",
    "no header changes the path or method of a request",
    LEAK,
    off=HOST_CODE,
    needs="network",
    label=_LABEL,
)
def rewriting_headers(arm: Arm) -> Seen:
    """Send headers that a reverse proxy, a server or a framework behind the permitted host may take for the path or the
    method; one as a trailer too."""
    mark = arm.canary
    start = "POST /public/ HTTP/1.1\r\nHost: api.example.com:PORT\r\nConnection: close\r\n"
    requests = {name: f"{start}Content-Length: 0\r\n{name}: /private/{mark}\r\n\r\n" for name in _REWRITING_HEADERS}
    chunked = f"{start}Transfer-Encoding: chunked\r\nTrailer: X-Original-URL\r\n\r\n0\r\n"
    requests["trailer"] = f"{chunked}X-Original-URL: /private/{mark}\r\n\r\n"
    return _sent(arm, requests, mark)


_ECHOED = """
token = os.environ["TOKEN"]
import base64
ways = {
    "header": f"Authorization: Bearer {token}", "own header": f"X-Api-Key: {token}",
    "basic": "Authorization: Basic " + base64.b64encode(f"me:{token}".encode()).decode(),
}
for name, line in ways.items():
    for path in ("/", f"/?key={token}"):
        asked = f"GET {path} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n{line}\\r\\nConnection: close\\r\\n\\r\\n"
        got = attempt(name, fetch, host, port, asked) or b""
        loot(got)
        for word in got.split():
            try: loot(base64.b64decode(word))
            except ValueError: pass
"""


@contextlib.contextmanager
def _unscrubbed() -> Iterator[None]:
    """Leave out the part of the gateway that removes secret values from responses, while the block runs."""
    from ringfence.gateway.secrets.scrub import Forms
    from ringfence.gateway.secrets.vault import Vault

    whole = Vault.forms
    Vault.forms = lambda *_: Forms([])  # type: ignore[method-assign]  # only an attack's arm leaves this part out
    try:
        yield
    finally:
        Vault.forms = whole  # type: ignore[method-assign]  # as above


@attack(
    "G24", "injected credentials do not come back in responses", LEAK, off=HOST_CODE, needs="network", label="scrubbing"
)
def echoed(arm: Arm) -> Seen:
    from ringfence.policy.secrets import Secret
    from ringfence_attacks import tls_server

    server = tls_server.echo(arm)
    if arm.off:
        arm.enter(_unscrubbed())
    secret = Secret("TOKEN", arm.canary, hosts=[tls_server.HOST], inject=("header", "query", "basic"))
    report = arm.python(
        tls_server.FETCH + _ECHOED, policy=tls_server.policy(server, secret), host=tls_server.HOST, port=server.port
    )
    if arm.canary.encode() not in server.heard:
        raise AssertionError(f"the value never went out, so nothing could come back: {report.words()}")
    return arm.stolen(report)


CASES = cases(globals())
