"""Checks an HTTP request against the rule that permits its host: method, path, authority, headers; HTTP/1.1 and HTTP/2.

The checks are strict: what two parsers could read in two ways is refused, not repaired (G11, G12, G23). Pure.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import TYPE_CHECKING

from ringfence.gateway.types import OverBudget, Refusal
from ringfence.policy.hosts import canonical_host, split_port
from ringfence.values import Struct, final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringfence.gateway.secrets.vault import Headers
    from ringfence.gateway.types import Target


# paths: a canonical form, and every way in which a server may read a path; a rule holds for all of them (G23)
#
# `%2e%2e`, `//`, `\\`, `%2f`, `%252f`, `..;` are how a path slips past a prefix. A path with one meaning is brought
# into canonical form, and that form is sent. A path that servers read in several ways must fit the rule in each
# reading, and must climb (`..`) in no reading: servers agree least on where a part ends. These functions raise
# ValueError.

_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_UNESCAPED = _UNRESERVED | frozenset(b"/!$&'()*+,;=:@")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_BROKEN = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_ESCAPED_CONTROL = re.compile(rb"%(?:[01][0-9A-Fa-f]|7[Ff])")
_SPELLINGS = [chr(value) if value in _UNESCAPED else f"%{value:02X}" for value in range(256)]
_SPELLINGS_AND_PERCENT = [*_SPELLINGS[:0x25], "%", *_SPELLINGS[0x26:]]
_MOST_DECODINGS = 8
# An ASCII character in more bytes than needed: not UTF-8, and yet some servers read it as that character.
_OVERLONG = re.compile(rb"[\xc0\xc1](.)|\xe0\x80(.)|\xf0\x80\x80(.)", re.DOTALL)
_ENDS_OF_PARTS = re.compile(rb"[/\\;?#]")  # for some server
LONGEST = 16_384
LONGEST_JUDGED = 4096  # each reading takes time, and the loop serves every sandbox


def split_target(target: str) -> tuple[str, str]:
    """Return path and query (with its "?", or empty) of a request target in origin form."""
    if not target.startswith("/") or len(target) > LONGEST:
        raise ValueError(f"the path does not start with a slash, or is longer than {LONGEST} characters")
    if not target.isascii() or not target.isprintable() or " " in target or "#" in target:
        raise ValueError("the path holds characters that a request cannot")
    path, mark, query = target.partition("?")
    return path, mark + query


def canonical_path(path: str) -> str:
    """Return the path with escapes in upper case and only where needed, without `.`, `..` and empty segments.

    Idempotent. Raises ValueError for broken escapes and control characters.
    """
    return _resolve(_normalise_escapes(path))


def readings(path: str) -> tuple[str, ...]:
    """Return the canonical form, then what servers that decode again, or cut `;` parameters, would read."""
    canonical = canonical_path(path)
    return _readings(canonical, _decodings(canonical))


def permitted(path: str, prefixes: Iterable[str]) -> bool:
    """Return whether a path as the guest wrote it fits the prefixes, as `fits` says."""
    return fits(canonical_path(path), prefixes)


def fits(canonical: str, prefixes: Iterable[str]) -> bool:
    """Return whether every reading of a canonical path starts with a prefix of the policy's.

    Raises ValueError as `canonical_path` does, and for a `..` that only some servers see: nginx takes `p\\q/../..` for
    one part and two steps up, others for two of each, so no list of readings is the whole list.
    """
    if len(canonical) > LONGEST_JUDGED:
        raise ValueError(f"it is longer than {LONGEST_JUDGED} characters")
    decodings = _decodings(canonical)
    if _climbs(decodings[-1]):  # what has become a `..` stays one when the rest is decoded
        raise ValueError("some servers would read a part of it as ..")
    known = set()
    for prefix in prefixes:
        known |= {prefix, _encode(_decode(prefix))}
    starts = tuple(known)
    return all(reading.startswith(starts) for reading in _readings(canonical, decodings))


def _climbs(data: bytes) -> bool:
    """Return whether a part is `..`, also where overlong UTF-8, full-width letters or spaces around it are read so."""
    texts = [data]
    if not data.isascii():
        folded = unicodedata.normalize("NFKC", data.decode("utf-8", "replace"))
        texts += [_OVERLONG.sub(_shortened, data), folded.encode()]
    return any(part.strip(b" ") == b".." for text in texts for part in _ENDS_OF_PARTS.split(text))


def _shortened(found: re.Match[bytes]) -> bytes:
    upper = 0x40 if found[0][0] == 0xC1 else 0
    return bytes([upper | found[0][-1] & 0x3F])


def _decodings(canonical: str) -> list[bytes]:
    """Return the path decoded once, twice, and so on, until nothing is left to decode."""
    found = [_decode(canonical)]
    while len(found) <= _MOST_DECODINGS:
        again = _decode(_encode(found[-1], keep_percent=True))
        if again == found[-1]:
            return found
        found.append(again)
    raise ValueError("the path is escaped too many times over")


def _readings(canonical: str, decodings: list[bytes]) -> tuple[str, ...]:
    found = [canonical]
    for data in decodings:
        for text in (data, _without_parameters(data.replace(b"\\", b"/"))):
            reading = _resolve(_encode(text.replace(b"\\", b"/")))
            if reading not in found:
                found.append(reading)
    return tuple(found)


def _normalise_escapes(path: str) -> str:
    """Return the path with every escape and every character that needs an escape in its normal spelling."""
    data = path.encode("ascii")
    if _ESCAPED_CONTROL.search(data):
        raise ValueError("the path holds an escaped control character")
    if _BROKEN.search(data):
        raise ValueError("a percent sign is not followed by two hex digits")
    return "".join(map(_SPELLINGS_AND_PERCENT.__getitem__, _ESCAPE.sub(_normal, data)))


def _normal(found: re.Match[bytes]) -> bytes:
    value = int(found[1], 16)
    return bytes([value]) if value in _UNRESERVED else b"%%%02X" % value


def _resolve(path: str) -> str:
    """Return the path without `.`, `..` and empty segments; a directory keeps its last slash."""
    made: list[str] = []
    segments = path.split("/")
    for segment in segments:
        if segment == "..":
            del made[-1:]
        elif segment not in ("", "."):
            made.append(segment)
    ends = segments[-1] in ("", ".", "..") and bool(made)
    return "/" + "/".join(made) + ("/" if ends else "")


def _decode(path: str) -> bytes:
    """Return the bytes that the path's escapes stand for, decoded once; broken escapes stay."""
    data = path.encode("ascii")
    if _ESCAPED_CONTROL.search(data):
        raise ValueError("the path holds an escaped control character")
    return _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), data)


