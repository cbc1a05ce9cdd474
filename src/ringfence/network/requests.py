"""One HTTP request against the rule that permits its host: method, path, authority, headers. HTTP/1.1 and HTTP/2 alike.

Strict: what two parsers could read in two ways is refused, not repaired (G11, G12, G23). Pure.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ringfence.network import paths
from ringfence.network.targets import OverBudget, Refusal
from ringfence.policy.hosts import canonical_host, split_port
from ringfence.values import Struct, final

if TYPE_CHECKING:
    from ringfence.network.swapping import Headers
    from ringfence.network.targets import Target

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# Names of headers by which some proxy, server or framework takes a request for one of another path, or does something
# with another path as well. A rule of words and no list of names: every product brings names of its own, a list is
# never whole, and what is refused here wrongly is told with its reason (G23-headers). docs/secrets.md has the same.
_NAMES_A_PATH = re.compile(
    rb"""(?:ur[li]|path|prefix|route|rewrite|path[^a-z]?info|script[^a-z]?name|request[^a-z]?target)s?(?![a-z])
    | (?:copy|rename|move)[^a-z]?source(?![a-z])  # of object stores: what is read is not what the path names
    | \A x[^a-z]?(?:copy[^a-z]?from|object[^a-z]?manifest|symlink[^a-z]?target) # of Swift, the same
    | \A destination \Z                          # of WebDAV
    | (?<![a-z])(?:accel|sendfile)(?![a-z])       # of Rack: which files a path stands for
    """,
    re.VERBOSE,
)
# The same for the method.
_NAMES_A_METHOD = re.compile(rb"(?:method|verb|method[^a-z]?override)s?(?![a-z])")
# Of clients that many use, and no server takes for a path or a method: what a browser asks about, which function of
# an SDK was called, the method of a JSON-RPC message that is in the body all the same, where a database lies.
_HARMLESS = frozenset(
    (
        *(b"access-control-request-method", b"x-stainless-helper-method", b"mcp-method"),
        *(b"google-cloud-resource-prefix", b"x-goog-spanner-route-to-leader"),
    )
)
_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te upgrade http2-settings".split()
)
# In which encodings an answer may come, and in which one it does: of HTTP, of its deltas, of gRPC and of its relative.
_ACCEPTED = frozenset((b"accept-encoding", b"a-im", b"grpc-accept-encoding", b"connect-accept-encoding"))
_ENCODED = frozenset((b"content-encoding", b"im", b"grpc-encoding", b"connect-content-encoding"))
LARGEST_HEAD = 1 << 16
MOST_HEADERS = 200


@final
class Asked(Struct):
    """What a request asks for, as the guest wrote it. `authority`: Host, or :authority."""

    method: str
    target: str  # origin form
    authority: str
    headers: tuple[tuple[bytes, bytes], ...]
    has_body: bool

    def all_of(self, name: bytes) -> list[bytes]:
        """Values of a header, by its lower-case name."""
        return [value for key, value in self.headers if key.lower() == name]


@final
class Checked(Struct):
    """What may go out: the request target to send, and the path for the log, where no query stands."""

    target: str
    path: str


def check_request(target: Target, asked: Asked) -> Checked:
    """Raises Refusal."""
    check_authority(target, asked.authority)
    try:
        path, query = paths.split_target(asked.target)
    except ValueError as error:
        raise malformed(str(error)) from None
    _check_method(target, asked)
    if target.rule is None or not target.rule.paths:
        return Checked(path + query, path)
    name = _first_named(_NAMES_A_PATH, asked)
    if name is not None:
        raise Refusal("net.path", f"the header {name} would make another path of this one at {target}")
    return Checked(_check_path(target, path) + query, path)


def check_authority(target: Target, authority: str) -> None:
    """Raises Refusal when Host or :authority names another host or port than the connection is for (G11)."""
    try:
        name, port = split_port(authority)
        name = canonical_host(name)
    except ValueError:
        raise malformed("Host is not the name of a host") from None
    if name != target.name or port not in (None, target.port):
        raise Refusal("net.other-host", f"the request names another host than {target}, where the connection goes")


def malformed(why: str) -> Refusal:
    """A request that is not HTTP as the standard has it, or that parsers read in different ways."""
    return Refusal("net.malformed", f"the request is malformed: {why}")


def check_header_block(headers: Headers) -> None:
    """Raises Refusal for names and values that no sound client sends."""
    if len(headers) > MOST_HEADERS:
        raise malformed(f"it has more than {MOST_HEADERS} headers")
    for name, value in headers:
        if not _TOKEN.fullmatch(name):
            raise malformed("a header's name holds characters that it cannot")
        if _CONTROL.search(value):
            raise malformed("a header holds control characters")


def check_raw_head(head: bytes) -> None:
    """The bytes of an HTTP/1.1 head, before they are parsed: what h11 would repair is refused (G12)."""
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines):
        raise malformed("a line does not end in CR LF, or holds NUL")
    for line in lines[1:]:
        if line[:1] in (b" ", b"\t"):
            raise malformed("a header is folded over two lines")
        name, colon, _ = line.partition(b":")
        if not colon or name != name.rstrip():
            raise malformed("a header has no colon right after its name")
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
        raise malformed("its length is said more than once")
    if any(
        name == b"content-length" and not _value(line).isdigit() for name, line in zip(names, lines[1:], strict=True)
    ):
        raise malformed("its length is not a number")
    if names.count(b"host") > 1:
        raise malformed("it has more than one Host")


def _value(line: bytes) -> bytes:
    return line.partition(b":")[2].strip(b" \t")


def end_to_end(headers: Headers) -> Headers:
    """Without those that are for one connection only."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP]


