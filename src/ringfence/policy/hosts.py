"""Defines the grammar of host names and host patterns: each host has a single spelling (G04, G14).

Any other spelling is refused. The gateway reads names from guests with the same functions, so that a policy and a
request cannot mean two things by the same text. Raises ValueError with the reason; nothing here resolves or connects.
"""

from __future__ import annotations

from ringfence.values import Struct, final

_LABEL = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdef")
_LONGEST = 253


@final
class HostPattern(Struct):
    """A host, or with `wildcard` every host below, without the host; `port` None means the network's ports."""

    name: str
    wildcard: bool = False
    port: int | None = None

    def __str__(self) -> str:
        return ("*." if self.wildcard else "") + self.name + ("" if self.port is None else f":{self.port}")

    def matches(self, name: str) -> bool:
        """Return whether the pattern means the canonical `name`, ports aside."""
        return name.endswith("." + self.name) if self.wildcard else name == self.name

    def covers(self, other: HostPattern) -> bool:
        """Return whether this pattern means every host that `other` means, ports aside."""
        if other.wildcard:
            return self.wildcard and (other.name == self.name or other.name.endswith("." + self.name))
        return self.matches(other.name)

    def overlaps(self, other: HostPattern) -> bool:
        """Return whether both patterns mean a common host, ports aside."""
        return self.covers(other) or other.covers(self)


def parse_pattern(text: str) -> HostPattern:
    """Return the pattern of a text: `a.com`, `a.com:8443`, `*.a.com`, `192.0.2.1`, `[2001:db8::1]:443`."""
    _refuse_url(text)
    name, port = split_port(text)
    wildcard = name.startswith("*.")
    if wildcard:
        name = name[2:]
    if "*" in name:
        raise ValueError('"*" can only replace whole labels at the start, as in "*.a.com"; for every host: "public"')
    host = canonical_host(name)
    if wildcard and is_address(host):
        raise ValueError("an address has no hosts below it")
    return HostPattern(host, wildcard, port)


def split_port(text: str) -> tuple[str, int | None]:
    """Return the host and the port of `host` or `host:port`. An IPv6 address is in brackets."""
    if text.startswith("["):
        address, bracket, rest = text.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("an IPv6 address is written as [2001:db8::1] or [2001:db8::1]:443")
        return address + "]", parse_port(rest[1:]) if rest else None
    name, colon, port = text.partition(":")
    if ":" in port:
        raise ValueError("more than one colon; an IPv6 address is written in brackets: [2001:db8::1]")
    return name, parse_port(port) if colon else None


def parse_port(text: str) -> int:
    """Return the port of a text: 1 to 65535, in plain digits."""
    if not text or len(text) > 5 or not _DIGITS.issuperset(text) or text[0] == "0" or int(text) > 65535:
        raise ValueError("the port is not a number from 1 to 65535")
    return int(text)


def canonical_host(text: str) -> str:
    """Return the canonical spelling of a name or address: lower case, no trailing dot, IDNA as xn--."""
    if text.startswith("["):
        return _canonical_ipv6(text)
    name = text.removesuffix(".")
    if not name.isascii():
        name = _to_ascii(name)
    name = name.lower()
    if not name or len(name) > _LONGEST:
        raise ValueError(f"a host has 1 to {_LONGEST} characters")
    labels = name.split(".")
    if _is_number(labels[-1]):
        return _canonical_ipv4(text.split("."))
    for label in labels:
        _check_label(label)
    return name


def is_address(host: str) -> bool:
    """Return whether a canonical host is an IP address: no name ends in a label of digits."""
    return host.startswith("[") or _DIGITS.issuperset(host.rpartition(".")[2])


def _refuse_url(text: str) -> None:
    if "://" in text:
        raise ValueError("it is a URL; write the host only, without a scheme")
    if "@" in text:
        raise ValueError("user names do not belong to a host")
    if "/" in text or "?" in text or "#" in text or "\\" in text:
        raise ValueError("write the host only, without a path")
    if "%" in text:
        raise ValueError("percent signs do not belong to a host")
    if text != text.strip() or not text.isprintable():
        raise ValueError("it holds spaces or characters that cannot be seen")


def _check_label(label: str) -> None:
    if not label:
        raise ValueError("it has an empty part between dots")
    if len(label) > 63:
        raise ValueError("a part between dots has at most 63 characters")
    if not _LABEL.issuperset(label):
        raise ValueError("a host has only letters, digits, hyphens and dots")
    if label[0] == "-" or label[-1] == "-":
        raise ValueError("a part between dots does not start or end with a hyphen")
    if label.startswith("xn--"):
        _check_punycode(label)


def _check_punycode(label: str) -> None:
    fault = ValueError(f"{label} is not valid IDNA")
    try:
        shown = label[4:].encode("ascii").decode("punycode")
        again = shown.encode("punycode").decode("ascii")
        shown.encode("utf-8")
    except (ValueError, IndexError, OverflowError):
        raise fault from None
    if again != label[4:] or shown.isascii() or not shown.isprintable() or shown != shown.lower():
        raise fault


def _to_ascii(name: str) -> str:
    """Return the IDNA form of a name where both standards agree. A name that IDNA maps to another name is refused."""
    fault = ValueError("the name has no single IDNA form; write it as xn--")
    try:
        encoded = name.encode("idna").decode("ascii")
        shown = encoded.encode("ascii").decode("idna")
    except ValueError:
        raise fault from None
    if shown != name.lower():
        raise fault
    return encoded


def _is_number(label: str) -> bool:
    """Return whether some resolver reads a name with this last label as an IPv4 address: 1, 0x7f, 017."""
    if _DIGITS.issuperset(label):
        return label != ""
    return label.startswith("0x") and _HEX.issuperset(label[2:])


def _canonical_ipv4(labels: list[str]) -> str:
    plain = len(labels) == 4 and all(
        label and len(label) <= 3 and _DIGITS.issuperset(label) and str(int(label)) == label and int(label) < 256
        for label in labels
    )
    if not plain:
        raise ValueError("it reads as an IPv4 address in an odd spelling; write four decimal numbers")
    return ".".join(labels)


def _canonical_ipv6(text: str) -> str:
    from ipaddress import AddressValueError, IPv6Address

    inner = text[1:-1]
    if not text.endswith("]") or len(inner) > 45 or not inner.isascii():
        raise ValueError("an IPv6 address is written as [2001:db8::1]")
    try:
        address = IPv6Address(inner)
    except AddressValueError:
        raise ValueError("it is not an IPv6 address") from None
    if address.scope_id or address.ipv4_mapped is not None:
        raise ValueError("write an IPv6 address without a zone, and a mapped IPv4 address as IPv4")
    return f"[{address}]"
