"""Checks of wrong arguments: they are refused before anything is done, and the sandbox goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfence import PolicyError, Sandbox
from ringfence.testing.model import in_box, raises

Wrong = tuple[Callable[[], object], type[Exception], str]


def _wrong(box: Any) -> list[Wrong]:
    return [
        (lambda: box.exec("ls -l"), TypeError, 'language="bash"'),
        (lambda: box.exec(None), TypeError, "argv is a list"),
        (lambda: box.exec([b"ls"]), TypeError, "argv is a list"),
        (lambda: box.exec({"ls"}), TypeError, "argv is a list"),
        (lambda: box.exec([]), PolicyError, "argv is empty"),
        (lambda: box.exec([""]), PolicyError, "argv is empty"),
        (lambda: box.exec(["a\0b"]), PolicyError, "NUL"),
        (lambda: box.exec(["ls", "\ud800"]), PolicyError, "lone surrogate"),
        (lambda: box.exec(["echo", *["x" * 1000] * 2000]), PolicyError, "longer than 1.5 MiB"),
        (lambda: box.exec(["ls"], cwd=""), PolicyError, "path is empty"),
        (lambda: box.exec(["ls"], cwd=5), TypeError, "path inside"),
        (lambda: box.exec(["ls"], user="root"), TypeError, "unexpected keyword argument 'user'"),
        (lambda: box.exec(["ls"], timeout_s=99), PolicyError, "more than the policy's"),
        (lambda: box.spawn("ls"), TypeError, "argv is a list"),
        (lambda: box.run(""), PolicyError, "no code"),
        (lambda: box.run("x", language="cobol"), PolicyError, "unknown language"),
        (lambda: box.session(""), PolicyError, "is no name for a session"),
        (lambda: box.session("n" * 65), PolicyError, "is no name for a session"),
        (lambda: box.session("a\nb"), PolicyError, "is no name for a session"),
        (lambda: list(box.files.list(pattern=5)), TypeError, "pattern"),
        (lambda: box.files.read("x", size=-1), ValueError, "size"),
        (lambda: box.files.read("x", offset=1 << 63), ValueError, "offset"),
        (lambda: box.files.chmod("x", None), TypeError, "mode"),
        (lambda: box.files.write("x", "\ud800"), ValueError, "surrogate"),
        (lambda: box.set_lifetime(0), PolicyError, "lifetime_s is 0"),
        (lambda: box.set_lifetime(True), PolicyError, "lifetime_s is True"),
    ]


def each_wrong_argument_is_refused_and_the_sandbox_goes_on(box: Sandbox) -> None:
    for call, kind, words in _wrong(box):
        with raises(kind) as caught:
            call()
        assert words in str(caught.value), str(caught.value)
    assert box.exec(["echo", "on"]).stdout == "on\n"
    assert list(box.files.list()) == []


def an_argument_that_the_kernel_refuses_is_a_result(box: Sandbox) -> None:
    """The kernel takes words of up to 128 KiB, and refuses a longer word after the fork."""
    result = box.exec(["echo", "x" * 200_000])
    assert (result.status, result.reason, result.exit_code) == ("error", "not-executable", 126)
    assert box.exec(["echo", "on"]).ok


def a_signal_that_is_none_is_refused(box: Sandbox) -> None:
    with box.spawn(["sleep", "60"]) as process:
        wrong: list[Any] = [0, 65, -9, "SIGTERM", True, None]
        for bad in wrong:
            with raises(PolicyError, match="is no signal"):
                process.signal(bad)
        number: Any = 5
        with raises(TypeError):
            process.write(number)
        assert process.running


CHECKS = (
    in_box(each_wrong_argument_is_refused_and_the_sandbox_goes_on),
    in_box(an_argument_that_the_kernel_refuses_is_a_result),
    in_box(a_signal_that_is_none_is_refused),
)