def response_headers(headers: Headers) -> Headers:
    """For the guest. Alt-Svc would send it to QUIC, which has no way out."""
    return [(name, value) for name, value in end_to_end(headers) if name.lower() != b"alt-svc"]


def identity_only(headers: Headers) -> Headers:
    """Asks for a response that can be read: a compressed one could hold a value unseen."""
    kept = [(name, value) for name, value in headers if name.lower() not in _ACCEPTED]
    return [*kept, (b"accept-encoding", b"identity")]


def check_readable(headers: Headers, target: Target) -> None:
    """Raises Refusal for a response that is compressed though it was asked not to be."""
    for name, value in headers:
        if name.lower() in _ENCODED and value.strip().lower() not in (b"identity", b""):
            message = f"{target} sent a compressed response though it was asked not to, and a secret could be in it"
            raise Refusal("secret.encoded-response", message, verdict="failed")


def is_grpc(headers: Headers) -> bool:
    """Whether the body is of messages that each have their length before them."""
    kinds = [value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
    return any(kind == b"application/grpc" or kind.startswith(b"application/grpc+") for kind in kinds)


def status_of(refusal: Refusal) -> int:
    if refusal.code == "net.malformed":
        return 400
    if isinstance(refusal, OverBudget):
        return 429
    return 502 if refusal.verdict == "failed" else 403


def refusal_body(refusal: Refusal) -> bytes:
    """The machine-readable answer to a refused client; ends in a line break."""
    said = {
        "error": f"{refusal.verdict} {'by' if refusal.verdict == 'denied' else 'at'} the sandbox's gateway",
        "code": refusal.code,
        "message": refusal.message,
        "allow": refusal.allow,
    }
    return json.dumps(said).encode() + b"\n"


def refusal_headers(body: bytes) -> Headers:
    return [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-ringfence", b"refused"),
        (b"cache-control", b"no-store"),
    ]


def _check_method(target: Target, asked: Asked) -> None:
    method = asked.method
    if not _TOKEN.fullmatch(method.encode("latin-1", "replace")):
        # Of HTTP/2: a server behind that writes it into a request line would read a path of the guest's there.
        raise malformed("its method holds characters that it cannot")
    if method.upper() in ("CONNECT", "TRACE"):
        # CONNECT would open a tunnel; TRACE sends the request back, an injected secret included (G24).
        raise Refusal("net.method", f"{method} is never permitted")
    rule = target.rule
    if rule is None or not rule.methods:
        return
    if method not in rule.methods:
        message = f"{_shown(method)} is not among the methods permitted for {target}"
        raise Refusal("net.method", message, allow=f'methods = [..., "{_shown(method)}"] in the rule for {rule.host}')
    name = _first_named(_NAMES_A_METHOD, asked)
    if name is not None:
        raise Refusal("net.method", f"the header {name} would make another method of {method} at {target}")
    if asked.has_body and method in ("GET", "HEAD"):
        raise Refusal("net.method", f"{method} with a body is not permitted for {target}")


def _first_named(pattern: re.Pattern[bytes], asked: Asked) -> str | None:
    """Whatever stands between its words: to CGI all but letters and digits is one character."""
    for name, _ in asked.headers:
        if pattern.search(name.lower()) and name.lower() not in _HARMLESS:
            return _shown(name.decode("ascii", "replace"))
    return None


def _check_path(target: Target, path: str) -> str:
    rule = target.rule
    assert rule is not None
    try:
        canonical = paths.canonical_path(path)
        fits = paths.fits(canonical, rule.paths)
    except ValueError as error:
        raise Refusal("net.path", f"the path is not permitted for {target}: {error}") from None
    if not fits:
        message = f"the path {_shown(canonical)} is not below what is permitted for {target}"
        raise Refusal("net.path", message, allow=f'paths = [..., "{_shown(canonical)}"] in the rule for {rule.host}')
    return canonical


def _shown(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