def _encode(data: bytes, *, keep_percent: bool = False) -> str:
    spellings = _SPELLINGS_AND_PERCENT if keep_percent else _SPELLINGS
    return "".join(map(spellings.__getitem__, data))


def _without_parameters(data: bytes) -> bytes:
    """Return the path without parameters: Tomcat reads `..;x` as `..`."""
    return b"/".join([segment.partition(b";")[0] for segment in data.split(b"/")])


# requests

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# Names of headers by which some proxy, server or framework takes a request for a request of another path, or uses
# another path as well. This is a rule of words, not a list of names: every product has its own names, a list is never
# complete, and a wrong refusal says its reason (G23-headers). docs/secrets.md has the same words.
_NAMES_A_PATH = re.compile(
    rb"""(?:ur[li]|path|prefix|route|rewrite|path[^a-z]?info|script[^a-z]?name|request[^a-z]?target)s?(?![a-z])
    | (?:copy|rename|move)[^a-z]?source(?![a-z])  # of object stores: what is read is not what the path names
    | \A x[^a-z]?(?:copy[^a-z]?from|object[^a-z]?manifest|symlink[^a-z]?target) # of Swift, the same
    | \A destination \Z                          # of WebDAV
    | (?<![a-z])(?:accel|sendfile)(?![a-z])       # of Rack: which files a path stands for
    """,
    re.VERBOSE,
)
# Names of headers by which a request is taken for a request of another method.
_NAMES_A_METHOD = re.compile(rb"(?:method|verb|method[^a-z]?override)s?(?![a-z])")
# Headers of common clients that no server takes for a path or a method: what a browser asks about, which function of
# an SDK was called, the method of a JSON-RPC message that its body names too, the place of a database.
_HARMLESS = frozenset(
    (
        *(b"access-control-request-method", b"x-stainless-helper-method", b"mcp-method"),
        *(b"google-cloud-resource-prefix", b"x-goog-spanner-route-to-leader"),
    )
)
_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te upgrade http2-settings".split()
)
# Headers for the encodings that an answer may have, and for the encoding it has: of HTTP, deltas, gRPC and Connect.
_ACCEPTED = frozenset((b"accept-encoding", b"a-im", b"grpc-accept-encoding", b"connect-accept-encoding"))
_ENCODED = frozenset((b"content-encoding", b"im", b"grpc-encoding", b"connect-content-encoding"))
LARGEST_HEAD = 1 << 16
MOST_HEADERS = 200


@final
class RequestHead(Struct):
    """The head of a request, as the guest wrote it. `authority`: Host, or :authority."""

    method: str
    target: str  # origin form
    authority: str
    headers: tuple[tuple[bytes, bytes], ...]
    has_body: bool

    def all_of(self, name: bytes) -> list[bytes]:
        """Return the values of a header, by its lower-case name."""
        return [value for key, value in self.headers if key.lower() == name]


