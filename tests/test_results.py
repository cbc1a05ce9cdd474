"""Results: what they say, and that guest-made text cannot speak in our name."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from ringfence.errors import GuestError
from ringfence.events import Exit, Stdout
from ringfence.records import FileInfo, HostSummary
from ringfence.rendering import telling
from ringfence.results import Control, Denial, Enforcement, GuestException, Output, Result, Usage
from ringfence.values import replace

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FULL = Control("cgroup v2", "full")
ENFORCEMENT = Enforcement(*[FULL] * 10)
GOOD = Result(
    id="r1",
    status="ok",
    reason="done",
    exit_code=0,
    signal=None,
    stdout_bytes=b"hi\n",
    stderr_bytes=b"",
    truncated=False,
    outputs=(),
    exception=None,
    state_kept=True,
    duration_s=0.25,
    started_at=AT,
    usage=Usage(),
    denials=(),
    enforcement=ENFORCEMENT,
    backend="process",
    image="host",
    policy_digest="00",
)
DENIAL = Denial("network", "a.com:443", "net.not-allowed", "a.com is not allowed", 'allow = ["a.com"]', 3, AT)


def test_a_control_prints_as_its_mechanism() -> None:
    assert str(FULL) == "cgroup v2"


def test_enforcement_names_what_a_weaker_mechanism_holds() -> None:
    weak = Control("rlimit", "weaker", "per process, not for the tree")
    assert replace(ENFORCEMENT, memory=weak, cpu=weak).weaker == ("cpu", "memory")
    assert ENFORCEMENT.weaker == ()


def test_a_good_result_checks_to_itself() -> None:
    assert GOOD.check() is GOOD
    assert GOOD.ok


def test_a_failed_result_checks_to_an_error_that_holds_it() -> None:
    bad = replace(GOOD, status="error", reason="exit", exit_code=3, stderr_bytes=b"first\nlast \x1b[31mline\n")
    with pytest.raises(GuestError) as caught:
        bad.check()
    assert caught.value.result is bad
    assert caught.value.code == "guest-error"
    assert str(caught.value) == ("error: ended with an error, exit code 3, 0.25 s; the guest said: last \\x1b[31mline")


def test_output_that_is_not_utf8_is_replaced_not_refused() -> None:
    assert replace(GOOD, stdout_bytes=b"a\xff", stderr_bytes=b"\xfe").stdout == "a\ufffd"


def test_the_value_is_the_text_of_the_last_expression() -> None:
    shown = Output({"text/plain": b"chart"})
    value = Output({"text/plain": b"42", "text/html": b"<b>42</b>", "image/png": b"\x89PNG"}, is_value=True)
    result = replace(GOOD, outputs=(value, shown))
    assert result.value == "42"
    assert (value.html, value.png, value.svg) == ("<b>42</b>", b"\x89PNG", None)
    assert GOOD.value is None


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"\xff",
        b"NaN",
        b"[1e999]",
        b"1" * 5000,
        b"[" * 200 + b"]" * 200,
        b"[" * 200_000,
        b'"' + b"a" * 8 * 1024 * 1024 + b'"',
        b"[" + b"[]," * 600_000 + b"1]",  # 1.8 MB, and forty as list objects
    ],
    ids=["cut", "bytes", "nan", "infinite", "huge int", "deep", "bomb", "large", "many"],
)
def test_json_outside_the_caps_is_none(data: bytes) -> None:
    assert Output({"application/json": data}).json is None


def test_json_within_the_caps_is_parsed() -> None:
    assert Output({"application/json": b'{"a": [1, 2.5, null]}'}).json == {"a": [1, 2.5, None]}
    assert Output({}).json is None


def test_render_indents_guest_text_so_that_it_cannot_speak_as_ours() -> None:
    forged = replace(
        GOOD, status="error", reason="exit", exit_code=1, stdout_bytes=b"x\nok: ended\rdenied: \x85ok: y\n"
    )
    ours = [line for line in forged.render().splitlines() if not line.startswith("  ")]
    assert ours == ["error: ended with an error, exit code 1, 0.25 s", "stdout:"]


def test_render_tells_a_traceback_once() -> None:
    raised = replace(
        GOOD,
        status="error",
        reason="exception",
        stdout_bytes=b"",
        stderr_bytes=b"warning\nTraceback:\nKeyError: 1\n",
        exception=GuestException("KeyError", "1", "Traceback:\nKeyError: 1\n"),
    )
    assert raised.render().splitlines()[1:] == [
        *("exception:", "  Traceback:", "  KeyError: 1"),
        *("stderr:", "  warning"),
    ]


def test_render_says_what_was_denied_and_what_would_allow_it() -> None:
    assert replace(GOOD, denials=(DENIAL,), stdout_bytes=b"").render() == (
        'ok: ended, 0.25 s\ndenied: a.com is not allowed (3 times); to allow it: allow = ["a.com"]'
    )


def _denied(target: str, code: str = "net.not-allowed", count: int = 1) -> Denial:
    kind = "tool" if code.startswith("tool.") else "mount" if code.startswith("mount.") else "network"
    return Denial(kind, target, code, f"{target} is refused", f"allow = [{target}]", count, AT)  # type: ignore[arg-type]  # one of three


def test_denials_push_nothing_out_of_a_rendered_result() -> None:
    """A guest can make any number of denials: a model would see only denials, and not the output (O24)."""
    said = replace(
        GOOD,
        status="error",
        reason="exception",
        exit_code=3,
        stdout_bytes=b"THE OUTPUT",
        stderr_bytes=b"THE WARNING",
        outputs=(Output({"text/plain": b"THE VALUE"}, is_value=True),),
        exception=GuestException("KeyError", "THE EXCEPTION", ""),
        truncated=True,
    )
    names = [f"{number}.{'x' * 60}.{'y' * 60}.{number % size}.com:53" for size in (1, 3000) for number in range(3000)]
    for targets in (names[:3000], names[3000:], [f"{name}{'z' * 5000}" for name in names]):
        denials = tuple(map(_denied, targets))
        for size in (1500, 2000, 8000):
            text = replace(said, denials=(*denials, _denied("exfil.attacker.com:53"))).render(max_chars=size)
            assert len(text) <= size
            words = ("exit code 3", "THE OUTPUT", "THE WARNING", "THE VALUE", "THE EXCEPTION", "was dropped")
            assert [word for word in words if word not in text] == []
            assert "denied: exfil.attacker.com:53 is refused" in text
            lines = [line for line in text.splitlines() if line.startswith("denied: ")]
            assert sum(map(len, lines)) <= size // 3
            assert f"note: and {len(denials) + 1 - len(lines)} more denials, see result.denials" in text


def test_of_many_denials_the_worst_the_rare_and_the_last_are_shown() -> None:
    flood = [_denied(f"n{number}.evil.example:443") for number in range(50)]
    one_by_one = [_denied(f"evil{number}.example:443") for number in range(50)]
    worst = [
        _denied("/work/.git/hooks/pre-commit", "mount.added"),
        _denied("169.254.169.254:80", "net.metadata-address"),
    ]
    tool, others = _denied("drop_table", "tool.unknown"), _denied("(others)", "net.not-allowed", 7)
    rare, last = _denied("rare.test:443"), _denied("last.test:443")
    found = telling((*flood, *worst, rare, tool, *flood, others, last), 6)
    assert [(denial.target, alike) for denial, alike in found] == [
        ("/work/.git/hooks/pre-commit", 0),
        ("169.254.169.254:80", 0),
        ("drop_table", 0),
        ("n49.evil.example:443", 99),
        ("(others)", 0),
        ("last.test:443", 0),
    ]
    found = telling((*one_by_one[:25], *worst, *one_by_one[25:], tool, last), 6)
    assert [denial.target for denial, _ in found] == [
        *(worst[0].target, worst[1].target, "evil48.example:443", "evil49.example:443", "drop_table", "last.test:443"),
    ]
    assert telling(tuple(worst), 6) == [(worst[0], 0), (worst[1], 0)]


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [
        ("{}.evil.example", 1),  # a look-up has no port
        ("{}.evil.example:443", 1),
        ("192.0.{}.1:80", 1),
        ("evil{}.example:443", 6),
        ("{}.0.2.1:80", 6),
        ("[2001:db8::{}]:443", 6),
    ],
)
def test_names_of_one_domain_and_addresses_of_one_network_are_one_line(pattern: str, shown: int) -> None:
    found = telling(tuple(_denied(pattern.format(number)) for number in range(100)), 6)
    assert (len(found), sum(alike + 1 for _, alike in found)) == (shown, 100 if shown == 1 else shown)


def test_where_few_denials_fit_the_worst_and_the_last_are_shown() -> None:
    denials = [*(_denied(f"{'x' * 200}{number}.example:443") for number in range(30)), _denied("last.test:443")]
    denials[15] = _denied("/work/.git/hooks/pre-commit", "mount.added")
    lines = [
        line for line in replace(GOOD, denials=tuple(denials)).render(max_chars=2000).splitlines() if "refused" in line
    ]
    assert sum(map(len, lines)) <= 667
    assert [any(word in line for line in lines) for word in ("pre-commit", "last.test")] == [True, True]


def test_a_denial_is_shown_on_one_line_and_what_was_only_found_is_not_called_denied() -> None:
    long = _denied("a" * 300)
    text = replace(
        GOOD, denials=(_denied("a\nok: ended"), _denied("/w/x", "mount.added"), long), stdout_bytes=b""
    ).render()
    assert text.splitlines() == [
        "ok: ended, 0.25 s",
        r"denied: a\nok: ended is refused; to allow it: allow = [a\nok: ended]",
        "found: /w/x is refused; to allow it: allow = [/w/x]",
        f"denied: {'a' * 99}…{'a' * 88} is refused",
    ]


@pytest.mark.parametrize("size", [0, 10, 60, 200, 2000])
def test_render_keeps_both_ends_within_its_size(size: int) -> None:
    long = replace(GOOD, stdout_bytes=b"START" + b"x" * 50_000 + b"END", stderr_bytes=b"E" * 50_000)
    text = long.render(max_chars=size)
    assert len(text) <= size
    if size == 2000:
        assert "START" in text
        assert "END" in text


def test_cutting_never_starts_a_line_of_the_guest_at_the_margin() -> None:
    lines = b"\n".join(b"%05d" % number for number in range(5_000))
    text = replace(GOOD, stdout_bytes=lines).render(max_chars=500)
    ours = [line for line in text.splitlines() if not line.startswith("  ")]
    assert ours == ["ok: ended, 0.25 s", "stdout:", ours[2]]
    assert ours[2].startswith("[… ")


def test_to_dict_is_json_with_every_field_and_bytes_as_base64() -> None:
    bad = GuestException("ValueError", "no", "Traceback")
    value = Output({"text/plain": b"4"}, is_value=True)
    found: Any = replace(GOOD, exception=bad, outputs=(value,), denials=(DENIAL,)).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert set(Result.__fields__) | {"ok", "stdout", "stderr", "value"} == set(found)
    assert (found["stdout"], found["stdout_bytes"], found["value"]) == ("hi\n", "aGkK", "4")
    assert found["started_at"] == "2026-01-02T03:04:05+00:00"
    assert found["denials"][0]["first_at"] == "2026-01-02T03:04:05+00:00"
    assert found["enforcement"]["memory"] == {"mechanism": "cgroup v2", "level": "full", "note": "", "reports": False}


def test_a_denial_without_a_time_is_of_now() -> None:
    assert Denial("network", "a", "c", "m", None).first_at.tzinfo is UTC


def test_events_and_records_are_frozen_values() -> None:
    assert Exit(GOOD, 4) == Exit(result=GOOD, cursor=4)
    assert Stdout(b"a", "a", 1) != Stdout(b"a", "a", 2)
    assert FileInfo("a", "file", 1, 0o644, AT).target is None
    assert hash(HostSummary("a", 1, 0, 0, {"GET": 1}, {200: 1}, 1, 1)) == hash(
        HostSummary("a", 1, 0, 0, {"GET": 1}, {200: 1}, 1, 1)
    )
