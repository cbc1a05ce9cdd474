"""Every form of a secret's value in a response is found, or docs/secrets.md says it is not: the table there is read."""

from __future__ import annotations

import base64
import binascii
import codecs
import gzip
import html.entities
import io
import json
import quopri
import re
import zipfile
import zlib
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from ringfence.gateway.secrets.scrub import Forms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE = Path(__file__).resolve().parents[3] / "docs/secrets.md"
EXAMPLE = "sk-1/aB+9="
VALUES = [EXAMPLE, "ghp_0Zz9Yy8Xx7Ww6Vv5Uu4Tt3Ss2Rr1Qq", "pa\\ss \"w&rd'<>%;:,~"]
NAMES = {char: f"&{name}" for name, char in sorted(html.entities.html5.items(), reverse=True) if name.endswith(";")}


def _each(form: str) -> Callable[[str], list[str]]:
    """Every character in one form, with digits in lower and upper case."""
    return lambda value: ["".join(map(way.format, value.encode())) for way in (form, form.replace(":x}", ":X}"))]


def _zipped(value: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("f", value * 40)
    return made.getvalue()


def _halves(value: str, between: str) -> str:
    return value[:6] + between + value[6:]


# The first of several is the example on the page, where the page has one.
FORMS: dict[str, Callable[[str], str | bytes | Sequence[str | bytes]]] = {
    "as it is": lambda value: value,
    "percent-encoded where a URL or a form needs it": lambda value: [quote_plus(value), quote(value), quote(value, "")],
    "percent-encoded, every character": _each("%{:02x}"),
    "as a string of JSON, `/` escaped or not": lambda value: [
        json.dumps(value)[1:-1].replace("/", "\\/"),
        json.dumps(value)[1:-1],
    ],
    "`\\uNNNN` for every character": _each("\\u{:04x}"),
    "`\\xNN` for every character": _each("\\x{:02x}"),
    "octal for every character": _each("\\{:03o}"),
    "in HTML, what is no letter and no digit by name or by number": lambda value: [
        "".join(char if char.isalnum() else NAMES.get(char, char) for char in value),
        "".join(char if char.isalnum() else f"&#{ord(char)};" for char in value),
        "".join(char if char.isalnum() else f"&#x{ord(char):X};" for char in value),
    ],
    "`&#N;` for every character": lambda value: [*_each("&#{};")(value), *_each("&#{:03};")(value)],
    "`&#xNN;` for every character": _each("&#x{:x};"),
    "quoted-printable": lambda value: quopri.encodestring(value.encode()),
    "`=NN` for every character": _each("={:02X}"),
    "hexadecimal": lambda value: [value.encode().hex(), value.encode().hex().upper()],
    "hexadecimal with colons or blanks": lambda value: [
        binascii.hexlify(value.encode(), ":").decode(),
        binascii.hexlify(value.encode(), " ").decode().upper(),
    ],
    "base64 of both alphabets, wherever the value begins in it": lambda value: [
        way(b"x" * before + value.encode() + b"x" * after)[len("x" * before) * 4 // 3 :]
        for way in (base64.b64encode, base64.urlsafe_b64encode)
        for before in range(4)
        for after in range(3)
    ],
    "base64, escaped for a URL or JSON": lambda value: [
        quote(base64.b64encode(value.encode()), safe=""),
        base64.b64encode(value.encode()).decode().replace("/", "\\/"),
    ],
    "all in lower case, all in upper case": lambda value: [value.lower(), value.upper()],
    "backwards": lambda value: value[::-1],
    # what is not found
    "escaped here and there, though it needs none": lambda value: f"%{ord(value[0]):02x}{value[1:]}",
    "`\\u{NN}`, `\\U000000NN`, as CSS has it": lambda value: [
        way for form in ("\\u{{{:x}}}", "\\U{:08x}", "\\{:x} ") for way in _each(form)(value)
    ],
    "numbers of HTML without semicolon, or with more than one zero before": lambda value: [
        way for form in ("&#x{:x}", "&#{:05};", "&#x{:06x};") for way in _each(form)(value)
    ],
    "escaped twice": lambda value: [
        quote(_each("%{:02x}")(value)[0], safe=""),
        base64.b64encode(base64.b64encode(value.encode())),
    ],
    "a list of numbers": lambda value: [str(list(value.encode())), ", ".join(map(hex, value.encode()))],
    "in binary or octal digits": lambda value: [_each("{:08b}")(value)[0], _each("{:03o}")(value)[0]],
    "base32, base58, base85, Ascii85, uuencode": lambda value: [
        base64.b32encode(value.encode()),
        base64.b85encode(value.encode()),
        base64.a85encode(value.encode()),
        binascii.b2a_uu(value.encode()[:45]),
    ],
    "base64 or quoted-printable broken into lines": lambda value: [
        _halves(base64.b64encode(value.encode()).decode(), "\r\n"),
        _halves(value, "=\n"),
    ],
    "over two lines, headers, cookies, fields or messages": lambda value: [
        _halves(value, between) for between in ("\n", "\r\n ", "\r\nSet-Cookie: b=", '", "')
    ],
    "other characters between its own": lambda value: ["-".join(value), "\0".join(value), "\u200b".join(value)],
    "UTF-16, UTF-32, EBCDIC, UTF-7": lambda value: [
        *(value.encode(name) for name in ("utf-16-le", "utf-16-be", "utf-32-le", "cp037")),
        value.replace("+", "+-").encode("utf-7") if "+" in value else value.encode("utf-16"),
    ],
    "look-alikes, as full-width letters": lambda value: "".join(
        chr(0xFEE0 + ord(char)) for char in value if char > " "
    ),
    "compressed without `Content-Encoding`: gzip, zlib, zip, a picture": lambda value: [
        gzip.compress(value.encode() * 9),
        zlib.compress(value.encode() * 9),
        _zipped(value),
    ],
    "enciphered, hashed, by XOR, ROT13": lambda value: [
        codecs.encode(value, "rot13"),
        bytes(7 ^ c for c in value.encode()),
    ],
    "the case of some letters changed": lambda value: value[0].swapcase() + value[1:],
    "a part of it: a beginning, a character at a time, by `Range`": lambda value: [value[:-1], value[1:]],
}


def rows() -> dict[str, tuple[str, bool]]:
    """Return the rows of the page's table: form → (example, found)."""
    _, _, rest = PAGE.read_text().partition("## Which forms are found\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {row[2] for row in cells} == {"yes", "no"}
    return {form: (example, found == "yes") for form, example, found in cells}


def texts(form: str, value: str) -> list[bytes]:
    made = FORMS[form](value)
    several = [made] if isinstance(made, str | bytes) else made
    return [text.encode() if isinstance(text, str) else text for text in several]


def test_the_page_lists_every_form_that_is_known_here_and_no_other() -> None:
    assert list(rows()) == list(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_the_example_on_the_page_is_this_form_of_it(form: str) -> None:
    example, _ = rows()[form]
    if example:
        assert re.fullmatch("`(.*)`", example)
        assert example[1:-1] == texts(form, EXAMPLE)[0].decode()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_found_exactly_when_the_page_says_so(form: str, value: str) -> None:
    forms = Forms([value])
    for text in texts(form, value):
        if text == value.encode() and form != "as it is":
            continue  # a value of which nothing needs to be escaped, say
        masked = forms.mask(b"[" + text + b"]")
        assert len(masked) == len(text) + 2
        scrubber = forms.stream()
        pieces = [scrubber.feed(text[at : at + 3]) for at in range(0, len(text), 3)]
        assert b"".join([*pieces, scrubber.end()]) == masked[1:-1]
        if rows()[form][1]:
            left = masked[1:-1].replace(b"*", b"")
            at_the_ends = 0 if not form.startswith("base64") else 8  # bits that belong to what stands beside it
            assert len(left) <= at_the_ends, (form, text, masked)
        else:
            assert b"*" not in masked.replace(text, b""), (form, text, masked)