@final
class CheckedRequest(Struct):
    """A request that may be sent: the request target, and the path for the log, without a query."""

    target: str
    path: str


def check_request(target: Target, asked: RequestHead) -> CheckedRequest:
    """Return what may be sent. Raises Refusal."""
    check_authority(target, asked.authority)
    try:
        path, query = split_target(asked.target)
    except ValueError as error:
        raise malformed(str(error)) from None
    _check_method(target, asked)
    if target.rule is None or not target.rule.paths:
        return CheckedRequest(path + query, path)
    name = _first_named(_NAMES_A_PATH, asked)
    if name is not None:
        raise Refusal("net.path", f"the header {name} would make another path of this one at {target}")
    return CheckedRequest(_check_path(target, path) + query, path)


def check_authority(target: Target, authority: str) -> None:
    """Raise Refusal when Host or :authority names another host or port than the connection is for (G11)."""
    try:
        name, port = split_port(authority)
        name = canonical_host(name)
    except ValueError:
        raise malformed("Host is not the name of a host") from None
    if name != target.name or port not in (None, target.port):
        raise Refusal("net.other-host", f"the request names another host than {target}, where the connection goes")


def malformed(why: str) -> Refusal:
    """Return the refusal of a request that is not standard HTTP, or that parsers read in different ways."""
    return Refusal("net.malformed", f"the request is malformed: {why}")


def check_header_block(headers: Headers) -> None:
    """Raise Refusal for names and values that no sound client sends."""
    if len(headers) > MOST_HEADERS:
        raise malformed(f"it has more than {MOST_HEADERS} headers")
    for name, value in headers:
        if not _TOKEN.fullmatch(name):
            raise malformed("a header's name holds characters that it cannot")
        if _CONTROL_CHARACTER.search(value):
            raise malformed("a header holds control characters")


def check_raw_head(head: bytes) -> None:
    """Check the bytes of an HTTP/1.1 head before h11 parses them: what h11 would repair is refused (G12)."""
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
    """Return the headers without those of a single connection."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP]


def response_headers(headers: Headers) -> Headers:
    """Return a response's headers for the guest. Alt-Svc would send the guest to QUIC, which is never let out."""
    return [(name, value) for name, value in end_to_end(headers) if name.lower() != b"alt-svc"]


def identity_only(headers: Headers) -> Headers:
    """Return headers that ask for an uncompressed response: a compressed response could hold a value unseen."""
    kept = [(name, value) for name, value in headers if name.lower() not in _ACCEPTED]
    return [*kept, (b"accept-encoding", b"identity")]


def check_readable(headers: Headers, target: Target) -> None:
    """Raise Refusal for a response that is compressed although the request asked otherwise."""
    for name, value in headers:
        if name.lower() in _ENCODED and value.strip().lower() not in (b"identity", b""):
            message = f"{target} sent a compressed response though it was asked not to, and a secret could be in it"
            raise Refusal("secret.encoded-response", message, verdict="failed")


def is_grpc(headers: Headers) -> bool:
    """Return whether the body consists of gRPC messages, each after its length."""
    kinds = [value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
    return any(kind == b"application/grpc" or kind.startswith(b"application/grpc+") for kind in kinds)


def status_of(refusal: Refusal) -> int:
    if refusal.code == "net.malformed":
        return 400
    if isinstance(refusal, OverBudget):
        return 429
    return 502 if refusal.verdict == "failed" else 403


def refusal_body(refusal: Refusal) -> bytes:
    """Return the machine-readable answer to a refused client; ends in a line break."""
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


def _check_method(target: Target, asked: RequestHead) -> None:
    method = asked.method
    if not _TOKEN.fullmatch(method.encode("latin-1", "replace")):
        # In HTTP/2: a server that writes the method into a request line would read a path of the guest's choice there.
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


def _first_named(pattern: re.Pattern[bytes], asked: RequestHead) -> str | None:
    """Return the first header whose name matches, shown for a message; None without a match.

    What stands between the words of a name does not matter: CGI takes all but letters and digits for one character.
    """
    for name, _ in asked.headers:
        if pattern.search(name.lower()) and name.lower() not in _HARMLESS:
            return _shown(name.decode("ascii", "replace"))
    return None


def _check_path(target: Target, path: str) -> str:
    rule = target.rule
    assert rule is not None
    try:
        canonical = canonical_path(path)
        is_permitted = fits(canonical, rule.paths)
    except ValueError as error:
        raise Refusal("net.path", f"the path is not permitted for {target}: {error}") from None
    if not is_permitted:
        message = f"the path {_shown(canonical)} is not below what is permitted for {target}"
        raise Refusal("net.path", message, allow=f'paths = [..., "{_shown(canonical)}"] in the rule for {rule.host}')
    return canonical


def _shown(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
